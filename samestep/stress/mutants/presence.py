"""Bugs about which gradients there are."""

from typing import Any

import torch

from samestep.comm.collectives import Pending, total
from samestep.comm.presence import PresenceAgreement
from samestep.optimizer.step import RuleOptimizer
from samestep.placements.whole.reduction import GradientReducer
from samestep.placements.whole.replicated import ReplicatedParameters
from samestep.stress.mutants.mutant import RANDOM, mutant


@mutant(
    "a rank without gradients skips their reduction, and the others wait for it",
    expected="hang",
    scenario="dist_adamw_muon",
)
def no_presence_mask() -> list[Any]:
    """Only buckets of which this rank has a gradient are reduced."""

    def launch(original: Any, self: GradientReducer) -> None:
        members = self._members[self.launched]
        if any(self._params[index].grad is not None for index in members):
            original(self)
            return
        size = self._plan.buckets[self.launched].segment_sizes[self._group.rank]
        nothing = torch.zeros(size)
        self._flying[self.launched] = Pending(None, (), lambda: nothing)
        self.launched += 1

    return [(GradientReducer, "launch_next", launch)]


@mutant(
    "zeros stand in for a gradient that no rank has, so momentum and decay move the parameter",
    expected="reference",
    scenario=RANDOM,
)
def absent_is_not_untouched() -> list[Any]:
    """Everything is present."""

    def agree(original: Any, self: PresenceAgreement, here: Any, problem: Any) -> list[bool]:
        return [True] * len(original(self, here, problem))

    return [(PresenceAgreement, "agree", agree)]


@mutant(
    "a gradient of zeros counts as none, so momentum no longer moves the parameter",
    expected="reference",
    scenario="fixed_capacity",
)
def zeros_are_absent() -> list[Any]:
    """Gradients of zeros are dropped."""

    def end_round(original: Any, self: GradientReducer, problem: Any) -> None:
        for param in self._params:
            if param.grad is not None and not param.grad.any():
                param.grad = None
        original(self, problem)

    return [(GradientReducer, "end_round", end_round)]


@mutant(
    "the step count of a parameter goes on while it has no gradient on any rank",
    expected="state",
    scenario=RANDOM,
)
def step_counted_for_absent() -> list[Any]:
    """Bias correction then is that of another step."""

    def operands(original: Any, self: ReplicatedParameters, number: int) -> Any:
        for piece in self._owned(self.plan.buckets[number]).pieces:
            state = self._state[self.params[piece.param]]
            if self._present[piece.param] is False and "step" in state:
                self._layout.views(piece, state)["step"] += 1
        return original(self, number)

    return [(ReplicatedParameters, "operands", operands)]


@mutant(
    "the mean is taken over the ranks that have a gradient, not over all",
    expected="state",
    scenario=RANDOM,
)
def mean_over_present_ranks() -> list[Any]:
    """The divisor changes from step to step."""
    counts: dict[int, list[float]] = {}

    def agree(original: Any, self: ReplicatedParameters, problem: Any) -> None:
        here = torch.tensor(self.reducer.here, dtype=torch.float32)
        counts[id(self)] = total("ranks present", here, self.group).wait().tolist()
        original(self, problem)

    def average(original: Any, self: ReplicatedParameters, number: int) -> None:
        original(self, number)
        for piece, grad in self._grads[number]:
            grad.mul_(self.group.size / max(counts[id(self)][piece.param], 1.0))

    return [(ReplicatedParameters, "agree", agree), (ReplicatedParameters, "average", average)]


@mutant(
    "only the last micro-batch counts: what came under no_sync() is forgotten",
    expected="reference",
    scenario="uneven_accumulation",
)
def last_micro_batch_only() -> list[Any]:
    """Gradients are dropped at the end of no_sync()."""

    def pause(original: Any, self: RuleOptimizer, paused: bool) -> None:
        original(self, paused)
        if not paused:
            self.zero_grad()

    return [(RuleOptimizer, "_pause_reductions", pause)]


@mutant(
    "Newton-Schulz runs once per micro-batch instead of once per step",
    expected="reference",
    scenario="uneven_accumulation",
)
def step_per_micro_batch() -> list[Any]:
    """Every micro-batch is a step."""

    def pause(original: Any, self: RuleOptimizer, paused: bool) -> None:
        original(self, paused)
        if not paused:
            with torch.no_grad():
                self._run_step()
            self.zero_grad()

    return [(RuleOptimizer, "_pause_reductions", pause)]
