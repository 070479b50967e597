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

from samestep.comm.collectives import gather_segments
from samestep.comm.groups import RankGroup
from samestep.groups.param_groups import Group, rule_of
from samestep.layout.blocks import Block, Shape
from samestep.layout.boxes import HeldBox, HeldState, held_range, whole_box
from samestep.placements.whole.held_tensors import HeldTensors
from samestep.placements.windows import Home
from samestep.plan.sharding import ParamSpec, Piece, ShardingPlan
from samestep.rules.state import (
    MASTERS,
    State,
    block_state_shapes,
    state_shapes,
    whole_shapes,
)

if TYPE_CHECKING:
    from samestep.placements.whole.mesh_parts import MeshParts  # DTensors take long to import


class PiecesDisagreeError(RuntimeError):
    """Pieces of one parameter have different counts of steps."""


class StateEntry(NamedTuple):
    """One state tensor of a parameter."""

    name: str
    key: str
    tensor: Tensor


class _Held(NamedTuple):
    """The state of a piece, as its rank has it."""

    rank: int  # global
    piece: Piece
    state: State


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


class StateLayout:
    """How a rank keeps state: per parameter and key one 1-D tensor, piece after piece.

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

    It lies where the optimizer keeps it, and is handed in.

    places: the ranks in the order of the plan's segments.
    mesh: the other parts, where pieces are those of parts of DTensors.
    """

    def __init__(
        self,
        plan: ShardingPlan,
        params: Sequence[Tensor],
        places: RankGroup,
        groups: Sequence[Group],
        mesh: "MeshParts | None",
    ) -> None:
        self._plan, self._params, self._places, self._mesh = plan, params, places, mesh
        self._groups = groups  # whose rules, and whatever state depends on, stay as they are
        self.layout = StateLayout(plan, places.rank, groups)
        self._block_starts: dict[tuple[int, str], dict[Block, int]] = {}

    def zeros(self, home: Home) -> dict[Tensor, State]:
        """What every parameter has here before the first step."""
        return {
            param: {key: home.zeros((size,), spec.stored[key].dtype) for key, size in sizes.items()}
            for param, spec, sizes in zip(
                self._params, self._plan.params, self.layout.sizes, strict=True
            )
        }

    def alike(self, state: Mapping[Tensor, State], group: RankGroup) -> Iterator[StateEntry]:
        """What every rank shall have alike.

        All state of a parameter that every rank updates; of one in which every rank owns a piece,
        the numbers that each piece has for itself, such as its step count.
        """
        owners = _owners(self._plan)
        for index, pieces in sorted(self._pieces().items()):
            param, spec = self._params[index], self._plan.params[index]
            for key, view in self.layout.views(pieces[0], state[param]).items():
                tensor = state[param][key]
                if view.ndim == 0 and len(owners[index]) in (0, group.size):
                    yield StateEntry(spec.name, key, view)
                elif not owners[index]:
                    whole = tensor.numel() == prod(spec.shape)
                    yield StateEntry(spec.name, key, tensor.view(spec.shape) if whole else tensor)

    def _rows(self, piece: Piece, key: str, values: Tensor) -> Iterator[tuple[int, Tensor]]:
        """A piece's state in runs, 1-D, and where each begins in all of its parameter's.

        Local state is one run, of what this rank holds; that of whole blocks has one for each block
        that the piece is a part of.
        """
        spec, starts = self._plan.params[piece.param], [0]
        per = spec.stored[key].per
        if per is not None:
            starts = [piece.start // per]
        elif piece.block is not None:
            known = self._starts_of_blocks(piece.param, key)
            starts = [known[block] for block in spec.whole_blocks(piece.block)]
        rows = values.reshape(len(starts), values.numel() // len(starts))
        return zip(starts, rows, strict=True)

    def _starts_of_blocks(self, index: int, key: str) -> dict[Block, int]:
        """State that is kept block after block."""
        known = self._block_starts.get((index, key))
        if known is None:
            spec = self._plan.params[index]
            group, cursor = self._groups[spec.group], 0
            known = self._block_starts[index, key] = {}
            for block in (spec.whole or spec).blocks or ():
                known[block] = cursor
                cursor += prod(block_state_shapes(rule_of(group), block, group, spec.stored)[key])
        return known

    def _pieces(self) -> dict[int, list[Piece]]:
        """Those of this rank, by parameter."""
        found: dict[int, list[Piece]] = {}
        for piece in self.layout.spans:
            found.setdefault(piece.param, []).append(piece)
        return found

    # --- put together --------------------------------------------------------------------

    def gather(
        self, state: Mapping[Tensor, State], wanted: Iterable[int], device: torch.device
    ) -> Callable[[], dict[Tensor, State]]:
        """Start gathering the state of all pieces of some parameters.

        What it gives waits for that, and is what one process has, on `device`.
        """
        gather = self._gather_local(state, wanted, device)
        mesh = self._mesh
        return gather if mesh is None else lambda: self._placed(gather(), mesh.whole)

    def kept(self, state: Mapping[Tensor, State], device: torch.device) -> dict[Tensor, State]:
        """All state, where every rank has all of it: that of DTensors placed as they are."""
        local = self._gather_local(state, range(len(self._params)), device)()
        return local if self._mesh is None else self._placed(local, self._mesh.beside)

    def local_masters(
        self, state: Mapping[Tensor, State], index: int, device: torch.device
    ) -> State:
        """All of a parameter's master copy that belongs to what this rank holds. Collective."""
        param = self._params[index]
        own = {key: tensor for key, tensor in state[param].items() if key in MASTERS}
        if not own:
            return {}
        masters = {p: own if p is param else {} for p in self._params}
        return self._gather_local(masters, [index], device)()[param]

    def _placed(
        self, state: dict[Tensor, State], put: Callable[[int, Tensor, int], Tensor]
    ) -> dict[Tensor, State]:
        """State with what `put` makes of local ones."""
        found = {}
        for index, (param, spec) in enumerate(zip(self._params, self._plan.params, strict=True)):
            if param in state:
                found[param] = {
                    key: put(index, tensor, spec.stored[key].per or 1)
                    if is_local(key, spec)
                    else tensor
                    for key, tensor in state[param].items()
                }
        return found

    def _gather_local(
        self, state: Mapping[Tensor, State], wanted: Iterable[int], device: torch.device
    ) -> Callable[[], dict[Tensor, State]]:
        """The same, in one gather per dtype; local state in the shape of what this rank holds.

        What it gives are new tensors on `device`, which may be another one than where state stays.
        What every rank has does not travel: that is this rank's own.
        """
        plan, params, places, groups = self._plan, self._params, self._places, self._groups
        owners, indices = _owners(plan), list(wanted)
        keys = [list(state[param]) for param in params]
        layouts = [StateLayout(plan, rank, groups) for rank in range(places.size)]
        travels: dict[torch.dtype, list[tuple[int, str]]] = {}
        for index in indices:
            if owners[index]:
                for key in keys[index]:
                    dtype = state[params[index]][key].dtype
                    travels.setdefault(dtype, []).append((index, key))
        gathers = {}
        for dtype, entries in travels.items():
            mine = torch.cat([state[params[index]][key].to(device) for index, key in entries])
            sizes = [sum(layout.sizes[index][key] for index, key in entries) for layout in layouts]
            gathers[dtype] = gather_segments("gather of the state", mine, sizes, places)

        def held() -> Iterator[_Held]:
            arrived = {dtype: gather.wait() for dtype, gather in gathers.items()}
            for rank, layout in enumerate(layouts):
                theirs: dict[int, State] = {}
                if rank == places.rank:
                    theirs = {
                        i: {key: tensor.to(device) for key, tensor in state[params[i]].items()}
                        for i in indices
                        if not owners[i]
                    }
                for dtype, entries in travels.items():
                    sizes = [layout.sizes[index][key] for index, key in entries]
                    parts = torch.split(arrived[dtype][rank], sizes)
                    for (index, key), part in zip(entries, parts, strict=True):
                        theirs.setdefault(index, {})[key] = part
                for piece in layout.spans:
                    if piece.param in theirs:
                        own = theirs[piece.param]
                        views = {key: layout.view(piece, key, own[key]) for key in own}
                        yield _Held(places.members[rank], piece, views)

        def finish() -> dict[Tensor, State]:
            empty = {index: self._empty(index, keys[index], device) for index in indices}
            self._put_together(held(), empty)
            return {params[index]: state for index, state in empty.items()}

        return finish

    def _empty(self, index: int, keys: Iterable[str], device: torch.device) -> State:
        """What one process has, with zeros; local state in the shape of what this rank holds."""
        spec, shapes = self._plan.params[index], self._process_shapes(index)
        return {
            key: torch.zeros(
                spec.stored[key].shape(spec.shape) if is_local(key, spec) else shapes[key],
                dtype=spec.stored[key].dtype,
                device=device,
            )
            for key in keys
        }

    def _process_shapes(self, index: int) -> dict[str, Shape]:
        """What one process keeps of a parameter."""
        spec = self._plan.params[index]
        whole, group = spec.whole or spec, self._groups[spec.group]
        return whole_shapes(rule_of(group), whole.shape, whole.blocks, group, spec.stored)

    def _put_together(self, pieces: Iterable[_Held], whole: Mapping[int, State]) -> None:
        """Write pieces into whole state; raises if numbers that each piece has are not the same."""
        numbers: dict[tuple[int, str], list[tuple[int, Tensor]]] = {}
        for rank, piece, state in pieces:
            for key, value in state.items():
                if value.ndim == 0 and piece.block is None:
                    numbers.setdefault((piece.param, key), []).append((rank, value))
                    continue
                flat = whole[piece.param][key].view(-1)
                for start, row in self._rows(piece, key, value):
                    flat[start : start + row.numel()].copy_(row)
        _require_same_numbers(self._plan.params, numbers)
        for (index, key), by_piece in numbers.items():
            whole[index][key].copy_(by_piece[0][1])

    def held(self, state: Mapping[Tensor, State]) -> Iterator[HeldState]:
        """As boxes of what one process has; a number that each piece has comes often."""
        pieces = self._pieces()
        for index, param in enumerate(self._params):
            shapes = self._process_shapes(index)
            parts = [(p, self.layout.views(p, state[param])) for p in pieces.get(index, ())]
            for key in state[param]:
                held: list[HeldBox] = []
                for piece, views in parts:
                    if not shapes[key]:
                        held.append(whole_box(views[key].view(())))
                        continue
                    for start, row in self._rows(piece, key, views[key]):
                        held += self._boxes(index, key, start, row, shapes[key])
                yield HeldState(param, key, shapes[key], held)

    def _boxes(
        self, index: int, key: str, start: int, row: Tensor, shape: Shape
    ) -> Iterable[HeldBox]:
        """Those of a run of state that has `shape` in one process."""
        spec = self._plan.params[index]
        if not is_local(key, spec):
            return held_range(shape, start, row)
        assert self._mesh is not None
        stored = spec.stored[key]
        outer = self._mesh.boxes[index].divided(stored.per or 1)
        local = held_range(stored.shape(spec.shape), start, row)
        return [HeldBox(box.shifted(outer), part) for box, part in local]

    # --- taken apart ---------------------------------------------------------------------

    def put(
        self, state: Mapping[Tensor, State], index: int, key: str, whole: Mapping[str, Tensor]
    ) -> None:
        """Take this rank's pieces of a parameter's state out of the whole."""
        spec = self._plan.params[index]
        if self._mesh is not None and is_local(key, spec):
            part = self._mesh.part(index, whole[key], spec.stored[key].per or 1)
            whole = {**whole, key: part}
        self.put_local(state, index, key, whole)

    def put_local(
        self, state: Mapping[Tensor, State], index: int, key: str, whole: Mapping[str, Tensor]
    ) -> None:
        """The same, where local state is given in the shape of what this rank holds."""
        tensor, flat = state[self._params[index]][key], whole[key].reshape(-1)
        for piece in self._pieces().get(index, ()):
            for start, row in self._rows(piece, key, self.layout.view(piece, key, tensor)):
                row.copy_(flat[start : start + row.numel()])

    def put_values(self, held: HeldTensors, index: int, key: str, into: Tensor) -> None:
        """Write a parameter's values into what lies as the state `key` does."""
        for piece in self._pieces().get(index, ()):
            view = self.layout.view(piece, key, into)
            view.copy_(held.read(piece).view(view.shape))


def _owners(plan: ShardingPlan) -> list[set[int]]:
    """Per parameter the ranks that own a piece which the others lack; none: all have all."""
    owners: list[set[int]] = [set() for _ in plan.params]
    for bucket in plan.buckets:
        for rank, segment in enumerate(() if bucket.replicated else bucket.segments):
            for piece in segment.pieces:
                owners[piece.param].add(rank)
    return owners


def _require_same_numbers(
    specs: Sequence[ParamSpec], numbers: Mapping[tuple[int, str], Sequence[tuple[int, Tensor]]]
) -> None:
    """Raise with the values per rank unless all pieces of a parameter have the same."""
    wide = [value.double() for by_piece in numbers.values() for _, value in by_piece]
    read = iter(torch.stack(wide).tolist() if wide else ())  # the device is waited for once
    for (index, key), by_piece in numbers.items():
        found = {(rank, repr(next(read))) for rank, _ in by_piece}
        if len({text for _, text in found}) > 1:
            values = ", ".join(f"{text} on rank {rank}" for rank, text in sorted(found))
            raise PiecesDisagreeError(
                f"state {key!r} of parameter {specs[index].name!r} is kept once per piece and "
                f"differs between pieces: {values}. Some pieces have missed a step: load the last "
                "checkpoint on every rank"
            )
