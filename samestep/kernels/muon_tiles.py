"""Triton kernels for both ends of Muon, on tiles of blocks: `samestep.rules.muon` has the formulas.

Arithmetic is in float32, sums are in float64. The formulas are functions of their own, which
`part_tiles` calls too: so parts of a block get the bits that the whole gets.
"""

import triton
import triton.language as tl

from samestep.kernels.elementwise import is_written, pointer_in


@triton.jit
def seen_gradient(values, factor, HAS_FACTOR: tl.constexpr, MAXIMIZE: tl.constexpr):
    """A gradient as momentum sees it."""
    g = values.to(tl.float32)
    if HAS_FACTOR:
        g = g * tl.load(factor).to(tl.float32)
    if MAXIMIZE:
        g = -g
    return g


@triton.jit
def new_momentum(m, g, mu, EMA: tl.constexpr):
    """ema: m + (1 - mu) (g - m).  sum: mu m + g."""
    if EMA:
        m += (1 - mu).to(tl.float32) * (g - m)
    else:
        m = m * mu.to(tl.float32) + g
    return m


@triton.jit
def direction_of(m, g, mu, EMA: tl.constexpr, NESTEROV: tl.constexpr):
    """The new momentum, or Nesterov's look-ahead from it."""
    u = m
    if NESTEROV:
        if EMA:
            u = g + mu.to(tl.float32) * (m - g)
        else:
            u = m * mu.to(tl.float32) + g
    return u


@triton.jit
def stepped(
    value, u, lr, weight_decay, lr_factor, SCALE_DECAY: tl.constexpr, CAUTIOUS: tl.constexpr
):
    """A parameter after weight decay and the step along u."""
    rate = tl.load(lr)
    adjusted = rate * lr_factor
    decay = (adjusted if SCALE_DECAY else rate) * tl.load(weight_decay)
    if CAUTIOUS:
        value -= tl.where(u * value >= 0, value * decay.to(tl.float32), 0.0)
    else:
        value *= (1 - decay).to(tl.float32)
    value -= adjusted.to(tl.float32) * u
    return value


@triton.jit
def momentum(
    grads,  # (count,) addresses of (rows, cols); GIVEN: directions, (count, rows, cols)
    momenta,  # (count,) addresses
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
    GIVEN: tl.constexpr,  # the direction is there already: no momentum
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
    if GIVEN:
        begin = number.to(tl.int64) * rows * cols
        u = tl.load(grads + begin + offsets, inside, 0.0).to(tl.float32)
    else:
        values = tl.load(pointer_in(grads, number, grad_dtype, ALIGNED) + offsets, inside, 0.0)
        state = pointer_in(momenta, number, state_dtype, ALIGNED) + offsets
        m = tl.load(state, inside, 0.0).to(tl.float32)
        g = seen_gradient(values, factor, HAS_FACTOR, MAXIMIZE)
        mu_ = tl.load(mu)
        m = new_momentum(m, g, mu_, EMA)
        u = direction_of(m, g, mu_, EMA, NESTEROV)
    u = tl.where(inside, u, 0.0)
    if HAS_SCALE:
        u = u * tl.load(scales + number)
    x = u.to(directions.dtype.element_ty)
    wide = x.to(tl.float64)
    if ONLY_SUMS:
        wide = u.to(tl.float64)
    tl.store(sums + number * tl.num_programs(0) + tile, tl.sum(wide * wide))
    if not ONLY_SUMS:
        if not GIVEN:
            written = is_written(only_if, writes + number, HAS_ONLY_IF, HAS_WRITES)
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
    inside = inside & is_written(only_if, writes + number, HAS_ONLY_IF, HAS_WRITES)
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
    param = pointer_in(tensors, number, param_dtype, ALIGNED) + offsets
    p = tl.load(param, inside, 0.0)
    value = p.to(tl.float32)
    if HAS_MASTER:
        master = pointer_in(tensors + count, number, tl.float32, ALIGNED) + offsets
        kept = tl.load(master, inside, 0.0)
        value = tl.where(kept.to(param_dtype) == p, kept, value)
    value = stepped(value, u, lr, weight_decay, lr_factor, SCALE_DECAY, CAUTIOUS)
    tl.store(param, value.to(param_dtype), inside)
    if HAS_MASTER:
        tl.store(master, value, inside)
