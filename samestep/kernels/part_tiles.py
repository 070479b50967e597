"""Triton kernels on parts of blocks, in place: momentum, step, and moves between buffers.

A part is a region of rows x cols whose rows are some stride apart. Each kernel has a table with a
row of whole numbers per part, and a table of programs: (part, tile of the part). Arguments may be
None as in `elementwise`; `writes` has an entry per parameter.
"""

import triton
import triton.language as tl

from samestep.kernels.elementwise import is_written, pointer_in
from samestep.kernels.muon_tiles import new_momentum, read_tile, step_to, tile_of
from samestep.kernels.small import keys_of, random_bits, signed_bits, write_state


@triton.jit
def _number(table, ALIGNED: tl.constexpr):
    """Load a stride, a size or an offset, in elements."""
    value = tl.load(table)
    if ALIGNED:  # lets the compiler read 16 bytes at once
        value = tl.multiple_of(value, 8)
    return value


@triton.jit
def momentum_of_parts(
    grads,  # (params,) addresses
    parts,  # (parts, 9): see `parts.MomentumOfParts`
    kept,  # (parts, 7): the same, of momentum that is rounded at random; RANDOM
    programs,  # (programs, 2)
    out,  # where directions go, in the dtype in which they travel
    only_if,
    writes,
    mu,
    factor,
    grad_dtype: tl.constexpr,
    state_dtype: tl.constexpr,
    step_dtype: tl.constexpr,
    Q: tl.constexpr,  # elements of a block of codes, and columns of a tile; 0: there are no codes
    RANDOM: tl.constexpr,
    PLACES: tl.constexpr,
    EMA: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    GRADS_ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Update the momentum and write the direction of one tile of one part."""
    program = tl.program_id(0)
    part, tile = tl.load(programs + 2 * program), tl.load(programs + 2 * program + 1)
    own = parts + 9 * part
    param, rows, cols = tl.load(own), tl.load(own + 1), _number(own + 2, ALIGNED)
    _, first_col, row, col = tile_of(tile, cols, ROWS, COLS)
    inside = (row < rows) & (col < cols)
    grad = pointer_in(grads, param, grad_dtype, GRADS_ALIGNED)
    grad += _number(own + 3, ALIGNED) + row * _number(own + 4, ALIGNED) + col
    state = pointer_in(own, 5, state_dtype, ALIGNED) + row * _number(own + 6, ALIGNED) + col
    bits, scale, there = None, None, row < rows
    if Q:
        scale = pointer_in(kept + 7 * part, 4, tl.float32, False)
        scale += row * tl.load(kept + 7 * part + 5) + first_col // Q
    m, u = new_momentum(grad, state, scale, inside, there, mu, factor, EMA, NESTEROV, MAXIMIZE)
    if RANDOM:
        # The owner of the block counts later, for all who hold parts of it.
        step = tl.load(pointer_in(kept + 7 * part, 6, step_dtype, False)) + 1
        keys = keys_of(kept + 7 * part, step)
        bits = signed_bits(random_bits(kept + 7 * part, row * cols, col, keys, PLACES))
    written = is_written(only_if, writes, param)
    write_state(state, inside & written, scale, there & written, m, bits)
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
    """Copy one tile of one region to another place."""
    program = tl.program_id(0)
    own, tile = moves + 8 * tl.load(programs + 2 * program), tl.load(programs + 2 * program + 1)
    rows, cols = _number(own, TURNED_ALIGNED), _number(own + 1, ALIGNED)
    first_row, first_col, row, col = tile_of(tile, cols, ROWS, COLS)
    source = pointer_in(sources, tl.load(own + 2), dtype, ALIGNED) + _number(own + 3, ALIGNED)
    stride, turned = _number(own + 4, ALIGNED), tl.load(own + 5)
    values = read_tile(source, stride, turned, first_row, first_col, rows, cols, ROWS, COLS)
    place = out + _number(own + 6, ALIGNED) + row * _number(own + 7, ALIGNED) + col
    tl.store(place, values, (row < rows) & (col < cols))


@triton.jit
def step_of_parts(
    sources,  # (sources,) addresses of directions
    parts,  # (parts, 11): see `parts.StepOfParts`
    lr_factors,  # (parts,) float32
    programs,  # (programs, 2)
    only_if,
    writes,
    lr,
    weight_decay,
    param_dtype: tl.constexpr,
    direction_dtype: tl.constexpr,
    SCALE_DECAY: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    INDEPENDENT: tl.constexpr,
    master_dtype: tl.constexpr,  # None: there is no master
    ALIGNED: tl.constexpr,
    TURNED_ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Apply weight decay and the step to one tile of one part."""
    program = tl.program_id(0)
    part, tile = tl.load(programs + 2 * program), tl.load(programs + 2 * program + 1)
    own = parts + 11 * part
    param, rows, cols = tl.load(own), _number(own + 1, TURNED_ALIGNED), _number(own + 2, ALIGNED)
    first_row, first_col, row, col = tile_of(tile, cols, ROWS, COLS)
    source = pointer_in(sources, tl.load(own + 7), direction_dtype, ALIGNED)
    source += _number(own + 8, ALIGNED)
    stride, turned = _number(own + 9, ALIGNED), tl.load(own + 10)
    u = read_tile(source, stride, turned, first_row, first_col, rows, cols, ROWS, COLS)
    inside = (row < rows) & (col < cols) & is_written(only_if, writes, param)
    target = pointer_in(own, 3, param_dtype, ALIGNED) + row * _number(own + 4, ALIGNED) + col
    master = None
    if master_dtype is not None:
        master = pointer_in(own, 5, master_dtype, ALIGNED) + row * _number(own + 6, ALIGNED) + col
    factor = tl.load(lr_factors + part)
    step_to(
        target, master, u.to(tl.float32), inside, lr, weight_decay, factor,
        SCALE_DECAY, CAUTIOUS, INDEPENDENT,
    )  # fmt: skip
