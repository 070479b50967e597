"""Local tensors of a plan's parameters, and the shards that this rank owns.

`LocalTensors` has parameters as plain tensors: all of a parameter, or its shard of a DTensor.
Whoever averages over copies works on these, whatever the rest of a parameter is on other ranks.
`PieceShards` has what a step updates of them, with state.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samestep.comm.groups import RankGroup
from samestep.comm.presence import RankFailure, changed_parameter
from samestep.groups.group_checks import same_objects, sparse_gradient
from samestep.groups.param_groups import Group, rule_of
from samestep.layout.boxes import cut_as, mesh_of, range_boxes
from samestep.plan.schedule import WindowId
from samestep.plan.sharding import Piece, ShardingPlan
from samestep.rules.state import (
    GlobalElementIndex,
    MatrixView,
    State,
    global_element_index,
    matrix_views,
)
from samestep.shards.replicated.reduced_gradient import ReducedGradient
from samestep.shards.replicated.state_packing import StatePacking, piece_shape
from samestep.shards.windows import OffloadSlice, OffloadUnit, Windows

if TYPE_CHECKING:
    from samestep.shards.dtensor.mesh_layout import MeshLayout  # DTensors take long to import

REPLICATED, SUMMAND, MEAN = 1, 2, 3  # what a gradient is along a mesh axis that has copies


class LocalTensors:
    """The parameters of one plan, by their index in it."""

    def __init__(self, params: Sequence[Tensor], names: Sequence[str]) -> None:
        self.params, self._names = list(params), names
        self._dtensors: list[Any] = [
            None if mesh_of(param) is None else param for param in self.params
        ]
        self._were = [(param.dtype, param.device) for param in self.params]

    # torch has no public way to move what a DTensor holds, and `to_local` is a part of autograd:
    # in every step this is asked of every parameter, so what is held is looked at directly.

    def _held(self, index: int) -> Tensor:
        dtensor = self._dtensors[index]
        held: Tensor = self.params[index] if dtensor is None else dtensor._local_tensor
        return held

    def value(self, index: int) -> Tensor:
        """View of a local tensor."""
        return self._held(index).detach()

    def read(self, index: int, elements: slice) -> Tensor:
        """Elements of a parameter, (size,): a view where strides allow."""
        value = self.value(index)
        if value.is_contiguous():
            return value.view(-1)[elements]
        return torch.cat([part.reshape(-1) for part in _boxes_of(value, elements)])

    def write(self, index: int, elements: slice, values: Tensor) -> None:
        """Write elements of a parameter from (size,)."""
        value = self.value(index)
        if value.is_contiguous():
            value.view(-1)[elements].copy_(values)
            return
        parts = _boxes_of(value, elements)
        sizes = [part.numel() for part in parts]
        for part, own in zip(parts, torch.split(values, sizes), strict=True):
            part.copy_(own.view(part.shape))

    def values(self) -> list[Tensor]:
        """The local tensors of all parameters."""
        return [self.value(index) for index in range(len(self.params))]

    def addresses(self) -> list[tuple[int, bool]]:
        """The address of each local tensor, and whether it is contiguous."""
        pairs = zip(self.params, self._dtensors, strict=True)
        held = [param if dtensor is None else dtensor._local_tensor for param, dtensor in pairs]
        return [(tensor.data_ptr(), tensor.is_contiguous()) for tensor in held]

    def changed(self, group: RankGroup) -> RankFailure | None:
        """First parameter that was moved or converted, and what it is now."""
        for index, (param, was) in enumerate(zip(self.params, self._were, strict=True)):
            if (param.dtype, param.device) != was:
                now, then = f"{param.dtype} on {param.device}", f"{was[0]} on {was[1]}"
                return changed_parameter(
                    self._names[index], index, f"is {now} now, and was {then}", group
                )
        return None

    @torch.no_grad()
    def replace(self, index: int, view: Tensor) -> None:
        """Move a parameter to other memory, with its values."""
        dtensor = self._dtensors[index]
        if dtensor is None:
            self.params[index].data = view
        else:
            dtensor._local_tensor = view

    def gradient(self, index: int) -> Tensor | None:
        """Local tensor of `.grad`, perhaps a summand over a mesh.

        None also where a gradient was reduced and given back.
        """
        grad: Any = self.params[index].grad
        if grad is None or type(grad) is ReducedGradient:
            return None
        dtensor = self._dtensors[index]
        if dtensor is None:
            return grad.detach()  # type: ignore[no-any-return]
        held = _held_of(grad)
        if held.shape != dtensor._local_tensor.shape:
            self._cut_gradient(index)
            held = _held_of(self.params[index].grad)
        return held.detach()

    def dense_gradient(self, index: int) -> Tensor | None:
        """Local gradient to send; raises if it is sparse."""
        grad = self.gradient(index)
        if grad is not None and grad.layout != torch.strided:
            raise sparse_gradient(self._names[index])
        return grad

    def has_gradient(self, index: int) -> bool:
        """Whether `.grad` can be read."""
        grad = self.params[index].grad
        return grad is not None and type(grad) is not ReducedGradient

    @torch.no_grad()
    def _cut_gradient(self, index: int) -> None:
        """This rank's shard of a replicated gradient."""
        param: Any = self.params[index]
        found = getattr(param.grad, "placements", None)
        if found is not None:
            param.grad = param.grad.redistribute(placements=cut_as(param.placements, found))

    @torch.no_grad()
    def put_gradient(self, index: int, local: Tensor | None) -> None:
        """Set or clear `.grad`, with the placements of the last one."""
        param = self.params[index]
        if local is None or self._dtensors[index] is None:
            param.grad = local
            return
        from samestep.shards.dtensor.gradients import placed  # DTensors take long to import

        like: Any = param.grad if self.has_gradient(index) else self._dtensors[index]
        param.grad = placed(local, like, like.placements)

    def kinds_along_axes(self, index: int) -> tuple[int, ...]:
        """Placement of a gradient on each mesh axis, as numbers.

        Raises:
            ValueError: It is placed in another way than its parameter.
        """
        dtensor = self._dtensors[index]
        if dtensor is None or not self.has_gradient(index):
            return ()
        self._cut_gradient(index)
        found = getattr(self.params[index].grad, "placements", None)
        if found is None:
            raise ValueError("is a plain tensor")
        kinds = []
        for own, of_grad in zip(dtensor.placements, found, strict=True):
            operation = getattr(of_grad, "reduce_op", None)
            if own == of_grad:
                kinds.append(REPLICATED if own.is_replicate() else 0)
            elif own.is_replicate() and of_grad.is_partial() and operation in ("sum", "avg"):
                kinds.append(SUMMAND if operation == "sum" else MEAN)
            else:
                raise ValueError(f"is {tuple(found)}")
        return tuple(kinds)


