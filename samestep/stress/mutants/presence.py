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
    replaces=(GradientReducer, "launch_next"),
)
def no_presence_mask(original: Any, self: GradientReducer) -> None:
    """Only buckets of which this rank has a gradient are reduced."""
    members = self._members[self.launched]
    if any(self._params[index].grad is not None for index in members):
        original(self)
        return
    size = self._plan.buckets[self.launched].segment_sizes[self._group.rank]
    nothing = torch.zeros(size)
    self._flying[self.launched] = Pending(None, (), lambda: nothing)
    self.launched += 1


@mutant(
    "zeros stand in for a gradient that no rank has, so momentum and decay move the parameter",
    expected="reference",
    scenario=RANDOM,
    replaces=(PresenceAgreement, "agree"),
)
def absent_is_not_untouched(
    original: Any, self: PresenceAgreement, here: Any, problem: Any
) -> list[bool]:
    """Everything is present."""
    return [True] * len(original(self, here, problem))


@mutant(
    "a gradient of zeros counts as none, so momentum no longer moves the parameter",
    expected="reference",
    scenario="fixed_capacity",
    replaces=(GradientReducer, "end_round"),
)
def zeros_are_absent(original: Any, self: GradientReducer, problem: Any) -> None:
    """Gradients of zeros are dropped."""
    for param in self._params:
        if param.grad is not None and not param.grad.any():
            param.grad = None
    original(self, problem)


@mutant(
    "the step count of a parameter goes on while it has no gradient on any rank",
    expected="state",
    scenario=RANDOM,
    replaces=(ReplicatedParameters, "operands"),
)
def step_counted_for_absent(original: Any, self: ReplicatedParameters, number: int) -> Any:
    """Bias correction then is that of another step."""
    for piece in self._owned(self.plan.buckets[number]).pieces:
        state = self._state[self.params[piece.param]]
        if self._present[piece.param] is False and "step" in state:
            self._layout.views(piece, state)["step"] += 1
    return original(self, number)


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
    replaces=(RuleOptimizer, "_pause_reductions"),
)
def last_micro_batch_only(original: Any, self: RuleOptimizer, paused: bool) -> None:
    """Gradients are dropped at the end of no_sync()."""
    original(self, paused)
    if not paused:
        self.zero_grad()


@mutant(
    "Newton-Schulz runs once per micro-batch instead of once per step",
    expected="reference",
    scenario="uneven_accumulation",
    replaces=(RuleOptimizer, "_pause_reductions"),
)
def step_per_micro_batch(original: Any, self: RuleOptimizer, paused: bool) -> None:
    """Every micro-batch is a step."""
    original(self, paused)
    if not paused:
        with torch.no_grad():
            self._run_step()
        self.zero_grad()
