"""State of pieces: where it lies in the tensors of each rank, and what it is to one process."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.comm.collectives import gather_segments
from samestep.comm.groups import RankGroup
from samestep.groups.param_groups import Group, rule_of
from samestep.layout.blocks import Block, Shape
from samestep.layout.boxes import HeldBox, HeldState, held_range, whole_box
from samestep.plan.sharding import ParamSpec, Piece, ShardingPlan
from samestep.rules.state import MASTER, State, block_states, initial_state, math_dtype


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


class StateLayout:
    """How a rank keeps state: per parameter and key one 1-D tensor, piece after piece.

    sizes: per parameter and key the elements of that tensor.
    spans: per piece and key where it starts in there, and its shape.
    """

    def __init__(
        self,
        plan: ShardingPlan,
        rank: int,
        keys: Sequence[Iterable[str]],
        groups: Sequence[Group],
    ) -> None:
        self.sizes = [dict.fromkeys(own, 0) for own in keys]
        self.spans: dict[Piece, dict[str, tuple[int, Shape]]] = {}
        for piece in plan.owned(rank):
            group, shape = groups[plan.params[piece.param].group], piece_shape(piece)
            shapes = {**rule_of(group).state_shapes(shape, group), MASTER: shape}
            sizes = self.sizes[piece.param]
            self.spans[piece] = {key: (start, shapes[key]) for key, start in sizes.items()}
            for key in sizes:
                sizes[key] += prod(shapes[key])

    def views(self, piece: Piece, state: State) -> State:
        """The piece's part of its parameter's state, in the shapes that the rule declares."""
        return {
            key: state[key][start : start + prod(shape)].view(shape)
            for key, (start, shape) in self.spans[piece].items()
        }


def state_alike(
    plan: ShardingPlan,
    params: Sequence[Tensor],
    layout: StateLayout,
    state: Mapping[Tensor, State],
    group: RankGroup,
) -> Iterator[StateEntry]:
    """What every rank shall have alike.

    All state of a parameter that every rank updates; of one in which every rank owns a piece,
    the numbers that each piece has for itself, such as its step count.
    """
    owners = _owners(plan)
    first_pieces: dict[int, Piece] = {}
    for piece in layout.spans:
        first_pieces.setdefault(piece.param, piece)
    for index, piece in sorted(first_pieces.items()):
        param, name = params[index], plan.params[index].name
        for key, view in layout.views(piece, state[param]).items():
            tensor = state[param][key]
            if view.ndim == 0 and len(owners[index]) in (0, group.size):
                yield StateEntry(name, key, view)
            elif not owners[index]:
                whole = tensor.numel() == param.numel()
                yield StateEntry(name, key, tensor.view(param.shape) if whole else tensor)


def gather_whole(
    plan: ShardingPlan,
    params: Sequence[Tensor],
    state: Mapping[Tensor, State],
    groups: Sequence[Group],
    group: RankGroup,
    wanted: Iterable[int],
) -> Callable[[], dict[Tensor, State]]:
    """Start gathering the state of the wanted parameters' pieces, in one gather per dtype.

    What it gives waits for that, and gives new tensors as one process would have them. What
    every rank has does not travel: that is this rank's own.
    """
    owners, indices = _owners(plan), list(wanted)
    keys = [list(state[param]) for param in params]
    layouts = [StateLayout(plan, rank, keys, groups) for rank in range(group.size)]
    travels: dict[torch.dtype, list[tuple[int, str]]] = {}
    for index in indices:
        if owners[index]:
            for key in keys[index]:
                dtype = state[params[index]][key].dtype
                travels.setdefault(dtype, []).append((index, key))
    gathers = {}
    for dtype, entries in travels.items():
        mine = torch.cat([state[params[index]][key] for index, key in entries])
        sizes = [sum(layout.sizes[index][key] for index, key in entries) for layout in layouts]
        gathers[dtype] = gather_segments("gather of the state", mine, sizes, group)

    def held() -> Iterator[_Held]:
        arrived = {dtype: gather.wait() for dtype, gather in gathers.items()}
        for rank, layout in enumerate(layouts):
            theirs: dict[int, State] = {}
            if rank == group.rank:
                theirs = {i: state[params[i]] for i in indices if not owners[i]}
            for dtype, entries in travels.items():
                sizes = [layout.sizes[index][key] for index, key in entries]
                parts = torch.split(arrived[dtype][rank], sizes)
                for (index, key), part in zip(entries, parts, strict=True):
                    theirs.setdefault(index, {})[key] = part
            for piece in layout.spans:
                if piece.param in theirs:
                    views = layout.views(piece, theirs[piece.param])
                    yield _Held(group.members[rank], piece, views)

    return lambda: _put_together(params, plan.params, keys, groups, indices, held())


def held_pieces(
    plan: ShardingPlan,
    params: Sequence[Tensor],
    layout: StateLayout,
    state: Mapping[Tensor, State],
    groups: Sequence[Group],
) -> Iterator[HeldState]:
    """A rank's state as boxes of what one process has; a number that each piece has comes often."""
    pieces: dict[int, list[Piece]] = {}
    for piece in layout.spans:
        pieces.setdefault(piece.param, []).append(piece)
    for index, (param, spec) in enumerate(zip(params, plan.params, strict=True)):
        group = groups[spec.group]
        rule = rule_of(group)
        like = torch.empty(spec.shape, dtype=param.dtype, device="meta")
        whole = initial_state(rule, like, spec.blocks, group, master_weights=False)
        if MASTER in state[param]:
            whole[MASTER] = like
        blocks = spec.blocks or ()
        in_whole = dict(zip(blocks, block_states(rule, whole, blocks, group), strict=True))
        parts = [(piece, layout.views(piece, state[param])) for piece in pieces.get(index, ())]
        for key in state[param]:
            shape = tuple(whole[key].shape)
            boxes: list[HeldBox] = []
            for piece, views in parts:
                values = views[key]
                start = piece.start
                if piece.block is not None:
                    start = int(in_whole[piece.block][key].storage_offset())
                elif values.ndim == 0:
                    boxes.append(whole_box(values))
                    continue
                boxes += held_range(shape, start, values)
            yield HeldState(param, key, shape, boxes)


