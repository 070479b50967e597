"""Recipes: clipping, schedules, variance reduction, fused matrices, overflow, saving."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from samestep.lab.stress.models import Matrices
from samestep.lab.stress.scenario import (
    RATES,
    AddGroup,
    Event,
    GradientScenario,
    Place,
    Resume,
    SetOptions,
    Train,
    Wanted,
)
from samestep.lab.stress.scenarios.patterns import FourPatternsRandom, TinyScenario

SMALL_TOO = 170  # as crossover: the second group of Muon's is replicated, the rest is sharded


class FrozenAndAdded(TinyScenario):
    """Parameters leave and come back, and new ones come."""

    name = "frozen_and_added"
    story = "parameters frozen, unfrozen and added while training"
    takes_any_model = False

    def options(self) -> dict[str, Any]:
        """Small buckets, so that one is complete before a parameter that was just unfrozen."""
        return {**super().options(), "bucket_size": 300}

    def own_model(self) -> nn.Module:
        # Three parameters that the optimizer does not get at first.
        late = {"late_adam": (19, 5), "late_muon_0": (10, 14), "late_muon_1": (10, 14)}
        shapes = {"adam": (23, 9), "mu_a_0": (16, 12), "mu_a_1": (16, 12), "mu_b_0": (8, 20)}
        model = Matrices({**shapes, **late})
        for name in late:
            model.get_parameter(name).requires_grad_(False)
        return model

    def events(self, step: int) -> Sequence[Event]:
        """Two groups come at steps 7 and 12; every 20 steps two parameters rest for 9."""
        if step == 7:
            return (AddGroup(("late_muon_0", "late_muon_1"), {"rule": "muon", "lr": 2**-6}),)
        if step == 12:
            return (AddGroup(("late_adam",), {"rule": "adamw", "weight_decay": 0.0}),)
        if step % 20 == 5:
            return (Train(("adam", "mu_a_1"), False),)
        return (Train(("adam", "mu_a_1"), True),) if step % 20 == 14 else ()

    def gradient(self, of: Wanted) -> Tensor | None:
        if (of.step + of.place + of.rank) % 4 == 3:
            return None
        return self.drawn(of)


class NotFinite(FourPatternsRandom):
    """The step is skipped on all ranks, and nothing of it stays."""

    name = "not_finite"
    story = "inf or NaN on one rank every 7 steps: that step changes nothing anywhere"

    def options(self) -> dict[str, Any]:
        """No limit, but the check."""
        return {**super().options(), "max_grad_norm": math.inf, "crossover": SMALL_TOO}

    def gradient(self, of: Wanted) -> Tensor | None:
        """One bad element in one parameter of one rank; also of those that are replicated."""
        grad = super().gradient(of)
        number, phase = divmod(of.step, 7)
        unlucky = phase >= 5 and of.rank == number % self.world and of.place == 4 * number % 6
        if grad is not None and unlucky:
            grad.view(-1)[number % grad.numel()] = math.inf if number % 2 else math.nan
        return grad


class Overflow(NotFinite):
    """The scale must stay the same on every rank."""

    name = "overflow_scaler"
    story = "the same under a GradScaler, whose scale all ranks share"
    scales = True

    def options(self) -> dict[str, Any]:
        return {**super().options(), "max_grad_norm": None}


class Clipped(FourPatternsRandom):
    """The joint norm of the averaged gradients decides, not that of a rank's own."""

    name = "clipped"
    story = "max_grad_norm=1 with gradients of very different sizes on ranks"

    def options(self) -> dict[str, Any]:
        """A limit that most steps exceed."""
        return {**super().options(), "max_grad_norm": 1.0, "crossover": SMALL_TOO}

    def gradient(self, of: Wanted) -> Tensor | None:
        """Ten times larger on odd ranks, and small in every fifth step."""
        grad = super().gradient(of)
        size = 10.0 if of.rank % 2 else 1.0
        return None if grad is None else grad * (size if of.step % 5 else 0.001)


class ClippedByRule(Clipped):
    """Each rule has a norm of its own; Muon's is only looked at."""

    name = "clipped_by_rule"
    story = "the same with a limit for AdamW's parameters alone"

    def options(self) -> dict[str, Any]:
        return {**super().options(), "max_grad_norm": {"adamw": 1.0, "muon": math.inf}}


