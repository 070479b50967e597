"""How blocks that are spread over ranks come together on their owners, and go back.

    parts of a block, one per rank that holds some of it  ->  its owner  ->  those ranks

Every part travels once to the owner, from one of the ranks that hold a copy of it, and the result
goes back to all of them. Blocks move in chunks: in each, every rank owns some.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod
from typing import Literal, NamedTuple

import torch

from samestep.layout.blocks import Block, Shape
from samestep.layout.boxes import Box
from samestep.layout.flat_ranges import in_runs
from samestep.layout.owners import balanced_owners, cyclic_owners
from samestep.plan.transfers import Traffic, Transfer
from samestep.rules.orthogonalize import block_flops

OwnerStrategy = Literal["balanced", "cyclic"]
Key = tuple[int, int]  # a block: its parameter, and its number among the parameter's blocks


class ShardedSpec(NamedTuple):
    """A parameter, its blocks if it has any, and who holds what of it, by rank of the group."""

    name: str
    shape: Shape
    blocks: tuple[Block, ...]
    boxes: tuple[Box, ...]
    replicas: tuple[int, ...]  # which copy of its box a rank holds


class Part(NamedTuple):
    """What a rank holds of a block."""

    rank: int
    in_param: Box  # of the whole parameter
    in_block: Box  # counted from the block's start
    sent: bool  # by this rank to the owner; others hold a copy


class Parts(tuple[Part, ...]):
    """What ranks hold of a block, in their order, each at most one part.

    Blocks of layers that are alike share one, so that what is asked often is found once.
    """

    @cached_property
    def of_rank(self) -> dict[int, Part]:
        return {part.rank: part for part in self}

    @cached_property
    def sizes(self) -> list[tuple[int, int, bool]]:
        """Of each its rank, its elements, and whether it is sent."""
        return [(part.rank, part.in_block.numel, part.sent) for part in self]


class Route(NamedTuple):
    """A block, its owner and its parts; `box` is the block's in the parameter."""

    param: int
    number: int  # among the parameter's blocks
    block: Block
    box: Box
    owner: int
    parts: Parts

    @property
    def key(self) -> Key:
        """What tells the block apart."""
        return self.param, self.number

    @property
    def travels(self) -> bool:
        """Whether any other rank than the owner holds some of it."""
        return any(part.rank != self.owner for part in self.parts)


class ExchangePlan(NamedTuple):
    """Chunks of blocks, in the order in which they move."""

    chunks: tuple[tuple[Route, ...], ...]


class _HeldBlock:
    """A block as ranks hold it, each a box of its parameter; the same for all that lie alike."""

    def __init__(self, box: Box, boxes: Sequence[Box], replicas: Sequence[int]) -> None:
        self.box = box
        self.holders: dict[Box, list[int]] = {}  # of each part the ranks that hold it
        for rank, held in enumerate(boxes):
            part = held.overlap(box)
            if part.numel:
                self.holders.setdefault(part, []).append(rank)
        self._replicas = replicas
        self._has_copies = any(len(ranks) > 1 for ranks in self.holders.values())
        self._parts: dict[int | None, Parts] = {}

    def route(self, param: int, number: int, block: Block, owner: int) -> Route:
        key = owner if self._has_copies else None  # decides who sends
        if key not in self._parts:
            self._parts[key] = self._parts_for(owner)
        return Route(param, number, block, self.box, owner, self._parts[key])

    def _parts_for(self, owner: int) -> Parts:
        """Of copies the owner's own is sent, which is not at all, else one of the same replica."""
        parts = []
        for part, ranks in self.holders.items():
            sender = min(
                ranks, key=lambda r: (r != owner, self._replicas[r] != self._replicas[owner])
            )
            inside = part.within(self.box)
            parts += [Part(rank, part, inside, rank == sender) for rank in ranks]
        return Parts(sorted(parts, key=lambda part: part.rank))


