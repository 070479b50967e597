"""Muon on blocks of one shape, in place: `samestep.rules.muon` has the formulas.

momentum (one pass: gradient and momentum in, momentum and 16-bit direction out)
-> orthogonalization -> step (one pass: direction and parameter in, parameter out)

Products are in float16, whose range is small: a power of two brings each direction to a norm of
8 to 16 and changes no digit. The norm is known only after the pass that writes the direction, so
that pass takes the power of the step before; where it has become another one (when a norm passes a
power of two), the direction is written once more. So no result depends on an earlier step. A
momentum that is kept in fewer bits is no longer what its direction came from: then that pass writes
the direction in bfloat16 too, beside, where the orthogonalization has room for its result later.

Blocks that were gathered from parts are only orthogonalized here: `parts` has both ends.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from samestep.kernels import call, elementwise, muon_tiles
from samestep.kernels.call import (
    FUSION,
    Gradients,
    Origins,
    Step,
    Table,
    codes_per_scale,
    tiled,
    tiles,
)
from samestep.kernels.choice import padded
from samestep.kernels.launch import launch
from samestep.kernels.norm import DTYPES, STORED_DTYPES
from samestep.kernels.orthogonalize import orthogonalize_wide
from samestep.rules.muon import (
    largest_singular_value,
    lr_factor,
    norm_factor_of,
    table_of,
    variance_of_rows,
)
from samestep.rules.noise import Origin
from samestep.rules.orthogonalize import cheaper_execution
from samestep.rules.rule import Options
from samestep.rules.state import MASTER, State
from samestep.rules.stored import REMAINDER_KEY, SCALE_SUFFIX, STEP

SCALES = "momentum_buffer" + SCALE_SUFFIX
AGAIN = 32  # programs per block that look whether a direction is to be written once more
STRIP, LONG = 16, 256  # rows and columns that are looked at together, where rows are summed


class MatrixStrides(NamedTuple):
    """Strides of a matrix's rows and columns, in elements; rows form groups of `group` rows."""

    group: int
    group_stride: int
    row_stride: int
    col_stride: int


def strides_of(view: Tensor) -> MatrixStrides:
    """Return the strides of a view: (rows, cols), or (groups, rows of a group, cols)."""
    if view.ndim == 2:
        return MatrixStrides(view.shape[0], 0, *view.stride())
    return MatrixStrides(view.shape[1], *view.stride())


class MuonBlocks:
    """Blocks of one shape on one device, and their state, whose dtypes are alike.

    `lie`: the strides of all blocks, gradients and state; None: they are contiguous.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[State],
        rows: int | None = None,  # None: as many as the first dim has
        lie: MatrixStrides | None = None,
        origins: Sequence[Origin] | None = None,  # where momenta are rounded at random
    ) -> None:
        self.count = len(params)
        self.lie = lie
        self.rows = params[0].shape[0] if rows is None else rows
        self.cols = params[0].numel() // self.rows
        self.tall = self.rows > self.cols  # then directions are the transposes of blocks
        self.states = states
        self.momenta = Table([[state["momentum_buffer"] for state in states]])
        kept = [key for key in (MASTER, REMAINDER_KEY) if key in states[0]]
        self.targets = Table([params, *([state[key] for state in states] for key in kept)])
        self.param_dtype = DTYPES[params[0].dtype]
        self.master_dtype = STORED_DTYPES[states[0][kept[0]].dtype] if kept else None
        self.state_dtype = STORED_DTYPES[states[0]["momentum_buffer"].dtype]
        self.device = params[0].device
        self.rounding = None if origins is None else Rounding(params, states, origins)
        # Of the step before.
        self.powers = torch.ones(self.count, dtype=torch.float32, device=self.device)
        # In the host's memory, where kernels write in the rare case and nobody waits to read.
        on_gpu = self.device.type == "cuda"
        self.outliers = torch.zeros(self.count, dtype=torch.int32, pin_memory=on_gpu)


class Rounding:
    """The kernel arguments of blocks whose momenta are rounded at random."""

    def __init__(
        self, params: Sequence[Tensor], states: Sequence[State], origins: Sequence[Origin]
    ) -> None:
        self.steps = Table([[state[STEP] for state in states]])
        self.step_dtype = DTYPES[states[0][STEP].dtype]
        places = Origins(origins, [param.shape for param in params])
        self.origins, self.places = places.on(params[0].device), places.places
        self.block, self.scales = 0, None  # of 8-bit codes
        if SCALES in states[0]:
            self.block = codes_per_scale(states[0], "momentum_buffer")
            self.scales = Table([[state[SCALES] for state in states]])

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `muon_tiles.momentum`."""
        return {
            "scales": None if self.scales is None else self.scales.addresses,
            "steps": self.steps.addresses,
            "origins": self.origins,
            "step_dtype": self.step_dtype,
            "Q": self.block,
            "RANDOM": True,
            "PLACES": self.places,
        }


