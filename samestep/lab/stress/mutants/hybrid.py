"""Bugs of DTensors and of the hybrid stack: who holds what, what is cut, who combines gradients.

Among them mistakes of users that nobody refuses any more.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from samestep.comm.groups import registry
from samestep.fsdp.participation import Unit
from samestep.lab.stress.mutants.mutant import RANDOM, mutant
from samestep.mesh.replicate_list import FUSED, ReplicateList
from samestep.parallel import apply, data, lora, tensor
from samestep.parallel.experts import Places
from samestep.rules.muon import MuonRule
from samestep.shards import planner
from samestep.shards.dtensor import gradients
from samestep.shards.dtensor.gradients import Mark
from samestep.shards.dtensor.local_shards import LocalShards
from samestep.shards.replicated.inside_backward import LaunchOrder

GPT = "hybrid_gpt"
mesh_build = import_module("samestep.mesh.build")  # its function has the same name


@mutant("contract", GPT, layout="hybrid_tp", steps=1, replaces=(tensor, "_copy_parameters"))
def router_sharded(original: Any, name: str, module: nn.Module, mesh: Any) -> None:
    """a router looks like any linear layer, and tensor parallel cuts it"""
    # As if the plan had it among the columns.
    is_router = isinstance(module, nn.Linear)
    for key, param in module.named_parameters(recurse=False):
        placement = Shard(0) if is_router else Replicate()
        spread = distribute_tensor(param.detach(), mesh, [placement])
        module.register_parameter(key, nn.Parameter(spread))


@mutant("replicas", GPT, layout="hybrid_tp", steps=2)
def norm_not_synchronized() -> list[Any]:
    """each rank takes its part of a QK-norm's gradient for the whole, so that copies drift apart"""
    # Ranks have heads of their own, and nobody adds up.
    return [_copies_are_whole(when_shared=False)]


@mutant("replicas", GPT, layout="hybrid_tp_sp", steps=2)
def sequence_parts_not_added() -> list[Any]:
    """with sequence parallel, norms see a part of the sequence,
    and nobody adds their gradients up
    """  # noqa: D205
    return [_copies_are_whole(when_shared=True)]


def _copies_are_whole(*, when_shared: bool) -> Any:
    """Whether norms on the residual stream, or on heads, count as whole on every rank."""

    def styles(original: Any, model: nn.Module, plan: Any, mesh: Any) -> Any:
        on_stream = {name for name, _ in plan.named(model, "on_stream")}
        for name, style in original(model, plan, mesh):
            if isinstance(style, tensor.CopiedModule) and (name in on_stream) == when_shared:
                style._given = Replicate()
            yield name, style

    return tensor, "_styles", styles


@mutant("plan", GPT, layout="hybrid_ep", steps=1, replaces=(Places, "on"))
def expert_predicate_off_the_wrong_mesh(original: Any, mesh: Any) -> Any:
    """whether experts are spread is asked of a mesh that is not made when they follow tensor
    parallel, so that tokens stay where they are
    """  # noqa: D205
    # `expert_tensor_parallel=0` makes no mesh of its own.
    found = original(mesh)
    made = mesh.degrees.expert_tensor_parallel > 0
    return found if made else found._replace(exchange=None)


@mutant("state", GPT, layout="hybrid_ep", steps=2, replaces=(data, "_divide_by"))
def experts_divided_by_their_own_ranks(
    original: Any, module: Any, divisor: int, *, alone: bool
) -> None:
    """gradients of experts are averaged over the ranks that hold them, not over all with tokens"""
    # FSDP2's own mean; Muon's direction does not see it, the joint norm does.
    module.set_force_sum_reduction_for_comms(True)


@mutant(
    "contract",
    GPT,
    layout="hybrid_tp_sp_ep",
    world=4,
    steps=1,
    replaces=(mesh_build, "make_groups"),
)
def duplicate_group(original: Any, groups: Any, timeout: Any, device: Any) -> None:
    """the same ranks get a new group each time that one is asked for"""
    # Nobody looks whether there is one. All ranks ask alike, or the second group could hang.
    wanted = list(groups)
    original(wanted, timeout, device)
    registry._by_members.clear()
    original(wanted, timeout, device)