def plan_exchange(
    specs: Sequence[ShardedSpec],
    ranks: int,
    *,
    chunk_elements: int,
    owners: OwnerStrategy = "balanced",
) -> ExchangePlan:
    """Give every block an owner, and put blocks into chunks of about that size."""
    blocks = [(i, j) for i, spec in enumerate(specs) for j in range(len(spec.blocks))]
    flops = [block_flops(specs[i].blocks[j]) for i, j in blocks]
    known: dict[tuple[Box, tuple[Box, ...], tuple[int, ...]], _HeldBlock] = {}  # layers are alike
    held = []
    for i, j in blocks:
        key = block_box(specs[i].blocks[j], specs[i].shape), specs[i].boxes, specs[i].replicas
        if key not in known:
            known[key] = _HeldBlock(*key)
        held.append(known[key])
    chosen = _owners(specs, blocks, held, flops, ranks, owners)
    routes = [
        each.route(i, j, specs[i].blocks[j], owner)
        for (i, j), each, owner in zip(blocks, held, chosen, strict=True)
    ]
    queues: list[list[Route]] = [[] for _ in range(ranks)]
    for place in sorted(range(len(routes)), key=lambda k: -flops[k]):  # equal work side by side
        queues[routes[place].owner].append(routes[place])
    turns = [
        [queue[turn] for queue in queues if turn < len(queue)]
        for turn in range(max(map(len, queues), default=0))
    ]
    return _in_chunks(turns, chunk_elements)


def plan_gather(specs: Sequence[ShardedSpec], ranks: int, *, chunk_elements: int) -> ExchangePlan:
    """Every rank is the owner of every block: it gathers all, and nothing goes back."""
    blocks = []
    for i, spec in enumerate(specs):
        for j, block in enumerate(spec.blocks):
            held = _HeldBlock(block_box(block, spec.shape), spec.boxes, spec.replicas)
            blocks.append([held.route(i, j, block, owner) for owner in range(ranks)])
    return _in_chunks(blocks, chunk_elements)


def _in_chunks(together: Iterable[Sequence[Route]], elements: int) -> ExchangePlan:
    """Routes that are taken together, in chunks of about so many elements of blocks."""

    def size(routes: Sequence[Route]) -> int:
        return sum({route.key: route.box.numel for route in routes}.values())

    runs = in_runs(together, size, elements)
    return ExchangePlan(tuple(tuple(chain.from_iterable(run)) for run in runs))


class Item(NamedTuple):
    """A part of a block that travels, and the other rank: where it goes to, or comes from."""

    rank: int
    route: int  # place in the chunk
    part: Part | None  # None: only what belongs to the whole block

    @property
    def numel(self) -> int:
        return 0 if self.part is None else self.part.in_block.numel


def to_owners(chunk: Sequence[Route], rank: int) -> tuple[list[Item], list[Item]]:
    """What a rank sends to the owners of a chunk's blocks, and what it gets as one of them.

    Each in the order in which it travels: rank after rank, block after block.
    """
    out, into = [], []
    for number, route in enumerate(chunk):
        if route.owner == rank:
            others = (part for part in route.parts if part.sent and part.rank != rank)
            into += [Item(part.rank, number, part) for part in others]
        else:
            mine = route.parts.of_rank.get(rank)
            if mine is not None and mine.sent:
                out.append(Item(route.owner, number, mine))
    return sorted(out, key=_order), sorted(into, key=_order)


def from_owners(
    chunk: Sequence[Route], rank: int, ranks: int, *, to_all: bool
) -> tuple[list[Item], list[Item]]:
    """What a rank sends back as an owner, and what it gets for the parts it holds.

    `to_all`: also to ranks that hold nothing of a block, what belongs to the whole of it.
    """
    out, into = [], []
    for number, route in enumerate(chunk):
        parts = route.parts.of_rank
        if route.owner == rank:
            others = (r for r in (range(ranks) if to_all else parts) if r != rank)
            out += [Item(other, number, parts.get(other)) for other in others]
        elif to_all or rank in parts:
            into.append(Item(route.owner, number, parts.get(rank)))
    return sorted(out, key=_order), sorted(into, key=_order)