def count_step(steps: Table, writes: Tensor | None, step: Step) -> None:
    """Add 1 to each step count of a table, () each."""
    (counts,) = steps.tensors
    launch(
        elementwise.counted,
        (len(counts),),
        steps.addresses,
        step.only_if,
        writes,
        step_dtype=DTYPES[counts[0].dtype],
        num_warps=1,
    )


EXACT = {
    **dict.fromkeys(["scales", "steps", "origins"]),
    "step_dtype": tl.float32,
    "Q": 0,
    "RANDOM": False,
    "PLACES": "near",
}  # the same where nothing is rounded at random


class GivenBlocks:
    """Directions of one shape that were gathered from parts, and the state of their blocks."""

    def __init__(
        self,
        values: Tensor,  # (count, rows, cols), contiguous
        states: Sequence[State],  # of whole blocks: variance
        writes: Tensor | None,  # (count,) float64: 0 leaves a variance as it is
    ) -> None:
        self.values, self.states, self.writes = values, states, writes
        self.device = values.device
        self.count, self.rows, self.cols = values.shape
        self.tall = self.rows > self.cols


Source = tuple[MuonBlocks, Gradients] | tuple[GivenBlocks, None]


def muon_(
    parts: Sequence[tuple[MuonBlocks, Gradients]], step: Step, *, measure: bool
) -> list[Tensor]:
    """Step blocks of a shape and of its transpose, which are orthogonalized together.

    Return per part the sums of squares of the directions, (count,), if `measure` is on.
    """
    squares = []
    for (blocks, grads), directions in zip(parts, orthogonalized(parts, step), strict=True):
        square = _step_along(blocks, grads, directions, step)
        if measure:
            squares.append(_squares(directions) if square is None else square)
    return squares


def orthogonalized(parts: Sequence[Source], step: Step) -> tuple[Tensor, ...]:
    """Update momenta and return directions of blocks of a shape and of its transpose.

    Directions are (count, short, long) per part, padded; tall blocks are transposed.
    """
    options, first = step.options, parts[0][0]
    short, long = sorted((padded(first.rows), padded(first.cols)))
    counts = [blocks.count for blocks, _ in parts]
    X = torch.empty((sum(counts), short, long), dtype=torch.float16, device=first.device)
    table = table_of(options)
    split = (lambda X: (X,)) if len(parts) == 1 else (lambda X: torch.split(X, counts))
    scales = [_directions(*pair, step) for pair in zip(parts, split(X), strict=True)]
    X = orthogonalize_wide(
        X,
        scales[0] if len(scales) == 1 else torch.cat(scales),
        table,
        options["execution"] or cheaper_execution(first.rows, first.cols, table, X.dtype),
        overwrite=True,
    )
    return split(X)


def finished(blocks: GivenBlocks, directions: Tensor, step: Step, dtype: torch.dtype) -> Tensor:
    """Return finished directions for the ranks that hold parts of blocks, in `dtype`.

    Factors are multiplied in, so that all ranks, the owner included, round alike.
    """
    factors, kind, _ = _factors(blocks, directions, step, blocks.writes)
    if _in_bfloat16(step.options):
        directions = directions.bfloat16()
    if factors is not None:
        along = {1: (-1, 1, 1), 2: (blocks.count, -1, 1), 3: (blocks.count, 1, -1)}[kind]
        directions = directions.float() * factors.view(along)
    return directions.to(dtype)


