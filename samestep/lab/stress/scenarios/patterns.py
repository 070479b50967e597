"""Gradients that some ranks have and others lack, as given and as models make them."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from samestep.lab.stress.layouts import LAYOUT_SETS
from samestep.lab.stress.models import GPT, TINY_GROUPS, Matrices, MixtureOfExperts, tiny
from samestep.lab.stress.scenario import (
    RATES,
    Edit,
    Event,
    GradientScenario,
    Loop,
    Scenario,
    Wanted,
    on_device_of,
)

# What even and odd ranks have: the four cases of two ranks, repeated over any number of them.
PATTERNS = ((1.0, None), (None, -0.5), (0.25, 0.75), (None, None))
SMALL = {**RATES, "lr": 2**-11, "crossover": 64, "bucket_size": 4000}
RECYCLE_EVERY = 40


class TinyScenario(GradientScenario):
    """On the tiny model with its three groups, or on any other model."""

    takes_any_model = True

    def own_model(self) -> nn.Module:
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

    def gradient(self, of: Wanted) -> Tensor | None:
        value = PATTERNS[of.step % 4][of.rank % 2]
        return None if value is None else torch.full_like(of.param, value)


class FourPatternsRandom(TinyScenario):
    """Every parameter is in another phase of the cycle, and every rank's gradient is its own."""

    name = "dist_adamw_muon_random"
    story = "the same patterns, each parameter in a phase of its own, random full-rank gradients"

    def gradient(self, of: Wanted) -> Tensor | None:
        value = PATTERNS[(of.step + of.place) % 4][of.rank % 2]
        return None if value is None else value * self.drawn(of)


class UnevenAccumulation(TinyScenario):
    """Ranks contribute to different numbers of micro-batches of a step."""

    name = "uneven_accumulation"
    story = "three micro-batches under no_sync(), to which ranks contribute differently often"

    def micro_batches(self, step: int) -> int:
        return 3

    def gradient(self, of: Wanted) -> Tensor | None:
        """Present in two of three micro-batches, in one, or in none."""
        _, place, param, step, rank, micro = of
        nowhere, not_here = (place + step) % 5 == 4, (place + step + rank) % 4 == 1
        if nowhere or not_here or (micro + rank + place + step) % (2 + rank % 2) == 0:
            return None
        return self.random(param.shape, place, step, rank, micro)


class UnevenAccumulationSharded(UnevenAccumulation):
    """Accumulation that keeps no whole gradients."""

    name = "uneven_accumulation_sharded"
    story = "the same, with synchronize() after each micro-batch"
    accumulation = "synchronize"


class AllocatorChurn(FourPatternsRandom):
    """A scenario in which freeing or reusing a buffer that is on its way loses its content."""

    name = "allocator_churn"
    story = "memory freed after each launch is filled with garbage before anyone waits"
    churns = True


class DifferentStart(FourPatternsRandom):
    """The optimizer has to notice, and to give all ranks the first one's."""

    name = "different_start"
    story = "replicas that differ before the first step"
    starts_differ = True


# --- models that compute different things on different ranks -------------------------------------


