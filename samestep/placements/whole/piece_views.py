"""Pieces as an update sees them: views of parameters and state that are made once, not every step.

State that stays on the host is seen in windows instead: what has come of it lies elsewhere.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from samestep.groups.param_groups import Group, rule_of
from samestep.placements.whole.held_tensors import HeldTensors
from samestep.placements.whole.piece_state import StatePacking, piece_shape
from samestep.placements.windows import Unit, WindowPart, Windows
from samestep.plan.schedule import WindowId
from samestep.plan.sharding import Piece, ShardingPlan
from samestep.rules.state import MatrixView, State, Whereabouts, matrix_views, whereabouts

if TYPE_CHECKING:
    from samestep.placements.whole.mesh_parts import MeshParts  # DTensors take long to import

# A piece or a range of it, its gradient in the shape of the block, its matrices.
Seen = tuple[Piece, Tensor, list[MatrixView]]


class _Known(NamedTuple):
    """Views of a piece, and what they are views of."""

    address: tuple[int, bool]
    of: tuple[Tensor, ...]
    value: Tensor
    state: State
    where: Whereabouts | None
    matrices: list[MatrixView]  # once somebody has asked

    @property
    def is_view(self) -> bool:
        """Whether the value is a view of its parameter, and not a copy beside it."""
        return self.address[1]


@dataclass(eq=False)
class PieceViews:
    """The views of the pieces that a rank owns; made anew if a parameter or state was replaced.

    state: that of the step at hand, by parameter.
    mesh: the other parts, where pieces are those of parts of DTensors.
    """

    held: HeldTensors
    plan: ShardingPlan
    packing: StatePacking
    groups: Sequence[Group]
    mesh: "MeshParts | None"
    state: Mapping[Tensor, State] = field(init=False)
    _known: dict[Piece, _Known] = field(init=False, default_factory=dict)

    def value_and_state(self, piece: Piece) -> tuple[Tensor, State]:
        """The piece in its parameter, and its state."""
        known = self._of(piece)
        return known.value, known.state

    def read_strided(self) -> None:
        """Take the values of parameters that are not contiguous, which are updated beside them."""
        for piece, known in self._known.items():
            if not known.is_view:
                known.value.copy_(self.held.read(piece).view(known.value.shape))

    def write_strided(self, pieces: Iterable[Piece] | None = None) -> None:
        """Put the updated values into their parameters: those of some pieces, or all."""
        for piece in list(self._known) if pieces is None else pieces:
            known = self._known.get(piece)
            if known is not None and not known.is_view:
                self.held.write(piece, known.value.reshape(-1))

    def unit(self, piece: Piece) -> Unit:
        """Its state as what comes to the device at once."""
        return Unit(piece, self._of(piece).state, piece.size, piece.block is None)

    def lying(self, grads: Iterable[tuple[Piece, Tensor]]) -> Iterator[Seen]:
        """Pieces with the state that lies beside them."""
        for piece, grad in grads:
            known = self._of(piece)
            if not known.matrices:
                known.matrices.extend(self._matrices(piece, known.value, known.state, known.where))
            yield piece, grad.view(known.value.shape), known.matrices

    def arrived(
        self,
        grads: Iterable[tuple[Piece, Tensor]],
        windows: Windows,
        window: WindowId,
        parts: Iterable[tuple[WindowPart, State]],
    ) -> Iterator[Seen]:
        """The pieces of a window of state, or ranges of them, with the state that has come."""
        by_piece = dict(grads)
        for place, (part, state) in enumerate(parts):
            piece: Piece = part.unit.about
            known, grad = self._of(piece), by_piece[piece]
            value, where = known.value, known.where
            if not part.is_whole:
                value, grad = value[part.start : part.stop], grad[part.start : part.stop]
                where = None if where is None else where.stretch(part.start, part.stop)
            make = partial(self._matrices, piece, value, state, where)
            matrices = windows.made(window, place, (state, known.value), make)
            yield piece, grad.view(value.shape), matrices

    def _of(self, piece: Piece) -> _Known:
        address = self.held.address(piece.param)
        state = self.state[self.held.params[piece.param]]
        known = self._known.get(piece)
        if (
            known is None
            or known.address != address
            or not all(map(operator.is_, known.of, state.values()))
        ):
            known = _Known(
                address,
                tuple(state.values()),
                self.held.read(piece).view(piece_shape(piece)),
                self.packing.views(piece, state),
                self._whereabouts(piece),
                [],
            )
            self._known[piece] = known
        return known

    def _whereabouts(self, piece: Piece) -> Whereabouts | None:
        """Of a piece in its whole parameter, if any of its state is rounded at random.

        Not of a part of a block, which is asked for where blocks come together.
        """
        spec = self.plan.params[piece.param]
        where = whereabouts(spec.name, (spec.whole or spec).shape, spec.stored)
        if where is None or (self.mesh is not None and piece.block is not None):
            return None
        if self.mesh is None:
            flat = where.elements.view(-1)[piece.start : piece.stop]
            return where.at(flat.view(piece_shape(piece)))
        held = where.elements[self.mesh.boxes[piece.param].slices]
        return where.at(held).stretch(piece.start, piece.stop)

    def _matrices(
        self, piece: Piece, value: Tensor, state: State, where: Whereabouts | None
    ) -> list[MatrixView]:
        """Those of a piece that is a block, or all of its elements."""
        if piece.block is None:
            return [MatrixView(value, state, None, None if where is None else where.origin())]
        spec = self.plan.params[piece.param]
        group = self.groups[spec.group]
        return matrix_views(rule_of(group), piece.block, value, state, group, spec.stored, where)
