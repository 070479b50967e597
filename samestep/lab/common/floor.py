"""The least work of a step: FLOPs of orthogonalization, and bytes of updates.

FLOPs count 5 iterations on rows m <= cols n, with every symmetric product at half price, in the
cheaper of two forms: step by step, 15 m^2 n + 5 m^3, or on the Gram matrix with one restart,
6 m^2 n + 14 m^3. Bytes count fp32 parameters, gradients and state, each tensor touched once.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple, Protocol

# gradient in; momentum in and out; 16-bit direction out and in; parameter in and out
MUON_BYTES = 4 + 8 + 4 + 8
ADAMW_BYTES = 4 + 24  # gradient in; parameter and two moments in and out
CLIP_BYTES = 4  # gradient in, once more


class Rates(Protocol):
    """The rates of a device: FLOPs and bytes per second."""

    @property
    def flops(self) -> float: ...

    @property
    def bytes(self) -> float: ...


class Floor(NamedTuple):
    """The least work of a step: FLOPs, and bytes of memory traffic."""

    flops: float
    bytes: float

    def ms(self, rates: Rates) -> float:
        """Return the time of the products plus that of the memory traffic, in ms."""
        return 1e3 * (self.flops / rates.flops + self.bytes / rates.bytes)


def least_flops(rows: int, cols: int) -> int:
    """Return the least FLOPs that orthogonalize one block."""
    m, n = min(rows, cols), max(rows, cols)
    return min(15 * m * m * n + 5 * m**3, 6 * m * m * n + 14 * m**3)


def step_floor(
    matrices: Iterable[Sequence[int]], others: Iterable[Sequence[int]], *, clips: bool
) -> Floor:
    """Return the floor of Muon on `matrices` (2-D, or 3-D stacks) and AdamW on `others`."""
    flops = traffic = 0.0
    for shape in matrices:
        flops += prod(shape[:-2]) * least_flops(*shape[-2:])
        traffic += prod(shape) * (MUON_BYTES + CLIP_BYTES * clips)
    for shape in others:
        traffic += prod(shape) * (ADAMW_BYTES + CLIP_BYTES * clips)
    return Floor(flops, traffic)
