"""Launches on many parts of blocks, in place: momentum, moves, steps.

Tables of parts are made once; only the addresses of gradients and buffers change between steps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.kernels import part_tiles
from samestep.kernels.call import Origins, Step, Table, tiled, tiles
from samestep.kernels.launch import launch
from samestep.kernels.norm import DTYPES, STORED_DTYPES
from samestep.rules.noise import Origin


class Rows(NamedTuple):
    """The place of rows: the offset of the first row and the row stride, in elements."""

    begin: int
    stride: int


class SourceRows(NamedTuple):
    """Rows in the buffer of a number; `turned`: the rows are stored as columns."""

    number: int
    begin: int
    stride: int
    turned: bool = False


class Size(NamedTuple):
    """The rows and columns of a part, block or region."""

    rows: int
    cols: int


class Rounded(NamedTuple):
    """Origin, step count and scales of a part whose momentum is rounded at random."""

    origin: Origin
    step: Tensor  # (): the steps of its block before this one
    scale: Tensor | None  # (rows, cols / q) of 8-bit codes


class MomentumPart(NamedTuple):
    """The places of a part's gradient, momentum and direction."""

    param: int
    size: Size
    grad: Rows  # in the gradient
    momentum: Tensor  # (rows, cols)
    out: Rows | None  # None: its direction goes nowhere
    rounded: Rounded | None = None

    @property
    def block(self) -> int:
        """Return the number of 8-bit codes that share a scale; 0: there are no codes."""
        if self.rounded is None or self.rounded.scale is None:
            return 0
        return self.size.cols // self.rounded.scale.shape[1]


class StepPart(NamedTuple):
    """A part that steps along its direction."""

    param: int
    size: Size
    target: Tensor  # (rows, cols)
    master: Tensor | None
    source: SourceRows
    block: Size  # that it is part of


class Move(NamedTuple):
    """A region to copy."""

    size: Size
    source: SourceRows
    out: Rows


class GradientTable(NamedTuple):
    """The addresses of a step's gradients."""

    addresses: Tensor  # (params,)
    aligned: bool
    writes: Tensor | None  # (params,) float64: 0 leaves a parameter as it is


class MomentumOfParts:
    """Momentum of parts of one group that agree in dtypes and in random rounding."""

    def __init__(self, parts: Sequence[MomentumPart], grad_dtype: torch.dtype) -> None:
        self.grad_dtype = DTYPES[grad_dtype]
        self.state_dtype = STORED_DTYPES[parts[0].momentum.dtype]
        device = parts[0].momentum.device
        out = [part.out or Rows(-1, 0) for part in parts]
        self.table = _on_device(
            [
                (part.param, *part.size, *part.grad, *_lying(part.momentum), *to)
                for part, to in zip(parts, out, strict=True)
            ],
            device,
        )
        self.aligned = all(
            _are_aligned(part.size.cols, *part.grad, max(to.begin, 0), to.stride)
            and _is_aligned(part.momentum)
            for part, to in zip(parts, out, strict=True)
        )
        self.block = parts[0].block
        self.cut = tiled(self.block)
        self.programs = programs([part.size for part in parts], device, self.cut)
        self.kept, self.places, self.step_dtype = None, "near", DTYPES[torch.float32]
        rounded = [(part.size, part.rounded) for part in parts if part.rounded is not None]
        if rounded:
            places = Origins([own.origin for _, own in rounded], [size for size, _ in rounded])
            self.places = places.places
            self.kept = _on_device(
                [
                    (
                        *row,
                        *((0, 0) if own.scale is None else _lying(own.scale)),
                        own.step.data_ptr(),
                    )
                    for row, (_, own) in zip(places.rows, rounded, strict=True)
                ],
                device,
            )
            self.step_dtype = DTYPES[rounded[0][1].step.dtype]

    def run_(self, grads: GradientTable, out: Tensor, step: Step) -> None:
        """Update momenta, and write directions into a buffer."""
        launch(
            part_tiles.momentum_of_parts,
            (len(self.programs),),
            grads.addresses,
            self.table,
            self.kept,
            self.programs,
            out,
            step.only_if,
            grads.writes,
            grad_dtype=self.grad_dtype,
            state_dtype=self.state_dtype,
            step_dtype=self.step_dtype,
            Q=self.block,
            RANDOM=self.kept is not None,
            PLACES=self.places,
            **step.momentum,
            ALIGNED=self.aligned,
            GRADS_ALIGNED=grads.aligned and self.aligned,
            **self.cut,
        )


