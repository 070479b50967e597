"""Plan chunks: groups of blocks that are sent to their owners together.

    shards of a block, on all ranks that hold some of it  ->  the block, on its owner  ->  shards

Each direction is an exchange. If several ranks have copies of a part, one of them sends it to the
owner, and the result is sent to all of them. In every chunk each rank owns some blocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import torch

from samestep.layout.blocks import Block, Shape
from samestep.layout.boxes import Box
from samestep.layout.flat_ranges import in_runs
from samestep.layout.owners import balanced_owners, cyclic_owners
from samestep.plan.exchanges import Exchange
from samestep.plan.layouts import Holdings, RankBoxes, whole_on
from samestep.plan.layouts import Key as TensorKey
from samestep.plan.sharding import ParamSpec
from samestep.plan.transfers import Transfer
from samestep.rules.orthogonalize import block_flops

OwnerStrategy = Literal["balanced", "cyclic"]
Key = tuple[int, int]  # a block: its parameter, and its number among the parameter's blocks


class PlannedBlock(NamedTuple):
    """A block with its owners and holders.

    box: where the block lies in its parameter.
    owners: the rank that orthogonalizes it, or all of them.
    held: boxes of the block, counted from its start.
    """

    param: int
    number: int  # among the parameter's blocks
    block: Block
    box: Box
    owners: tuple[int, ...]
    held: Holdings

    @property
    def key(self) -> Key:
        """Return the key of the block."""
        return self.param, self.number


Blocks = tuple[PlannedBlock, ...]  # of one chunk


def blocks_to_owners(
    specs: Sequence[ParamSpec],
    held: Sequence[RankBoxes],
    ranks: int,
    *,
    chunk_elements: int,
    owners: OwnerStrategy = "balanced",
) -> list[Blocks]:
    """Give every block an owner, and group blocks in chunks of about `chunk_elements`.

    Chunks are in the order in which they move.
    """
    found = list(_without_owners(specs, held))
    flops = [block_flops(planned.block) for planned in found]
    chosen = _owners(found, flops, ranks, owners)
    queues: list[list[PlannedBlock]] = [[] for _ in range(ranks)]
    for place in sorted(range(len(found)), key=lambda k: -flops[k]):  # equal work side by side
        queues[chosen[place]].append(found[place]._replace(owners=(chosen[place],)))
    turns = [
        [queue[turn] for queue in queues if turn < len(queue)]
        for turn in range(max(map(len, queues), default=0))
    ]
    return _in_chunks(turns, chunk_elements)


def blocks_to_all(
    specs: Sequence[ParamSpec], held: Sequence[RankBoxes], ranks: int, *, chunk_elements: int
) -> list[Blocks]:
    """Make every rank an owner of every block: each gathers all, and returns nothing."""
    everyone = tuple(range(ranks))
    blocks = ([planned._replace(owners=everyone)] for planned in _without_owners(specs, held))
    return _in_chunks(blocks, chunk_elements)


def _without_owners(
    specs: Sequence[ParamSpec], held: Sequence[RankBoxes]
) -> Iterable[PlannedBlock]:
    """Yield all blocks, one parameter after the other."""
    known: dict[tuple[Box, RankBoxes], Holdings] = {}  # layers are alike
    for param, (spec, of_ranks) in enumerate(zip(specs, held, strict=True)):
        for number, block in enumerate(spec.blocks or ()):
            box = block_box(block, spec.shape)
            key = box, of_ranks
            if key not in known:
                known[key] = of_ranks.within(box)
            yield PlannedBlock(param, number, block, box, (), known[key])


def _in_chunks(together: Iterable[Sequence[PlannedBlock]], elements: int) -> list[Blocks]:
    """Group runs of blocks that stay together in chunks of about `elements`."""

    def size(blocks: Sequence[PlannedBlock]) -> int:
        return sum(planned.box.numel for planned in blocks)

    runs = in_runs(together, size, elements)
    return [tuple(chain.from_iterable(run)) for run in runs]


# --- what travels --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Chunk:
    """Blocks that move at once, from shards to owners and back.

    In both exchanges a block's key is its index in the chunk. Values that belong to a whole block
    have the key `OF_WHOLE`: they are returned beside the shards, unrounded, also to ranks that
    hold no part of the block, and are counted in elements of the dtype that is sent.

    giving_back: None where every rank is an owner.
    wide: the dtype in which blocks are computed.
    sums: gathers the terms of sums over blocks from their parts; None: no rule needs any.
    summed: sums over each matrix of a block, by place of the block.
    """

    blocks: tuple[PlannedBlock, ...]
    collection: Exchange
    giving_back: Exchange | None
    wide: torch.dtype
    sums: Transfer | None = None
    summed: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which blocks are sent."""
        return self.collection.transfer.dtype


