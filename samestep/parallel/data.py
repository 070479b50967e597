"""Data parallel: FSDP2 and HSDP, a unit per block and experts apart, or copies on every rank.

And what sums of gradients are divided by.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from samestep.fsdp import use_ordered_reduction
from samestep.mesh import Mesh
from samestep.parallel.experts import Places, TokenDispatch
from samestep.parallel.lora import lora_parameters
from samestep.parallel.plan import Plan, PlanError
from samestep.shards.dtensor.fsdp_units import grid


def place_experts(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Cut the stacks of experts over the expert and model axes, and tell those who send tokens."""
    axes = [name for name in ("expert", "model") if mesh.axis(name) is not None]
    stacks = list(plan.stacks(model))
    dispatches = [module for module in model.modules() if isinstance(module, TokenDispatch)]
    if not axes or not stacks:
        return
    if not dispatches:
        raise PlanError(
            "the plan names experts, and the model has no "
            "samestep.parallel.experts.TokenDispatch that sends tokens to them: use one in "
            "the layer of experts"
        )
    for dispatch in dispatches:
        dispatch.places = Places.on(mesh)
    inner = mesh.device_mesh[tuple(axes)]
    for name, dim in stacks:
        owner_name, _, key = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        param = owner.get_parameter(key)
        follows = mesh.degrees.expert_tp > 1
        cuts = {"expert": Shard(0), "model": Shard(dim) if follows else Replicate()}
        placements = [cuts[axis] for axis in axes]
        spread = distribute_tensor(param.detach(), inner, placements, src_data_rank=None)
        owner.register_parameter(key, nn.Parameter(spread, requires_grad=param.requires_grad))


def shard(model: nn.Module, plan: Plan, mesh: Mesh, *, ordered: bool) -> None:
    """Shard every block and the rest of the model over the ranks whose losses are averaged.

    Dense parameters are summed over all of these, experts over those with the same experts; both
    sums are divided by how many ranks have tokens of their own.
    """
    divisor = mesh.degrees.batch_ranks
    if mesh.dense.size() == mesh.expert.size() == 1:
        return
    for module in model.modules():
        if isinstance(module, TokenDispatch):
            module.gathered_experts = True
    for name, module in plan.expert_modules(model):
        _check_alone(name, module)
        fully_shard(module, mesh=mesh.expert)
    factors = set(lora_parameters(model))  # whole on every rank
    for _, module in plan.named(model, "blocks"):
        fully_shard(module, mesh=mesh.dense, ignored_params=factors)
    fully_shard(model, mesh=mesh.dense, ignored_params=factors)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            ranks = grid(module)  # none if it has no parameters of its own
            _divide_by(module, divisor, alone=bool(ranks) and len(ranks[0]) == 1)
    if ordered:
        use_ordered_reduction(model)


def leave_copies(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Every data rank keeps its copy, and the optimizer averages over copies.

    An expert's gradient is the sum over the ranks that have sent it tokens, and it has fewer copies
    than there are such ranks: it is made the mean over them right here.
    """
    degrees = mesh.degrees
    if degrees.ep > 1 and degrees.ep_carries_data:
        params = dict(model.named_parameters())
        for name, _ in plan.stacks(model):
            mean = partial(torch.div, other=degrees.ep)
            params[name].register_hook(mean)  # type: ignore[no-untyped-call]


def _divide_by(module: FSDPModule, divisor: int, *, alone: bool) -> None:
    """Let a unit divide its sums; `alone`: there is no second shard."""
    module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    if alone:  # torch 2.13 divides twice then
        module.set_gradient_divide_factor(1.0)
        divide: Any = partial(Tensor.div_, other=divisor)  # torch types it to return nothing
        module.set_all_reduce_hook(divide)
    else:
        module.set_gradient_divide_factor(float(divisor))


def _check_alone(name: str, module: nn.Module) -> None:
    """Whatever else is in the module would be summed over too few ranks."""
    others = [key for key, param in module.named_parameters() if param.dim() != 3]
    if others:
        raise PlanError(
            f"{name!r} holds stacks of experts and also {', '.join(others)}, whose "
            "gradients are summed over other ranks: move the stacks of experts into a "
            "module of their own"
        )
