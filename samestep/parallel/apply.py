"""A plan applied to a model: everything in the order that is right."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from samestep.mesh import Mesh
from samestep.parallel import data, replicas, tensor
from samestep.parallel.plan import Plan, PlanError


@dataclass(frozen=True)
class Applied:
    """What was done to a model.

    found: Hooks on modules of the plan before.
    unasked: Hooks on them afterwards that nobody asked for.
    """

    mesh: str
    found: int
    unasked: int

    def line(self) -> str:
        """For the trace of the first step."""
        return f"rank={dist.get_rank()} mesh={self.mesh} hooks pre={self.found} post={self.unasked}"


def apply(model: nn.Module, plan: Plan, mesh: Mesh, *, ordered: bool = False) -> Applied:
    """Lay a model out over a mesh. All ranks call it, with the same model.

    First experts and matrices are cut, since FSDP2 shards what is left on a rank; FSDP2 comes
    last, from the inside out. Make the optimizer afterwards.

    Args:
        model: With the same values on all ranks.
        plan: What is cut, and what stays whole.
        mesh: From `samestep.mesh.build`.
        ordered: Add up gradients in rank order.
    """
    plan.check(model)
    _check_degrees(model, plan, mesh)
    named = {name for part in PARTS for name, _ in plan.named(model, part)}
    before = _hooks(model)
    stale = {name: before[name] for name in named if before[name]}
    if stale:
        raise PlanError(
            f"{len(stale)} modules of the plan have hooks already ({_some(stale)}): they would "
            "run beside those of the plan. Apply it once, to a model without hooks"
        )
    replicas.require_same_values(model)
    data.place_experts(model, plan, mesh)
    asked = tensor.parallelize(model, plan, mesh)
    if mesh.axis("model") is not None:
        tensor.check_all_named(model)
    after = _hooks(model)
    extra = {name: after[name] - before[name] - asked.get(name, 0) for name in after}
    extra = {name: count for name, count in extra.items() if count}
    if extra:
        raise PlanError(f"modules have hooks that the plan did not ask for: {_some(extra)}")
    data.shard(model, plan, mesh, ordered=ordered)
    return Applied(mesh.name, sum(stale.values()), sum(extra.values()))


PARTS = ("embedding", "head", "branches", "column", "row", "on_stream", "on_heads")


def _check_degrees(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    stacks = dict(model.named_parameters())
    for name, _ in plan.stacks(model):
        experts = stacks[name].shape[0]
        if experts % mesh.degrees.ep:
            raise PlanError(
                f"{name!r} has {experts} experts, which {mesh.degrees.ep} ranks cannot share evenly"
            )
    if mesh.degrees.ep > 1 and not plan.experts:
        raise PlanError(f"ep is {mesh.degrees.ep}, and the plan names no experts")


def _hooks(model: nn.Module) -> dict[str, int]:
    """How many hooks run before and after each module's forward. torch has no public count."""
    return {
        name: len(module._forward_pre_hooks) + len(module._forward_hooks)
        for name, module in model.named_modules()
    }


def _some(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in list(counts.items())[:6])
