"""Bugs of the hybrid stack: what is cut, who combines gradients, and which code runs."""

from importlib import import_module
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from samestep.comm.groups import registry
from samestep.parallel import apply, data, lora, tensor
from samestep.parallel.experts import Places
from samestep.stress.mutants.mutant import mutant

GPT = "hybrid_gpt"


@mutant(
    "a router looks like any linear layer, and tensor parallel cuts it",
    expected="contract",
    scenario=GPT,
    layout="hybrid_tp",
    steps=1,
)
def router_sharded() -> list[Any]:
    """As if the plan had it among the columns."""

    def copy_parameters(original: Any, name: str, module: nn.Module, mesh: Any) -> None:
        is_router = isinstance(module, nn.Linear)
        for key, param in module.named_parameters(recurse=False):
            placement = Shard(0) if is_router else Replicate()
            spread = distribute_tensor(param.detach(), mesh, [placement])
            module.register_parameter(key, nn.Parameter(spread))

    return [(tensor, "_copy_parameters", copy_parameters)]


@mutant(
    "each rank takes its part of a QK-norm's gradient for the whole, so that copies drift apart",
    expected="replicas",
    scenario=GPT,
    layout="hybrid_tp",
    steps=2,
)
def norm_not_synchronized() -> list[Any]:
    """Ranks have heads of their own, and nobody adds up."""
    return [_copies_are_whole(when_shared=False)]


@mutant(
    "with sequence parallel, norms see a part of the sequence, and nobody adds their gradients up",
    expected="replicas",
    scenario=GPT,
    layout="hybrid_tp_sp",
    steps=2,
)
def sequence_parts_not_added() -> list[Any]:
    """As if every rank had seen the whole sequence."""
    return [_copies_are_whole(when_shared=True)]


def _copies_are_whole(*, when_shared: bool) -> Any:
    """Of norms on the stream (they share the sequence), or of those on heads alone."""

    def styles(original: Any, model: nn.Module, plan: Any, mesh: Any) -> Any:
        on_stream = {name for name, _ in plan.named(model, "on_stream")}
        for name, style in original(model, plan, mesh):
            if isinstance(style, tensor.Copies) and (name in on_stream) == when_shared:
                style._given = Replicate()
            yield name, style

    return tensor, "_styles", styles


@mutant(
    "whether experts are spread is asked of a mesh that is not made when they follow tensor "
    "parallel, so that tokens stay where they are",
    expected="plan",
    scenario=GPT,
    layout="hybrid_ep",
    steps=1,
)
def expert_predicate_off_the_wrong_mesh() -> list[Any]:
    """`expert_tensor_parallel=0` makes no mesh of its own."""

    def on(original: Any, mesh: Any) -> Places:
        found: Places = original(mesh)
        made = mesh.degrees.expert_tensor_parallel > 0
        return found if made else found._replace(exchange=None)

    return [(Places, "on", on)]


@mutant(
    "gradients of experts are averaged over the ranks that hold them, not over all with tokens",
    expected="state",
    scenario=GPT,
    layout="hybrid_ep",
    steps=2,
)
def experts_divided_by_their_own_ranks() -> list[Any]:
    """FSDP2's own mean; Muon's direction does not see it, the joint norm does."""

    def divide_by(original: Any, module: Any, divisor: int, *, alone: bool) -> None:
        module.set_force_sum_reduction_for_comms(True)

    return [(data, "_divide_by", divide_by)]


@mutant(
    "the same ranks get a new group each time that one is asked for",
    expected="contract",
    scenario=GPT,
    layout="hybrid_tp_sp_ep",
    world=4,
    steps=1,
)
def duplicate_group() -> list[Any]:
    """Nobody looks whether there is one. All ranks ask alike, or the second group could hang."""

    def make_groups(original: Any, groups: Any, timeout: Any, device: Any) -> None:
        wanted = list(groups)
        original(wanted, timeout, device)
        registry._by_members.clear()
        original(wanted, timeout, device)

    build = import_module("samestep.mesh.build")  # its function has the same name
    return [(build, "make_groups", make_groups)]


@mutant(
    "a predicate is read off an object that one rank does not have",
    expected="plan",
    scenario=GPT,
    layout="hybrid_tp",
    steps=1,
)
def ranks_disagree_on_a_predicate() -> list[Any]:
    """The last rank says that it cuts nothing."""

    def observed(original: Any, model: nn.Module, mesh: Any) -> dict[str, Any]:
        seen: dict[str, Any] = original(model, mesh)
        last = mesh.rank == mesh.degrees.world - 1
        return seen | {"tensor_parallel_active": not last}

    return [(apply, "_observed", observed)]


@mutant(
    "factors of LoRA, which are whole on every rank, keep the gradient of the rank's own tokens",
    expected="replicas",
    scenario="hybrid_lora",
    layout="hybrid_ep",
    steps=2,
)
def lora_not_synchronized() -> list[Any]:
    """Gradients are taken for what the factors are: whole."""

    def spread(original: Any, *args: Any) -> Any:
        factor, _ = original(*args)
        return factor, list(factor.placements)

    return [(lora, "_spread", spread)]
