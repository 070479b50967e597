"""Muon on blocks of one shape where they lie: `samestep.rules.muon` has the formulas.

momentum (one pass: gradient and momentum in, momentum and 16-bit direction out)
-> orthogonalization -> step (one pass: direction and parameter in, parameter out)
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.kernels import elementwise
from samestep.kernels.norm import DTYPES
from samestep.kernels.orthogonalize import (
    fitting_powers,
    inverse_norms,
    orthogonalize_wide,
    padded,
)
from samestep.kernels.tables import addresses, aligned
from samestep.rules.muon import lr_factor
from samestep.rules.orthogonalize import POLYNOMIALS, cheaper_execution, step_coefficients
from samestep.rules.rule import Options
from samestep.state import MASTER, State

TILE = 64  # rows and columns of a block that one program works on


class Part(NamedTuple):
    """Blocks of one shape."""

    params: Sequence[Tensor]  # (rows, cols)
    grads: Sequence[Tensor]
    states: Sequence[State]
    writes: Tensor | None  # (count,) float64: 0 leaves a block as it is

    @property
    def rows(self) -> int:
        """Of each block."""
        return self.params[0].shape[0]

    @property
    def cols(self) -> int:
        """Of each block."""
        return self.params[0].numel() // self.rows

    @property
    def tall(self) -> bool:
        """Whether the directions are the transposes of its blocks."""
        return self.rows > self.cols


def muon_(
    parts: Sequence[Part],
    scalars: Mapping[str, Tensor],
    options: Options,
    *,
    factor: Tensor | None,
    maximize: bool,
    measure: bool,
) -> list[Tensor]:
    """One step on contiguous blocks of one device, whose dtypes are alike.

    Blocks of a shape and of its transpose are orthogonalized together. Gives per part the sums of
    squares of the directions, (count,), if they are to be measured.
    """
    rows, cols = parts[0].rows, parts[0].cols
    short, long = sorted((padded(rows), padded(cols)))
    counts = [len(part.params) for part in parts]
    dtype = options["compute_dtype"] or torch.bfloat16
    X = torch.empty(sum(counts), short, long, dtype=dtype, device=parts[0].params[0].device)
    scales = [
        _momentum(part, X_part, scalars, options, factor=factor, maximize=maximize)
        for part, X_part in zip(parts, X.split(counts), strict=True)
    ]
    X = orthogonalize_wide(
        X,
        torch.cat(scales),
        step_coefficients(
            options["orthogonalize"], options["ns_steps"], options["ns_coefficients"]
        ),
        options["execution"] or cheaper_execution(rows, cols, options["ns_steps"]),
    )
    squares = [
        _step_along(part, directions, scalars, options)
        for part, directions in zip(parts, X.split(counts), strict=True)
    ]
    if not measure:
        return []
    return [
        _norms(directions, (1, 2)).square().flatten() if square is None else square
        for square, directions in zip(squares, X.split(counts), strict=True)
    ]


def _step_along(
    part: Part, directions: Tensor, scalars: Mapping[str, Tensor], options: Options
) -> Tensor | None:
    """Decay and step; the squares of the directions, (count,), if they came up."""
    factors, kind, squares = _factors(part, directions, scalars, options)
    targets = [list(part.params)]
    if MASTER in part.states[0]:
        targets.append([state[MASTER] for state in part.states])
    rows, cols, count = part.rows, part.cols, len(part.params)
    elementwise.step_along[(_tiles(rows) * _tiles(cols), count)](
        addresses(targets),
        count,
        directions,
        directions if factors is None else factors,
        directions if part.writes is None else part.writes,
        scalars["lr"],
        scalars["weight_decay"],
        lr_factor(rows, cols, options["adjust_lr"]),
        rows,
        cols,
        *directions.shape[1:],
        param_dtype=DTYPES[part.params[0].dtype],
        FACTORS=kind,
        SCALE_DECAY=options["scale_decay"],
        CAUTIOUS=options["cautious"],
        TALL=part.tall,
        HAS_MASTER=len(targets) == 2,
        HAS_WRITES=part.writes is not None,
        ALIGNED=aligned(targets),
        ROWS=TILE,
        COLS=TILE,
        num_warps=4,
    )
    return squares


def _momentum(
    part: Part,
    directions: Tensor,  # (count, short, long), padded
    scalars: Mapping[str, Tensor],
    options: Options,
    *,
    factor: Tensor | None,
    maximize: bool,
) -> Tensor:
    """Update the momenta and write the directions; what scales them to unit norm, (count,)."""
    rows, cols, (count, short, long) = part.rows, part.cols, directions.shape
    momenta = [state["momentum_buffer"] for state in part.states]
    tensors = [list(part.grads), momenta]
    table = addresses(tensors)
    tiles = _tiles(short) * _tiles(long)
    sums = torch.empty(count, tiles, dtype=torch.float64, device=directions.device)

    def run(powers: Tensor | None, *, only_sums: bool) -> Tensor:
        elementwise.momentum[(tiles, count)](
            table,
            count,
            directions,
            sums if powers is None else powers,
            sums,
            sums if part.writes is None else part.writes,
            scalars["momentum"],
            sums if factor is None else factor,
            rows,
            cols,
            short,
            long,
            grad_dtype=DTYPES[part.grads[0].dtype],
            state_dtype=DTYPES[momenta[0].dtype],
            EMA=options["momentum_form"] == "ema",
            NESTEROV=options["nesterov"],
            TALL=part.tall,
            HAS_SCALE=powers is not None,
            HAS_FACTOR=factor is not None,
            HAS_WRITES=part.writes is not None,
            MAXIMIZE=maximize,
            ONLY_SUMS=only_sums,
            ALIGNED=aligned(tensors),
            ROWS=TILE,
            COLS=TILE,
            num_warps=4,
        )
        return sums.sum(dim=1).sqrt()

    powers: Tensor | None = None
    if directions.dtype == torch.float16 or options["eps"] == 0:
        # Gradients of any size are brought into the range first.
        powers = fitting_powers(run(None, only_sums=True))
    norms = run(powers, only_sums=False)
    if options["equilibrate"]:
        _equilibrate_(directions, norms, rows, part.tall)
        norms = _norms(directions, (1, 2)).flatten().double()
    norm_factor = POLYNOMIALS[options["orthogonalize"]].norm_factor
    own = norms if powers is None else norms / powers
    scales = inverse_norms(own, norm_factor, options["eps"], options["eps_form"])
    return (scales if powers is None else scales / powers).float()


def _equilibrate_(directions: Tensor, norms: Tensor, rows: int, tall: bool) -> None:
    """Bring the rows of each block to one norm; zero rows stay zero."""
    own = _norms(directions, (1,) if tall else (2,))
    directions.mul_((norms.float() / rows**0.5).view(-1, 1, 1) / own.clamp_min(1e-6))


def _factors(
    part: Part, directions: Tensor, scalars: Mapping[str, Tensor], options: Options
) -> tuple[Tensor | None, int, Tensor | None]:
    """What the directions are multiplied with, along what (`FACTORS`), and their squares, (B,)."""
    rows, cols, states, writes = part.rows, part.cols, part.states, part.writes
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
    weight = (1 - scalars["variance_beta2"]).float()
    new = torch.lerp(old, square_sums / min(rows, cols), weight)
    if writes is not None:
        torch._foreach_copy_(kept, torch.where(writes[:, None] != 0, new, old).unbind())
    else:
        torch._foreach_copy_(kept, new.unbind())
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


def _tiles(size: int) -> int:
    return -(-size // TILE)