class Schedules(FourPatternsRandom):
    """Learning rate, momentum and decay of either rule move at every step."""

    name = "schedules"
    story = "warm-up and cosine for the learning rates, momentum from 0.85 to 0.95, moving decay"

    def events(self, step: int) -> Sequence[Event]:
        phase = step % 100
        rate = 0.02 * (phase + 1) / 10 if phase < 10 else 0.01 * (1 + math.cos(phase * 0.031))
        momentum = 0.85 + 0.1 * min(phase, 50) / 50
        muon = {"lr": rate, "momentum": momentum, "weight_decay": 0.1 * rate}
        adamw = {"lr": rate / 2, "betas": (momentum - 0.05, 0.95 + phase * 1e-4)}
        return SetOptions("muon", muon), SetOptions("adamw", adamw)


class SchedulesToZero(FourPatternsRandom):
    """Numbers that a compiler may take for constants."""

    name = "schedules_to_zero"
    story = "rates, momentum and decay pass through exactly 0 and 1, each in its own turn"

    def events(self, step: int) -> Sequence[Event]:
        """All are powers of two but for momentum; warm-up begins and cool-down ends with 0."""
        rate = (0.0, 2**-8, 2**-7, 2**-7, 2**-8)[step % 5]
        decay = (0.0, 2**-3, 1.0)[step % 3]
        momentum = (0.0, 0.9, 0.95, 0.9, 0.5, 0.95, 0.9)[step % 7]
        muon = {"lr": rate, "momentum": momentum, "weight_decay": decay}
        adamw = {"lr": rate, "betas": (momentum, 0.95), "weight_decay": 1.0 - decay}
        return SetOptions("muon", muon), SetOptions("adamw", adamw)


class NorMuon(FourPatternsRandom):
    """A recipe that looks at whole rows, whole norms and signs."""

    name = "normuon_cautious"
    story = "variance reduction, cautious decay, row equilibration, sum momentum, 3-D stacks"
    takes_any_model = False

    def own_model(self) -> nn.Module:
        return Matrices(
            {"adam": (23, 9), "mu_a_0": (20, 8), "mu_a_1": (20, 8), "mu_b_0": (3, 8, 12)}
        )

    def options(self) -> dict[str, Any]:
        options = super().options()
        adam, mu_a, mu_b = options.pop("groups")
        nanochat = {"equilibrate": True, "renormalize": True, "variance_beta2": 0.9, "lr": 2**-4}
        # A sign that rounding flips costs lr x decay x |p|, which must stay below the limit.
        cautious = {"cautious": True, "lr": 2**-6, "weight_decay": 2**-5, "variance_beta2": 0.9}
        sums = {"momentum_form": "sum", "adjust_lr": "original"}
        groups = [adam, {**mu_a, **nanochat}, {**mu_b, **cautious, **sums}]
        return {**options, "groups": groups}


class OptionsOfPeers(FourPatternsRandom):
    """The math of other libraries: state and factors that the usual options do not have."""

    name = "options_of_peers"
    story = "AdaMuon; NorMuon per row; AdamW with cautious, independent decay and eps before"

    def options(self) -> dict[str, Any]:
        options = super().options()
        adam, mu_a, mu_b = options.pop("groups")
        adam |= {"eps_hat": True, "cautious": True, "decay_form": "independent"}
        rows = {
            "variance_beta2": 0.9, "variance_axis": "rows", "variance_eps": 1e-8,
            "variance_eps_form": "add", "adjust_lr": "unit_rms_norm", "update_scale": 0.5,
            "orthogonalize": "quintic", "decay_form": "independent",
        }  # fmt: skip
        decays = {"weight_decay": 2**-9}
        groups = [{**adam, **decays}, {**mu_a, "rule": "adamuon"}, {**mu_b, **rows, **decays}]
        return {**options, "groups": groups}


class Resumed(FourPatternsRandom):
    """A resume: the run goes on with what was saved."""

    name = "resume"
    story = "saved, and loaded into a new optimizer, every 10 steps; options set between are kept"

    def events(self, step: int) -> Sequence[Event]:
        """Resumed after 10, 20, ... steps; options are set in between, and not again after."""
        if step % 10 == 4:
            low = step % 20 == 4
            muon = {"lr": 2**-8 if low else 2**-7, "momentum": 0.9 if low else 0.95}
            adamw = {"lr": muon["lr"], "betas": (0.8, 0.9) if low else (0.9, 0.95)}
            return SetOptions("muon", muon), SetOptions("adamw", adamw)
        return (Resume(),) if step and step % 10 == 0 else ()


