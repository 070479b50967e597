"""How blocks that are spread over ranks come together on their owners, and go back.

    parts of a block, one per rank that holds some of it  ->  its owner  ->  those ranks

Every part travels once to the owner, from one of the ranks that hold a copy of it, and the result
goes back to all of them. Blocks move in chunks: in each, every rank owns some.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch

from samestep.layout.blocks import Block, Shape
from samestep.layout.dtensor_shards import Box
from samestep.layout.owners import balanced_owners, cyclic_owners
from samestep.plan.transfers import Traffic, Transfer
from samestep.rules.orthogonalize import orthogonalize_flops

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


class Route(NamedTuple):
    """A block, its owner and its parts; `box` is the block's in the parameter."""

    param: int
    number: int  # among the parameter's blocks
    block: Block
    box: Box
    owner: int
    parts: tuple[Part, ...]

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


def plan_exchange(
    specs: Sequence[ShardedSpec],
    ranks: int,
    *,
    chunk_elements: int,
    owners: OwnerStrategy = "balanced",
) -> ExchangePlan:
    """Give every block an owner, and put blocks into chunks of about that size."""
    blocks = [(i, j) for i, spec in enumerate(specs) for j in range(len(spec.blocks))]
    flops = [_flops(specs[i].blocks[j]) for i, j in blocks]
    known: dict[tuple[Box, tuple[Box, ...]], dict[Box, list[int]]] = {}  # layers are alike
    holders = []
    for i, j in blocks:
        key = block_box(specs[i].blocks[j], specs[i].shape), specs[i].boxes
        if key not in known:
            known[key] = _holders(*key)
        holders.append(known[key])
    chosen = _owners(specs, blocks, holders, flops, ranks, owners)
    routes = [
        _route(i, j, specs[i], held, owner)
        for (i, j), held, owner in zip(blocks, holders, chosen, strict=True)
    ]
    queues: list[list[Route]] = [[] for _ in range(ranks)]
    for place in sorted(range(len(routes)), key=lambda k: -flops[k]):  # equal work side by side
        queues[routes[place].owner].append(routes[place])
    chunks: list[list[Route]] = []
    room = 0
    for turn in range(max(map(len, queues), default=0)):
        together = [queue[turn] for queue in queues if turn < len(queue)]
        size = sum(route.box.numel for route in together)
        if not chunks or size > room:
            chunks.append([])
            room = chunk_elements
        chunks[-1] += together
        room -= size
    return ExchangePlan(tuple(map(tuple, chunks)))


def plan_gather(specs: Sequence[ShardedSpec], ranks: int, *, chunk_elements: int) -> ExchangePlan:
    """Every rank is the owner of every block: it gathers all, and nothing goes back."""
    chunks: list[list[Route]] = []
    room = 0
    for i, spec in enumerate(specs):
        for j, block in enumerate(spec.blocks):
            box = block_box(block, spec.shape)
            holders = _holders(box, spec.boxes)
            if not chunks or box.numel > room:
                chunks.append([])
                room = chunk_elements
            chunks[-1] += [_route(i, j, spec, holders, owner) for owner in range(ranks)]
            room -= box.numel
    return ExchangePlan(tuple(map(tuple, chunks)))


class Item(NamedTuple):
    """A part of a block that travels, and the other rank: where it goes to, or comes from."""

    rank: int
    route: int  # place in the chunk
    part: Part | None  # None: only what belongs to the whole block

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return 0 if self.part is None else self.part.in_block.numel


def to_owners(chunk: Sequence[Route], rank: int) -> tuple[list[Item], list[Item]]:
    """What a rank sends to the owners of a chunk's blocks, and what it gets as one of them.

    Each in the order in which it travels: rank after rank, block after block.
    """
    out, into = [], []
    for number, route in enumerate(chunk):
        for part in route.parts:
            if part.sent and part.rank != route.owner:
                if part.rank == rank:
                    out.append(Item(route.owner, number, part))
                if route.owner == rank:
                    into.append(Item(part.rank, number, part))
    return sorted(out, key=_order), sorted(into, key=_order)


