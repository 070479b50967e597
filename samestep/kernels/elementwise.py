"""Triton kernels for what is done to every element: norm, AdamW, and both ends of Muon.

Each works on many tensors in one launch, through tables of their addresses, and reads and writes
every value once. Numbers that change from step to step are read from the device, so nothing waits
and nothing is compiled anew. Arithmetic is in float32, sums in float64.
"""

import triton
import triton.language as tl


@triton.jit
def _pointer(table, number, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in a table as a pointer."""
    pointer = tl.load(table + number).to(tl.pointer_type(dtype))
    if ALIGNED:  # lets the compiler read 16 bytes at once
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _written(only_if, write, HAS_ONLY_IF: tl.constexpr, HAS_WRITES: tl.constexpr):
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
    values = tl.load(_pointer(table, number, dtype, ALIGNED) + offsets, offsets < size, 0.0)
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
    place = _pointer(steps, number, step_dtype, False)
    count = tl.load(place).to(tl.float64)
    if _written(only_if, writes + number, HAS_ONLY_IF, HAS_WRITES):
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
    if not _written(only_if, writes + number, HAS_ONLY_IF, HAS_WRITES):
        return
    offsets = tl.multiple_of(begin, BLOCK) + tl.arange(0, BLOCK)
    inside = offsets < size
    param = _pointer(tensors, number, param_dtype, ALIGNED) + offsets
    grad = _pointer(grads, number, grad_dtype, ALIGNED) + offsets
    first = _pointer(tensors + count, number, first_dtype, ALIGNED) + offsets
    second = _pointer(tensors + 2 * count, number, second_dtype, ALIGNED) + offsets
    p, g = tl.load(param, inside, 0.0), tl.load(grad, inside, 0.0).to(tl.float32)
    m = tl.load(first, inside, 0.0).to(tl.float32)
    v = tl.load(second, inside, 0.0).to(tl.float32)
    value = p.to(tl.float32)
    if HAS_MASTER:
        master = _pointer(tensors + 3 * count, number, tl.float32, ALIGNED) + offsets
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


@triton.jit
def momentum(
    grads,  # (count,) addresses of (rows, cols)
    momenta,  # the same
    directions,  # (count, short, long), padded; the transpose of a tall block
    scales,  # (count,): the direction is multiplied with it; unless HAS_SCALE: not
    sums,  # (count, tiles): the squares of the direction
    only_if,
    writes,  # (count,): 0 leaves a momentum as it is
    mu,
    factor,
    rows,
    cols,
    short,
    long,
    grad_dtype: tl.constexpr,
    state_dtype: tl.constexpr,
    EMA: tl.constexpr,
    NESTEROV: tl.constexpr,
    TALL: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_ONLY_IF: tl.constexpr,
    HAS_WRITES: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ONLY_SUMS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Momentum and the direction that is orthogonalized, of one tile of one block."""
    tile, number = tl.program_id(0), tl.program_id(1)
    if TALL:  # tiles of the padded block, in its own orientation
        across = tl.cdiv(short, COLS)
    else:
        across = tl.cdiv(long, COLS)
    row = (tile // across) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tile % across) * COLS + tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (col < cols)
    offsets = row * cols + col
    g = tl.load(_pointer(grads, number, grad_dtype, ALIGNED) + offsets, inside, 0.0)
    state = _pointer(momenta, number, state_dtype, ALIGNED) + offsets
    m = tl.load(state, inside, 0.0).to(tl.float32)
    g = g.to(tl.float32)
    if HAS_FACTOR:
        g = g * tl.load(factor).to(tl.float32)
    if MAXIMIZE:
        g = -g
    mu_ = tl.load(mu)
    if EMA:
        m += (1 - mu_).to(tl.float32) * (g - m)
    else:
        m = m * mu_.to(tl.float32) + g
    u = m
    if NESTEROV:
        if EMA:
            u = g + mu_.to(tl.float32) * (m - g)
        else:
            u = m * mu_.to(tl.float32) + g
    u = tl.where(inside, u, 0.0)
    if HAS_SCALE:
        u = u * tl.load(scales + number)
    x = u.to(directions.dtype.element_ty)
    wide = x.to(tl.float64)
    if ONLY_SUMS:
        wide = u.to(tl.float64)
    tl.store(sums + number * tl.num_programs(0) + tile, tl.sum(wide * wide))
    if not ONLY_SUMS:
        written = _written(only_if, writes + number, HAS_ONLY_IF, HAS_WRITES)
        tl.store(state, m.to(state_dtype), inside & written)
        own = directions + number.to(tl.int64) * short * long
        if TALL:
            # the tile turned, so that neighbours in memory are written by neighbours
            col_ = (tile % across) * COLS + tl.arange(0, COLS)[:, None]
            row_ = (tile // across) * ROWS + tl.arange(0, ROWS)[None, :]
            tl.store(own + col_ * long + row_, x.T, (col_ < short) & (row_ < long))
        else:
            tl.store(own + row * long + col, x, (row < short) & (col < long))


@triton.jit
def step_along(
    tensors,  # (1 or 2, count): parameters and masters, (rows, cols) each
    count,
    directions,  # (count, short, long), padded; the transpose of a tall block
    factors,  # (count, 1), (count, short) or (count, long): the direction is multiplied with it
    only_if,
    writes,
    lr,
    weight_decay,
    lr_factor,
    rows,
    cols,
    short,
    long,
    param_dtype: tl.constexpr,
    FACTORS: tl.constexpr,  # none, one per block, per short or per long coordinate: 0 to 3
    SCALE_DECAY: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    TALL: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    HAS_ONLY_IF: tl.constexpr,
    HAS_WRITES: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Weight decay and the step, of one tile of one block."""
    tile, number = tl.program_id(0), tl.program_id(1)
    across = tl.cdiv(cols, COLS)
    row = (tile // across) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tile % across) * COLS + tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (col < cols)
    inside = inside & _written(only_if, writes + number, HAS_ONLY_IF, HAS_WRITES)
    own = directions + number.to(tl.int64) * short * long
    if TALL:
        col_ = (tile % across) * COLS + tl.arange(0, COLS)[:, None]
        row_ = (tile // across) * ROWS + tl.arange(0, ROWS)[None, :]
        u = tl.load(own + col_ * long + row_, (col_ < cols) & (row_ < rows), 0.0).T
    else:
        u = tl.load(own + row * long + col, inside, 0.0)
    u = u.to(tl.float32)
    if FACTORS == 1:
        u *= tl.load(factors + number)
    if FACTORS == 2:
        along = col if TALL else row
        u *= tl.load(factors + number * short + along, along < short, 0.0)
    if FACTORS == 3:
        along = row if TALL else col
        u *= tl.load(factors + number * long + along, along < long, 0.0)
    offsets = row * cols + col
    param = _pointer(tensors, number, param_dtype, ALIGNED) + offsets
    p = tl.load(param, inside, 0.0)
    value = p.to(tl.float32)
    if HAS_MASTER:
        master = _pointer(tensors + count, number, tl.float32, ALIGNED) + offsets
        kept = tl.load(master, inside, 0.0)
        value = tl.where(kept.to(param_dtype) == p, kept, value)
    rate = tl.load(lr)
    adjusted = rate * lr_factor
    decay = (adjusted if SCALE_DECAY else rate) * tl.load(weight_decay)
    if CAUTIOUS:
        value -= tl.where(u * value >= 0, value * decay.to(tl.float32), 0.0)
    else:
        value *= (1 - decay).to(tl.float32)
    value -= adjusted.to(tl.float32) * u
    tl.store(param, value.to(param_dtype), inside)
    if HAS_MASTER:
        tl.store(master, value, inside)