class ResumedMidrun(Resumed):
    """With `samestep.save` and `samestep.load`, against a run that was never interrupted."""

    name = "resume_midrun"
    story = (
        "begun in one process, loaded on all ranks, later in a new run, another layout, and back"
    )
    saves = True
    begun_alone = 5

    def events(self, step: int) -> Sequence[Event]:
        """Options are set, and not again after loading."""
        return [event for event in super().events(step) if not isinstance(event, Resume)]

    def goes_on(self, step: int) -> Place | None:
        """Early in short runs, and again in every 100 steps of long ones."""
        places: dict[int, Place] = {8: "here", 11: "elsewhere", 14: "here"}
        return places.get(step % 100)


class FusedQKV(GradientScenario):
    """A fused matrix with `split_sizes` must move as separate matrices do."""

    heads: ClassVar[tuple[int, int, int]]

    @property
    def stored(self) -> tuple[int, int]:
        """The shape of the fused matrix."""
        return (sum(self.heads), 12)

    @property
    def cut(self) -> dict[str, Any]:
        """The options that say where its parts are."""
        return {"split_sizes": self.heads}

    def apart(self, fused: Tensor) -> Sequence[Tensor]:
        """The parts of the fused weight: (out, in) each."""
        return torch.split(fused, list(self.heads))

    def own_model(self) -> nn.Module:
        model = Matrices({"adam": (11, 7), "fused": self.stored})
        parts = self.apart(model.get_parameter("fused").detach())
        for name, part in zip("qkv", parts, strict=True):
            model.register_parameter(name, nn.Parameter(part.clone()))
        return model

    def options(self) -> dict[str, Any]:
        """With variance reduction, so that shapes of state differ too."""
        muon = {"rule": "muon", "variance_beta2": 0.9}
        fused = {**muon, "params": ["fused"], **self.cut}
        groups = [{"params": ["adam"], "rule": "adamw"}, fused, {**muon, "params": ["[qkv]"]}]
        return {**RATES, "crossover": 32, "bucket_size": 400, "groups": groups}

    def gradient(self, of: Wanted) -> Tensor | None:
        """The parts of the fused matrix's, present on the same ranks."""
        if (of.step + of.rank) % 3 == 0 or (of.step % 7 == 6 and of.name != "adam"):
            return None
        if of.name == "adam":
            return self.random(of.param.shape, 1, of.step, of.rank)
        whole = self.random(self.stored, 0, of.step, of.rank)
        return whole if of.name == "fused" else self.apart(whole)["qkv".index(of.name)]

    def broken_promise(self, params: Mapping[str, Tensor]) -> str | None:
        """Fused and separate matrices are equal, bit for bit."""
        fused, apart = (
            torch.cat([*self.apart(params["fused"])]),
            torch.cat([params[name] for name in "qkv"]),
        )
        if torch.equal(fused, apart):
            return None
        distance = float((fused - apart).abs().max())
        return f"the fused matrix and the separate ones differ by {distance:.3g}"


class FusedMHA(FusedQKV):
    """A fused weight with as many keys and values as queries."""

    name = "fused_qkv_mha"
    story = "fused QKV against separate matrices, multi-head"
    heads = (12, 12, 12)


class FusedGQA(FusedQKV):
    """Fewer keys and values."""

    name = "fused_qkv_gqa"
    story = "fused QKV against separate matrices, grouped queries"
    heads = (24, 8, 8)


class FusedMQA(FusedQKV):
    """One head of keys and values."""

    name = "fused_qkv_mqa"
    story = "fused QKV against separate matrices, one head of keys and values"
    heads = (24, 3, 3)


class FusedInGroups(FusedQKV):
    """Every one of three groups has 6 rows of queries, 2 of keys and 2 of values, as columns."""

    name = "fused_qkv_groups"
    story = "Q, K, V of each group in turn, stored as (in, out), against separate matrices"
    heads = (18, 6, 6)

    @property
    def stored(self) -> tuple[int, int]:
        return (12, sum(self.heads))

    @property
    def cut(self) -> dict[str, Any]:
        return {"split_sizes": "interleaved:6+2+2x3", "transposed": True}

    def apart(self, fused: Tensor) -> Sequence[Tensor]:
        rows: list[list[int]] = [
            [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25],
            [6, 7, 16, 17, 26, 27],
            [8, 9, 18, 19, 28, 29],
        ]
        return [fused.mT[own].contiguous() for own in rows]
