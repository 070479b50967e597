"""Bugs about the joint norm, steps that are skipped, and the scale of a GradScaler."""

from typing import Any

import torch
from torch import Tensor

from samestep.comm.collectives import Pending
from samestep.optimizer import step as rule_optimizer
from samestep.optimizer.grad_scaler import GradScaler
from samestep.placements.whole.reduction import GradientReducer
from samestep.stress.mutants.mutant import mutant
from samestep.stress.scenarios.recipes import SMALL_TOO


@mutant(
    "each rank clips by the norm of its own gradients, before they are averaged",
    expected="state",
    scenario="clipped",
)
def clipped_before_averaging() -> list[Any]:
    """Ranks with large gradients count for less."""

    def end_round(original: Any, self: GradientReducer, problem: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self._params, 1.0)
        original(self, problem)

    return [(GradientReducer, "end_round", end_round)]


@mutant(
    "each rank decides by itself whether a step has overflowed",
    expected="state",
    scenario="not_finite",
)
def overflow_not_shared() -> list[Any]:
    """Owners of the bad values skip, the others do not."""

    def own_norm(original: Any, name: str, values: Tensor, group: Any) -> Pending[Tensor]:
        return Pending(None, (values,), lambda: values)

    return [(rule_optimizer, "total", own_norm)]


@mutant(
    "a step with inf or NaN is taken, and momentum never recovers",
    expected="reference",
    scenario="not_finite",
)
def overflow_taken() -> list[Any]:
    """The verdict is ignored."""

    def clip(original: Any, self: Any, operation: Any) -> None:
        original(self, operation)
        self._verdict = rule_optimizer.Verdict()

    return [(rule_optimizer.RuleOptimizer, "_clip", clip)]


@mutant(
    "small parameters, which every rank updates, are left out of the joint norm",
    expected="state",
    scenario="clipped",
)
def small_left_out_of_the_norm() -> list[Any]:
    """Counted by all they would count several times, so they are counted by none."""

    def square_sum(original: Any, grads: Any) -> Tensor | None:
        result: Tensor | None = original([g for g in grads if g.numel() >= SMALL_TOO])
        return result

    return [(rule_optimizer, "square_sum", square_sum)]


@mutant(
    "the scale of a GradScaler grows, and is never reduced after an overflow",
    expected="state",
    scenario="overflow_scaler",
)
def scale_never_backs_off() -> list[Any]:
    """The step is skipped, but the scaler does not hear of it."""

    def step(original: Any, self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(self, optimizer, *args, **kwargs)
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for device in found:
            found[device] = torch.zeros_like(found[device])

    return [(GradScaler, "step", step)]
