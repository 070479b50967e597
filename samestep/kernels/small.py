"""State in few bits inside kernels: `samestep.rules.stored` and `noise` have the formulas.

Every operation is the one that plain torch does, so that bits are equal. Kernels that call these
functions are compiled with `enable_fp_fusion=False`: a fused multiply-add would round otherwise.
Blocks of 8-bit codes are the rows of a tile (rows, Q): a scale is the largest of a row.
"""

import triton
import triton.language as tl

FIRST, SECOND = tl.constexpr(0x7FEB352D), tl.constexpr(0x846CA68B)
GOLDEN = tl.constexpr(0x9E3779B1)
# 1 / 127 and 1 / 255 as 32 bits have them.
SIGNED_STEP, UNSIGNED_STEP = tl.constexpr(0.007874015718698502), tl.constexpr(0.003921568859368563)


@triton.jit
def mixed(word):
    """Return the hash lowbias32 of uint32."""
    word = (word ^ (word >> 16)) * FIRST
    word = (word ^ (word >> 15)) * SECOND
    return word ^ (word >> 16)


@triton.jit
def index_word(origin, start, within, PLACES: tl.constexpr):
    """Return uint32 words of the flat indices of elements in the whole tensor.

    `origin` points to a row of `call.Origins`, which also explains PLACES: 64-bit indices
    take many registers.
    """
    if PLACES == "far":
        start, run = start.to(tl.int64), tl.load(origin + 1)
        index = tl.load(origin) + start // run * tl.load(origin + 2) + start % run + within
        word = index.to(tl.uint32) ^ ((index >> 32).to(tl.uint32) * GOLDEN)
    else:
        start = start.to(tl.uint32)
        if PLACES == "runs":
            run, stride = tl.load(origin + 1).to(tl.uint32), tl.load(origin + 2).to(tl.uint32)
            start = start // run * stride + start % run
        word = tl.load(origin).to(tl.uint32) + start + tl.cast(within, tl.uint32)
    return word


@triton.jit
def keys_of(origin, step):
    """Return two words made of the seed and the step, for all elements of a tensor."""
    step_word = step.to(tl.int32).to(tl.uint32, bitcast=True)
    first = mixed(mixed(step_word) ^ tl.load(origin + 3).to(tl.uint32))
    return first, mixed(first ^ GOLDEN)


@triton.jit
def random_bits(origin, start, within, keys, PLACES: tl.constexpr):
    """Return random uint32 words of elements of the local tensor; both halves are random.

    `start` is the local index where (parts of) runs begin, and `within` the offset from `start`.
    """
    first, second = keys
    word = index_word(origin, start, within, PLACES) + first
    word = (word ^ (word >> 16)) * FIRST + second
    return (word ^ (word >> 15)) * SECOND


@triton.jit
def signed_bits(bits):
    """Return the 16 bits for signed state, int32: the upper half, which needs no last mixing."""
    return (bits >> 16).to(tl.int32)


@triton.jit
def unsigned_bits(bits):
    """Return the 16 bits for second moments, int32."""
    return ((bits ^ (bits >> 16)) & 0xFFFF).to(tl.int32)


@triton.jit
def ratios(codes, SIGNED: tl.constexpr):
    """Return the fraction of the scale that codes, given as float32, stand for."""
    if SIGNED:
        share = codes * SIGNED_STEP
        found = share * tl.abs(share)
    else:
        share = codes * UNSIGNED_STEP
        square = share * share
        found = square * square
    return found


@triton.jit
def decoded(codes, scale):
    """Return the float32 values of int8 or uint8 codes."""
    return ratios(codes.to(tl.float32), codes.dtype == tl.int8) * scale


