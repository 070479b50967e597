"""State of pieces: where it lies in the tensors of each rank, and what it is to one process.

Of DTensors a rank has pieces of the part that it holds. State with an element for each of the
parameter's is that of this part, and called local here; state that belongs to whole blocks is
there for each block that a piece is a part of, one after the other.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from samestep.comm.groups import RankGroup
from samestep.groups.param_groups import Group, rule_of
from samestep.layout.blocks import Block, Shape
from samestep.layout.boxes import Box, HeldBox, HeldState, held_range, whole_box
from samestep.plan.layouts import Key
from samestep.plan.sharding import ParamSpec, Piece, ShardingPlan
from samestep.rules.state import (
    MASTERS,
    State,
    block_state_shapes,
    state_shapes,
    whole_shapes,
)
from samestep.shards.replicated.local_tensors import LocalTensors
from samestep.shards.state_store import Part, StateStore
from samestep.shards.windows import StateDevice

if TYPE_CHECKING:
    from samestep.shards.dtensor.mesh_layout import MeshLayout  # DTensors take long to import


class StateEntry(NamedTuple):
    """One state tensor of a parameter."""

    name: str
    key: str
    tensor: Tensor


def piece_shape(piece: Piece) -> Shape:
    """(size,), or (rows, cols) of a block."""
    return (piece.size,) if piece.block is None else piece.block.shape


def is_local(key: str, spec: ParamSpec) -> bool:
    """Whether state of a DTensor is laid out as the part that a rank holds."""
    return spec.whole is not None and spec.stored[key].per is not None


def _state_shapes(piece: Piece, spec: ParamSpec, group: Group) -> dict[str, Shape]:
    """Of a piece, by key."""
    rule, stored = rule_of(group), spec.stored
    if piece.block is None:
        return state_shapes(rule, piece_shape(piece), group, stored)
    shapes = block_state_shapes(rule, piece.block, group, stored)
    if spec.whole is None:
        return shapes
    blocks = spec.whole_blocks(piece.block)
    of_whole = block_state_shapes(rule, blocks[0], group, stored)
    return {
        key: own if is_local(key, spec) else (len(blocks), *of_whole[key])
        for key, own in shapes.items()
    }


class StatePacking:
    """Where the state of pieces lies on a rank: per parameter and key one 1-D tensor of pieces.

    sizes: per parameter and key the elements of that tensor.
    spans: per piece and key where it starts in there, and its shape.
    """

    def __init__(self, plan: ShardingPlan, rank: int, groups: Sequence[Group]) -> None:
        self.sizes = [dict.fromkeys(spec.stored, 0) for spec in plan.params]
        self.spans: dict[Piece, dict[str, tuple[int, Shape]]] = {}
        for piece in plan.owned(rank):
            spec = plan.params[piece.param]
            shapes = _state_shapes(piece, spec, groups[spec.group])
            sizes = self.sizes[piece.param]
            self.spans[piece] = {key: (start, shapes[key]) for key, start in sizes.items()}
            for key in sizes:
                sizes[key] += prod(shapes[key])

    def views(self, piece: Piece, state: State) -> State:
        """The piece's part of its parameter's state, in the shapes that the rule declares."""
        return {key: self.view(piece, key, state[key]) for key in self.spans[piece]}

    def view(self, piece: Piece, key: str, tensor: Tensor) -> Tensor:
        """The piece's part of one state tensor of its parameter, or of one that lies alike."""
        start, shape = self.spans[piece][key]
        return tensor[start : start + prod(shape)].view(shape)


