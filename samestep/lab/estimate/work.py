"""The work of every rank in a step: FLOPs of orthogonalization, and bytes of updates."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from itertools import chain
from math import prod

import torch
from torch import Tensor

from samestep.lab.common.floor import ADAMW_BYTES, MUON_BYTES
from samestep.lab.estimate.grid import Grid, per_peer
from samestep.lab.estimate.grid_plan import GridPlacement, GridPlan
from samestep.lab.estimate.hardware import Hardware
from samestep.layout.blocks import Block
from samestep.layout.owners import busiest_lower_bound
from samestep.plan.layouts import RankBoxes
from samestep.plan.placement_plan import BlockPlan, BucketPlan
from samestep.rules.orthogonalize import orthogonalize_flops

shape_flops = lru_cache(maxsize=1024)(orthogonalize_flops)  # of rows and cols: shapes are few


def block_flops(block: Block) -> int:
    """Return the FLOPs of orthogonalizing all matrices of a block."""
    return sum(shape_flops(*shape) for shape in block.matrices)


@dataclass(frozen=True)
class Work:
    """The work of all ranks of a plan: float64 tensors with one number per rank."""

    product_seconds: Tensor
    flops: Tensor
    bytes: Tensor  # read and written by updates
    pieces: Tensor

    def seconds(self, hardware: Hardware) -> Tensor:
        return self.product_seconds + self.bytes / hardware.bytes_rate + self.pieces * hardware.call


Cost = tuple[float, float, float, int]  # of one piece, in the order of `Work`


def _work(ranks: int, costs: Iterable[tuple[int, Cost]]) -> Work:
    """Add up the costs of pieces by rank; `costs` are pairs of a rank and a cost."""
    product_seconds, flops, moved, pieces = columns = [[0.0] * ranks for _ in fields(Work)]
    for rank, cost in costs:
        product_seconds[rank] += cost[0]
        flops[rank] += cost[1]
        moved[rank] += cost[2]
        pieces[rank] += cost[3]
    return Work(*map(per_peer, columns))


def piece_cost(
    shape: tuple[int, int] | None, elements: int, width: int, hardware: Hardware
) -> Cost:
    """Return the cost of a block, or (shape None) a slice; `width`: bytes per element."""
    narrower = 2 * (4 - width)  # than fp32, read and written
    if shape is None:
        return 0.0, 0.0, elements * (ADAMW_BYTES - narrower), 1
    return _product(shape, elements * (MUON_BYTES - narrower), hardware)


def _product(shape: tuple[int, int], moved: int, hardware: Hardware) -> Cost:
    flops = shape_flops(*shape)
    return flops / hardware.product_rate(min(shape)), flops, moved, 1


@dataclass(frozen=True)
class OwnerBalance:
    """The balance of a plan's orthogonalizations over ranks.

    ratio: FLOPs of the busiest rank over the mean; no assignment has a ratio below `bound`.
    """

    axes: str
    ranks: int
    blocks: int
    flops: float
    ratio: float
    bound: float


def balance(placement: GridPlacement) -> OwnerBalance | None:
    """Return the balance of a placement; None if it has no matrix rule."""
    ranks = placement.everyone.size
    blocks = [block_flops(block) for spec in placement.specs for block in spec.blocks or ()]
    if not blocks:
        return None
    count = len(blocks)
    flops = _owned_flops(placement).flatten().tolist()
    blocks = blocks * int(sum(flops) // sum(blocks))  # as often as all are computed
    mean = sum(flops) / ranks
    busiest = max(flops), busiest_lower_bound(blocks, ranks)
    ratios = (each / mean if mean else 1.0 for each in busiest)
    return OwnerBalance(placement.everyone.name, ranks, count, sum(flops), *ratios)


def owner_flops(placement: GridPlacement, grid: Grid) -> Tensor:
    """Return each rank's FLOPs of orthogonalization, in the shape of the grid."""
    return grid.spread_both(_owned_flops(placement), placement.peers, placement.mesh)