@mutant("plan", GPT, layout="hybrid_tp", steps=1, replaces=(apply, "_observed"))
def ranks_disagree_on_a_predicate(original: Any, model: nn.Module, mesh: Any) -> dict[str, Any]:
    """a predicate is read off an object that one rank does not have"""
    seen: dict[str, Any] = original(model, mesh)
    last = mesh.rank == mesh.degrees.world - 1
    return seen | {"tensor_parallel_active": not last}


@mutant("replicas", "hybrid_lora", layout="hybrid_ep", steps=2, replaces=(lora, "_spread"))
def lora_not_synchronized(original: Any, *args: Any) -> Any:
    """factors of LoRA, which are whole on every rank, keep the gradient of the rank's own tokens"""
    # Gradients are taken for what the factors are: whole.
    factor, _ = original(*args)
    return factor, list(factor.placements)


@mutant(
    "replicas",
    "fsdp2_alone",
    layout="fsdp2_alone",
    world=4,
    steps=4,
    replaces=(planner, "refuse_copies_nobody_averages"),
)
def nobody_averages_over_data(original: Any, named: Any, ranks: Any, outer: Any) -> None:
    """FSDP2 on halves of the ranks that have data of their own, and nobody averages between them"""
    # Copies on other meshes are not looked for.


@mutant(
    "hang", "two_optimizers", layout="two_optimizers", steps=1, replaces=(LaunchOrder, "_others")
)
def two_orders_of_launches(original: Any, self: LaunchOrder) -> Any:
    """two optimizers launch their reductions inside one backward, in no common order"""
    # Each optimizer knows its own buckets only.
    return iter(())


@mutant("reference", "fused_qkv_cut", layout="hybrid_tp", steps=2, replaces=(ReplicateList, "kind"))
def fused_qkv_cut_by_rows(original: Any, self: ReplicateList, name: str) -> Any:
    """one weight of queries, keys and values is cut by rows, so that ranks take queries for keys"""
    # It looks like any other column layer.
    found = original(self, name)
    return None if found == FUSED else found


@mutant("reference", RANDOM, layout="fsdp2_parallel", replaces=(gradients, "has_gradient"))
def filled_zeros_are_used(original: Any, param: Tensor) -> bool:
    """zeros that FSDP2 was given for an unused parameter count as its gradient"""
    return param.grad is not None


@mutant("hang", "conditional_compute", layout="fsdp2_parallel", replaces=(Unit, "fill"))
def unused_are_left_out(original: Any, self: Unit) -> None:
    """FSDP2 reduces only the gradients that a rank has, which are others on each rank"""
    self.waits = False


@mutant("reference", "uneven_accumulation", layout="fsdp2_parallel", replaces=(Mark, "renew"))
def use_in_the_last_micro_batch_only(original: Any, self: Mark) -> None:
    """of several micro-batches only the last one tells which parameters were used"""
    self.used = False


@mutant("reference", RANDOM, layout="fsdp2_gather", replaces=(MuonRule, "transform"))
def shards_orthogonalized(original: Any, self: MuonRule, direction: Tensor, *rest: Any) -> Any:
    """each rank orthogonalizes the rows that it holds of a DTensor, instead of the whole"""
    # Cut as FSDP2 cuts for two ranks.
    parts = [original(self, rows, *rest) for rows in direction.chunk(2, -2)]
    return torch.cat([part for part, _ in parts], -2), parts[0][1]


@mutant("state", RANDOM, layout="fsdp2_parallel", replaces=(LocalShards, "gradient_of"))
def reduced_gradients_divided_again(original: Any, self: LocalShards, index: int) -> Any:
    """gradients of DTensors, which come averaged, are divided by the number of ranks again"""
    # Invisible in Muon's parameters, not in its momentum.
    return original(self, index) / self.group.size


@mutant("state", "clipped", layout="ep_fsdp2", replaces=(LocalShards, "is_primary"))
def copies_counted_in_the_norm(original: Any, self: LocalShards, index: int) -> bool:
    """copies of a DTensor are all counted in the joint norm"""
    return True
