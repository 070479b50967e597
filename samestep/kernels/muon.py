"""Muon on blocks of one shape where they lie: `samestep.rules.muon` has the formulas.

momentum (one pass: gradient and momentum in, momentum and 16-bit direction out)
-> orthogonalization -> step (one pass: direction and parameter in, parameter out)

Of blocks that came together from parts only the middle is done here: `parts` has their ends.
"""

import struct
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from samestep.kernels import muon_tiles
from samestep.kernels.call import FUSION, Gradients, Step
from samestep.kernels.norm import DTYPES
from samestep.kernels.orthogonalize import (
    fitting_powers,
    inverse_norms,
    orthogonalize_wide,
)
from samestep.kernels.tables import Table
from samestep.kernels.ways import padded
from samestep.rules.muon import lr_factor
from samestep.rules.orthogonalize import POLYNOMIALS, cheaper_execution, step_coefficients
from samestep.state import MASTER, State

TILE = 64  # rows and columns of a block that one program works on


class MuonBlocks:
    """Contiguous blocks of one shape on one device, and their state, whose dtypes are alike."""

    def __init__(self, params: Sequence[Tensor], states: Sequence[State]) -> None:
        self.count = len(params)
        self.rows = params[0].shape[0]
        self.cols = params[0].numel() // self.rows
        self.tall = self.rows > self.cols  # then directions are the transposes of blocks
        self.states = states
        self.momenta = Table([[state["momentum_buffer"] for state in states]])
        masters = [[state[MASTER] for state in states]] if MASTER in states[0] else []
        self.targets = Table([params, *masters])
        self.param_dtype = DTYPES[params[0].dtype]
        self.state_dtype = DTYPES[states[0]["momentum_buffer"].dtype]


class GivenBlocks:
    """Directions of one shape that came together from parts, and the state of their blocks."""

    def __init__(
        self,
        values: Tensor,  # (count, rows, cols), contiguous
        states: Sequence[State],  # of whole blocks: variance
        writes: Tensor | None,  # (count,) float64: 0 leaves a variance as it is
    ) -> None:
        self.values, self.states, self.writes = values, states, writes
        self.count, self.rows, self.cols = values.shape
        self.tall = self.rows > self.cols


Source = tuple[MuonBlocks, Gradients] | tuple[GivenBlocks, None]


def muon_(
    parts: Sequence[tuple[MuonBlocks, Gradients]], step: Step, *, measure: bool
) -> list[Tensor]:
    """One step on blocks of a shape and of its transpose, which are orthogonalized together.

    Gives per part the sums of squares of the directions, (count,), if they are to be measured.
    """
    squares = []
    for (blocks, grads), directions in zip(parts, orthogonalized(parts, step), strict=True):
        square = _step_along(blocks, grads, directions, step)
        if measure and square is None:
            square = _norms(directions, (1, 2)).square().flatten()
        if measure and square is not None:
            squares.append(square)
    return squares


def orthogonalized(parts: Sequence[Source], step: Step) -> tuple[Tensor, ...]:
    """The directions of blocks of a shape and of its transpose, together; momenta are updated.

    Per part (count, short, long), padded; the transposes of tall blocks.
    """
    options, first = step.options, parts[0][0]
    short, long = sorted((padded(first.rows), padded(first.cols)))
    counts = [blocks.count for blocks, _ in parts]
    X = torch.empty(
        (sum(counts), short, long),
        dtype=options["compute_dtype"] or torch.bfloat16,
        device=_device(first),
    )
    split = (lambda X: (X,)) if len(parts) == 1 else (lambda X: torch.split(X, counts))
    scales = [_momentum(*pair, step) for pair in zip(parts, split(X), strict=True)]
    X = orthogonalize_wide(
        X,
        scales[0] if len(scales) == 1 else torch.cat(scales),
        step_coefficients(
            options["orthogonalize"], options["ns_steps"], options["ns_coefficients"]
        ),
        options["execution"] or cheaper_execution(first.rows, first.cols, options["ns_steps"]),
        overwrite=True,
    )
    return split(X)