def piece_of_state(
    piece: Piece, spec: ParamSpec, group: Group, key: str, whole: Mapping[str, Tensor]
) -> Tensor:
    """A piece's part of a parameter's whole state: the opposite of putting it together."""
    if piece.block is not None:
        assert spec.blocks is not None
        views = block_states(rule_of(group), dict(whole), spec.blocks, group)
        return views[spec.blocks.index(piece.block)][key]
    if whole[key].ndim == 0 and key != MASTER:
        return whole[key]  # a number that every piece has
    return whole[key].reshape(-1)[piece.start : piece.stop]


def _owners(plan: ShardingPlan) -> list[set[int]]:
    """Per parameter the ranks that own a piece which the others lack; none: all have all."""
    owners: list[set[int]] = [set() for _ in plan.params]
    for bucket in plan.buckets:
        for rank, segment in enumerate(() if bucket.replicated else bucket.segments):
            for piece in segment.pieces:
                owners[piece.param].add(rank)
    return owners


def _put_together(
    params: Sequence[Tensor],
    specs: Sequence[ParamSpec],
    keys: Sequence[Sequence[str]],
    groups: Sequence[Group],
    wanted: Sequence[int],
    pieces: Iterable[_Held],
) -> dict[Tensor, State]:
    """The state of whole parameters; raises if numbers that each piece has are not the same."""
    whole: dict[int, State] = {}
    block_views: dict[tuple[int, Block], State] = {}
    for index in wanted:
        param, spec = params[index], specs[index]
        group = groups[spec.group]
        state = initial_state(rule_of(group), param, spec.blocks, group, master_weights=False)
        if MASTER in keys[index]:
            state[MASTER] = torch.zeros(param.shape, dtype=math_dtype(param), device=param.device)
        whole[index] = state
        blocks = spec.blocks or ()
        views = block_states(rule_of(group), state, blocks, group)
        block_views |= {(index, b): view for b, view in zip(blocks, views, strict=True)}
    numbers: dict[tuple[int, str], list[tuple[int, Tensor]]] = {}
    for rank, piece, state in pieces:
        for key, value in state.items():
            if piece.block is not None:
                block_views[piece.param, piece.block][key].copy_(value)
            elif value.ndim == 0:
                numbers.setdefault((piece.param, key), []).append((rank, value))
            else:
                whole[piece.param][key].view(-1)[piece.start : piece.stop].copy_(value)
    _require_same_numbers(specs, numbers)
    for (index, key), by_piece in numbers.items():
        whole[index][key].copy_(by_piece[0][1])
    return {params[index]: state for index, state in whole.items()}


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