class PieceState:
    """The state of a plan's pieces: what this rank has of it, and what that is to one process.

    The optimizer keeps the tensors, and hands them in.

    places: the ranks in the order of the plan's segments.
    layout: who holds which shards, where pieces are those of shards of DTensors.
    """

    def __init__(
        self,
        plan: ShardingPlan,
        params: Sequence[Tensor],
        places: RankGroup,
        groups: Sequence[Group],
        layout: "MeshLayout | None",
    ) -> None:
        self._plan, self._params, self._layout = plan, params, layout
        self._groups = groups  # whose rules, and whatever state depends on, stay as they are
        self.packing = StatePacking(plan, places.rank, groups)
        self._owners = _owners(plan)
        self._block_starts: dict[tuple[int, str], dict[Block, int]] = {}
        self._shapes = [self._process_shapes(index) for index in range(len(params))]
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

    def zeros(self, home: StateDevice) -> dict[Tensor, State]:
        """What every parameter has here before the first step."""
        return {
            param: {key: home.zeros((size,), spec.stored[key].dtype) for key, size in sizes.items()}
            for param, spec, sizes in zip(
                self._params, self._plan.params, self.packing.sizes, strict=True
            )
        }

    def alike(self, state: Mapping[Tensor, State], group: RankGroup) -> Iterator[StateEntry]:
        """What every rank shall have alike.

        All state of a parameter that every rank updates; of one in which every rank owns a piece,
        the numbers that each piece has for itself, such as its step count.
        """
        first: dict[int, Piece] = {}
        for piece in self.packing.spans:
            first.setdefault(piece.param, piece)
        for index, piece in sorted(first.items()):
            param, spec, owners = self._params[index], self._plan.params[index], self._owners[index]
            for key, view in self.packing.views(piece, state[param]).items():
                tensor = state[param][key]
                if view.ndim == 0 and len(owners) in (0, group.size):
                    yield StateEntry(spec.name, key, view)
                elif not owners:
                    whole = tensor.numel() == prod(spec.shape)
                    yield StateEntry(spec.name, key, tensor.view(spec.shape) if whole else tensor)

    # --- which rank keeps what ---------------------------------------------------------------

    def _parts_of(self, rank: int) -> dict[Key, list[Part]]:
        """The parts of every state tensor that the pieces of a rank make up."""
        found: dict[Key, list[Part]] = {key: [] for key in self._keys}
        for piece, spans in StatePacking(self._plan, rank, self._groups).spans.items():
            for key, (start, shape) in spans.items():
                found[piece.param, key] += self._parts(piece, key, start, shape)
        return found

    def _parts(self, piece: Piece, key: str, start: int, shape: Shape) -> Iterator[Part]:
        """The state of a piece, which begins at `start` in the tensor of its rank.

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
        """All of a state tensor as one stretch, in the shape of what this rank holds if local."""
        spec, shape = self._plan.params[index], self._shapes[index][key]
        if is_local(key, spec):
            shape = spec.stored[key].shape(spec.shape)
        is_number = not shape and spec.stored[key].per is None
        return () if is_number else (prod(shape),)

    def _starts_of_blocks(self, index: int, key: str) -> dict[Block, int]:
        """Where the state of each block begins, which is kept block after block."""
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
        """What one process keeps of a parameter."""
        spec = self._plan.params[index]
        whole, group = spec.whole or spec, self._groups[spec.group]
        return whole_shapes(rule_of(group), whole.shape, whole.blocks, group, spec.stored)

    def _described(self, key: Key) -> str:
        index, name = key
        return f"state {name!r} of parameter {self._plan.params[index].name!r}"

    # --- put together ------------------------------------------------------------------------

    def gather(
        self, state: Mapping[Tensor, State], wanted: Iterable[int], device: torch.device
    ) -> Callable[[], dict[Tensor, State]]:
        """Start gathering the state of all pieces of some parameters.

        What it gives waits for that, and is what one process has, on `device`.
        """
        indices = list(wanted)
        land = self._store.launch(self._tensors(state, indices), device)

        def finish() -> dict[Tensor, State]:
            stretches = land()
            local = {key: values for key, values in stretches.items() if self._is_local(key)}
            whole = {**stretches, **self._of_mesh.gather(local, device)} if local else stretches
            return self._by_param(indices, whole, lambda index, key: self._shapes[index][key])

        return finish

    def kept(self, state: Mapping[Tensor, State], device: torch.device) -> dict[Tensor, State]:
        """All state, where every rank keeps all of it: that of DTensors placed as they are."""
        indices = range(len(self._params))
        stretches = self._store.launch(self._tensors(state, indices), device)()
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

    def local_masters(
        self, state: Mapping[Tensor, State], index: int, device: torch.device
    ) -> State:
        """All of a parameter's master copy that belongs to what this rank holds. Collective."""
        tensors: dict[Key, Tensor] = {
            (index, key): tensor
            for key, tensor in state[self._params[index]].items()
            if key in MASTERS
        }
        found = self._store.launch(tensors, device)()
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
        """Of all that belongs to what this rank holds."""
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

    def held(self, state: Mapping[Tensor, State]) -> Iterator[HeldState]:
        """As boxes of what one process has; a number that each piece has comes often."""
        for index, param in enumerate(self._params):
            for key, tensor in state[param].items():
                boxes = [
                    box
                    for part in self._store.parts((index, key))
                    for box in self._boxes(index, key, part, part.of(tensor))
                ]
                yield HeldState(param, key, self._shapes[index][key], boxes)

    def _boxes(self, index: int, key: str, part: Part, values: Tensor) -> Iterable[HeldBox]:
        """The boxes of a stretch of state, in what one process has."""
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

    def put(
        self, state: Mapping[Tensor, State], index: int, key: str, whole: Mapping[str, Tensor]
    ) -> None:
        """Take this rank's pieces of a parameter's state out of the whole."""
        values, spec = whole[key], self._plan.params[index]
        if self._layout is not None and is_local(key, spec):
            values = self._layout.part(index, values, spec.stored[key].per or 1)
        self.put_local(state, index, key, values)

    def put_local(
        self, state: Mapping[Tensor, State], index: int, key: str, values: Tensor
    ) -> None:
        """The same, where local state is given in the shape of what this rank holds."""
        self._store.take((index, key), state[self._params[index]][key], values)

    def put_values(self, held: LocalTensors, index: int, key: str, into: Tensor) -> None:
        """Write a parameter's values into what lies as the state `key` does."""
        for piece in self.packing.spans:
            if piece.param == index:
                view = self.packing.view(piece, key, into)
                view.copy_(held.read(index, piece.elements).view(view.shape))


def _owners(plan: ShardingPlan) -> list[set[int]]:
    """Per parameter the ranks that own a piece which the others lack; none: all have all."""
    owners: list[set[int]] = [set() for _ in plan.params]
    for bucket in plan.buckets:
        for rank, segment in enumerate(() if bucket.replicated else bucket.segments):
            for piece in segment.pieces:
                owners[piece.param].add(rank)
    return owners