def finished(blocks: GivenBlocks, directions: Tensor, step: Step, dtype: torch.dtype) -> Tensor:
    """Directions as those who hold parts of them step along them, in the dtype they travel in.

    What they are multiplied with is in them: rounded the same for all, also for the owner.
    """
    factors, kind, _ = _factors(blocks, directions, step, blocks.writes)
    if factors is not None:
        along = {1: (-1, 1, 1), 2: (blocks.count, -1, 1), 3: (blocks.count, 1, -1)}[kind]
        directions = directions.float() * factors.view(along)
    return directions.to(dtype)


def _device(blocks: MuonBlocks | GivenBlocks) -> torch.device:
    own = blocks.values if isinstance(blocks, GivenBlocks) else blocks.targets.addresses
    return own.device


def _step_along(
    blocks: MuonBlocks, grads: Gradients, directions: Tensor, step: Step
) -> Tensor | None:
    """Decay and step; the squares of the directions, (count,), if they came up."""
    scalars, options = step.scalars, step.options
    factors, kind, squares = _factors(blocks, directions, step, grads.writes)
    muon_tiles.step_along[(_tiles(blocks.rows) * _tiles(blocks.cols), blocks.count)](
        blocks.targets.addresses,
        blocks.count,
        directions,
        directions if factors is None else factors,
        directions if step.only_if is None else step.only_if,
        directions if grads.writes is None else grads.writes,
        scalars["lr"],
        scalars["weight_decay"],
        _float32(lr_factor(blocks.rows, blocks.cols, options["adjust_lr"])),
        blocks.rows,
        blocks.cols,
        *directions.shape[1:],
        param_dtype=blocks.param_dtype,
        FACTORS=kind,
        SCALE_DECAY=options["scale_decay"],
        CAUTIOUS=options["cautious"],
        TALL=blocks.tall,
        HAS_MASTER=len(blocks.targets.tensors) == 2,
        HAS_ONLY_IF=step.only_if is not None,
        HAS_WRITES=grads.writes is not None,
        ALIGNED=blocks.targets.aligned,
        ROWS=TILE,
        COLS=TILE,
        num_warps=4,
        enable_fp_fusion=FUSION,
    )
    return squares


def _momentum(source: Source, directions: Tensor, step: Step) -> Tensor:
    """Update momenta and write directions; what scales those to norm 1, (count,)."""
    options, (count, short, long) = step.options, directions.shape
    tiles = _tiles(short) * _tiles(long)
    sums = torch.empty(count, tiles, dtype=torch.float64, device=directions.device)
    blocks, grads = source
    if isinstance(blocks, GivenBlocks):
        given, momenta, aligned, writes = blocks.values, blocks.values, False, None
        dtypes = tl.float32, tl.float32  # not read
    else:
        assert grads is not None
        given, momenta, writes = grads.addresses, blocks.momenta.addresses, grads.writes
        aligned = grads.aligned and blocks.momenta.aligned
        dtypes = grads.dtype, blocks.state_dtype

    def run(powers: Tensor | None, *, only_sums: bool) -> Tensor:
        muon_tiles.momentum[(tiles, count)](
            given,
            momenta,
            directions,
            sums if powers is None else powers.float(),
            sums,
            sums if step.only_if is None else step.only_if,
            sums if writes is None else writes,
            step.scalars["momentum"],
            sums if step.factor is None else step.factor,
            blocks.rows,
            blocks.cols,
            short,
            long,
            grad_dtype=dtypes[0],
            state_dtype=dtypes[1],
            GIVEN=grads is None,
            EMA=options["momentum_form"] == "ema",
            NESTEROV=options["nesterov"],
            TALL=blocks.tall,
            HAS_SCALE=powers is not None,
            HAS_FACTOR=step.factor is not None,
            HAS_ONLY_IF=step.only_if is not None,
            HAS_WRITES=writes is not None,
            MAXIMIZE=step.maximize,
            ONLY_SUMS=only_sums,
            ALIGNED=aligned,
            ROWS=TILE,
            COLS=TILE,
            num_warps=4,
            enable_fp_fusion=FUSION,
        )
        return sums.sum(dim=1).sqrt()

    powers: Tensor | None = None
    if directions.dtype == torch.float16 or options["eps"] == 0:
        # Gradients of any size are brought into the range first.
        powers = fitting_powers(run(None, only_sums=True))
    norms = run(powers, only_sums=False)
    if options["equilibrate"]:
        _equilibrate_(directions, norms, blocks.rows, blocks.tall)
        norms = _norms(directions, (1, 2)).flatten().double()
    norm_factor = POLYNOMIALS[options["orthogonalize"]].norm_factor
    own = norms if powers is None else norms / powers
    scales = inverse_norms(own, norm_factor, options["eps"], options["eps_form"])
    return (scales if powers is None else (scales / powers).clamp_max(1.0)).float()