def _in_bfloat16(options: Options) -> bool:
    """Whether directions are rounded to bfloat16 before and after orthogonalization."""
    return options["compute_dtype"] is not torch.float16


def _step_along(
    blocks: MuonBlocks, grads: Gradients, directions: Tensor, step: Step
) -> Tensor | None:
    """Decay and step; return the directions' squares, (count,), if they were computed."""
    scalars, options = step.scalars, step.options
    factors, kind, squares = _factors(blocks, directions, step, grads.writes)
    cut = tiled(turned=blocks.tall)
    launch(
        muon_tiles.step_along,
        (tiles(blocks.rows, blocks.cols, cut), blocks.count),
        blocks.targets.addresses,
        blocks.count,
        directions,
        factors,
        step.only_if,
        grads.writes,
        scalars["lr"],
        scalars["weight_decay"],
        _float32(
            lr_factor(blocks.rows, blocks.cols, options["adjust_lr"], options["update_scale"])
        ),
        blocks.outliers,
        min(cut["ROWS"], cut["COLS"], blocks.rows, blocks.cols)
        * largest_singular_value(options) ** 2,
        **_sizes(blocks, directions),
        **_lying(blocks),
        param_dtype=blocks.param_dtype,
        master_dtype=blocks.master_dtype,
        FACTORS=kind,
        SCALE_DECAY=options["scale_decay"],
        CAUTIOUS=options["cautious"],
        INDEPENDENT=options["decay_form"] == "independent",
        BFLOAT16=_in_bfloat16(options),
        ALIGNED=blocks.targets.aligned and blocks.lie is None,
        **cut,
    )
    return squares


class _Numbers(NamedTuple):
    """The numbers of each block that its products need, (count,) each."""

    norms: Tensor
    powers: Tensor
    again: Tensor  # whether the power is another one than before
    scales: Tensor  # what brings the direction, times its power, to norm 1


def _directions(source: Source, directions: Tensor, step: Step) -> Tensor:
    """Update momenta, write directions, and return their scales to norm 1, (count,)."""
    blocks, options = source[0], step.options
    own = blocks if isinstance(blocks, MuonBlocks) else None
    if own is not None and own.rounding is not None:
        assert source[1] is not None
        count_step(own.rounding.steps, source[1].writes, step)
    small = own is not None and own.state_dtype is not tl.float32
    if options["equilibrate"] and _in_bfloat16(options):
        # In bfloat16 at first, which has all digits of rows of any size, and needs no power.
        given = directions.view(torch.bfloat16)
        numbers = _numbers(_pass(source, given, step)(None), step)
        return _equilibrated(blocks, given, directions, numbers, step)
    run = _pass(source, directions, step)
    if own is not None and (not small or _in_bfloat16(options)):
        # A small momentum is rounded in this pass: it does not give its direction again.
        shape = own.count, own.rows, own.cols
        unscaled = directions.new_empty(shape, dtype=torch.bfloat16) if small else None
        numbers = _numbers(run(own.powers, unscaled=unscaled), step, own.powers)
        _write_again(own, source[1], directions, unscaled, numbers, step)
    else:
        numbers = _numbers(run(None, only_sums=True), step)
        run(numbers.powers)
    if options["equilibrate"]:
        return _equilibrated(blocks, directions, directions, numbers, step)
    return numbers.scales


