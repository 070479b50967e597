"""State in fewer bits than its arithmetic: 8-bit codes, bfloat16 rounded at random, remainders.

8 bits: a block of q neighbours of the last dim has one scale, its largest magnitude a, and each
element a code c. Signed values (`exp_avg`, momentum) are a c |c| / 127^2, second moments
a (c / 255)^4: fine where values are small, since a block holds some of very different sizes.

A moment moves by less than half of such a step at a time and would stand still if it were rounded
to the nearest. So it is rounded to one of both neighbours at random, to the nearer one more often,
and is right in the mean. The bits are those of `noise`: the same in every layout.

Which codes are beside a value is found by comparing numbers that are rounded alike everywhere, of
products and quotients in 32 bits: torch on every device and the kernels (`samestep.kernels.small`)
give the same bits, however they guess where to look.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from samestep.rules.noise import CHUNK, SECOND_MOMENTS, Noise

EIGHT_BITS, STOCHASTIC, REMAINDER = "8bit", "bf16_stochastic", "remainder"
FORMATS = (EIGHT_BITS, STOCHASTIC, REMAINDER)  # what `state_dtypes` takes beside dtypes

SCALE_SUFFIX = "_scale"  # the key of the scales of `exp_avg` is "exp_avg_scale"
REMAINDER_KEY = "master_remainder"
STEP = "step"  # the count that chooses random bits; AdamW has it anyway

BLOCKS = (256, 128, 64, 32)  # sizes of blocks, the first that divides the last dim

# Codes are multiplied with 1 / 127 or 1 / 255; 127 and 255 times these are 1 exactly.
SIGNED_MOST, SIGNED_STEP = 127, 1 / 127
UNSIGNED_MOST, UNSIGNED_STEP = 255, 1 / 255

INFINITE = 0x7F800000  # bits of float32
LARGEST_NARROW = 0x7F7F0000  # the largest finite bfloat16
QUIET = 0x00400000  # makes a NaN of what else would be infinite


def block_size(length: int, most: int = BLOCKS[0]) -> int | None:
    """Return how many elements share a scale in a last dim so long; None: state has 32 bits."""
    return next((size for size in BLOCKS if size <= most and length % size == 0), None)


def is_signed(key: str) -> bool:
    """Whether a state tensor has values of both signs."""
    return key not in SECOND_MOMENTS


def code_dtype(key: str) -> torch.dtype:
    """Return int8 for state with signs, else uint8, so that the dtype tells how codes are read."""
    return torch.int8 if is_signed(key) else torch.uint8


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the values of codes, float32; q neighbours share a scale."""
    if codes.numel() == 0:
        return codes.float()
    q = codes.numel() // scale.numel()
    values = _ratios(codes.float(), signed=codes.dtype == torch.int8)
    return values.view(-1, q).mul_(scale.reshape(-1, 1)).view(codes.shape)


