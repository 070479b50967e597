"""Makes the plan of replicated parameters, and compares it between ranks."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from samestep.comm.collectives import is_nccl
from samestep.comm.groups import GroupReduction, RankGroup, fabric_of
from samestep.comm.replicated_votes import ReplicatedHere
from samestep.groups.distribution import Distribution
from samestep.kernels.choice import describe_kernels
from samestep.plan.placement_plan import BucketPlan, RankPlan, Topology, plan_placement
from samestep.plan.replicated_gradients import replicated_by_all
from samestep.shards.placement import PlanMembers

if TYPE_CHECKING:
    from samestep.shards.dtensor.mesh_layout import MeshLayout  # DTensors take long to import
    from samestep.shards.planner import Request


_WAY_OUT = (
    'By grads="reduced" somebody else averages gradients, and all ranks have the same ones then: '
    "have a rank that did not use the parameter give zeros to the average, and take it; or leave "
    'grads="reduced" out, and the optimizer averages'
)


def votes_on_copies(params: int, group: RankGroup) -> ReplicatedHere:
    """Votes on gradients that all ranks with copies must share."""
    return ReplicatedHere(replicated_by_all(params, group.size), (0,), group, _WAY_OUT)


def reduced_alike(
    request: "Request", indices: Iterable[int], usual: GroupReduction
) -> dict[GroupReduction, list[int]]:
    """Sort groups by the ranks that average them.

    usual: the reduction of groups without ranks of their own.
    """
    found: dict[GroupReduction, list[int]] = {}
    for index in indices:
        found.setdefault(request.reductions.get(index, usual), []).append(index)
    return found


def plan_on_rank(
    request: "Request",
    members: PlanMembers,
    reduction: GroupReduction,
    device: torch.device,
    distribution: Distribution,
    layout: "MeshLayout | None",
) -> RankPlan:
    """This rank's plan.

    layout: of the mesh of DTensors that these ranks hold copies of; None: plain parameters.
    """
    group, outer = reduction.ranks, reduction.outer
    ordered = distribution.reduction == "ordered"
    topology = Topology(
        device,
        fabric_of(group, device, distribution.ranks_per_host, ordered=ordered),
        None if layout is None else tuple(layout.held),
        None if outer is None else outer.size,
        is_nccl(group, device),
    )
    watched = request.in_flight.all_watched(members.params)
    planned = plan_placement(
        members.specs, distribution, topology, places=members.places, watched=watched
    )
    return planned.on_rank(group.rank, 0 if layout is None else layout.group.rank)


def plan_lines(planned: BucketPlan, layout: "MeshLayout | None") -> list[str]:
    """A plan as text: owners and collectives."""
    shares = planned.even or planned.plan
    return shares.lines() + ([] if layout is None else layout.lines(shares.params))


def comparable_lines(
    planned: BucketPlan, members: PlanMembers, of_plan: Sequence[str], device: torch.device
) -> list[str]:
    """Lines of the plan that must agree on all ranks.

    Parameters and options come before the plan made of them, `of_plan`.
    """
    # Users may set `grad_dtype` of a parameter, which decides what is sent.
    dtypes = [f"{spec.name}: gradients of {spec.gradient_dtype}" for spec in members.specs]
    levels = f"in {planned.policy.levels} levels"
    return [
        *(planned.even or planned.plan).parameter_lines(),
        *dtypes,
        *members.lines,
        *of_plan,
        describe_kernels(device),
        f"{planned.fabric.hosts} hosts by LOCAL_WORLD_SIZE or ranks_per_host=, {levels}",
    ]