class Moves:
    """Copies of regions from buffers of one dtype into one buffer of the same dtype."""

    def __init__(self, moves: Sequence[Move], device: torch.device) -> None:
        self.table = _on_device([(*m.size, *m.source, *m.out) for m in moves], device)
        self.aligned = all(
            _are_aligned(m.size.cols, m.source.begin, m.source.stride, *m.out) for m in moves
        )
        self.turned_aligned = _are_aligned(*(move.size.rows for move in moves))
        self.programs = programs([move.size for move in moves], device)

    def run_(self, sources: Sequence[Tensor], out: Tensor) -> None:
        table = Table([sources])
        launch(
            part_tiles.moved,
            (len(self.programs),),
            table.addresses,
            self.table,
            self.programs,
            out,
            dtype=DTYPES[out.dtype],
            ALIGNED=self.aligned and all(map(_is_aligned, sources)),
            TURNED_ALIGNED=self.turned_aligned,
            **tiled(),
        )


class StepOfParts:
    """Steps of parts of one group, alike in dtypes, all with main parameters or all without."""

    def __init__(
        self,
        parts: Sequence[StepPart],
        # Of a block: rows, cols, adjust_lr, update_scale.
        lr_factor: Callable[[int, int, str | None, float], float],
    ) -> None:
        self.param_dtype = DTYPES[parts[0].target.dtype]
        master = parts[0].master
        self.master_dtype = None if master is None else STORED_DTYPES[master.dtype]
        self.device = parts[0].target.device
        self.table = _on_device(
            [
                (
                    part.param,
                    *part.size,
                    *_lying(part.target),
                    *((0, 0) if part.master is None else _lying(part.master)),
                    *part.source,
                )
                for part in parts
            ],
            self.device,
        )
        self.aligned = all(
            _are_aligned(part.size.cols, part.source.begin, part.source.stride)
            and _is_aligned(part.target)
            and (part.master is None or _is_aligned(part.master))
            for part in parts
        )
        self.turned_aligned = _are_aligned(*(part.size.rows for part in parts))
        self.programs = programs([part.size for part in parts], self.device)
        self.blocks = [part.block for part in parts]
        self.lr_factor = lr_factor
        self._lr_factors: tuple[tuple[str | None, float], Tensor] | None = None

    def lr_factors(self, adjust_lr: str | None, scale: float) -> Tensor:
        """Return the factors on the learning rate of each part, (parts,) float32."""
        asked = adjust_lr, scale
        if self._lr_factors is None or self._lr_factors[0] != asked:
            found = [self.lr_factor(*block, *asked) for block in self.blocks]
            self._lr_factors = asked, torch.tensor(found, dtype=torch.float32, device=self.device)
        return self._lr_factors[1]

    def run_(self, sources: Sequence[Tensor], writes: Tensor | None, step: Step) -> None:
        """Decay and step along directions, which are in the buffers `sources` of one dtype."""
        options, scalars, table = step.options, step.scalars, Table([sources])
        launch(
            part_tiles.step_of_parts,
            (len(self.programs),),
            table.addresses,
            self.table,
            self.lr_factors(options["adjust_lr"], options["update_scale"]),
            self.programs,
            step.only_if,
            writes,
            scalars["lr"],
            scalars["weight_decay"],
            param_dtype=self.param_dtype,
            direction_dtype=DTYPES[sources[0].dtype],
            SCALE_DECAY=options["scale_decay"],
            CAUTIOUS=options["cautious"],
            INDEPENDENT=options["decay_form"] == "independent",
            master_dtype=self.master_dtype,
            ALIGNED=self.aligned and all(map(_is_aligned, sources)),
            TURNED_ALIGNED=self.turned_aligned,
            **tiled(),
        )


def programs(
    sizes: Sequence[Size], device: torch.device, cut: Mapping[str, Any] | None = None
) -> Tensor:
    """Return the part and the tile of each program, (programs, 2) int32."""
    cut = tiled() if cut is None else cut
    counts = torch.tensor([tiles(*size, cut) for size in sizes])
    parts = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    firsts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    within = torch.arange(len(parts)) - firsts
    return torch.stack([parts, within], dim=1).int().to(device)


def _lying(matrix: Tensor) -> tuple[int, int]:
    """Return the address of a matrix and its row stride in elements."""
    return matrix.data_ptr(), matrix.stride(0)


def _is_aligned(matrix: Tensor) -> bool:
    """Whether 16 bytes can be read at once; only the row stride of a matrix matters."""
    return matrix.data_ptr() % 16 == 0 and (matrix.ndim != 2 or matrix.stride(0) % 8 == 0)


def _are_aligned(*numbers: int) -> bool:
    return not any(number % 8 for number in numbers)


def _on_device(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(device)