@dataclass(frozen=True, eq=False)
class ChunkTransfers:
    """What one chunk sends; blocks are computed in `wide`.

    back: None where every rank is an owner.
    extra: by route, elements that belong to the whole block, beside its parts. They go back with
        it, to ranks that hold nothing of it too; unrounded, so counted in the dtype that travels.
    """

    to: Transfer
    back: Transfer | None
    extra: tuple[int, ...]
    wide: torch.dtype


def chunk_transfers(
    number: int,
    chunk: Sequence[Route],
    extra: Sequence[int],
    ranks: int,
    *,
    dtype: torch.dtype,
    wide: torch.dtype,
    gives_back: bool,
) -> ChunkTransfers:
    """Of a chunk that travels in `dtype`; `extra` is counted in `wide`."""
    beside = tuple(count * wide.itemsize // dtype.itemsize for count in extra)
    sent, got = _elements(chunk, ranks, only_sent=True)
    name = f"collection of chunk {number}"
    to, back = Transfer(Traffic.PARTS, name, dtype, sum(sent), sent, got), None
    if gives_back:
        got, sent = _elements(chunk, ranks, only_sent=False)
        whole = sum(beside)
        got = [count + whole for count in got]
        for route, count in zip(chunk, beside, strict=True):
            got[route.owner] -= count
            sent[route.owner] += count * (ranks - 1)
        back = Transfer(Traffic.PARTS, f"return of chunk {number}", dtype, sum(sent), sent, got)
    return ChunkTransfers(to, back, beside, wide)


def _elements(
    chunk: Sequence[Route], ranks: int, *, only_sent: bool
) -> tuple[list[int], list[int]]:
    """What goes between ranks and owners: of parts by who holds them, of blocks by their owner.

    An owner's own part goes nowhere. `only_sent`: of copies one.
    """
    alike: dict[int, tuple[Parts, list[int]]] = {}  # blocks that share their parts: the owners
    for route in chunk:
        alike.setdefault(id(route.parts), (route.parts, []))[1].append(route.owner)
    of_parts, of_blocks = [0] * ranks, [0] * ranks
    for parts, owners in alike.values():
        sizes = {rank: size for rank, size, is_sent in parts.sizes if is_sent or not only_sent}
        whole = sum(sizes.values())
        for rank, size in sizes.items():
            of_parts[rank] += size * len(owners)
        for owner in owners:
            own = sizes.get(owner, 0)
            of_parts[owner] -= own
            of_blocks[owner] += whole - own
    return of_parts, of_blocks


def _order(item: Item) -> tuple[int, int]:
    return item.rank, item.route


def block_box(block: Block, shape: Shape) -> Box:
    """Where a block lies in its parameter."""
    if block.matrix is None:
        rest = shape[1:]
        return Box((block.row, *(0 for _ in rest)), (block.rows, *rest))
    return Box((block.matrix, block.row, 0), (1, block.rows, block.cols))


def _owners(
    specs: Sequence[ShardedSpec],
    blocks: Sequence[tuple[int, int]],
    held: Sequence[_HeldBlock],
    flops: Sequence[int],
    ranks: int,
    strategy: OwnerStrategy,
) -> list[int]:
    """A block that some rank holds whole stays there; the others go to the least busy ranks."""
    loads = [0] * ranks
    owners: dict[int, int] = {}
    for place in sorted(range(len(blocks)), key=lambda k: -flops[k]):
        whole = held[place].holders.get(held[place].box)
        if whole:
            owners[place] = min(whole, key=lambda rank: loads[rank])
            loads[owners[place]] += flops[place]
    spread = [place for place in range(len(blocks)) if place not in owners]
    if strategy == "cyclic":
        given = cyclic_owners(len(spread), ranks)
    else:
        sizes = [prod(specs[blocks[k][0]].blocks[blocks[k][1]].shape) for k in spread]
        given = balanced_owners([flops[k] for k in spread], sizes, ranks, loads=loads)
    owners |= dict(zip(spread, given, strict=True))
    return [owners[place] for place in range(len(blocks))]
