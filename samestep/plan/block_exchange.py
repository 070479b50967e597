"""How blocks that are spread over ranks come together on their owners, and go back.

    parts of a block, one per rank that holds some of it  ->  its owner  ->  those ranks

Every part travels once to the owner, from one of the ranks that hold a copy of it, and the result
goes back to all of them. Blocks move in chunks: in each, every rank owns some.
"""

from collections.abc import Sequence
from math import prod
from typing import Literal, NamedTuple

from samestep.layout.blocks import Block, Shape
from samestep.layout.dtensor_shards import Box
from samestep.layout.owners import balanced_owners, cyclic_owners
from samestep.rules.orthogonalize import orthogonalize_flops

OwnerStrategy = Literal["balanced", "cyclic"]


class ShardedSpec(NamedTuple):
    """A matrix parameter and who holds what of it, by rank of the group."""

    name: str
    shape: Shape
    dtype: str
    group: int  # index of its parameter group
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
    def travels(self) -> bool:
        """Whether any other rank than the owner holds some of it."""
        return any(part.rank != self.owner for part in self.parts)


class ExchangePlan(NamedTuple):
    """Chunks of blocks, in the order in which they move."""

    chunks: tuple[tuple[Route, ...], ...]

    def lines(self, specs: Sequence[ShardedSpec]) -> list[str]:
        """The plan as text, for comparing it between ranks."""
        return [
            f"chunk {number}: block {route.number} of {specs[route.param].name} on {route.owner}, "
            f"from {[part.rank for part in route.parts if part.sent]}"
            for number, chunk in enumerate(self.chunks)
            for route in chunk
        ]


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