def _owned_flops(placement: GridPlacement) -> Tensor:
    """Return the FLOPs of every rank as (peers, ranks of their mesh)."""
    flops = [[0.0] * placement.mesh.size for _ in range(placement.peers.size)]
    for own, plan in zip(flops, placement.block_plans, strict=False):
        for planned in chain.from_iterable(chunk.blocks for chunk in plan.chunks):
            for owner in planned.owners:
                own[owner] += block_flops(planned.block)
    for bucket in () if placement.block_plans else placement.buckets.plan.buckets:
        has_blocks = any(placement.specs[param].blocks for param in bucket.params)
        for rank, segment in bucket.filled if has_blocks else ():
            blocks = [piece.block for piece in segment.pieces if piece.block is not None]
            cost = sum(block_flops(block) for block in blocks)
            for own in flops if bucket.replicated else flops[rank : rank + 1]:
                own[0] += cost
    return torch.tensor(flops, dtype=torch.float64)


def bucket_work(buckets: BucketPlan, number: int, hardware: Hardware) -> Work:
    """Return the work of a bucket's updates, without blocks whose parts are on several ranks."""
    bucket = buckets.plan.buckets[number]
    width = buckets.plan.params[bucket.params[0]].torch_dtype.itemsize  # a bucket has one dtype
    costs = (
        (place, piece_cost(shape, prod(shape or (piece.size,)), width, hardware))
        for place, segment in bucket.filled
        for piece in segment.pieces
        if piece.block is None or buckets.even is None
        for shape in ((None,) if piece.block is None else piece.block.matrices)
    )
    found = _work(len(bucket.segments), costs)
    if bucket.replicated:
        return Work(*(own.expand(buckets.fabric.ranks) for own in vars(found).values()))
    return found


def local_work(grid_plan: GridPlan, hardware: Hardware) -> Work:
    """Return the work of one process that has all parameters."""
    costs: list[Cost] = []
    for param in (param for group in grid_plan.groups for param in group["params"]):
        blocks, width = grid_plan.optimizer.plan.blocks[param], param.dtype.itemsize
        if blocks is None:
            costs.append(piece_cost(None, param.numel(), width, hardware))
        for block in blocks or ():
            costs += [piece_cost(shape, prod(shape), width, hardware) for shape in block.matrices]
        if grid_plan.clips:
            costs.append((0.0, 0.0, param.numel() * 4, 0))
    return _work(1, ((0, cost) for cost in costs))


def elementwise_work(plan: BlockPlan, hardware: Hardware) -> Work:
    """Return the work of elementwise updates of a mesh: every rank updates its shards."""
    # Layers have the same boxes.
    alike: dict[tuple[int, int], list[RankBoxes]] = defaultdict(list)
    for spec, held in zip(plan.specs, plan.held, strict=True):
        if spec.blocks is None:
            alike[id(held.boxes), spec.torch_dtype.itemsize].append(held)
    costs = (
        (place, (times * products, times * flops, times * moved, times * pieces))
        for (_, width), same in alike.items()
        for times in [len(same)]
        for place, box in enumerate(same[0].boxes)
        for products, flops, moved, pieces in [piece_cost(None, box.numel, width, hardware)]
    )
    return _work(plan.ranks, costs)


def chunk_flops(plan: BlockPlan, number: int, hardware: Hardware) -> Work:
    costs = (  # bytes: it is put together
        (owner, _product(shape, 8 * prod(shape), hardware))
        for planned in plan.chunks[number].blocks
        for owner in planned.owners
        for shape in planned.block.matrices
    )
    return _work(plan.ranks, costs)


def chunk_parts(plan: BlockPlan, number: int, count: Callable[[int], int] = int) -> Tensor:
    """Return each rank's elements of a chunk's blocks, or the sum of `count` of them: (ranks,)."""
    found = [0] * plan.ranks
    for planned in plan.chunks[number].blocks:
        for rank, size in planned.held.sizes.items():
            found[rank] += count(size)
    return per_peer(found)


chunk_count = partial(chunk_parts, count=bool)  # blocks of which each rank holds a part
