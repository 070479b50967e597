"""What is planned for copies, as `estimate` asks for it."""

from collections.abc import Sequence

import torch

from samestep.groups.distribution import Distribution
from samestep.plan.links import Fabric
from samestep.plan.placement_plan import BucketPlan, _known_sharding, levels_of
from samestep.plan.sharding import ParamSpec
from samestep.shards.placement import PlanMembers


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
) -> BucketPlan:
    """Plan for parameters that the ranks of a fabric hold copies of."""
    on_cpu = device.type == "cpu"
    levels = levels_of(specs, fabric, distribution, on_cpu=on_cpu) if alone else 1
    plan = _known_sharding(tuple(specs), fabric, distribution, levels)
    policy = distribution.bucket_policy(fabric.ranks, outer, device, uneven=uneven, levels=levels)
    return BucketPlan(plan, policy, fabric, distribution, members.places, watched)
