"""State and whole values of replicated parameters.

A rank keeps the state of the pieces that it owns, as `state_packing` says. Of DTensors the owner
of a block alone may have some of its state, which ranks of its mesh lack: it comes together in the
mesh first.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from samestep.comm.collectives import maximum
from samestep.comm.groups import RankGroup
from samestep.groups.param_groups import Group, rule_of
from samestep.layout.blocks import Block, Shape
from samestep.layout.boxes import Box, HeldBox, HeldState, held_range, whole_box
from samestep.plan.layouts import Key
from samestep.plan.mesh_shares import BlockOwners
from samestep.plan.sharding import Piece, ShardingPlan
from samestep.rules.state import MASTERS, State, block_state_shapes, whole_shapes
from samestep.shards.replicated.local_tensors import LocalTensors
from samestep.shards.replicated.reduction import BucketReductions
from samestep.shards.replicated.state_packing import StatePacking, is_local
from samestep.shards.state_store import Part, StateStore
from samestep.shards.values import ShardValues
from samestep.shards.windows import StateDevice
from samestep.update.plain import scale

if TYPE_CHECKING:
    from samestep.shards.replicated.replicated import MeshSide


class StateEntry(NamedTuple):
    """One state tensor of a parameter."""

    name: str
    key: str
    tensor: Tensor


class ReplicatedValues(ShardValues):
    """State of owned pieces, and whole values of parameters and gradients.

    Args:
        local: The parameters as this rank holds them.
        places: The ranks in the order of the plan's segments.
        groups: Of the optimizer, whose rules stay as they are.
        home: Where state stays between steps.
        reductions: The gradients; None: somebody else averages them.
        everyone: Groups of ranks that, one after the other, reach all that may have a gradient.
        mesh: Of DTensors, who of their mesh holds which shards.
    """

    def __init__(
        self,
        local: LocalTensors,
        plan: ShardingPlan,
        places: RankGroup,
        groups: Sequence[Group],
        home: StateDevice,
        reductions: "BucketReductions | None",
        everyone: Sequence[RankGroup],
        mesh: "MeshSide | None",
    ) -> None:
        self.params = self._params = local.params
        self._local, self._plan, self._places, self._groups = local, plan, places, groups
        self._home, self._device = home, local.value(0).device
        self._reductions, self._everyone, self._mesh = reductions, everyone, mesh
        self._layout = layout = None if mesh is None else mesh.layout
        owners = None if mesh is None else mesh.blocks.owners
        self.packing = StatePacking(plan, places.rank, groups, owners)
        self._owners = _owners(plan)
        self._block_starts: dict[tuple[int, str], dict[Block, int]] = {}
        self._shapes = [self._process_shapes(index) for index in range(len(self.params))]
        self._keys = [(i, key) for i, spec in enumerate(plan.params) for key in spec.stored]
        # Pieces are stretches of contiguous tensors.
        stretches = {(i, key): self._stretch(i, key) for i, key in self._keys}
        counts = {key for key, shape in stretches.items() if not shape and self._owners[key[0]]}
        self._store = StateStore(
            "gather of the state", stretches, self._parts_of, places, counts, self._described
        )
        if layout is not None:
            of_parts = {
                (index, key): (self._shapes[index][key], plan.params[index].stored[key].per or 1)
                for index, key in self._keys
                if is_local(key, plan.params[index])
            }
            self._of_mesh = layout.store(of_parts)
        self._of_owners: StateStore | None = None
        owned = [key for key in self._keys if self._is_owned(key)]
        if layout is not None and owners is not None and owned:
            together = StatePacking(plan, places.rank, groups)
            shapes = {(i, key): (together.sizes[i][key],) for i, key in owned}
            parts = _parts_of_owners(shapes, together, owners, layout.group.size)
            self._of_owners = StateStore(
                "gather of the owners' state", shapes, parts.__getitem__, layout.group
            )

    @property
    def keeps_all(self) -> bool:
        """Whether every rank has all state."""
        replicated = all(bucket.replicated for bucket in self._plan.buckets)
        return replicated and self._of_owners is None

    def _is_owned(self, key: Key) -> bool:
        """Whether only owners of blocks have a state."""
        index, name = key
        return self._plan.params[index].stored[name].owned

    def new_state(self) -> dict[Tensor, State]:
        """The state of every parameter before the first step."""
        return {
            param: {
                key: self._home.zeros((size,), spec.stored[key].dtype)
                for key, size in sizes.items()
            }
            for param, spec, sizes in zip(
                self._params, self._plan.params, self.packing.sizes, strict=True
            )
        }

    def state_alike(self, state: Mapping[Tensor, State]) -> Iterator[StateEntry]:
        """State that all ranks hold in common.

        All state of a parameter that every rank updates; of one in which every rank owns a piece,
        the numbers that each piece has for itself, such as its step count.
        """
        first: dict[int, Piece] = {}
        for piece in self.packing.parts:
            first.setdefault(piece.param, piece)
        for index, piece in sorted(first.items()):
            param, spec, owners = self._params[index], self._plan.params[index], self._owners[index]
            for key, view in self.packing.views(piece, state[param]).items():
                tensor = state[param][key]
                if self._of_owners is not None and self._is_owned((index, key)):
                    continue  # of other blocks on every rank
                if view.ndim == 0 and len(owners) in (0, self._places.size):
                    yield StateEntry(spec.name, key, view)
                elif not owners:
                    whole = tensor.numel() == prod(spec.shape)
                    yield StateEntry(spec.name, key, tensor.view(spec.shape) if whole else tensor)

    # --- which rank keeps what ---------------------------------------------------------------

    def _parts_of(self, rank: int) -> dict[Key, list[Part]]:
        """Boxes of every state tensor in the pieces of a rank."""
        found: dict[Key, list[Part]] = {key: [] for key in self._keys}
        for piece, spans in StatePacking(self._plan, rank, self._groups).parts.items():
            for key, part in spans.items():
                found[piece.param, key] += self._parts(piece, key, part.start, part.sizes)
        return found

    def _parts(self, piece: Piece, key: str, start: int, shape: Shape) -> Iterator[Part]:
        """Boxes of the state of a piece.

        Local state is one stretch, of what this rank holds; that of whole blocks has one for each
        block that the piece is a part of.
        """
        if not self._stretch(piece.param, key):
            yield Part(Box((), ()), start)
            return
        spec, begins = self._plan.params[piece.param], [0]
        per = spec.stored[key].per
        if per is not None:
            begins = [piece.start // per]
        elif piece.block is not None:
            known = self._starts_of_blocks(piece.param, key)
            begins = [known[block] for block in spec.whole_blocks(piece.block)]
        size = prod(shape) // len(begins)
        for number, begin in enumerate(begins):
            yield Part(Box((begin,), (size,)), start + number * size)

    def _stretch(self, index: int, key: str) -> Shape:
        """A whole state tensor as one box."""
        spec, shape = self._plan.params[index], self._shapes[index][key]
        if is_local(key, spec):
            shape = spec.stored[key].shape(spec.shape)
        is_number = not shape and spec.stored[key].per is None
        return () if is_number else (prod(shape),)

    def _starts_of_blocks(self, index: int, key: str) -> dict[Block, int]:
        """Offset of each block's state."""
        known = self._block_starts.get((index, key))
        if known is None:
            spec = self._plan.params[index]
            group, cursor = self._groups[spec.group], 0
            known = self._block_starts[index, key] = {}
            for block in (spec.whole or spec).blocks or ():
                known[block] = cursor
                cursor += prod(block_state_shapes(rule_of(group), block, group, spec.stored)[key])
        return known

    def _process_shapes(self, index: int) -> dict[str, Shape]:
        """Shapes of state on one process."""
        spec = self._plan.params[index]
        whole, group = spec.whole or spec, self._groups[spec.group]
        return whole_shapes(rule_of(group), whole.shape, whole.blocks, group, spec.stored)

    def _described(self, key: Key) -> str:
        index, name = key
        return f"state {name!r} of parameter {self._plan.params[index].name!r}"

    # --- put together ------------------------------------------------------------------------

    def gather_state(
        self, state: Mapping[Tensor, State], only: Sequence[Tensor] | None = None
    ) -> Callable[[], dict[Tensor, State]]:
        """Gather whole state on the parameters' device."""
        indices = list(range(len(self.params)) if only is None else map(self.index, only))
        tensors = self._tensors(state, indices)
        owned = {key: own for key, own in tensors.items() if self._is_owned(key)}
        if self._of_owners is not None and owned:
            tensors |= self._of_owners.gather(owned, self._device)
        land = self._store.launch(tensors, self._device)

        def finish() -> dict[Tensor, State]:
            stretches = land()
            local = {key: values for key, values in stretches.items() if self._is_local(key)}
            whole = (
                {**stretches, **self._of_mesh.gather(local, self._device)} if local else stretches
            )
            return self._by_param(indices, whole, lambda index, key: self._shapes[index][key])

        return finish

    def kept_state(self, state: Mapping[Tensor, State]) -> dict[Tensor, State]:
        """All state, where every rank keeps it."""
        assert self.keeps_all  # so nothing travels, and it comes together where it stays
        indices = range(len(self._params))
        stretches = self._store.launch(self._tensors(state, indices), self._home.device)()
        found = self._by_param(indices, stretches, self._shape_here)
        if self._layout is not None:
            for index, param in enumerate(self._params):
                spec = self._plan.params[index]
                found[param] = {
                    key: self._layout.beside(index, tensor, spec.stored[key].per or 1)
                    if is_local(key, spec)
                    else tensor
                    for key, tensor in found[param].items()
                }
        return found

    def _local_masters(self, state: Mapping[Tensor, State], index: int) -> State:
        """Main parameter of the local tensor. Collective."""
        tensors: dict[Key, Tensor] = {
            (index, key): tensor
            for key, tensor in state[self._params[index]].items()
            if key in MASTERS
        }
        found = self._store.launch(tensors, self._device)()
        return self._by_param([index], found, self._shape_here)[self._params[index]]

    def _tensors(self, state: Mapping[Tensor, State], indices: Iterable[int]) -> dict[Key, Tensor]:
        return {
            (index, key): tensor
            for index in indices
            for key, tensor in state[self._params[index]].items()
        }

    def _is_local(self, key: Key) -> bool:
        index, name = key
        return is_local(name, self._plan.params[index])

    def _shape_here(self, index: int, key: str) -> Shape:
        """Shape of state for the local tensor."""
        spec = self._plan.params[index]
        if is_local(key, spec):
            return spec.stored[key].shape(spec.shape)
        return self._shapes[index][key]

    def _by_param(
        self,
        indices: Iterable[int],
        tensors: Mapping[Key, Tensor],
        shape: Callable[[int, str], Shape],
    ) -> dict[Tensor, State]:
        found: dict[Tensor, State] = {self._params[index]: {} for index in indices}
        for (index, key), tensor in tensors.items():
            found[self._params[index]][key] = tensor.view(shape(index, key))
        return found

    def held_state(self, state: Mapping[Tensor, State]) -> Iterator[HeldState]:
        """State of this rank as boxes of whole tensors."""
        for index, param in enumerate(self._params):
            for key, tensor in state[param].items():
                boxes = [
                    box
                    for part in self._parts_here((index, key))
                    for box in self._boxes(index, key, part, part.of(tensor))
                ]
                yield HeldState(param, key, self._shapes[index][key], boxes)

    def _parts_here(self, key: Key) -> Sequence[Part]:
        """Boxes of a whole tensor that this rank has."""
        found = self._store.parts(key)
        if self._of_owners is None or not self._is_owned(key):
            return found
        owned = {part.box.offsets[0]: part.start for part in self._of_owners.parts(key)}
        return [part._replace(start=owned[part.start]) for part in found if part.start in owned]

    def _boxes(self, index: int, key: str, part: Part, values: Tensor) -> Iterable[HeldBox]:
        """Boxes of a range of state."""
        if not part.box.sizes:
            return [whole_box(values)]
        (start,) = part.box.offsets
        here = held_range(self._shape_here(index, key), start, values)
        spec = self._plan.params[index]
        if self._layout is None or not is_local(key, spec):
            return here
        outer = self._layout.boxes[index].divided(spec.stored[key].per or 1)
        return [HeldBox(box.shifted(outer), own) for box, own in here]

    # --- taken apart -------------------------------------------------------------------------

    def put_state(
        self, state: Mapping[Tensor, State], param: Tensor, key: str, whole: Mapping[str, Tensor]
    ) -> None:
        """Copy this rank's pieces out of whole state."""
        index = self.index(param)
        values, spec = whole[key], self._plan.params[index]
        if self._layout is not None and is_local(key, spec):
            values = self._layout.part(index, values, spec.stored[key].per or 1)
        tensor = state[param][key]
        if self._of_owners is None or not self._is_owned((index, key)):
            self._store.take((index, key), tensor, values)
            return
        (size,) = self._of_owners.shapes[index, key]
        of_place = tensor.new_empty(size)
        self._store.take((index, key), of_place, values)
        self._of_owners.take((index, key), tensor, of_place)

    def put_parameter(self, param: Tensor, key: str, into: Tensor) -> None:
        """Write a parameter into state."""
        index = self.index(param)
        for piece in self.packing.parts:
            if piece.param == index:
                view = self.packing.view(piece, key, into)
                view.copy_(self._local.read(index, piece.elements).view(view.shape))

    # --- whole parameters and gradients ------------------------------------------------------

    def whole_value(self, param: Tensor) -> Tensor:
        """The whole parameter."""
        if self._layout is None:
            return super().whole_value(param)
        index = self.index(param)
        return self._layout.whole(index, self._local.value(index))

    def put_value(self, param: Tensor, whole: Tensor) -> None:
        """Set the whole parameter."""
        if self._layout is None:
            super().put_value(param, whole)
        else:
            index = self.index(param)
            self._local.value(index).copy_(self._layout.part(index, whole))

    def scale(self, state: Mapping[Tensor, State], param: Tensor, factor: Tensor) -> None:
        """Scale this rank's copy and its main parameters.

        A rank that rounded its copy by itself would round what was rounded before.
        """
        index = self.index(param)
        if self._layout is not None:
            factor = self._layout.part(index, factor)
        local = self._local_masters(state, index)
        scale(self._local.value(index), local, factor)
        for key, values in local.items():
            self._store.take((index, key), state[param][key], values)

    def whole_gradient(self, param: Tensor) -> Tensor | None:
        """Mean gradient of the rounds so far."""
        reductions, index = self._reductions, self.index(param)
        if reductions is None:
            return super().whole_gradient(param)
        here = torch.tensor([reductions.sent.here[index]], dtype=torch.int64, device=self._device)
        mean = reductions.mean_of(index).view(self._plan.params[index].shape)
        for group in self._everyone:
            name = self._plan.params[index].name
            here = maximum(f"presence of {name}", here, group).wait()
        if self._mesh is not None:
            self._mesh.agree_on_kinds(reductions, self._everyone)
            all_of_it = [(Piece(index, 0, mean.numel()), mean)]
            ((_, summed),) = self._mesh.sums.added_up(all_of_it, reductions.kinds)
            mean = self._mesh.layout.whole(index, summed.view(mean.shape))
        return mean if bool(here) else None

    def put_gradient(self, param: Tensor, whole: Tensor) -> None:
        """Set the mean gradient."""
        reductions, index = self._reductions, self.index(param)
        if reductions is None:
            super().put_gradient(param, whole)
            return
        if self._mesh is not None:
            self._mesh.agree_on_kinds(reductions, self._everyone)
            part = self._mesh.layout.part(index, whole)
            whole = self._mesh.sums.as_summand(part, reductions.kinds[index])
        reductions.set_mean_of(index, whole.reshape(-1))


def _parts_of_owners(
    shapes: Iterable[Key], together: StatePacking, owners: BlockOwners, ranks: int
) -> list[dict[Key, list[Part]]]:
    """Per rank, the state of blocks it owns."""
    found: list[dict[Key, list[Part]]] = [{key: [] for key in shapes} for _ in range(ranks)]
    for piece, spans in together.parts.items():
        for key, whole in spans.items():
            for rank, parts in enumerate(found):
                own = parts.get((piece.param, key), [])
                for stack in owners.stacks(piece, rank) if (piece.param, key) in parts else ():
                    size = prod(whole.sizes[1:])
                    box = Box((whole.start + stack * size,), (size,))
                    own.append(Part(box, sum(part.box.numel for part in own)))
    return found


def _owners(plan: ShardingPlan) -> list[set[int]]:
    """Per parameter, ranks that own a piece."""
    owners: list[set[int]] = [set() for _ in plan.params]
    for bucket in plan.buckets:
        for rank, segment in enumerate(() if bucket.replicated else bucket.segments):
            for piece in segment.pieces:
                owners[piece.param].add(rank)
    return owners