class MegatronConditional(Scenario):
    """Layers are skipped, neurons recycled and the second head is used, on each rank by itself."""

    name = "megatron_conditional"
    story = "a GPT with skipped layers, recycled neurons and a second head, toggled per rank"
    loop: ClassVar[Loop] = "recorded"
    layers: ClassVar[int] = 1

    def own_model(self) -> nn.Module:
        return GPT(layers=self.layers)

    def options(self) -> dict[str, Any]:
        """Fused QKV is cut. One wave, as there is little to send."""
        cut = {"*.qkv.weight": {"split_sizes": (16, 16, 16)}}
        return {**SMALL, "overrides": cut, "waves": 1}

    def events(self, step: int) -> Sequence[Event]:
        """Now and then some neurons start afresh, on all ranks alike."""
        if step == 0 or step % RECYCLE_EVERY:
            return ()
        layer = step // RECYCLE_EVERY % self.layers
        fresh = torch.Generator().manual_seed(self.seed + step)
        return (Edit(f"layers.{layer}.recycle", 1 + 0.1 * torch.randn(32, generator=fresh)),)

    def loss(self, model: nn.Module, step: int, rank: int, micro: int) -> Tensor | None:
        """The loss of a rank's own tokens; every sixth step one rank has none."""
        if step % 6 == 5 and step // 6 % self.world == rank:
            return None
        generator = torch.Generator().manual_seed(self.seed + 7919 * step + rank)
        tokens = torch.randint(40, (2, 8), generator=generator)
        loss: Tensor = model(
            on_device_of(model, tokens),
            skipped=frozenset(n for n in range(self.layers) if (step // 2 + n + rank) % 3 == 0),
            recycled=(step // 5 + rank) % 4 == 0,
            second=(step + rank) % 4 == 0,
        )
        return loss


class MegatronConditionalLive(MegatronConditional):
    """With the gradients of each layout's own parameters."""

    name = "megatron_conditional_live"
    story = "the same with two layers, each layout with the gradients of its own parameters"
    loop: ClassVar[Loop] = "closed"
    layers: ClassVar[int] = 2


class EmptyExpert(Scenario):
    """Every rank has tokens for some experts only; at times nobody has any for one."""

    name = "empty_expert"
    story = "a mixture of experts in which some get no tokens on some ranks, or on all"
    loop: ClassVar[Loop] = "closed"

    def own_model(self) -> nn.Module:
        return MixtureOfExperts()

    def options(self) -> dict[str, Any]:
        return {**SMALL, "bucket_size": 500}

    def loss(self, model: nn.Module, step: int, rank: int, micro: int) -> Tensor | None:
        """Tokens for two of four experts; expert 3 gets some in every third step only."""
        generator = torch.Generator().manual_seed(self.seed + 104729 * step + rank)
        experts = [(step + rank) % 3, 3 if step % 3 == 0 else (step + rank + 1) % 3]
        picks = torch.randint(2, (10,), generator=generator)
        rows = torch.randint(6, (10,), generator=generator)
        tokens = 4 * rows + torch.tensor(experts)[picks]
        loss: Tensor = model(on_device_of(model, tokens))
        return loss


class FixedCapacity(GradientScenario):
    """Experts without tokens have a gradient of zeros, so momentum goes on moving them."""

    name = "fixed_capacity"
    story = "experts without tokens have zeros, which count as a gradient"
    bucket_size: ClassVar[int] = 400

    def own_model(self) -> nn.Module:
        """A stack of experts, single ones, and a small parameter that backward reaches first."""
        shapes: dict[str, tuple[int, ...]] = {f"expert_{number}": (12, 8) for number in range(3)}
        return Matrices({"router": (8, 5), "stack": (3, 10, 8), **shapes, "temperature": (7,)})

    def options(self) -> dict[str, Any]:
        return {
            **RATES,
            "crossover": 32,
            "bucket_size": self.bucket_size,
            "groups": [
                {"params": ["router", "temperature"], "rule": "adamw"},
                {"params": ["stack"], "rule": "muon"},
                {"params": ["expert_*"], "rule": "muon"},
            ],
        }

    def gradient(self, of: Wanted) -> Tensor | None:
        grad = self.drawn(of)
        if of.name == "stack":
            for expert in range(len(grad)):
                if not self._has_tokens(expert, of.step, of.rank):
                    grad[expert] = 0
        elif of.name.startswith("expert") and not self._has_tokens(of.place, of.step, of.rank):
            return self.without_tokens(of.param)
        return grad

    def without_tokens(self, param: Tensor) -> Tensor | None:
        return torch.zeros_like(param)

    def _has_tokens(self, expert: int, step: int, rank: int) -> bool:
        return (step + expert) % 4 != 0 and (step + expert + rank) % 3 == 0


class ConditionalCompute(FixedCapacity):
    """Experts without tokens are not computed: without a gradient anywhere nothing moves them."""

    name = "conditional_compute"
    story = "the same experts have no gradient, which leaves them untouched"
    bucket_size: ClassVar[int] = 120  # one expert each, so that a rank owns nothing in a bucket

    def without_tokens(self, param: Tensor) -> Tensor | None:
        return None


class ExpertStacks(ConditionalCompute):
    """Stacks that an axis of experts cuts evenly; a rank without any token for one lacks it."""

    name = "expert_stacks"
    story = "stacks of four experts, of which ranks without tokens have no gradient"
    layouts = LAYOUT_SETS["copies"]

    def own_model(self) -> nn.Module:
        return Matrices(
            {
                "router": (8, 6),
                "stack": (4, 10, 8),
                "gate_stack": (4, 6, 8),
                "bias_stack": (4, 6, 4),
                "norm": (10,),
                "dense": (12, 8),
            }
        )

    def options(self) -> dict[str, Any]:
        """Muon with variance reduction, which is of whole matrices; biases by AdamW."""
        groups: list[dict[str, Any]] = [
            {"params": ["router", "norm", "bias_stack"], "rule": "adamw"},
            {"params": ["dense", "gate_stack"], "rule": "muon"},
            {"params": ["stack"], "rule": "muon", "variance_beta2": 0.9},
        ]
        return {**super().options(), "groups": groups}

    def gradient(self, of: Wanted) -> Tensor | None:
        """Zeros for experts without tokens, None where there is none for the whole stack."""
        grad = self.drawn(of)
        if of.param.dim() < 3:
            return None if (of.step + of.place + of.rank) % 3 == 0 else grad
        turn = of.step + of.place
        having = [self._has_tokens(expert, turn, of.rank) for expert in range(len(grad))]
        grad[[not has for has in having]] = 0
        return grad if any(having) else None