def encode(
    value: Tensor, q: int, *, signed: bool, noise: Noise | None = None
) -> tuple[Tensor, Tensor]:
    """Return codes (..., n) and scales (..., n / q) of values; without noise, to the nearest.

    Zero stays zero. A second moment that is not zero gets no code 0, or it would divide by eps
    alone. A block with a NaN becomes NaN, one with an infinite value infinite. Where there are no
    elements, q may be 0: shapes do not tell it there.
    """
    q = max(1, q)
    flat = value.detach().float().reshape(-1)
    dtype = torch.int8 if signed else torch.uint8
    codes = torch.empty(flat.shape, dtype=dtype, device=value.device)
    scale = flat.new_empty(len(flat) // q)
    for begin, end, bits in _plain_chunks(flat) if noise is None else noise.chunks(value):
        blocks = flat[begin:end].view(-1, q)
        # Of bits, since these are ordered as magnitudes are, and NaN is the largest of all.
        own = blocks.abs().view(torch.int32).amax(1).view(torch.float32)
        scale[begin // q : end // q] = own
        codes[begin:end] = _codes(blocks, own[:, None], bits, signed=signed).view(-1)
    return codes.view(value.shape), scale.view(*value.shape[:-1], value.shape[-1] // q)


def _plain_chunks(flat: Tensor) -> Iterator[tuple[int, int, None]]:
    step = CHUNK if flat.device.type == "cpu" else max(1, len(flat))
    for begin in range(0, len(flat), step):
        yield begin, min(begin + step, len(flat)), None


def _ratios(codes: Tensor, *, signed: bool) -> Tensor:
    """Return the values of codes relative to their scale; overwrites `codes`, which are float32."""
    codes *= SIGNED_STEP if signed else UNSIGNED_STEP
    if signed:
        return codes.mul_(codes.abs())
    codes *= codes
    return codes.mul_(codes)


def _codes(blocks: Tensor, scale: Tensor, bits: Tensor | None, *, signed: bool) -> Tensor:
    """Return the codes of blocks (n, q) with scales (n, 1)."""
    # A power of two keeps what codes stand for away from where numbers lose digits.
    power = torch.where(scale < 2.0**-32, 2.0**64, torch.where(scale > 2.0**64, 2.0**-64, 1.0))
    scale = torch.where(scale == 0, 1.0, scale * power)
    size = blocks.abs() * power
    finite = torch.where(scale.isfinite(), scale, math.nan)
    if signed:
        return _signed_codes(size, finite, bits).copysign_(blocks).to(torch.int8)
    code = _unsigned_codes(size, scale, finite, bits)
    return torch.maximum(code, blocks.gt(0).float(), out=code).to(torch.uint8)


def _signed_codes(size: Tensor, scale: Tensor, bits: Tensor | None) -> Tensor:
    """Return the sizes of signed codes, rounded between squares: c^2 <= y < c^2 + 2 c + 1.

    The difference is exact. A line in 14 bits keeps 2^-15 of a step away from both codes: a root
    that is one too few or too many there, as that of a GPU may be, leads to the same code.
    """
    y = size * torch.full_like(scale, SIGNED_MOST**2).div_(
        scale
    )  # a number's quotient rounds twice
    most = SIGNED_MOST - 1.0
    code = y.sqrt().floor_().nan_to_num_(nan=most).clamp_(max=most)
    y -= code * code
    gap = code.mul(2.0).add_(1.0)
    gap *= 0.5 if bits is None else (bits.view(size.shape) >> 2).float().add_(0.5).mul_(2.0**-14)
    code += gap.lt_(y)
    return code


def _unsigned_codes(size: Tensor, scale: Tensor, finite: Tensor, bits: Tensor | None) -> Tensor:
    """Return unsigned codes, rounded between their values with 16 random bits."""
    # A guess at the code below, not more and at most one less; the last but one if not finite.
    most = UNSIGNED_MOST - 1.0
    code = (size / finite).sqrt_().sqrt_().mul_(UNSIGNED_MOST).sub_(0.01).floor_()
    code = code.nan_to_num_(nan=most).clamp_(0.0, most)
    # The value is beside what the next code stands for: above it, or below.
    near = _ratios(code + 1, signed=False).mul_(scale)
    more = torch.le(near, size, out=torch.empty_like(near))  # as numbers, since masks take long
    far = _ratios(torch.add(code, more, alpha=2), signed=False).mul_(scale)
    code += more
    low = torch.minimum(near, far)
    room = far.sub_(near).abs_()
    room *= 0.5 if bits is None else bits.view(size.shape).float().add_(0.5).mul_(2.0**-16)
    code += room.lt_(size - low)
    return code


def round_bf16(value: Tensor, noise: Noise) -> Tensor:
    """Round float32 to one of its two neighbours in bfloat16 at random, right in the mean.

    A value that bfloat16 can hold is unchanged, and a finite value stays finite.
    """
    flat = value.detach().float().reshape(-1)
    narrow = torch.empty(flat.shape, dtype=torch.bfloat16, device=value.device)
    for begin, end, bits in noise.chunks(value):
        word = flat[begin:end].view(torch.int32)
        size = word & 0x7FFFFFFF
        bits *= torch.lt(size, LARGEST_NARROW, out=torch.empty_like(size))
        bits += word
        bits |= size.gt_(INFINITE).mul_(QUIET)
        narrow[begin:end] = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return narrow.view(value.shape)


def split_remainder(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 into bfloat16, rounded to nearest with ties away from zero, and an int16 rest.

    The rest is the lower half of the bits: negative where the upper half was rounded up.
    """
    # A NaN could become infinite, or with a carry -0: it keeps none of its digits.
    value = master.detach().contiguous().nan_to_num(math.nan, math.inf, -math.inf)
    word = value.view(torch.int32)
    lower = word.to(torch.int16)
    return word.add_(0x8000).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16), lower


def join_remainder(param: Tensor, remainder: Tensor) -> Tensor:
    """Join halves to float32: exactly the input of `split_remainder`, but for a NaN's digits.

    A parameter that somebody set to zero is zero, whatever remainder was left of it.
    """
    upper = param.detach().contiguous().view(torch.int16).to(torch.int32)
    lower = remainder.reshape(param.shape).to(torch.int32)
    # Nothing is rounded up to zero: there is no such remainder of it.
    lower = lower.masked_fill_((upper & 0x7FFF == 0) & (lower < 0), 0)
    return upper.bitwise_left_shift_(16).add_(lower).view(torch.float32)
