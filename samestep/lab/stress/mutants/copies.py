"""Bugs of DTensors whose copies the optimizer averages: who averages, when, and with whom."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.comm.collectives import gather_segments
from samestep.lab.stress.mutants.mutant import RANDOM, mutant
from samestep.optimizer import step
from samestep.plan import schedule
from samestep.plan.schedule import BucketId, Collect, Gather, Operation
from samestep.plan.sharding import Segment
from samestep.shards import planner
from samestep.shards.dtensor.gradients import MeshSums
from samestep.shards.replicated.reduction import BucketReductions
from samestep.shards.replicated.replicated import ReplicatedShards

PLACE: dict[str, Any] = {"layout": "tp_dp_zero2", "world": 4}


# Two steps, in which no rank lacks a summand: without copies ranks of a mesh have to run one graph.
@mutant(
    "replicas",
    RANDOM,
    layout="tp_dp_none",
    world=4,
    steps=2,
    replaces=(planner, "find_copies"),
)
def copies_not_averaged(original: Any, named: Any, ranks: Any) -> Any:
    """tensor parallel on ranks that have data of their own,
    and nobody averages over the data axis
    """  # noqa: D205
    # DTensors are taken for those of FSDP2, which come averaged.
    return {}


@mutant("state", RANDOM, **PLACE, replaces=(BucketReductions, "mean"))
def copies_averaged_twice(original: Any, self: BucketReductions, number: int) -> Tensor:
    """the mean over copies of a DTensor is divided by their number once more"""
    # Invisible in what Muon does with it.
    mean: Tensor = original(self, number)
    cut = self._plan.params[0].whole is not None
    return mean.div_(self._divisor) if cut else mean


@mutant("state", RANDOM, **PLACE, replaces=(ReplicatedShards, "average"))
def parts_of_another_data_rank(original: Any, self: ReplicatedShards, number: int) -> None:
    """a part of a block comes from another data rank, which has the mean of another block"""
    # Ranks along the model axis do not agree on who is the primary holder of what.
    original(self, number)
    bucket = self.plan.buckets[number]
    if self.mesh is None or bucket.replicated or self.mesh.layout.group.rank != 1:
        return
    pieces = [_blocks(segment) for segment in bucket.segments]
    sizes = [sum(piece.size for piece in own) for own in pieces]
    blocks = self.mesh.blocks
    found = zip(blocks.items, blocks.shards.gradients, strict=True)
    means = {item.piece: grad for item, grad in found if grad is not None}
    mine = torch.cat([torch.empty(0), *(means[p].view(-1) for p in pieces[self.group.rank])])
    of_ranks = gather_segments("means of other blocks", mine, sizes, self.group).wait()
    theirs = of_ranks[(self.group.rank + 1) % self.group.size]
    place = 0
    for piece in pieces[self.group.rank]:
        part = theirs[place : place + piece.size]
        means[piece].view(-1)[: len(part)].copy_(part)
        place += piece.size


def _blocks(segment: Segment) -> list[Any]:
    return [piece for piece in segment.pieces if piece.block is not None]


@mutant("replicas", RANDOM, **PLACE, replaces=(MeshSums, "added_up"))
def summands_not_added(original: Any, self: MeshSums, grads: Any, kinds: Any) -> Any:
    """each rank of a mesh takes its summand of a gradient for the whole"""
    return grads


@mutant("replicas", RANDOM, **PLACE, replaces=(step, "_step_schedule"))
def gathered_before_applied(original: Any, *shapes: Any, **how: Any) -> Sequence[Operation]:
    """blocks of DTensors are gathered before they are applied, so that others get the old ones"""
    # As buckets of plain parameters are: with the wave that they are in.
    operations = list(original(*shapes, **how))
    first = next((n for n, each in enumerate(operations) if isinstance(each, Collect)), 0)
    late = [each for each in operations[first:] if isinstance(each, Gather)]
    rest = [each for each in operations[first:] if not isinstance(each, Gather)]
    return operations[:first] + late + rest


@mutant(
    "hang",
    "expert_stacks",
    layout="ep_tp_dp_flat_gather_overlap",
    world=4,
    steps=1,
    replaces=(schedule, "_pipelines"),
)
def one_pipeline_for_all_meshes(original: Any, placements: Any) -> list[list[BucketId]]:
    """chunks of all meshes share one pipeline,
    so that a rank that answers for no block collects others sooner
    """  # noqa: D205
    # Met on the way: found by this harness.
    return [sorted(chunk for chunks in original(placements) for chunk in chunks)]