def _boxes_of(value: Tensor, elements: slice) -> list[Tensor]:
    """Views that together are some elements of a parameter."""
    shape = tuple(value.shape)
    return [value[box.slices] for box in range_boxes(shape, elements.start, elements.stop)]


def _held_of(grad: Any) -> Tensor:
    """Local tensor of a gradient."""
    held: Tensor = getattr(grad, "_local_tensor", grad)
    return held


# --- what a step updates ------------------------------------------------------------------------

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
    """Shards of this rank, as updates use them.

    A step is short beside the making of views, so shards are made once and kept until a parameter
    or a state tensor was replaced by another object. State that stays on the host is updated in
    windows: a window that has come to the device lies elsewhere than its shard's state.

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
        self._strided: list[Piece] = []  # of parameters that are not contiguous
        self._made_of: list[Tensor] = []  # all state
        self._addresses: list[tuple[int, bool]] = []  # of parameters

    def __getitem__(self, piece: Piece) -> Shard:
        return self._shards[piece]

    def look_at(self, state: Mapping[Tensor, State]) -> bool:
        """Use the parameters and state of this step.

        Called when a step begins. Returns whether shards were made. Parameters that are not
        contiguous are updated as copies, which get their values here.
        """
        tensors = [tensor for param in self._held.params for tensor in state[param].values()]
        addresses = self._held.addresses()
        are_new = addresses != self._addresses or not same_objects(tensors, self._made_of)
        if are_new:
            self._made_of, self._addresses = tensors, addresses
            self._shards = {
                piece: self._made(piece, state[self._held.params[piece.param]])
                for piece in self._packing.parts
            }
            self._strided = [p for p, shard in self._shards.items() if not shard.is_view]
        for piece in self._strided:
            shard, values = self._shards[piece], self._held.read(piece.param, piece.elements)
            shard.value.copy_(values.view(shard.value.shape))
        return are_new

    def write_strided(self, pieces: Iterable[Piece] | None = None) -> None:
        """Copy updated values into parameters that are not contiguous."""
        for piece in self._strided if pieces is None else pieces:
            shard = self._shards[piece]
            if not shard.is_view:
                self._held.write(piece.param, piece.elements, shard.value.reshape(-1))

    def unit(self, piece: Piece) -> OffloadUnit:
        """Offload unit of a piece."""
        return OffloadUnit(piece, self._shards[piece].state, piece.size, piece.block is None)

    def lying(self, grads: Iterable[tuple[Piece, Tensor]]) -> Iterator[Seen]:
        """Pieces with gradients and state on the device."""
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
        """Pieces of a window of offloaded state."""
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
        """Global indices of a piece, for stochastic rounding.

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
        """Matrices of a block, or all elements of another piece."""
        if piece.block is None:
            return [MatrixView(value, state, None, None if where is None else where.origin())]
        spec = self._plan.params[piece.param]
        group = self._groups[spec.group]
        return matrix_views(rule_of(group), piece.block, value, state, group, spec.stored, where)
