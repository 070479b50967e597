"""Triton kernels for what is done to every element: norm and AdamW; `muon_tiles` has Muon's.

Each works on many tensors in one launch, through tables of their addresses, and reads and writes
every value once. Numbers that change from step to step are read from the device, so nothing waits
and nothing is compiled anew. Arithmetic is in float32, sums in float64.
"""

import triton
import triton.language as tl


@triton.jit
def pointer_in(table, number, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in a table as a pointer."""
    pointer = tl.load(table + number).to(tl.pointer_type(dtype))
    if ALIGNED:  # lets the compiler read 16 bytes at once
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def is_written(only_if, write, HAS_ONLY_IF: tl.constexpr, HAS_WRITES: tl.constexpr):
    """Whether a tensor is changed at all."""
    result = tl.full((), True, tl.int1)
    if HAS_ONLY_IF:
        result = result & (tl.load(only_if) != 0)
    if HAS_WRITES:
        result = result & (tl.load(write) != 0)
    return result


@triton.jit
def square_sums(
    table, chunks, sums, dtype: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """The sum of squares of one chunk of one tensor."""
    chunk = tl.program_id(0)
    number, first = tl.load(chunks + 3 * chunk), tl.load(chunks + 3 * chunk + 1)
    size = tl.load(chunks + 3 * chunk + 2)
    if ALIGNED:
        size = tl.multiple_of(size, 8)
    offsets = tl.multiple_of(first, BLOCK) + tl.arange(0, BLOCK)
    values = tl.load(pointer_in(table, number, dtype, ALIGNED) + offsets, offsets < size, 0.0)
    wide = values.to(tl.float64)
    tl.store(sums + chunk, tl.sum(wide * wide))


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
    HAS_ONLY_IF: tl.constexpr,
    HAS_WRITES: tl.constexpr,
):
    """Count AdamW's step of one tensor, and correct its moments for having begun at zero."""
    number = tl.program_id(0)
    place = pointer_in(steps, number, step_dtype, False)
    count = tl.load(place).to(tl.float64)
    if is_written(only_if, writes + number, HAS_ONLY_IF, HAS_WRITES):
        count += 1
        tl.store(place, count.to(step_dtype))
    b1, b2 = tl.load(beta1), tl.load(beta2)
    tl.store(step_sizes + number, tl.load(lr) / (1 - tl.exp(count * tl.log(b1))))
    tl.store(root_corrections + number, tl.sqrt(1 - tl.exp(count * tl.log(b2))))


@triton.jit
def adamw(
    grads,  # (count,) addresses
    tensors,  # (3 or 4, count): parameters, first and second moments, masters
    count,
    chunks,
    step_sizes,  # (count,): lr / (1 - beta1^t)
    root_corrections,  # (count,): sqrt(1 - beta2^t)
    only_if,  # 0: nothing is changed
    writes,  # (count,): 0 leaves a tensor as it is
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
    HAS_MASTER: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_ONLY_IF: tl.constexpr,
    HAS_WRITES: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One AdamW step on one chunk of one tensor."""
    chunk = tl.program_id(0)
    number, begin = tl.load(chunks + 3 * chunk), tl.load(chunks + 3 * chunk + 1)
    size = tl.load(chunks + 3 * chunk + 2)
    if ALIGNED:
        size = tl.multiple_of(size, 8)
    if not is_written(only_if, writes + number, HAS_ONLY_IF, HAS_WRITES):
        return
    offsets = tl.multiple_of(begin, BLOCK) + tl.arange(0, BLOCK)
    inside = offsets < size
    param = pointer_in(tensors, number, param_dtype, ALIGNED) + offsets
    grad = pointer_in(grads, number, grad_dtype, ALIGNED) + offsets
    first = pointer_in(tensors + count, number, first_dtype, ALIGNED) + offsets
    second = pointer_in(tensors + 2 * count, number, second_dtype, ALIGNED) + offsets
    p, g = tl.load(param, inside, 0.0), tl.load(grad, inside, 0.0).to(tl.float32)
    m = tl.load(first, inside, 0.0).to(tl.float32)
    v = tl.load(second, inside, 0.0).to(tl.float32)
    value = p.to(tl.float32)
    if HAS_MASTER:
        master = pointer_in(tensors + 3 * count, number, tl.float32, ALIGNED) + offsets
        kept = tl.load(master, inside, 0.0)
        value = tl.where(kept.to(param_dtype) == p, kept, value)
    if HAS_FACTOR:
        g = g * tl.load(factor).to(tl.float32)
    if MAXIMIZE:
        g = -g
    b1, b2 = tl.load(beta1), tl.load(beta2)
    m += (1 - b1).to(tl.float32) * (g - m)
    v = v * b2.to(tl.float32) + (1 - b2).to(tl.float32) * g * g
    denominator = tl.sqrt_rn(v) / tl.load(root_corrections + number).to(tl.float32)
    denominator += tl.load(eps).to(tl.float32)
    value *= (1 - tl.load(lr) * tl.load(weight_decay)).to(tl.float32)
    value -= tl.load(step_sizes + number).to(tl.float32) * m / denominator
    tl.store(param, value.to(param_dtype), inside)
    tl.store(first, m.to(first_dtype), inside)
    tl.store(second, v.to(second_dtype), inside)
    if HAS_MASTER:
        tl.store(master, value, inside)