def _equilibrate_(directions: Tensor, norms: Tensor, rows: int, tall: bool) -> None:
    """Bring the rows of each block to one norm; zero rows stay zero."""
    own = _norms(directions, (1,) if tall else (2,))
    directions.mul_((norms.float() / rows**0.5).view(-1, 1, 1) / own.clamp_min(1e-6))


def _factors(
    blocks: MuonBlocks | GivenBlocks, directions: Tensor, step: Step, writes: Tensor | None
) -> tuple[Tensor | None, int, Tensor | None]:
    """What the directions are multiplied with, along what (`FACTORS`), and their squares, (B,)."""
    rows, cols, states, options = blocks.rows, blocks.cols, blocks.states, step.options
    scale: Tensor | None = None
    if options["renormalize"]:
        scale = min(rows, cols) ** 0.5 / _norms(directions, (1, 2)).flatten().clamp_min(1e-6)
    if "variance" not in states[0]:
        if scale is None:
            return None, 0, None
        return scale, 1, torch.full_like(scale, min(rows, cols))
    # One per row of a block that is not wide, one per column of a wide one.
    along_short = rows == cols
    count = max(rows, cols)
    square_sums = _norms(directions, (2,) if along_short else (1,)).square().flatten(1)[:, :count]
    if scale is not None:
        square_sums = square_sums * scale.square()[:, None]
    kept = [state["variance"].view(-1) for state in states]
    old = torch.stack(kept).float()
    weight = (1 - step.scalars["variance_beta2"]).float()
    new = torch.lerp(old, square_sums / min(rows, cols), weight)
    stored = new if step.only_if is None else torch.where(step.only_if != 0, new, old)
    if writes is not None:
        stored = torch.where(writes[:, None] != 0, stored, old)
    torch._foreach_copy_(kept, list(stored.unbind()))
    rescale = new.clamp_min(1e-10).rsqrt()
    squares = square_sums.sum(dim=1)
    new_norm = (square_sums * rescale.square()).sum(dim=1).sqrt()
    factors = rescale * (squares.sqrt() / new_norm.clamp_min(1e-10))[:, None]
    if scale is not None:
        factors = factors * scale[:, None]
    room = directions.shape[1 if along_short else 2] - count
    return torch.nn.functional.pad(factors, (0, room)), 2 if along_short else 3, squares


def _norms(directions: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Norms of 16-bit values in float32, with the dimensions kept."""
    norms: Tensor = torch.linalg.vector_norm(
        directions, dim=dims, keepdim=True, dtype=torch.float32
    )
    return norms


def _float32(number: float) -> float:
    """As a GPU is told it; Triton's interpreter would see more digits."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


def _tiles(size: int) -> int:
    return -(-size // TILE)