def _pass(source: Source, directions: Tensor, step: Step) -> Callable[..., Tensor]:
    """Return the pass over gradients and momenta, which takes powers and returns square sums."""
    count, (blocks, grads) = len(directions), source
    rounding = None
    if isinstance(blocks, GivenBlocks):
        given, momenta, aligned, writes = blocks.values, blocks.values, False, None
        dtypes = tl.float32, tl.float32  # not read
    else:
        assert grads is not None
        given, momenta, writes = grads.addresses, blocks.momenta.addresses, grads.writes
        aligned = grads.aligned and blocks.momenta.aligned and blocks.lie is None
        dtypes, rounding = (grads.dtype, blocks.state_dtype), blocks.rounding
    cut = tiled(0 if rounding is None else rounding.block, turned=blocks.tall)
    several = 1 if rounding is None or rounding.block else call.SEVERAL
    programs = -(-_tiles(blocks, directions, cut) // several)
    sums = torch.empty(count, programs, dtype=torch.float64, device=directions.device)

    def run(
        powers: Tensor | None, *, unscaled: Tensor | None = None, only_sums: bool = False
    ) -> Tensor:
        launch(
            muon_tiles.momentum,
            (programs, count),
            given,
            momenta,
            directions=directions,
            powers=powers,
            unscaled=unscaled,
            sums=sums,
            only_if=step.only_if,
            writes=writes,
            **(EXACT if rounding is None else rounding.arguments()),
            **step.momentum,
            **_sizes(blocks, directions),
            **_lying(blocks),
            grad_dtype=dtypes[0],
            state_dtype=dtypes[1],
            GIVEN=grads is None,
            BFLOAT16=_in_bfloat16(step.options),
            ONLY_SUMS=only_sums,
            ALIGNED=aligned,
            TILES=several,
            **cut,
        )
        return sums

    return run


def _numbers(
    sums: Tensor, step: Step, powers: Tensor | None = None, *, multiplied: bool = False
) -> _Numbers:
    """Compute numbers of blocks from sums of squares, (count, parts); `powers` are replaced.

    `multiplied`: the directions that were summed are already multiplied with `powers`.
    """
    count, parts = sums.shape
    options, made = step.options, torch.empty(3, count, dtype=torch.float32, device=sums.device)
    norms, scales, own = made.unbind()
    powers = own if powers is None else powers
    again = torch.empty(count, dtype=torch.int32, device=sums.device)
    launch(
        muon_tiles.block_numbers,
        (count,),
        sums,
        parts,
        powers,
        again,
        norms,
        scales,
        norm_factor_of(options),
        options["eps"],
        ADD=options["eps_form"] == "add",
        HAS_POWER=multiplied,
        PARTS=min(triton.next_power_of_2(parts), 1024),
        num_warps=4,
        enable_fp_fusion=FUSION,
    )
    return _Numbers(norms, powers, again, scales)


def _write_again(
    blocks: MuonBlocks,
    grads: Gradients | None,
    directions: Tensor,
    unscaled: Tensor | None,  # (count, rows, cols): the same without powers; None: from momenta
    numbers: _Numbers,
    step: Step,
) -> None:
    """Write the directions whose power of two has changed once more."""
    assert grads is not None
    count, cut = len(directions), tiled(turned=blocks.tall)
    in_block = _tiles(blocks, directions, cut)
    launch(
        muon_tiles.direction_again,
        (min(AGAIN, in_block), count),
        grads.addresses,
        blocks.momenta.addresses,
        directions,
        unscaled,
        numbers.powers,
        numbers.again,
        tiles=in_block,
        grad_dtype=grads.dtype,
        BFLOAT16=_in_bfloat16(step.options),
        **step.momentum,
        **_sizes(blocks, directions),
        **_lying(blocks),
        ALIGNED=grads.aligned and blocks.momenta.aligned and blocks.lie is None,
        **cut,
    )


def _equilibrated(
    blocks: MuonBlocks | GivenBlocks,
    given: Tensor,
    directions: Tensor,  # the same memory
    numbers: _Numbers,
    step: Step,
) -> Tensor:
    """Bring a block's rows to one norm; return the blocks' scales to norm 1, (count,)."""
    count = len(directions)
    # Neighbours in memory are those of a row, or those of a column of a tall block.
    high, wide = (call.TILE, call.TILE) if blocks.tall else (STRIP, LONG)
    strips = -(-blocks.rows // high)
    sums = torch.empty(count, strips, dtype=torch.float64, device=directions.device)
    launch(
        muon_tiles.equilibrate,
        (strips, count),
        given,
        directions,
        numbers.norms,
        numbers.powers,
        sums,
        root_rows=_float32(blocks.rows**0.5),
        **_sizes(blocks, directions),
        MULTIPLIED=given is directions,
        ROWS=high,
        COLS=wide,
        num_warps=4,
        enable_fp_fusion=FUSION,
    )
    return _numbers(sums, step, numbers.powers, multiplied=True).scales


def _factors(
    blocks: MuonBlocks | GivenBlocks, directions: Tensor, step: Step, writes: Tensor | None
) -> tuple[Tensor | None, int, Tensor | None]:
    """Return the directions' factors, their kind (`FACTORS`), and sums of squares, (count,)."""
    rows, cols, options = blocks.rows, blocks.cols, step.options
    variance = "variance" in blocks.states[0]
    if not variance and not options["renormalize"]:
        return None, 0, None
    # Directions of tall blocks are transposed, so that their rows lie along the long side.
    of_rows = variance_of_rows(rows, cols, options["variance_axis"])
    along_short = of_rows and not blocks.tall
    count, short, long = directions.shape
    along = rows if of_rows else cols
    room = (short if along_short else long) if variance else 1
    square_sums = _sums_along(directions, along, along_short)
    factors = directions.new_empty(count, room, dtype=torch.float32)
    squares = directions.new_empty(count, dtype=torch.float32)
    kept = [state["variance"] for state in blocks.states] if variance else []
    launch(
        muon_tiles.direction_factors,
        (count,),
        square_sums,
        Table([kept]).addresses if variance else None,
        factors,
        squares,
        step.only_if,
        writes,
        step.scalars["variance_beta2"] if variance else None,
        along,
        cols if of_rows else rows,
        room,
        float(min(rows, cols)),
        options["variance_eps"],
        variance_dtype=DTYPES[kept[0].dtype] if variance else tl.float32,
        RENORMALIZE=options["renormalize"],
        ADD=options["variance_eps_form"] == "add",
        SIZE=min(triton.next_power_of_2(max(along, room)), 1024),
        num_warps=4,
        enable_fp_fusion=FUSION,
    )
    return factors, (2 if along_short else 3) if variance else 1, squares


def _sums_along(directions: Tensor, along: int, along_short: bool) -> Tensor:
    """Return sums of squares of rows or columns in float32, (count, along)."""
    count, short, long = directions.shape
    sums = directions.new_empty(count, along, dtype=torch.float32)
    high, wide = (STRIP, LONG) if along_short else (call.TILE, call.TILE)
    size = high if along_short else wide
    launch(
        muon_tiles.squares_along,
        (-(-along // size), count),
        directions,
        sums,
        short,
        long,
        along,
        SHORT=along_short,
        ROWS=high,
        COLS=wide,
        num_warps=4,
    )
    return sums


def _tiles(blocks: MuonBlocks | GivenBlocks, directions: Tensor, cut: dict[str, Any]) -> int:
    """Return the number of tiles of a padded block, in its own orientation."""
    _, short, long = directions.shape
    return tiles(*((long, short) if blocks.tall else (short, long)), cut)


def _sizes(blocks: MuonBlocks | GivenBlocks, directions: Tensor) -> dict[str, int]:
    """Return the sizes of a block and of its padded direction, as kernel arguments."""
    _, short, long = directions.shape
    sizes = {"rows": blocks.rows, "cols": blocks.cols, "short": short, "long": long}
    return {**sizes, "TALL": blocks.tall}


def _lying(blocks: MuonBlocks | GivenBlocks) -> dict[str, int]:
    """Return the strides of a block as kernel arguments."""
    lie = blocks.lie if isinstance(blocks, MuonBlocks) else None
    return {**(lie or MatrixStrides(1, 0, 0, 0))._asdict(), "LAID": lie is not None}


def _squares(directions: Tensor) -> Tensor:
    """Return sums of squares of 16-bit values in float32, (count,)."""
    norms: Tensor = torch.linalg.vector_norm(directions, dim=(1, 2), dtype=torch.float32)
    return norms.square()


def _float32(number: float) -> float:
    """Round a number to float32, as a GPU does; Triton's interpreter would keep more digits."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded
