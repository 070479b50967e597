"""Gradients that some ranks have and others lack."""

from typing import Any

import torch
from torch import Tensor, nn

from samestep.stress.models import TINY_GROUPS, tiny
from samestep.stress.scenario import RATES, GradientScenario

# What even and odd ranks have: the four cases of two ranks, repeated over any number of them.
PATTERNS = ((1.0, None), (None, -0.5), (0.25, 0.75), (None, None))


class TinyScenario(GradientScenario):
    """On the tiny model with its three groups, or on any other model."""

    takes_any_model = True

    def own_model(self) -> nn.Module:
        """One AdamW parameter, two groups of Muon parameters."""
        return tiny()

    def options(self) -> dict[str, Any]:
        """Buckets so small that there are several, and hardly anything below the crossover."""
        own = {} if self._make_model is not None else {"groups": TINY_GROUPS}
        return {**RATES, "crossover": 64, "bucket_size": 600, **own}


class FourPatterns(TinyScenario):
    """All parameters of a rank have one value, or none."""

    name = "dist_adamw_muon"
    story = "four patterns of present and missing gradients in turn, constant values"

    def options(self) -> dict[str, Any]:
        """A low rate: the gradients push one way, and rounding grows with the parameters."""
        return {**super().options(), "lr": 2**-9, "bucket_size": 2000}

    def gradient(
        self, name: str, place: int, param: Tensor, step: int, rank: int, micro: int
    ) -> Tensor | None:
        """The value of the pattern in every element."""
        value = PATTERNS[step % 4][rank % 2]
        return None if value is None else torch.full_like(param, value)


class FourPatternsRandom(TinyScenario):
    """Every parameter is in another phase of the cycle, and every rank's gradient is its own."""

    name = "dist_adamw_muon_random"
    story = "the same patterns, each parameter in a phase of its own, random full-rank gradients"

    def gradient(
        self, name: str, place: int, param: Tensor, step: int, rank: int, micro: int
    ) -> Tensor | None:
        """Random numbers where the pattern has a value."""
        value = PATTERNS[(step + place) % 4][rank % 2]
        return None if value is None else value * self.random(param.shape, place, step, rank)


class UnevenAccumulation(TinyScenario):
    """Ranks contribute to different numbers of micro-batches of a step."""

    name = "uneven_accumulation"
    story = "three micro-batches under no_sync(), to which ranks contribute differently often"

    def micro_batches(self, step: int) -> int:
        """Three."""
        return 3

    def gradient(
        self, name: str, place: int, param: Tensor, step: int, rank: int, micro: int
    ) -> Tensor | None:
        """Present in two of three micro-batches, in one, or in none."""
        nowhere, not_here = (place + step) % 5 == 4, (place + step + rank) % 4 == 1
        if nowhere or not_here or (micro + rank + place + step) % (2 + rank % 2) == 0:
            return None
        return self.random(param.shape, place, step, rank, micro)


class UnevenAccumulationSharded(UnevenAccumulation):
    """The same without keeping whole gradients."""

    name = "uneven_accumulation_sharded"
    story = "the same, with synchronize() after each micro-batch"
    accumulation = "synchronize"


class AllocatorChurn(FourPatternsRandom):
    """Whoever frees or reuses a buffer that is still on its way loses its content."""

    name = "allocator_churn"
    story = "memory freed after each launch is filled with garbage before anyone waits"
    churns = True


class DifferentStart(FourPatternsRandom):
    """The optimizer has to notice, and to give all ranks the first one's."""

    name = "different_start"
    story = "replicas that differ before the first step"
    starts_differ = True
