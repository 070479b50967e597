"""Applies a plan to a model: shards its layers in the right order, and checks the result."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from samestep.mesh import Mesh
from samestep.mesh.degrees import Degrees, nearest_multiples
from samestep.mesh.replicate_list import ReplicateList, ShardRule, cuts, shapes
from samestep.parallel import data, replicas, router_losses, tensor
from samestep.parallel.experts import TokenDispatch
from samestep.parallel.fused import CUT_BY_PARTS, check_fused
from samestep.parallel.lora import lora_shard_rules
from samestep.parallel.plan import Plan, PlanError
from samestep.parallel.recompute import What, what_of
from samestep.parallel.recompute import recompute as recompute_block


def apply(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    *,
    ordered: bool = False,
    adapt: Callable[[nn.Module], object] | None = None,
    compile: bool | str = False,
    fsdp: bool = True,
    recompute: bool | What = False,
) -> dict[str, Any]:
    """Lay a model, or a stage of it, out over a mesh. Collective.

    Experts and matrices are cut first, since FSDP2 shards what is left on a rank; FSDP2 comes
    last, from the inside out. Make the optimizer afterwards.

    Args:
        model: With the same values on all ranks.
        plan: What is cut, and what stays whole.
        mesh: From `samestep.mesh.build`.
        ordered: Add up gradients in rank order.
        adapt: Called when matrices are cut and FSDP2 is not there yet, to add LoRA factors.
        compile: Compile every block, also with a backend by name; ask `samestep.mesh.gates` first
            whether that is wise.
        fsdp: Shard over the ranks whose losses are averaged. False: each of them keeps a copy, and
            the optimizer averages over copies, with the sharding and buffers that it is given.
        recompute: Let every block compute again in backward what it would have kept: True or
            "full", or "selective", which keeps what matrix products and attention give.

    Returns:
        Facts under the names of `samestep.mesh.predicates`, read off the model itself. "hooks_pre"
        were on modules of the plan before, "hooks_post" are there beyond what plan and FSDP2 need.
    """
    plan.check(model)
    before = hooks_of(model)
    refuse_stale(before, plan, model)
    rules = shard_rules(model, plan)
    check_fused(model, plan, mesh.degrees.tp)
    if mesh.degrees.tp > 1:
        refuse_experts_in_branches(model, plan)
    check_sizes(model, plan, rules, mesh.degrees)
    replicas.require_same_values(model)
    whole = shapes(model)
    data.place_experts(model, plan, mesh)
    router_losses.place_on(model, mesh)
    asked = tensor.parallelize(model, plan, mesh)
    if mesh.axis("model") is not None:
        tensor.check_all_named(model)
    if adapt is not None:
        adapt(model)
    extra = {n: found - before.get(n, 0) - asked.get(n, 0) for n, found in hooks_of(model).items()}
    again = what_of(recompute)
    backend = compile if isinstance(compile, str) else "inductor"
    for _, block in plan.named(model, "blocks"):
        if again is not None:
            recompute_block(block, backend if compile else None, again)
        elif compile:
            block.compile(backend=backend)
    _refuse_unasked(extra)
    if fsdp:
        data.shard(model, plan, mesh, ordered=ordered)
    else:
        data.leave_copies(model, plan, mesh)
    ReplicateList((*rules, *plan.rules, *lora_shard_rules(model))).check(model, whole)
    stale = sum(before.get(name, 0) for name in plan.modules(model))
    return {**_observed(model, mesh), "hooks_pre": stale, "hooks_post": sum(extra.values())}


def shard_rules(model: nn.Module, plan: Plan) -> tuple[ShardRule, ...]:
    """Rules for the parameters that a plan may shard."""
    dims = {"embedding": 1, "head": 0, "column": 0, "row": 1}
    rules = [
        ShardRule(f"{name}.{key}", "model", 0 if param.dim() == 1 else dim)
        for part, dim in dims.items()
        for name, module in plan.named(model, part)
        for key, param in module.named_parameters(recurse=False)
        if not (part == "row" and param.dim() == 1)  # added to the sum, whole
    ]
    for name, module in plan.named(model, "fused"):
        keys = [key for key, _ in module.named_parameters(recurse=False)]
        rules += [ShardRule(f"{name}.{key}", "model", 0, CUT_BY_PARTS) for key in keys]
    for name, dim in plan.stacks(model):
        rules += [ShardRule(name, "expert", 0), ShardRule(name, "model", dim)]
    return tuple(rules)


def check_sizes(
    model: nn.Module, plan: Plan, rules: tuple[ShardRule, ...], degrees: Degrees
) -> None:
    """Raise unless every sharded dim can be divided evenly."""
    if degrees.ep > 1 and not any(rule.axis == "expert" for rule in rules):
        raise PlanError(
            f"the mesh has ep={degrees.ep}, and the plan names no experts: name them in "
            "Plan.experts, or build a mesh with ep=1"
        )
    if degrees.tp > 1 and not any(rule.axis == "model" for rule in rules):
        raise PlanError(
            f"the mesh has tp={degrees.tp}, and the plan shards no layer: name layers in "
            "Plan.column, row, fused, embedding or head, or build a mesh with tp=1"
        )
    params = dict(model.named_parameters(remove_duplicate=False))
    stacks = {rule.pattern for rule in rules if rule.axis == "expert"}
    fused = {name for name, _ in plan.named(model, "fused")}  # part by part, by check_fused
    heads = {name for name, _ in plan.named(model, "head")}  # parts of any sizes
    for name, axis, dim, _ in rules:
        if name.rpartition(".")[0] in fused | heads:
            continue
        by_model = degrees.expert_tp if name in stacks else degrees.tp
        ranks = degrees.ep if axis == "expert" else by_model
        size = params[name].shape[dim]
        if size % ranks:
            raise PlanError(
                f"dim {dim} of {name!r} is {size}, which {ranks} ranks of the {axis} "
                "axis cannot share evenly: make it "
                f"{' or '.join(map(str, nearest_multiples(ranks, size)))}, or use a "
                f"number of ranks that divides {size}. Only layers in Plan.head may be "
                "uneven"
            )


def refuse_experts_in_branches(model: nn.Module, plan: Plan) -> None:
    """Raise if a module in `branches` holds experts, which need their own tokens."""
    for name, module in plan.named(model, "branches"):
        stacks = [stack for stack, _ in plan.stacks(model) if stack.startswith(f"{name}.")]
        if stacks or any(isinstance(inner, TokenDispatch) for inner in module.modules()):
            raise PlanError(
                f"branches: {name!r} holds experts "
                f"({stacks[0] if stacks else 'a TokenDispatch'}), which take each "
                "rank's own tokens and send them themselves: leave it out of branches, "
                "and name its router and its shared experts in on_stream"
            )


def refuse_stale(hooks: Mapping[str, int], plan: Plan, model: nn.Module) -> None:
    stale = {name: hooks[name] for name in plan.modules(model) if hooks[name]}
    if stale:
        some = ", ".join(f"{name} has {count}" for name, count in list(stale.items())[:6])
        raise PlanError(
            f"{len(stale)} modules of the plan have forward hooks already ({some}), "
            "which would run beside the plan's: apply a plan once, to a model without "
            "hooks"
        )


def _refuse_unasked(extra: Mapping[str, int]) -> None:
    found = [f"{name} {count:+}" for name, count in extra.items() if count]
    if found:
        raise PlanError(
            "modules have hooks that the plan did not add, or lack hooks that it did "
            f"({', '.join(found[:6])}): other code added or removed hooks while the "
            "plan was applied"
        )


def hooks_of(model: nn.Module) -> dict[str, int]:
    """Number of forward hooks of each module."""
    return {
        name: len(module._forward_pre_hooks) + len(module._forward_hooks)
        for name, module in model.named_modules()
    }


def _observed(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    """Facts read from the laid-out model, independent of the degrees."""
    params = list(model.parameters())
    cut = {axis for param in params for axis, _ in cuts(param)}
    stacks_cut = {axis for param in params if param.dim() == 3 for axis, _ in cuts(param)}
    seen: dict[str, Any] = {
        "tensor_parallel_active": "model" in cut,
        "data_sharded": mesh.dense.shape[-1] > 1
        and any(isinstance(module, FSDPModule) for module in model.modules()),
    }
    dispatches = [module for module in model.modules() if isinstance(module, TokenDispatch)]
    if dispatches:  # a pipeline stage without experts has nothing to say of them
        seen["expert_parallel_active"] = "expert" in cut
        seen["expert_lane"] = all(d.places.exchange is not None for d in dispatches)
        seen["expert_tensor_parallel_active"] = "model" in stacks_cut
    return seen
