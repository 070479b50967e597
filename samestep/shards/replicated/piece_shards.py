"""The shards of the pieces that a rank owns, as updates see them.

A step is short beside the making of views, so shards are made once and kept until a parameter or a
state tensor was replaced by another object.

State that stays on the host is updated in windows: a window that has come to the device lies
elsewhere than its shard's state.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from samestep.groups.group_checks import same_objects
from samestep.groups.param_groups import Group, rule_of
from samestep.plan.schedule import WindowId
from samestep.plan.sharding import Piece, ShardingPlan
from samestep.rules.state import (
    GlobalElementIndex,
    MatrixView,
    State,
    global_element_index,
    matrix_views,
)
from samestep.shards.replicated.local_tensors import LocalTensors
from samestep.shards.replicated.state_packing import StatePacking, piece_shape
from samestep.shards.windows import OffloadSlice, OffloadUnit, Windows

if TYPE_CHECKING:
    from samestep.shards.dtensor.mesh_layout import MeshLayout  # DTensors take long to import

# A piece or a range of it, its gradient in the shape of the block, its matrices.
Seen = tuple[Piece, Tensor, list[MatrixView]]


@dataclass(eq=False)
class Shard:
    """A part of a parameter on this rank.

    value: (size,), or (rows, cols) of a block; a view of the parameter if `is_view`, else a copy.
    state: by key, in the shapes that the rule declares; where the state stays between steps.
    where: which elements of the whole parameter these are, if any state is rounded at random.
    matrices: what the rule sees, with state that stays on the device; empty until it is asked for.
    """

    value: Tensor
    is_view: bool
    state: State
    where: GlobalElementIndex | None
    matrices: list[MatrixView] = field(default_factory=list)


class PieceShards:
    """The shards of this rank, by piece.

    layout: who holds which shards, where pieces are those of shards of DTensors.
    """

    def __init__(
        self,
        held: LocalTensors,
        plan: ShardingPlan,
        packing: StatePacking,
        groups: Sequence[Group],
        layout: "MeshLayout | None",
    ) -> None:
        self._held, self._plan, self._packing = held, plan, packing
        self._groups, self._layout = groups, layout
        self._shards: dict[Piece, Shard] = {}
        self._made_of: list[Tensor] = []  # all state
        self._addresses: list[tuple[int, bool]] = []  # of parameters

    def __getitem__(self, piece: Piece) -> Shard:
        return self._shards[piece]

    def look_at(self, state: Mapping[Tensor, State]) -> bool:
        """Make shards of the parameters and state of this step, unless they are those of before.

        Called when a step begins. Returns whether shards were made.
        """
        tensors = [tensor for param in self._held.params for tensor in state[param].values()]
        addresses = self._held.addresses()
        if addresses == self._addresses and same_objects(tensors, self._made_of):
            return False
        self._made_of, self._addresses = tensors, addresses
        self._shards = {
            piece: self._made(piece, state[self._held.params[piece.param]])
            for piece in self._packing.parts
        }
        return True

    def read_strided(self) -> None:
        """Take the values of parameters that are not contiguous, which are updated as copies."""
        for piece, shard in self._shards.items():
            if not shard.is_view:
                values = self._held.read(piece.param, piece.elements)
                shard.value.copy_(values.view(shard.value.shape))

    def write_strided(self, pieces: Iterable[Piece] | None = None) -> None:
        """Put updated copies into their parameters: those of some pieces, or all."""
        for piece in self._shards if pieces is None else pieces:
            shard = self._shards[piece]
            if not shard.is_view:
                self._held.write(piece.param, piece.elements, shard.value.reshape(-1))

    def unit(self, piece: Piece) -> OffloadUnit:
        """The state of a piece, as what comes from the host at once."""
        return OffloadUnit(piece, self._shards[piece].state, piece.size, piece.block is None)

    def lying(self, grads: Iterable[tuple[Piece, Tensor]]) -> Iterator[Seen]:
        """Pieces with their gradients, and the state that stays on the device."""
        for piece, grad in grads:
            shard = self._shards[piece]
            if not shard.matrices:
                shard.matrices += self._matrices(piece, shard.value, shard.state, shard.where)
            yield piece, grad.view(shard.value.shape), shard.matrices

    def arrived(
        self,
        grads: Iterable[tuple[Piece, Tensor]],
        windows: Windows,
        window: WindowId,
        parts: Iterable[tuple[OffloadSlice, State]],
    ) -> Iterator[Seen]:
        """The pieces of a window of state, or ranges of them, with the state that has come."""
        by_piece = dict(grads)
        for place, (part, state) in enumerate(parts):
            piece: Piece = part.unit.about
            shard, grad = self._shards[piece], by_piece[piece]
            value, where = shard.value, shard.where
            if not part.is_whole:
                value, grad = value[part.start : part.stop], grad[part.start : part.stop]
                where = None if where is None else where.stretch(part.start, part.stop)
            make = partial(self._matrices, piece, value, state, where)
            matrices = windows.made(window, place, (state, shard.value), make)
            yield piece, grad.view(value.shape), matrices

    def _made(self, piece: Piece, state: State) -> Shard:
        _, is_view = self._addresses[piece.param]
        value = self._held.read(piece.param, piece.elements).view(piece_shape(piece))
        return Shard(value, is_view, self._packing.views(piece, state), self._whereabouts(piece))

    def _whereabouts(self, piece: Piece) -> GlobalElementIndex | None:
        """The elements of its whole parameter that a piece has, if any state is rounded at random.

        None for a part of a block, of which the rounding is done where the block comes together.
        """
        spec = self._plan.params[piece.param]
        where = global_element_index(spec.name, (spec.whole or spec).shape, spec.stored)
        if where is None or (self._layout is not None and piece.block is not None):
            return None
        if self._layout is None:
            flat = where.elements.view(-1)[piece.start : piece.stop]
            return where.at(flat.view(piece_shape(piece)))
        held = where.elements[self._layout.boxes[piece.param].slices]
        return where.at(held).stretch(piece.start, piece.stop)

    def _matrices(
        self, piece: Piece, value: Tensor, state: State, where: GlobalElementIndex | None
    ) -> list[MatrixView]:
        """The matrices of a piece that is a block, or all of its elements as one."""
        if piece.block is None:
            return [MatrixView(value, state, None, None if where is None else where.origin())]
        spec = self._plan.params[piece.param]
        group = self._groups[spec.group]
        return matrix_views(rule_of(group), piece.block, value, state, group, spec.stored, where)
