"""Triton kernels for both ends of Muon, on tiles of blocks: `samestep.rules.muon` has the formulas.

Arithmetic is in float32, sums are in float64. The formulas are functions of their own, which
`part_tiles` calls too: so parts of a block get the bits that the whole gets. None as an argument
is as in `elementwise`. Loops over sizes that
the compiler does not know are `while`s whose counter begins as a tensor (`tl.program_id(0) * 0`):
Triton's interpreter, through which tests run these kernels, takes no such size in `range`.
"""

import triton
import triton.language as tl

from samestep.kernels.elementwise import (
    bounded,
    is_written,
    main_value,
    pointer_in,
    seen_gradient,
    store_value,
)
from samestep.kernels.small import keys_of, random_bits, read_state, signed_bits, write_state
from samestep.rules.muon import LARGEST_GRADIENT, LARGEST_RESCALE

MUON_LARGEST = tl.constexpr(LARGEST_GRADIENT)
RESCALE_LARGEST = tl.constexpr(LARGEST_RESCALE)


@triton.jit
def direction_of(m, g, mu, EMA: tl.constexpr, NESTEROV: tl.constexpr):
    """Return the new momentum, or Nesterov's look-ahead from it."""
    u = m
    if NESTEROV:
        if EMA:
            u = g + mu.to(tl.float32) * (m - g)
        else:
            u = m * mu.to(tl.float32) + g
    return u


