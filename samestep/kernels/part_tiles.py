"""Triton kernels on parts of blocks where they lie: momentum, step, and moves between buffers.

A part is a region of rows x cols whose rows are some stride apart. Each kernel has a table with a
row of whole numbers per part, and one of programs: (part, tile of it).
"""

import triton
import triton.language as tl

from samestep.kernels.elementwise import is_written
from samestep.kernels.muon_tiles import direction_of, new_momentum, seen_gradient, stepped


@triton.jit
def _number(table, ALIGNED: tl.constexpr):
    """A stride, a size or an offset, in elements."""
    value = tl.load(table)
    if ALIGNED:  # lets the compiler read 16 bytes at once
        value = tl.multiple_of(value, 8)
    return value


@triton.jit
def _at(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _turnable(
    begin, stride, turned, first_row, first_col, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """A tile of a region; `turned`: the region is the transpose, its rows lie as columns."""
    if turned != 0:
        col_ = first_col + tl.arange(0, COLS)[:, None]
        row_ = first_row + tl.arange(0, ROWS)[None, :]
        values = tl.load(begin + col_ * stride + row_, (col_ < cols) & (row_ < rows), 0.0).T
    else:
        row = first_row + tl.arange(0, ROWS)[:, None]
        col = first_col + tl.arange(0, COLS)[None, :]
        values = tl.load(begin + row * stride + col, (row < rows) & (col < cols), 0.0)
    return values


@triton.jit
def momentum_of_parts(
    grads,  # (params,) addresses
    parts,  # (parts, 9): see `parts.MomentumOfParts`
    programs,  # (programs, 2)
    out,  # where directions go, in the dtype in which they travel
    only_if,
    writes,  # (params,): 0 leaves a momentum as it is
    mu,
    factor,
    grad_dtype: tl.constexpr,
    state_dtype: tl.constexpr,
    EMA: tl.constexpr,
    NESTEROV: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_ONLY_IF: tl.constexpr,
    HAS_WRITES: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    GRADS_ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Momentum and direction of one tile of one part."""
    program = tl.program_id(0)
    own, tile = parts + 9 * tl.load(programs + 2 * program), tl.load(programs + 2 * program + 1)
    param, rows, cols = tl.load(own), tl.load(own + 1), _number(own + 2, ALIGNED)
    across = tl.cdiv(cols, COLS)
    row = (tile // across) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tile % across) * COLS + tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (col < cols)
    grad = _at(tl.load(grads + param), grad_dtype, GRADS_ALIGNED)
    grad += _number(own + 3, ALIGNED) + row * _number(own + 4, ALIGNED) + col
    state = _at(tl.load(own + 5), state_dtype, ALIGNED) + row * _number(own + 6, ALIGNED) + col
    values = tl.load(grad, inside, 0.0)
    m = tl.load(state, inside, 0.0).to(tl.float32)
    g = seen_gradient(values, factor, HAS_FACTOR, MAXIMIZE)
    mu_ = tl.load(mu)
    m = new_momentum(m, g, mu_, EMA)
    u = direction_of(m, g, mu_, EMA, NESTEROV)
    written = is_written(only_if, writes + param, HAS_ONLY_IF, HAS_WRITES)
    tl.store(state, m.to(state_dtype), inside & written)
    begin = tl.load(own + 7)
    wanted = inside & (begin >= 0)  # a copy that another rank sends goes nowhere
    begin = tl.maximum(begin, 0)
    if ALIGNED:
        begin = tl.multiple_of(begin, 8)
    place = out + begin + row * _number(own + 8, ALIGNED) + col
    tl.store(place, u.to(out.dtype.element_ty), wanted)


@triton.jit
def moved(
    sources,  # (sources,) addresses
    moves,  # (moves, 8): see `parts.Moves`
    programs,  # (programs, 2)
    out,
    dtype: tl.constexpr,
    ALIGNED: tl.constexpr,
    TURNED_ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """One tile of one region, copied to another place."""
    program = tl.program_id(0)
    own, tile = moves + 8 * tl.load(programs + 2 * program), tl.load(programs + 2 * program + 1)
    rows, cols = _number(own, TURNED_ALIGNED), _number(own + 1, ALIGNED)
    across = tl.cdiv(cols, COLS)
    first_row, first_col = (tile // across) * ROWS, (tile % across) * COLS
    source = _at(tl.load(sources + tl.load(own + 2)), dtype, ALIGNED) + _number(own + 3, ALIGNED)
    stride, turned = _number(own + 4, ALIGNED), tl.load(own + 5)
    values = _turnable(source, stride, turned, first_row, first_col, rows, cols, ROWS, COLS)
    row, col = first_row + tl.arange(0, ROWS)[:, None], first_col + tl.arange(0, COLS)[None, :]
    place = out + _number(own + 6, ALIGNED) + row * _number(own + 7, ALIGNED) + col
    tl.store(place, values, (row < rows) & (col < cols))


@triton.jit
def step_of_parts(
    sources,  # (sources,) addresses of directions
    parts,  # (parts, 11): see `parts.StepOfParts`
    lr_factors,  # (parts,) float32
    programs,  # (programs, 2)
    only_if,
    writes,  # (params,)
    lr,
    weight_decay,
    param_dtype: tl.constexpr,
    direction_dtype: tl.constexpr,
    SCALE_DECAY: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    HAS_ONLY_IF: tl.constexpr,
    HAS_WRITES: tl.constexpr,
    ALIGNED: tl.constexpr,
    TURNED_ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Weight decay and the step, of one tile of one part."""
    program = tl.program_id(0)
    part, tile = tl.load(programs + 2 * program), tl.load(programs + 2 * program + 1)
    own = parts + 11 * part
    param, rows, cols = tl.load(own), _number(own + 1, TURNED_ALIGNED), _number(own + 2, ALIGNED)
    across = tl.cdiv(cols, COLS)
    first_row, first_col = (tile // across) * ROWS, (tile % across) * COLS
    source = _at(tl.load(sources + tl.load(own + 7)), direction_dtype, ALIGNED)
    source += _number(own + 8, ALIGNED)
    stride, turned = _number(own + 9, ALIGNED), tl.load(own + 10)
    u = _turnable(source, stride, turned, first_row, first_col, rows, cols, ROWS, COLS)
    u = u.to(tl.float32)
    row, col = first_row + tl.arange(0, ROWS)[:, None], first_col + tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (col < cols)
    inside = inside & is_written(only_if, writes + param, HAS_ONLY_IF, HAS_WRITES)
    target = _at(tl.load(own + 3), param_dtype, ALIGNED) + row * _number(own + 4, ALIGNED) + col
    p = tl.load(target, inside, 0.0)
    value = p.to(tl.float32)
    if HAS_MASTER:
        master = _at(tl.load(own + 5), tl.float32, ALIGNED) + row * _number(own + 6, ALIGNED) + col
        kept = tl.load(master, inside, 0.0)
        value = tl.where(kept.to(param_dtype) == p, kept, value)
    factor = tl.load(lr_factors + part)
    value = stepped(value, u, lr, weight_decay, factor, SCALE_DECAY, CAUTIOUS)
    tl.store(target, value.to(param_dtype), inside)
    if HAS_MASTER:
        tl.store(master, value, inside)
