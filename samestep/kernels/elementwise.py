"""Triton kernels for elementwise work: norm and AdamW; `muon_tiles` has the kernels of Muon.

Each works on many tensors in one launch, through tables of their addresses, and reads and writes
every value once. Numbers that change from step to step are read from the device, so nothing waits
and nothing is compiled anew. Arithmetic is in float32, sums in float64.

An argument that may be None is left out of the compiled code where it is: `only_if` (0: nothing is
changed), `writes` ((count,): 0 leaves a tensor as it is), `factor` (of gradients).
"""

import triton
import triton.language as tl

from samestep.kernels.small import (
    joined,
    keys_of,
    random_bits,
    read_state,
    signed_bits,
    split,
    unsigned_bits,
    write_state,
)
from samestep.rules.adamw import LARGEST_GRADIENT

ADAMW_LARGEST = tl.constexpr(LARGEST_GRADIENT)


@triton.jit
def pointer_in(table, number, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Return an address of a table as a pointer."""
    pointer = tl.load(table + number).to(tl.pointer_type(dtype))
    if ALIGNED:  # lets the compiler read 16 bytes at once
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def is_written(only_if, writes, number):
    """Whether a tensor is changed at all."""
    result = tl.full((), True, tl.int1)
    if only_if is not None:
        result = result & (tl.load(only_if) != 0)
    if writes is not None:
        result = result & (tl.load(writes + number) != 0)
    return result


@triton.jit
def seen_gradient(values, factor, MAXIMIZE: tl.constexpr):
    """Return a gradient as it enters the moments."""
    g = values.to(tl.float32)
    if factor is not None:
        g = g * tl.load(factor).to(tl.float32)
    if MAXIMIZE:
        g = -g
    return g


@triton.jit
def bounded(values, MOST: tl.constexpr):
    """Bound a value as `rules.rule.bounded_gradient` does; infinite and NaN values stay so."""
    size = tl.abs(values)
    cut = (size > MOST) & (size < float("inf"))
    return tl.where(cut, tl.where(values > 0, MOST, -MOST), values)


@triton.jit
def main_value(p, master, inside):
    """Return the main parameter's value, or the parameter's own if it was edited since.

    A main parameter of 16 bits is a remainder, which does not reveal edits of the parameter.
    """
    value = p.to(tl.float32)
    if master is not None:
        if master.dtype.element_ty == tl.int16:
            value = joined(p.to(tl.int16, bitcast=True), tl.load(master, inside, 0))
        else:
            kept = tl.load(master, inside, 0.0)
            value = tl.where(kept.to(p.dtype) == p, kept, value)
    return value


@triton.jit
def store_value(param, master, value, inside):
    """Write a parameter, and its main parameter or remainder if it has one."""
    if master is None:
        tl.store(param, value.to(param.dtype.element_ty), inside)
    else:
        if master.dtype.element_ty == tl.int16:
            upper, lower = split(value)
            tl.store(param, upper.to(tl.bfloat16, bitcast=True), inside)
            tl.store(master, lower, inside)
        else:
            tl.store(param, value.to(param.dtype.element_ty), inside)
            tl.store(master, value, inside)


@triton.jit
def elements_of(chunks, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the tensor of this program's chunk, its elements' places and their mask.

    `chunks` is a table of `call.chunk_table`.
    """
    own = chunks + 3 * tl.program_id(0)
    number, first, size = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    if ALIGNED:
        size = tl.multiple_of(size, 8)
    offsets = tl.multiple_of(first, BLOCK) + tl.arange(0, BLOCK)
    return number, offsets, offsets < size


@triton.jit
def blocks_of(chunks, BLOCK: tl.constexpr, Q: tl.constexpr):
    """Return values as blocks that share a scale, (BLOCK / Q, Q), and the places of scales."""
    own = chunks + 3 * tl.program_id(0)
    number, first, size = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    block = tl.multiple_of(first, BLOCK) // Q + tl.arange(0, BLOCK // Q)[:, None]
    there = block < size // Q
    offsets = block * Q + tl.arange(0, Q)[None, :]
    return number, offsets, tl.broadcast_to(there, offsets.shape), block, there


@triton.jit
def square_sums(
    table, chunks, sums, dtype: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the sum of squares of one chunk of one tensor."""
    number, offsets, inside = elements_of(chunks, ALIGNED, BLOCK)
    values = tl.load(pointer_in(table, number, dtype, ALIGNED) + offsets, inside, 0.0)
    wide = values.to(tl.float64)
    tl.store(sums + tl.program_id(0), tl.sum(wide * wide))


@triton.jit
def advance(
    steps,  # (count,) addresses of the numbers of steps taken
    step_sizes,  # (count,): lr / (1 - beta1^t), written
    root_corrections,  # (count,): sqrt(1 - beta2^t), written
    only_if,
    writes,
    lr,
    beta1,
    beta2,
    step_dtype: tl.constexpr,
):
    """Count AdamW's step of one tensor, and compute the bias corrections of its moments."""
    number = tl.program_id(0)
    place = pointer_in(steps, number, step_dtype, False)
    count = tl.load(place).to(tl.float64)
    if is_written(only_if, writes, number):
        count += 1
        tl.store(place, count.to(step_dtype))
    b1, b2 = tl.load(beta1), tl.load(beta2)
    tl.store(step_sizes + number, tl.load(lr) / (1 - tl.exp(count * tl.log(b1))))
    tl.store(root_corrections + number, tl.sqrt(1 - tl.exp(count * tl.log(b2))))


@triton.jit
def counted(steps, only_if, writes, step_dtype: tl.constexpr):
    """Add 1 to the step count of one tensor."""
    number = tl.program_id(0)
    place = pointer_in(steps, number, step_dtype, False)
    tl.store(place, (tl.load(place) + 1).to(step_dtype), is_written(only_if, writes, number))


@triton.jit
def adamw(
    grads,  # (count,) addresses
    tensors,  # (3 or 4, count): parameters, first and second moments, masters
    scales,  # (2, count): of the moments that are 8-bit codes
    count,
    chunks,
    steps,  # (count,) addresses of the numbers of steps taken, with this one; if RANDOM
    origins,  # (count, 4): see `call.Origins`; if RANDOM
    step_sizes,  # (count,): lr / (1 - beta1^t)
    root_corrections,  # (count,): sqrt(1 - beta2^t)
    only_if,
    writes,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    factor,
    param_dtype: tl.constexpr,
    grad_dtype: tl.constexpr,
    first_dtype: tl.constexpr,
    second_dtype: tl.constexpr,
    master_dtype: tl.constexpr,  # None: there is no master
    step_dtype: tl.constexpr,
    Q: tl.constexpr,  # elements of a block of codes; 0: there are no codes
    FIRST_RANDOM: tl.constexpr,
    SECOND_RANDOM: tl.constexpr,
    PLACES: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    EPS_HAT: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    DECAY: tl.constexpr,  # "decoupled" | "independent" | "l2"
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run one AdamW step on one chunk of one tensor."""
    if Q:
        number, offsets, inside, block, there = blocks_of(chunks, BLOCK, Q)
    else:
        number, offsets, inside = elements_of(chunks, ALIGNED, BLOCK)
        block, there = None, None
    if not is_written(only_if, writes, number):
        return
    param = pointer_in(tensors, number, param_dtype, ALIGNED) + offsets
    grad = pointer_in(grads, number, grad_dtype, ALIGNED) + offsets
    first = pointer_in(tensors + count, number, first_dtype, ALIGNED) + offsets
    second = pointer_in(tensors + 2 * count, number, second_dtype, ALIGNED) + offsets
    first_scale, second_scale, master = None, None, None
    if first_dtype == tl.int8:
        first_scale = pointer_in(scales, number, tl.float32, False) + block
    if second_dtype == tl.uint8:
        second_scale = pointer_in(scales + count, number, tl.float32, False) + block
    if master_dtype is not None:
        master = pointer_in(tensors + 3 * count, number, master_dtype, ALIGNED) + offsets
    value = main_value(tl.load(param, inside, 0.0), master, inside)
    g = seen_gradient(tl.load(grad, inside, 0.0), factor, MAXIMIZE)
    g = bounded(g, ADAMW_LARGEST)
    decay = tl.load(weight_decay)
    if DECAY == "l2":
        g += value * decay.to(tl.float32)
    m = read_state(first, inside, first_scale, there)
    v = read_state(second, inside, second_scale, there)
    b1, b2 = tl.load(beta1), tl.load(beta2)
    m += (1 - b1).to(tl.float32) * (g - m)
    v = v * b2.to(tl.float32) + (1 - b2).to(tl.float32) * g * g
    denominator = tl.sqrt_rn(v)
    if EPS_HAT:
        denominator += tl.load(eps).to(tl.float32)
    denominator = denominator / tl.load(root_corrections + number).to(tl.float32)
    if not EPS_HAT:
        denominator += tl.load(eps).to(tl.float32)
    denominator = tl.where(denominator == 0, float("inf"), denominator)
    if DECAY == "decoupled":
        decay = tl.load(lr) * decay
    if CAUTIOUS:
        differ = ((m > 0) & (value < 0)) | ((m < 0) & (value > 0))
        value -= tl.where(differ, 0.0, value * decay.to(tl.float32))
    elif DECAY != "l2":
        value *= (1 - decay).to(tl.float32)
    value -= tl.load(step_sizes + number).to(tl.float32) * m / denominator
    store_value(param, master, value, inside)
    first_bits, second_bits = None, None
    if FIRST_RANDOM or SECOND_RANDOM:
        origin = origins + 4 * number
        keys = keys_of(origin, tl.load(pointer_in(steps, number, step_dtype, False)))
        if Q:
            bits = random_bits(origin, block * Q, tl.arange(0, Q)[None, :], keys, PLACES)
        else:
            bits = random_bits(origin, offsets, 0, keys, PLACES)
        if FIRST_RANDOM:
            first_bits = signed_bits(bits)
        if SECOND_RANDOM:
            second_bits = unsigned_bits(bits)
    write_state(first, inside, first_scale, there, m, first_bits)
    write_state(second, inside, second_scale, there, v, second_bits)
