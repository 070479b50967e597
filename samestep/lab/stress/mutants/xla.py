"""Bugs of a step that is one XLA program: it is compiled again, waited for, or kept whole."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from samestep.lab.stress.mutants.mutant import RANDOM, mutant
from samestep.optimizer.step import StepRunner
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
