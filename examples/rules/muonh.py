"""MuonH: Muon whose weights stay on a sphere (Wen, Dang, Lyu, Ma and Liang, "Hyperball", 2025).

    W <- R norm(W - lr R norm(u)),   norm(X) = X / ||X||_F

u is Muon's orthogonalized momentum, and R is ||W||_F of the step before, as Megatron's
`MuonHyperball` has it: the first weight's norm for good, but for rounding. So `lr` is the angle of
a step, and there is no weight decay.

    import samestep
    from examples.rules.muonh import MuonH

    samestep.register_rule(MuonH())
    opt = samestep.MuonAdamW(model, overrides={"*.weight": {"rule": "muonh", "lr": 0.02}})

Three sums over the whole weight say how long it and the step are, and by the cosine between them
how long the new weight would be. Where weights are divided each rank adds up what it holds, and
the library the rest: nothing else travels than for Muon.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from samestep.rules import MuonRule, checks

Tensors = Mapping[str, Tensor]
Options = Mapping[str, Any]

# Of Muon's: what scales an update, or shrinks the weight.
NOT_HERE = (
    "weight_decay", "decay_form", "scale_decay", "cautious", "adjust_lr", "update_scale",
)  # fmt: skip


class MuonH(MuonRule):
    """The matrix rule `"muonh"`: Muon's options but those of `NOT_HERE`, and `radius`."""

    name = "muonh"
    defaults: ClassVar[Options] = {
        **{key: value for key, value in MuonRule.defaults.items() if key not in NOT_HERE},
        "lr": 0.02,
        "radius": None,  # of every weight; None: the norm that it has
    }
    schedulable = frozenset({"lr", "momentum", "variance_beta2"})
    taken: ClassVar = {
        **{key: check for key, check in MuonRule.taken.items() if key not in NOT_HERE},
        "radius": checks.optional(checks.positive),
    }

    def scalars(self, options: Options) -> dict[str, float | Tensor]:
        return super().scalars({**options, "weight_decay": 0.0})

    def sums(self, options: Options) -> tuple[str, ...]:
        """Squares of the weight and of the step, and products of both."""
        return "weight_square", "step_square", "product"

    def summands(
        self,
        param: Tensor,
        direction: Tensor,
        block_shape: tuple[int, ...],
        scalars: Tensors,
        options: Options,
    ) -> dict[str, Tensor]:
        weight, step = param.double(), direction.double()
        return {
            "weight_square": weight.square(),
            "step_square": step.square(),
            "product": weight * step,
        }

    def finish(
        self,
        param: Tensor,
        direction: Tensor,
        block_shape: tuple[int, ...],
        scalars: Tensors,
        options: Options,
    ) -> Tensor:
        """W a - u b, where a and b are numbers of the whole block."""
        weight, step = scalars["weight_square"].sqrt(), scalars["step_square"].sqrt()
        radius = weight if options["radius"] is None else torch.full_like(weight, options["radius"])
        lr = torch.where(step > 0, scalars["lr"].to(weight.dtype), 0.0)
        weight, step = weight.clamp_min(1e-30), torch.where(step > 0, step, 1.0)
        # Of the weight at length 1, what is left of its length after the step.
        cosine = scalars["product"] / (weight * step)
        length = (1 - 2 * lr * cosine + lr.square()).clamp_min(1e-30).sqrt()
        kept, taken = radius / (weight * length), lr * radius / (step * length)
        return param * kept.to(param.dtype) - direction * taken.to(param.dtype)
