"""Sums over blocks that have the same bits however a block is cut into parts.

Floating-point sums depend on their order, and every layout has another one. So each term is cut
into digits of 32 bits at fixed places, t = sum of d_k 2^(32 k), and digits are added up as whole
numbers, which is exact in any order. Of every part three digits are kept, from that of its largest
term down; of the block those at the three highest places of any part. What is left out lies at
fixed places as well, so nothing that is kept depends on who held which term.

The sum is right to the last bits of float64, or to n 2^-64 of the largest of n terms. Up to 2^31
terms fit.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

BITS = 32  # of a digit
DIGITS = 3
WIDTH = 1 + DIGITS  # numbers that a part says: the place of its first digit, and its digits
LOWEST = -31  # the place of the smallest normal float64; all zeros have it too
BROKEN = 99  # the place of terms that are not all finite
CHUNK = 1 << 18  # terms at once on CPU, that stay in a cache


def digits_of(terms: Tensor) -> Tensor:
    """Return the sum of each row of terms (B, n) as digits: whole numbers (B, WIDTH), int64."""
    if terms.numel() == 0:
        return nothing(terms.shape[0], terms.device)
    step = terms.shape[1]
    if terms.device.type == "cpu" and not torch.compiler.is_compiling():
        step = CHUNK
    largest = terms.detach().abs().amax(1).double()
    finite = largest.isfinite()
    exponent = (torch.where(finite, largest, 1.0).view(torch.int64) >> 52) - 1023
    place = exponent.div(BITS, rounding_mode="floor").clamp_min(LOWEST)
    scale = _power_of_two(-BITS * place)[:, None]
    found = [torch.zeros_like(place) for _ in range(DIGITS)]
    for part in torch.split(terms.detach(), step, dim=1):
        rest = torch.where(finite[:, None], part.double(), 0.0) * scale
        for digit in found:
            whole = rest.trunc()
            digit += whole.to(torch.int64).sum(1)
            rest = (rest - whole) * 2.0**BITS
    return torch.stack([torch.where(finite, place, BROKEN), *found], 1)


def nothing(rows: int, device: torch.device) -> Tensor:
    """Return the digits of `rows` sums that have no terms, (rows, WIDTH)."""
    found = torch.zeros(rows, WIDTH, dtype=torch.int64, device=device)
    found[:, 0] = LOWEST
    return found


def total_of(parts: Tensor) -> Tensor:
    """Return the sums of rows, (B,) float64, from the digits of their parts, (P, B, WIDTH).

    A sum is NaN where any term was not finite.
    """
    places = parts[..., 0]
    top = places.amax(0)
    below, digits = top - places, []
    for at in range(DIGITS):
        shares = (
            torch.where(below == at - number, parts[..., 1 + number], 0).sum(0)
            for number in range(at + 1)
        )
        digits.append(sum(shares, start=torch.zeros_like(top)).double())
    value = digits[-1]
    for digit in reversed(digits[:-1]):
        value = value * 2.0**-BITS + digit
    broken = top == BROKEN
    value = value * _power_of_two(BITS * torch.where(broken, 0, top))
    return torch.where(broken, torch.nan, value)


def sums_of_blocks(terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return, by name, the sum of each block of stacks (B, rows, cols), as (B, 1, 1) float64."""
    return {
        name: total_of(digits_of(values.flatten(1))[None]).view(-1, 1, 1)
        for name, values in terms.items()
    }


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent, exactly, for exponents of normal numbers."""
    return ((exponent + 1023) << 52).view(torch.float64)