@triton.jit
def encoded(values, bits, SIGNED: tl.constexpr):
    """Return the codes of blocks, (rows, Q), and scales, (rows, 1); `bits`: 0 to 65535."""
    word = values.to(tl.int32, bitcast=True)
    size_word = word & 0x7FFFFFFF
    # Of bits, since these are ordered as magnitudes are, and NaN is the largest of all.
    scale_word = tl.max(size_word, axis=1, keep_dims=True)
    largest = scale_word.to(tl.float32, bitcast=True)
    power = tl.where(largest < 2.0**-32, 2.0**64, tl.where(largest > 2.0**64, 2.0**-64, 1.0))
    scale = tl.where(largest == 0, 1.0, largest * power)
    size = size_word.to(tl.float32, bitcast=True) * power
    finite = scale_word < 0x7F800000
    if SIGNED:
        square = size * tl.where(finite, tl.div_rn(16129.0, scale), float("nan"))
        # The last of the root's digits may be another one than in plain torch. Where it decides,
        # the value is beside a code, which it then gets in any case: `rules.stored` has the room.
        code = tl.floor(tl.sqrt(square))
        code = tl.where(code < 126.0, code, 126.0)  # also for NaN
        gap = tl.fma(code, 2.0, 1.0)
        # 14 bits and a half as the digits behind 1.
        line = (((bits << 7) & 0x7FFE00) | 0x3F800100).to(tl.float32, bitcast=True)
        # A product with -1 is a sign of an operand; a minus would be a difference from 0.
        more = tl.fma(line, gap, gap * -1.0) < tl.fma(code * -1.0, code, square)
        code = tl.where(more, code + 1.0, code).to(tl.int32, bitcast=True)
        code = (code | (word & -0x80000000)).to(tl.float32, bitcast=True).to(tl.int8)  # its sign
    else:
        # A guess, as in plain torch; by quick operations, since it is made good.
        code = tl.sqrt(tl.sqrt(size * tl.where(finite, 1.0 / scale, float("nan"))))
        code = tl.floor(code * 255.0 - 0.01)
        code = tl.maximum(tl.where(code < 254.0, code, 254.0), 0.0)  # also for NaN
        near = ratios(code + 1.0, SIGNED) * scale
        more = near <= size
        far = ratios(tl.where(more, code + 2.0, code), SIGNED) * scale
        code = tl.where(more, code + 1.0, code)
        line = (bits.to(tl.float32) + 0.5) * 1.52587890625e-05  # 2^-16
        code = tl.where(tl.abs(far - near) * line < size - tl.minimum(near, far), code + 1.0, code)
        code = tl.where((values > 0) & (code == 0), 1.0, code).to(tl.int32).to(tl.uint8)
    return code, largest


@triton.jit
def rounded_bf16(values, bits):
    """Round float32 to a neighbour in bfloat16, as int16; `bits`: 0 to 65535."""
    word = values.to(tl.int32, bitcast=True)
    size = word & 0x7FFFFFFF
    word += tl.where(size < 0x7F7F0000, bits, 0)
    word = tl.where(size > 0x7F800000, word | 0x00400000, word)
    return (word >> 16).to(tl.int16)


@triton.jit
def joined(param, remainder):
    """Return the float32 of a bfloat16 and its remainder, both as int16 bits."""
    upper, lower = param.to(tl.int32), remainder.to(tl.int32)
    lower = tl.where(((upper & 0x7FFF) == 0) & (lower < 0), 0, lower)
    return ((upper << 16) + lower).to(tl.float32, bitcast=True)


@triton.jit
def split(values):
    """Return the bits of a bfloat16 and its remainder, both int16."""
    word = values.to(tl.int32, bitcast=True)
    word = tl.where((word & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, word)
    return ((word + 0x8000) >> 16).to(tl.int16), word.to(tl.int16)


@triton.jit
def read_state(place, inside, scale_place, scale_inside):
    """Return the values at pointers in float32; `scale_place`, (rows, 1), is only for codes."""
    if scale_place is None:
        values = tl.load(place, inside, 0.0).to(tl.float32)
    else:
        values = decoded(tl.load(place, inside, 0), tl.load(scale_place, scale_inside, 0.0))
    return values


@triton.jit
def write_state(place, inside, scale_place, scale_inside, values, bits):
    """Write float32 values to pointers; `bits` is None if rounding is not random."""
    if bits is None:
        tl.store(place, values.to(place.dtype.element_ty), inside)
    else:
        if scale_place is None:
            tl.store(place, rounded_bf16(values, bits).to(tl.bfloat16, bitcast=True), inside)
        else:
            SIGNED: tl.constexpr = place.dtype.element_ty == tl.int8
            codes, scale = encoded(values, bits, SIGNED)
            tl.store(place, codes, inside)
            tl.store(scale_place, scale, scale_inside)