OF_WHOLE = "of the whole block"


def chunk_of(
    number: int,
    blocks: tuple[PlannedBlock, ...],
    extra: Sequence[int],
    ranks: int,
    *,
    dtype: torch.dtype,
    wide: torch.dtype,
    gives_back: bool,
) -> Chunk:
    """Plan one chunk."""
    shards: dict[TensorKey, Holdings] = {}
    wholes: dict[TensorKey, Holdings] = {}
    for place, planned in enumerate(blocks):
        shards[place, ""] = planned.held
        wholes[place, ""] = whole_on(planned.box.sizes, planned.owners)
    collection = Exchange(f"collection of chunk {number}", shards, wholes, ranks, dtype)
    if not gives_back:
        return Chunk(blocks, collection, None, wide)
    owned: dict[TensorKey, Holdings] = {}
    returned: dict[TensorKey, Holdings] = {}
    everywhere: dict[int, Holdings] = {}
    for (place, _), held in shards.items():
        owned[place, ""], returned[place, ""] = wholes[place, ""], held
        beside = extra[place] * wide.itemsize // dtype.itemsize
        if beside:
            if beside not in everywhere:
                everywhere[beside] = whole_on((beside,), range(ranks))
            owned[place, OF_WHOLE] = whole_on((beside,), blocks[place].owners)
            returned[place, OF_WHOLE] = everywhere[beside]
    giving_back = Exchange(f"return of chunk {number}", owned, returned, ranks, dtype)
    return Chunk(blocks, collection, giving_back, wide)


def owned_blocks(chunks: Iterable[Chunk], rank: int, params: int) -> list[list[int]]:
    """Return for each parameter the numbers of the blocks that a rank owns, in order."""
    found: list[list[int]] = [[] for _ in range(params)]
    for planned in chain.from_iterable(chunk.blocks for chunk in chunks):
        if rank in planned.owners:
            found[planned.param].append(planned.number)
    return [sorted(numbers) for numbers in found]


def block_box(block: Block, shape: Shape) -> Box:
    """Return the box of a block in its parameter."""
    if block.matrix is None:
        rest = shape[1:]
        return Box((block.row, *(0 for _ in rest)), (block.rows, *rest))
    return Box((block.matrix, block.row, 0), (1, block.rows, block.cols))


def _owners(
    blocks: Sequence[PlannedBlock], flops: Sequence[int], ranks: int, strategy: OwnerStrategy
) -> list[int]:
    """Assign owners: a rank that holds the whole block, else the least busy."""
    loads = [0] * ranks
    owners: dict[int, int] = {}
    for place in sorted(range(len(blocks)), key=lambda k: -flops[k]):
        held = blocks[place].held
        if len(held) == 1:
            owners[place] = min(held[0].ranks, key=lambda rank: loads[rank])
            loads[owners[place]] += flops[place]
    spread = [place for place in range(len(blocks)) if place not in owners]
    if strategy == "cyclic":
        given = cyclic_owners(len(spread), ranks)
    else:
        sizes = [blocks[place].box.numel for place in spread]
        given = balanced_owners([flops[k] for k in spread], sizes, ranks, loads=loads)
    owners |= dict(zip(spread, given, strict=True))
    return [owners[place] for place in range(len(blocks))]
