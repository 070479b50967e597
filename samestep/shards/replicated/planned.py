"""The plan for copies: their buckets, in how many levels these travel, and what they send.

Pure: optimizers ask before they make anything, and `estimate` asks the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil

import torch

from samestep.comm.groups import ranks_text
from samestep.groups.distribution import Distribution
from samestep.plan.bucket_exchanges import bucket_exchanges
from samestep.plan.flat import plan_flat
from samestep.plan.links import Fabric, bucket_elements
from samestep.plan.mesh_shares import restrict_to_shards
from samestep.plan.schedule import PlacementShape
from samestep.plan.sharding import ParamSpec, ShardingPlan, plan_sharding
from samestep.plan.transfers import CollectivePolicy
from samestep.shards.placement import PlanMembers
from samestep.shards.replicated.buckets import joint_gradient_dtype


def planned(
    specs: Sequence[ParamSpec], fabric: Fabric, distribution: Distribution, levels: int = 1
) -> ShardingPlan:
    """The plan that some keywords ask for, between ranks with these links."""
    size = _bucket_size(specs, fabric, distribution)
    columns = fabric.per_host if levels == 2 else 1
    if distribution.buffers == "flat":
        return plan_flat(specs, fabric.ranks, bucket_elements=size, columns=columns)
    return plan_sharding(
        specs,
        fabric.ranks,
        shard=distribution.sharding != "none",
        crossover=distribution.crossover,
        bucket_elements=size,
        owners=distribution.owners,
        max_size_ratio=distribution.max_state_ratio,
        columns=columns,
    )


def _shared_plan(
    specs: tuple[ParamSpec, ...], fabric: Fabric, distribution: Distribution, levels: int
) -> ShardingPlan:
    """zero1 and zero2 have one plan: they differ in when gradients are let go of."""
    if distribution.sharding == "zero2":
        distribution = replace(distribution, sharding="zero1")
    return _known_plan(specs, fabric, distribution, levels)


_known_plan = lru_cache(maxsize=2)(planned)


def refuse_levels(
    distribution: Distribution, fabric: Fabric, ranks: Sequence[int], *, is_alone: bool
) -> None:
    """Raise if two levels are asked for where there are none.

    is_alone: these are plain parameters, and no other ranks have copies of them.
    """
    if not distribution.two_levels or (is_alone and fabric.has_levels):
        return
    reason = "DTensors and outer_group have groups of their own"
    if is_alone:
        reason = f"{ranks_text(ranks)} are on {fabric.hosts} hosts, {fabric.per_host} on each"
    raise ValueError(
        f"two_levels=True needs several hosts with several ranks each: {reason}. Give "
        "ranks_per_host= if they are not what torchrun says, or leave two_levels out"
    )


def levels_of(
    specs: Sequence[ParamSpec], fabric: Fabric, distribution: Distribution, *, on_cpu: bool
) -> int:
    """2: buckets go inside hosts and across them."""
    asked = distribution.two_levels
    if asked is None:
        elements = sum(spec.numel for spec in specs)
        share = min(1.0, _bucket_size(specs, fabric, distribution) / max(elements, 1))
        exchanged = on_cpu or distribution.reduction == "ordered"
        block = largest_block(specs)
        asked = fabric.pays_in_two(
            share * bytes_of(specs),
            exchanged=exchanged,
            block=block,
            in_a_row=legs_in_a_row(ceil(1 / share), on_cpu=on_cpu),
        )
    return 1 + (asked and fabric.has_levels)


def legs_in_a_row(buckets: int, *, on_cpu: bool) -> int:
    """The number of buckets whose legs go beside each other: on a CPU one."""
    return 1 if on_cpu else buckets


def _bucket_size(specs: Sequence[ParamSpec], fabric: Fabric, distribution: Distribution) -> int:
    """Elements, as asked for or chosen."""
    if distribution.bucket_size is not None:
        return distribution.bucket_size
    waves = None if distribution.overlap_grad_reduce else distribution.waves
    elements = sum(spec.numel for spec in specs)
    return bucket_elements(elements, bytes_of(specs), fabric, most_buckets=waves)


def largest_block(specs: Sequence[ParamSpec]) -> int:
    """Bytes of it, 0 if there is none."""
    sizes = (
        block.rows * block.cols * width_of(spec.dtype)
        for spec in specs
        for block in spec.blocks or ()
    )
    return max(sizes, default=0)


def bytes_of(specs: Sequence[ParamSpec]) -> int:
    """The bytes of parameters, as a rank holds them."""
    return sum(spec.numel * width_of(spec.dtype) for spec in specs)


def width_of(dtype: str) -> int:
    """Bytes of an element."""
    found: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    return found.itemsize


@dataclass(frozen=True, eq=False)
class ReplicatedPlan:
    """All that is decided before the first step for parameters that several ranks hold copies of.

    plan: who updates which pieces, in which buckets; of DTensors for the shards of this rank.
    even: of DTensors the same for even shares of what a mesh holds, as all its ranks have it;
        None: parameters are plain.
    fabric: the links between its ranks.
    policy: which collectives carry the buckets.
    watched: modules wait for all of the parameters.
    """

    members: PlanMembers
    distribution: Distribution
    fabric: Fabric
    plan: ShardingPlan
    policy: CollectivePolicy
    watched: bool
    even: ShardingPlan | None = None

    def restricted_to(self, shards: Sequence[ParamSpec]) -> "ReplicatedPlan":
        """The plan of a rank that holds these shards; this one is for even shares.

        Raises:
            ValueError: With flat buffers, where shards are not equal.
        """
        flat = self.distribution.buffers == "flat"
        plan = restrict_to_shards(self.plan, shards, flat=flat)
        return replace(self, plan=plan, even=self.plan)

    @cached_property
    def shape(self) -> PlacementShape:
        """The shape of the placement, which the schedule of a step depends on."""
        params, buckets = self.members.params, self.plan.buckets
        of_buckets = [[params[index] for index in bucket.params] for bucket in buckets]
        dtypes = [of_bucket[0].dtype for of_bucket in of_buckets]  # a bucket has one
        gradients = [
            self.distribution.reduce_dtype or joint_gradient_dtype(of_bucket)
            for of_bucket in of_buckets
        ]
        overlap = self.distribution.overlap_param_gather
        return PlacementShape(
            # A bucket is complete with the parameter that forward uses first.
            places=tuple(self.members.places[bucket.params[0]] for bucket in buckets),
            exchanges=bucket_exchanges(self.plan, self.policy, gradients, dtypes),
            # Waves are the same on all ranks of a mesh, also where their shards are not equal.
            bucket_sizes=tuple(bucket.size for bucket in (self.even or self.plan).buckets),
            agrees=True,
            reduces=self.distribution.grads == "local",
            overlaps=self.distribution.overlap_grad_reduce or self.distribution.check_gradients,
            defers=overlap and self.watched,
            has_parts=self.even is not None
            and any(spec.blocks is not None for spec in self.plan.params),
        )


def plan_copies(
    members: PlanMembers,
    specs: Sequence[ParamSpec],
    fabric: Fabric,
    distribution: Distribution,
    device: torch.device,
    *,
    outer: int,
    uneven: bool,
    alone: bool,
    watched: bool,
) -> ReplicatedPlan:
    """Plan for parameters that the ranks of a fabric hold copies of.

    specs: of the parameters; of DTensors those of even shares.
    outer: groups of ranks that do the same; 1: there are no others.
    uneven: the backend gathers unequal lengths in one call.
    alone: they are plain parameters, and no other groups of ranks do the same, so that buckets may
        go in two levels, inside hosts and across them.
    """
    on_cpu = device.type == "cpu"
    levels = levels_of(specs, fabric, distribution, on_cpu=on_cpu) if alone else 1
    plan = _shared_plan(tuple(specs), fabric, distribution, levels)
    policy = distribution.bucket_policy(fabric.ranks, outer, device, uneven=uneven, levels=levels)
    return ReplicatedPlan(members, distribution, fabric, plan, policy, watched)
