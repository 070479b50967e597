"""State in fewer bits: 8, 16 rounded at random, and master copies that are remainders.

What is rounded at random is so by bits that belong to each element, so that layouts agree to the
bit; the reference, which rounds nothing, is some way off.
"""

from collections.abc import Mapping
from math import lcm
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from samestep.lab.stress.models import TINY_GROUPS, Matrices
from samestep.lab.stress.scenario import Place, Wanted
from samestep.lab.stress.scenarios.patterns import FourPatternsRandom


class EightBits(FourPatternsRandom):
    """Moments and momentum in 8 bits, in rows that every layout cuts between blocks."""

    name = "small_state_8bit"
    story = "moments in 8 bits, resumed twice; `adam_odd` and `mu_b_odd` stay in 32"
    takes_any_model = False
    saves = True
    limits: ClassVar[Mapping[str, float] | None] = {"adam": 0.05, "mu_a": 0.05, "mu_b": 0.05}
    state_dtypes: ClassVar[Any] = "8bit/32"

    def own_model(self) -> nn.Module:
        cols = 32 * lcm(4, self.world)  # also where rows are cut, no scale is
        shapes = {
            "adam": (23, cols), "adam_odd": (23, 9), "mu_a_0": (16, cols), "mu_a_1": (16, cols),
            "mu_b_0": (8, cols), "mu_b_odd": (8, 20),
        }  # fmt: skip
        return Matrices(shapes)  # type: ignore[arg-type]

    def options(self) -> dict[str, Any]:
        """Buckets so small that parameters of AdamW are cut several times."""
        groups = [{**group, "state_dtypes": self.state_dtypes} for group in TINY_GROUPS]
        return {**super().options(), "groups": groups, "bucket_size": 2000}

    def goes_on(self, step: int) -> Place | None:
        places: dict[int, Place] = {4: "elsewhere", 9: "here"}
        return places.get(step)


class RandomBFloat16(EightBits):
    """A value rounded to bfloat16, to one of its neighbours at random."""

    name = "small_state_bf16"
    story = "moments in bfloat16, rounded at random, resumed twice"
    state_dtypes: ClassVar[Any] = "bf16_stochastic"


class Remainders(EightBits):
    """bfloat16 parameters whose master copies are what these lack, and moments in 8 bits."""

    name = "small_state_remainder"
    story = "bfloat16 parameters, master copies as remainders of 16 bits, moments in 8 bits"
    state_dtypes: ClassVar[Any] = {
        "exp_avg": "8bit/32",
        "exp_avg_sq": "bf16_stochastic",
        "momentum_buffer": "8bit/32",
        "master_weight": "remainder",
    }

    def own_model(self) -> nn.Module:
        return super().own_model().to(torch.bfloat16)

    def options(self) -> dict[str, Any]:
        return {**super().options(), "master_weights": True}

    def gradient(self, of: Wanted) -> Tensor | None:
        """Eighths, times what no power of two divides: their mean has few bits, as bfloat16 has."""
        grad = super().gradient(of)
        if grad is None:
            return None
        odd = self.world // (self.world & -self.world)
        return (grad * 8).round().clamp(-16, 16).mul(odd / 8).to(torch.bfloat16)
