"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from samestep.rules import checks
from samestep.rules.rule import Options, Shape, Update


class AdamWRule:
    """The elementwise rule `"adamw"`, the same operations in the same order as torch's.

    p <- p (1 - lr wd)
    m <- m + (1 - beta1) (g - m)
    v <- beta2 v + (1 - beta2) g^2
    p <- p - lr / (1 - beta1^t)  m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    With `amsgrad` the largest v so far stands for v in the last line.
    """

    name = "adamw"
    kind: Literal["elementwise"] = "elementwise"
    defaults: ClassVar[Options] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "amsgrad": False,
    }
    schedulable = frozenset({"lr", "betas", "eps", "weight_decay"})

    def check(self, options: Options) -> None:
        """Raise if an option of the group cannot run."""
        checks.learning_rate(options["lr"])
        checks.betas(options["betas"])
        checks.not_negative("eps", options["eps"])
        checks.not_negative("weight_decay", options["weight_decay"])
        checks.boolean("amsgrad", options["amsgrad"])

    def scalars(self, options: Options) -> dict[str, float | Tensor]:
        """Give the numbers that a schedule may change."""
        beta1, beta2 = options["betas"]
        return {
            "lr": options["lr"],
            "beta1": beta1,
            "beta2": beta2,
            "eps": options["eps"],
            "weight_decay": options["weight_decay"],
        }

    def state_shapes(self, shape: Shape, options: Options) -> dict[str, Shape]:
        """Two moments of the parameter's shape (three with amsgrad), and a step count."""
        shapes = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
        return {**shapes, "max_exp_avg_sq": shape} if options["amsgrad"] else shapes

    def update(
        self,
        param: Tensor,
        grad: Tensor,
        state: Mapping[str, Tensor],
        scalars: Mapping[str, Tensor],
        options: Options,
    ) -> Update:
        """One AdamW step on tensors of any shape."""
        lr, beta1, beta2 = scalars["lr"], scalars["beta1"], scalars["beta2"]
        step = state["step"] + 1
        exp_avg = torch.lerp(state["exp_avg"], grad, (1 - beta1).to(grad.dtype))
        exp_avg_sq = (state["exp_avg_sq"] * beta2).addcmul_(grad * (1 - beta2), grad)
        new_state = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        second_moment = exp_avg_sq
        if options["amsgrad"]:
            second_moment = torch.maximum(state["max_exp_avg_sq"], exp_avg_sq)
            new_state["max_exp_avg_sq"] = second_moment
        correction1 = 1 - beta1**step
        correction2 = 1 - beta2**step
        denominator = second_moment.sqrt().div_(correction2.sqrt()).add_(scalars["eps"])
        step_size = (lr / correction1).to(param.dtype)
        decayed = param * (1 - lr * scalars["weight_decay"])
        return Update(
            decayed.addcdiv_(exp_avg * -step_size, denominator),
            new_state,
            lambda: exp_avg / (denominator * correction1),
        )
