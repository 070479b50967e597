"""Bugs of a step that is one XLA program: it is compiled again, waited for, or kept whole.

And of parameters that lie otherwise than a plan says, which no value would ever show.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from samestep.lab.stress.mutants.mutant import RANDOM, mutant
from samestep.mesh.spmd import Spec
from samestep.optimizer.step import StepRunner
from samestep.parallel import spmd
from samestep.update import plain
from samestep.xla import tiling

PLACE: dict[str, Any] = {"device": "xla", "layout": "xla_data"}
Values = Mapping[str, float | Tensor]


@mutant("programs", "schedules", replaces=(plain, "_as_one_vector"), **PLACE)
def python_float(
    scalars: Callable[..., Any], values: Values, device: torch.device
) -> Mapping[str, Any]:
    """Betas are numbers of Python, whose powers are written into the program, step by step."""
    floats = {key: value for key, value in values.items() if key in ("beta1", "beta2")}
    return {**scalars(values, device), **floats}


@mutant("programs", "schedules_to_zero", replaces=(plain, "_as_one_vector"), **PLACE)
def scalars_one_by_one(
    _: Callable[..., Any], values: Values, device: torch.device
) -> Mapping[str, Tensor]:
    """Scalars are filled one by one, and XLA takes a single 0 or 1 for a constant."""
    found = {}
    for key, value in values.items():
        found[key] = torch.zeros((), dtype=torch.float64, device=device)
        found[key].fill_(float(value))
    return found


@mutant("host_reads", "clipped", replaces=(StepRunner, "_clip"), **PLACE)
def host_read(clip: Callable[..., None], runner: StepRunner, operation: Any) -> None:
    """The host looks at the norm, and the devices wait for it."""
    clip(runner, operation)
    if runner.grad_norm is not None:
        float(runner.grad_norm)


@mutant("memory", RANDOM, **PLACE)
def state_left_whole() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Every device keeps all of the state."""

    def lay_out(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return original(*args, **{**options, "shares": False})

    return [(tiling, "lay_out", lay_out)]


@mutant("host_reads", RANDOM, **PLACE)
def values_lie_anywhere() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Nobody says where new values lie, so the partitioner moves them, and they are moved back."""
    return [(tiling, "stay", lambda _, found: None)]


HYBRID: dict[str, Any] = {
    "device": "xla", "layout": "xla_hybrid_tp_sp_ep", "world": 4, "steps": 1,
    "replaces": (spmd, "partition_specs"),
}  # fmt: skip
Specs = dict[str, Spec]


@mutant("contract", "hybrid_gpt", **HYBRID)
def router_sharded_in_a_program(specs: Callable[..., Specs], *args: Any, **options: Any) -> Specs:
    """A router looks like any linear layer, and its spec cuts it over the model axis."""
    found = specs(*args, **options)
    return {name: (("model",), ()) if "router" in name else spec for name, spec in found.items()}


@mutant("contract", "hybrid_gpt", **HYBRID)
def columns_cut_for_rows(specs: Callable[..., Specs], *args: Any, **options: Any) -> Specs:
    """The specs of queries cut their inputs, as those of a row layer, and XLA makes it right."""
    found = specs(*args, **options)
    return {
        name: ((), ("model",)) if name.endswith("q.weight") else spec
        for name, spec in found.items()
    }


@mutant("plan", "hybrid_gpt", **HYBRID)
def experts_asked_of_the_wrong_mesh(
    specs: Callable[..., Specs], model: Any, plan: Any, degrees: Any, **options: Any
) -> Specs:
    """Experts lie on their axis only if they have tensor parallel of their own to be asked for."""
    found = specs(model, plan, degrees, **options)
    if degrees.expert_tensor_parallel > 0:
        return found
    stacks = {name for name, _ in plan.stacks(model)}
    return {
        name: tuple(tuple(axis for axis in axes if axis != "expert") for axes in spec)
        if name in stacks
        else spec
        for name, spec in found.items()
    }