@triton.jit
def new_momentum(
    grad, momentum, scale, inside, scale_inside, mu, factor,
    EMA: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    """Return the new momentum and the direction of the elements at pointers.

    `scale` points to the scales of 8-bit codes, per code or per row; None: there are no codes.
    ema: m + (1 - mu) (g - m).  sum: mu m + g.
    """
    g = seen_gradient(tl.load(grad, inside, 0.0), factor, MAXIMIZE)
    g = bounded(g, MUON_LARGEST)
    m = read_state(momentum, inside, scale, scale_inside)
    mu_ = tl.load(mu)
    if EMA:
        m += (1 - mu_).to(tl.float32) * (g - m)
    else:
        m = m * mu_.to(tl.float32) + g
    return m, direction_of(m, g, mu_, EMA, NESTEROV)


@triton.jit
def step_to(
    param, master, u, inside, lr, weight_decay, lr_factor,
    SCALE_DECAY: tl.constexpr, CAUTIOUS: tl.constexpr, INDEPENDENT: tl.constexpr,
):  # fmt: skip
    """Apply weight decay and the step along u to the elements at pointers."""
    value = main_value(tl.load(param, inside, 0.0), master, inside)
    rate = tl.load(lr)
    adjusted = rate * lr_factor
    decay = tl.load(weight_decay)
    if not INDEPENDENT:
        decay = (adjusted if SCALE_DECAY else rate) * decay
    if CAUTIOUS:
        value -= tl.where(u * value >= 0, value * decay.to(tl.float32), 0.0)
    else:
        value *= (1 - decay).to(tl.float32)
    value -= adjusted.to(tl.float32) * u
    store_value(param, master, value, inside)


@triton.jit
def tile_of(tile, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return a tile's first row, first column, rows and columns, in a region of `cols` columns."""
    across = tl.cdiv(cols, COLS)
    first_row, first_col = (tile // across) * ROWS, (tile % across) * COLS
    row = first_row + tl.arange(0, ROWS)[:, None]
    col = first_col + tl.arange(0, COLS)[None, :]
    return first_row, first_col, row, col


@triton.jit
def read_tile(
    begin, stride, turned, first_row, first_col, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Read a tile of a region; `turned`: the region is stored as its transpose."""
    if turned != 0:
        # so that neighbours in memory are read by neighbours
        col_ = first_col + tl.arange(0, COLS)[:, None]
        row_ = first_row + tl.arange(0, ROWS)[None, :]
        values = tl.load(begin + col_ * stride + row_, (col_ < cols) & (row_ < rows), 0.0).T
    else:
        row = first_row + tl.arange(0, ROWS)[:, None]
        col = first_col + tl.arange(0, COLS)[None, :]
        values = tl.load(begin + row * stride + col, (row < rows) & (col < cols), 0.0)
    return values


@triton.jit
def places_of(row, col, cols, group, group_stride, row_stride, col_stride, LAID: tl.constexpr):
    """Return the offsets of a block's elements; LAID: interleaved with others in groups of rows."""
    if LAID:
        begin = (row // group).to(tl.int64) * group_stride
        offsets = begin + (row % group).to(tl.int64) * row_stride + col.to(tl.int64) * col_stride
    else:
        offsets = row * cols + col
    return offsets


@triton.jit
def rounded_direction(u, BFLOAT16: tl.constexpr):
    """Return a tile of a direction in float32, rounded to bfloat16 if BFLOAT16.

    Ranks that receive the direction in bfloat16 then have the same bits.
    """
    if BFLOAT16:
        u = u.to(tl.bfloat16).to(tl.float32)
    return u


@triton.jit
def write_direction(
    own, x, row, col, first_row, first_col, short, long,
    TALL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write a tile of a block into its direction, (short, long) and padded; tall: transposed."""
    if TALL:
        # the tile turned, so that neighbours in memory are written by neighbours
        col_, row_ = (
            first_col + tl.arange(0, COLS)[:, None],
            first_row + tl.arange(0, ROWS)[None, :],
        )
        tl.store(own + col_ * long + row_, x.T, (col_ < short) & (row_ < long))
    else:
        tl.store(own + row * long + col, x, (row < short) & (col < long))


@triton.jit
def momentum(
    grads,  # (count,) addresses of (rows, cols); GIVEN: directions, (count, rows, cols)
    momenta,  # (count,) addresses
    scales,  # (count,) addresses of those of 8-bit momenta
    steps,  # (count,) addresses of the numbers of steps, with this one; RANDOM
    origins,  # (count, 4): see `call.Origins`; RANDOM
    directions,  # (count, short, long), padded; the transpose of a tall block
    powers,  # (count,): the direction is multiplied with it; None: not
    unscaled,  # (count, rows, cols) bfloat16: the direction itself; None: nobody asks for it
    sums,  # (count, programs): the squares of the direction, not multiplied
    only_if,
    writes,  # (count,): 0 leaves a momentum as it is
    mu,
    factor,
    rows,
    cols,
    short,
    long,
    group,
    group_stride,
    row_stride,
    col_stride,
    grad_dtype: tl.constexpr,
    state_dtype: tl.constexpr,
    step_dtype: tl.constexpr,
    Q: tl.constexpr,  # elements of a block of codes, and columns of a tile; 0: there are no codes
    RANDOM: tl.constexpr,
    PLACES: tl.constexpr,
    GIVEN: tl.constexpr,  # the direction is there already: no momentum
    EMA: tl.constexpr,
    NESTEROV: tl.constexpr,
    TALL: tl.constexpr,
    LAID: tl.constexpr,
    BFLOAT16: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ONLY_SUMS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILES: tl.constexpr,  # of one program, one after the other
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Compute momentum and the direction before orthogonalization, of tiles of one block."""
    number = tl.program_id(1)
    # All that serves every tile is read here: the compiler does not know that nobody writes it.
    if not GIVEN:
        grad_begin = pointer_in(grads, number, grad_dtype, ALIGNED)
        state_begin = pointer_in(momenta, number, state_dtype, ALIGNED)
        written = is_written(only_if, writes, number)
    if Q:
        scale_begin = pointer_in(scales, number, tl.float32, False)
    if RANDOM:
        origin = origins + 4 * number
        keys = keys_of(origin, tl.load(pointer_in(steps, number, step_dtype, False)))
    power = 1.0
    if powers is not None:
        power = tl.load(powers + number)
    squares = tl.zeros((ROWS,), tl.float64)
    for turn in range(TILES):
        # tiles of the padded block, in its own orientation; those behind the last are outside
        tile = tl.program_id(0) * TILES + turn
        first_row, first_col, row, col = tile_of(tile, short if TALL else long, ROWS, COLS)
        inside = (row < rows) & (col < cols)
        offsets = places_of(row, col, cols, group, group_stride, row_stride, col_stride, LAID)
        if GIVEN:
            begin = number.to(tl.int64) * rows * cols
            u = tl.load(grads + begin + offsets, inside, 0.0).to(tl.float32)
        else:
            grad, state = grad_begin + offsets, state_begin + offsets
            scale, there = None, inside
            if Q:  # one for each row of the tile
                scale = scale_begin + row * (cols // Q) + first_col // Q
                there = (row < rows) & (first_col < cols)
            m, u = new_momentum(
                grad, state, scale, inside, there, mu, factor, EMA, NESTEROV, MAXIMIZE
            )  # fmt: skip
        u = rounded_direction(tl.where(inside, u, 0.0), BFLOAT16)
        wide = u.to(tl.float64)
        squares += tl.sum(wide * wide, 1)
        if not ONLY_SUMS:
            if not GIVEN:
                bits = None
                if RANDOM:
                    bits = signed_bits(random_bits(origin, row * cols + col, 0, keys, PLACES))
                write_state(state, inside & written, scale, there & written, m, bits)
            if unscaled is not None:
                place = unscaled + number.to(tl.int64) * rows * cols + row * cols + col
                tl.store(place, u.to(tl.bfloat16), inside)
            if powers is not None:
                u = u * power
            x = u.to(directions.dtype.element_ty)
            own = directions + number.to(tl.int64) * short * long
            write_direction(own, x, row, col, first_row, first_col, short, long, TALL, ROWS, COLS)
    tl.store(sums + number * tl.num_programs(0) + tl.program_id(0), tl.sum(squares))


@triton.jit
def direction_again(
    grads,  # as `momentum` has them
    momenta,  # float32, updated
    directions,
    unscaled,  # as `momentum` wrote it; None: momenta are not rounded, and give it again
    powers,
    again,  # (count,): 0 leaves a direction as it is
    mu,
    factor,
    rows,
    cols,
    short,
    long,
    group,
    group_stride,
    row_stride,
    col_stride,
    tiles,
    grad_dtype: tl.constexpr,
    EMA: tl.constexpr,
    NESTEROV: tl.constexpr,
    TALL: tl.constexpr,
    LAID: tl.constexpr,
    BFLOAT16: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Write directions once more whose power of two has changed.

    Few programs with many tiles each are launched: most steps change no power.
    """
    number = tl.program_id(1)
    if tl.load(again + number) != 0:
        power, mu_ = tl.load(powers + number), tl.load(mu)
        tile = tl.program_id(0)
        while tile < tiles:
            first_row, first_col, row, col = tile_of(tile, short if TALL else long, ROWS, COLS)
            inside = (row < rows) & (col < cols)
            if unscaled is not None:
                place = unscaled + number.to(tl.int64) * rows * cols + row * cols + col
                u = tl.load(place, inside, 0.0).to(tl.float32)
            else:
                offsets = places_of(
                    row, col, cols, group, group_stride, row_stride, col_stride, LAID
                )
                g_begin = pointer_in(grads, number, grad_dtype, ALIGNED)
                m_begin = pointer_in(momenta, number, tl.float32, ALIGNED)
                g = seen_gradient(tl.load(g_begin + offsets, inside, 0.0), factor, MAXIMIZE)
                g = bounded(g, MUON_LARGEST)
                m = tl.load(m_begin + offsets, inside, 0.0)
                u = direction_of(m, g, mu_, EMA, NESTEROV)
                u = rounded_direction(tl.where(inside, u, 0.0), BFLOAT16)
            u = u * power
            x = u.to(directions.dtype.element_ty)
            own = directions + number.to(tl.int64) * short * long
            write_direction(own, x, row, col, first_row, first_col, short, long, TALL, ROWS, COLS)
            tile += tl.num_programs(0)


@triton.jit
def fitting_power(norm):
    """Return the power of two, in float32, that brings a float64 norm of any size to 8 .. 16."""
    exponent = ((norm.to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1022  # norm = f 2^e, f < 1
    exponent = tl.minimum(tl.maximum(exponent, -99), 121)
    return ((131 - exponent).to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def block_numbers(
    sums,  # (count, parts): squares of the directions; HAS_POWER: of those that are multiplied
    parts,
    powers,  # (count,): read where HAS_POWER, else written
    again,  # (count,): whether the power is another one than was there before
    norms,  # (count,)
    scales,  # (count,): what brings a direction, multiplied with its power, to norm 1
    norm_factor,
    eps,
    ADD: tl.constexpr,
    HAS_POWER: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Compute the norm, power and scale of one block, which its products need."""
    number = tl.program_id(0)
    totals = tl.zeros((PARTS,), tl.float64)
    first = tl.program_id(0) * 0
    while first < parts:
        place = first + tl.arange(0, PARTS)
        totals += tl.load(sums + number * parts + place, place < parts, 0.0)
        first += PARTS
    norm = tl.sqrt(tl.sum(totals))
    if HAS_POWER:
        power = tl.load(powers + number)
        norm = norm / power.to(tl.float64)
    else:
        power = fitting_power(norm)
        tl.store(again + number, (power != tl.load(powers + number)).to(tl.int32))
        tl.store(powers + number, power)
    tl.store(norms + number, norm.to(tl.float32))
    scaled = norm * norm_factor
    if ADD:
        scaled += eps
    # A zero block is divided by the smallest normal number, and then by no less than 1.
    floor = tl.maximum(eps, 1.1754943508222875e-38)
    scale = 1.0 / (tl.maximum(scaled, floor) * power.to(tl.float64))
    tl.store(scales + number, tl.minimum(scale, 1.0).to(tl.float32))


@triton.jit
def equilibrate(
    given,  # (count, short, long): directions, in bfloat16 or as float16 times their powers
    directions,  # the same memory: float16, times their powers
    norms,  # (count,) of whole directions, not multiplied
    powers,  # (count,)
    sums,  # (count, programs): squares of the result
    rows,
    cols,
    short,
    long,
    root_rows,
    TALL: tl.constexpr,
    MULTIPLIED: tl.constexpr,  # whether what is given is multiplied with its power
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Bring ROWS rows of a block to one norm; zero rows stay zero."""
    tile, number = tl.program_id(0), tl.program_id(1)
    begin = number.to(tl.int64) * short * long
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]
    row_stride, col_stride = 1 if TALL else long, long if TALL else 1
    power = tl.load(powers + number)
    squares = tl.zeros((ROWS, COLS), tl.float32)
    first = tl.program_id(0) * 0
    while first < cols:
        col = first + tl.arange(0, COLS)[None, :]
        places = row * row_stride + col * col_stride
        x = tl.load(given + begin + places, (row < rows) & (col < cols), 0.0).to(tl.float32)
        if not MULTIPLIED:
            x = x * power
        squares += x * x
        first += COLS
    own = tl.sqrt(tl.sum(squares, 1))[:, None] / power
    factor = tl.load(norms + number) / root_rows / tl.maximum(own, 1e-6)
    factor = tl.minimum(factor, 3.4028234663852886e38)  # finite also for rows of zeros
    if not MULTIPLIED:
        factor = factor * power
    total = tl.zeros((ROWS, COLS), tl.float64)
    first = tl.program_id(0) * 0
    while first < cols:
        col = first + tl.arange(0, COLS)[None, :]
        places = row * row_stride + col * col_stride
        inside = (row < rows) & (col < cols)
        x = tl.load(given + begin + places, inside, 0.0).to(tl.float32) * factor
        x = x.to(directions.dtype.element_ty)
        tl.store(directions + begin + places, x, inside)
        wide = x.to(tl.float64)
        total += wide * wide
        first += COLS
    tl.store(sums + number * tl.num_programs(0) + tile, tl.sum(total))


@triton.jit
def squares_along(
    directions,  # (count, short, long)
    sums,  # (count, along)
    short,
    long,
    along,
    SHORT: tl.constexpr,  # along the short side: of each of its rows; else of each column
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Sum the squares of ROWS rows, or of COLS columns, of one direction."""
    tile, number = tl.program_id(0), tl.program_id(1)
    begin = number.to(tl.int64) * short * long
    squares = tl.zeros((ROWS, COLS), tl.float32)
    own = tile * (ROWS if SHORT else COLS) + tl.arange(0, ROWS if SHORT else COLS)
    first = tl.program_id(0) * 0
    while first < (long if SHORT else short):
        if SHORT:
            row, col = own[:, None], first + tl.arange(0, COLS)[None, :]
        else:
            row, col = first + tl.arange(0, ROWS)[:, None], own[None, :]
        inside = (row < short) & (col < long)
        u = tl.load(directions + begin + row * long + col, inside, 0.0).to(tl.float32)
        squares += u * u
        first += COLS if SHORT else ROWS
    tl.store(sums + number * along + own, tl.sum(squares, 1 if SHORT else 0), own < along)


@triton.jit
def direction_factors(
    square_sums,  # (count, along): of rows or columns of directions
    variances,  # (count,) addresses of (along,); None: no variance is reduced
    factors,  # (count, room): with variance one per row or column, else the first counts
    squares,  # (count,): of whole directions, times the factor of renormalization
    only_if,
    writes,
    beta2,
    along,
    across,  # elements of a row or column
    room,
    least,  # the shorter side: the square of the norm of an orthogonal block
    eps,
    variance_dtype: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ADD: tl.constexpr,  # whether eps is added to the root, or the variance is no less than it
    SIZE: tl.constexpr,
):
    """Compute the factors of one direction: `renormalize`, then `reduce_variance`."""
    number = tl.program_id(0)
    totals = tl.zeros((SIZE,), tl.float32)
    first = tl.program_id(0) * 0
    while first < along:
        place = first + tl.arange(0, SIZE)
        totals += tl.load(square_sums + number * along + place, place < along, 0.0)
        first += SIZE
    square = tl.sum(totals)
    scale = 1.0
    if RENORMALIZE:
        scale = tl.sqrt(least) / tl.maximum(tl.sqrt(square), 1e-6)
    square = square * scale * scale
    tl.store(squares + number, square)
    if variances is None:
        tl.store(factors + number * room, scale)
    else:
        written = is_written(only_if, writes, number)
        kept = pointer_in(variances, number, variance_dtype, False)
        weight = (1 - tl.load(beta2)).to(tl.float32)
        new_squares = tl.zeros((SIZE,), tl.float32)
        first = tl.program_id(0) * 0
        while first < along:
            place = first + tl.arange(0, SIZE)
            inside = place < along
            own = tl.load(square_sums + number * along + place, inside, 0.0) * scale * scale
            old = tl.load(kept + place, inside, 0.0).to(tl.float32)
            new = old + weight * (own / across - old)
            tl.store(kept + place, new.to(variance_dtype), inside & written)
            if ADD:
                rescale = 1.0 / (tl.sqrt(new) + eps)
            else:
                rescale = 1.0 / tl.sqrt(tl.maximum(new, eps))
            rescale = tl.minimum(rescale, RESCALE_LARGEST)
            tl.store(factors + number * room + place, rescale, inside)
            new_squares += tl.where(inside, own * rescale * rescale, 0.0)
            first += SIZE
        keep = tl.sqrt(square) / tl.maximum(tl.sqrt(tl.sum(new_squares)), eps) * scale
        tl.debug_barrier()  # what was stored is read again
        first = tl.program_id(0) * 0
        while first < room:
            place = first + tl.arange(0, SIZE)
            rescale = tl.load(factors + number * room + place, place < along, 0.0)
            tl.store(factors + number * room + place, rescale * keep, place < room)
            first += SIZE


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
    flags,  # (count,): 1 is written where a tile is larger than it can be
    limit,  # the largest sum of squares of a tile of an orthogonalized block
    rows,
    cols,
    short,
    long,
    group,
    group_stride,
    row_stride,
    col_stride,
    param_dtype: tl.constexpr,
    master_dtype: tl.constexpr,  # None: there is no master
    FACTORS: tl.constexpr,  # none, one per block, per short or per long coordinate: 0 to 3
    SCALE_DECAY: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    INDEPENDENT: tl.constexpr,
    TALL: tl.constexpr,
    LAID: tl.constexpr,
    BFLOAT16: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Apply weight decay and the step to one tile of one block."""
    tile, number = tl.program_id(0), tl.program_id(1)
    first_row, first_col, row, col = tile_of(tile, cols, ROWS, COLS)
    inside = (row < rows) & (col < cols) & is_written(only_if, writes, number)
    own = directions + number.to(tl.int64) * short * long
    u = read_tile(own, long, TALL, first_row, first_col, rows, cols, ROWS, COLS)
    u = rounded_direction(u.to(tl.float32), BFLOAT16)
    fits = tl.sum(tl.where(inside, u * u, 0.0)) <= limit
    if fits == 0:  # also if it is NaN
        tl.store(flags + number, 1)
    if FACTORS == 1:
        u *= tl.load(factors + number)
    if FACTORS == 2:
        along = col if TALL else row
        u *= tl.load(factors + number * short + along, along < short, 0.0)
    if FACTORS == 3:
        along = row if TALL else col
        u *= tl.load(factors + number * long + along, along < long, 0.0)
    offsets = places_of(row, col, cols, group, group_stride, row_stride, col_stride, LAID)
    param = pointer_in(tensors, number, param_dtype, ALIGNED) + offsets
    master = None
    if master_dtype is not None:
        master = pointer_in(tensors + count, number, master_dtype, ALIGNED) + offsets
    step_to(
        param, master, u, inside, lr, weight_decay, lr_factor, SCALE_DECAY, CAUTIOUS, INDEPENDENT
    )  # fmt: skip