def from_owners(
    chunk: Sequence[Route], rank: int, ranks: int, *, to_all: bool
) -> tuple[list[Item], list[Item]]:
    """What a rank sends back as an owner, and what it gets for the parts it holds.

    `to_all`: also to ranks that hold nothing of a block, what belongs to the whole of it.
    """
    out, into = [], []
    for number, route in enumerate(chunk):
        parts = {part.rank: part for part in route.parts}
        for other in range(ranks):
            if other != route.owner and (to_all or other in parts):
                if route.owner == rank:
                    out.append(Item(other, number, parts.get(other)))
                if other == rank:
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
    sent, got = [0] * ranks, [0] * ranks
    for route in chunk:
        for part in route.parts:
            if part.sent and part.rank != route.owner:
                sent[part.rank] += part.in_block.numel
                got[route.owner] += part.in_block.numel
    name = f"collection of chunk {number}"
    to, back = Transfer(Traffic.PARTS, name, dtype, sum(sent), sent, got), None
    if gives_back:
        sent, got = _elements_from_owners(chunk, beside, ranks)
        back = Transfer(Traffic.PARTS, f"return of chunk {number}", dtype, sum(sent), sent, got)
    return ChunkTransfers(to, back, beside, wide)


def _elements_from_owners(
    chunk: Sequence[Route], beside: Sequence[int], ranks: int
) -> tuple[list[int], list[int]]:
    """What each rank sends back as an owner, and what it gets."""
    sent, got = [0] * ranks, [0] * ranks
    to_all = any(beside)
    for route, extra in zip(chunk, beside, strict=True):
        for part in route.parts:
            if part.rank != route.owner:
                sent[route.owner] += part.in_block.numel
                got[part.rank] += part.in_block.numel
        if to_all:
            sent[route.owner] += extra * (ranks - 1)
            for rank in range(ranks):
                got[rank] += extra if rank != route.owner else 0
    return sent, got


def _order(item: Item) -> tuple[int, int]:
    return item.rank, item.route


def block_box(block: Block, shape: Shape) -> Box:
    """Where a block lies in its parameter."""
    if block.matrix is None:
        rest = shape[1:]
        return Box((block.row, *(0 for _ in rest)), (block.rows, *rest))
    return Box((block.matrix, block.row, 0), (1, block.rows, block.cols))


def _flops(block: Block) -> int:
    return orthogonalize_flops(block.rows, block.cols)


def _owners(
    specs: Sequence[ShardedSpec],
    blocks: Sequence[tuple[int, int]],
    holders: Sequence[dict[Box, list[int]]],
    flops: Sequence[int],
    ranks: int,
    strategy: OwnerStrategy,
) -> list[int]:
    """A block that some rank holds whole stays there; the others go to the least busy ranks."""
    loads = [0] * ranks
    owners: dict[int, int] = {}
    for place in sorted(range(len(blocks)), key=lambda k: -flops[k]):
        i, j = blocks[place]
        box = block_box(specs[i].blocks[j], specs[i].shape)
        whole = holders[place].get(box)
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


def _holders(box: Box, boxes: Sequence[Box]) -> dict[Box, list[int]]:
    """The parts of a block, and the ranks that hold each of them."""
    holders: dict[Box, list[int]] = {}
    for rank, held in enumerate(boxes):
        part = held.overlap(box)
        if part.numel:
            holders.setdefault(part, []).append(rank)
    return holders


def _route(
    param: int, number: int, spec: ShardedSpec, holders: dict[Box, list[int]], owner: int
) -> Route:
    """Where the parts of a block are, and which copies of them are sent."""
    block = spec.blocks[number]
    box = block_box(block, spec.shape)
    parts = []
    for part, ranks in holders.items():
        sender = min(ranks, key=lambda rank: _distance(spec, rank, owner))
        inside = part.within(box)
        parts += [Part(rank, part, inside, rank == sender) for rank in ranks]
    parts.sort(key=lambda part: part.rank)
    return Route(param, number, block, box, owner, tuple(parts))


def _distance(spec: ShardedSpec, rank: int, owner: int) -> tuple[bool, bool]:
    """The owner's own copy is nearest, then one of the same replica."""
    return rank != owner, spec.replicas[rank] != spec.replicas[owner]
