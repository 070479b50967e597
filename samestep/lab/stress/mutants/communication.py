"""Bugs about which gradients there are, what travels, when, and who has it."""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm import collectives
from samestep.comm.collectives import Pending, maximum, total
from samestep.comm.presence import PresenceAgreement
from samestep.lab.stress.mutants.mutant import RANDOM, mutant
from samestep.optimizer.rule_optimizer import RuleOptimizer
from samestep.plan import placement_plan, sharding
from samestep.plan.bucket_exchanges import bucket_exchanges
from samestep.plan.transfers import Transfer
from samestep.shards.replicated import reduction
from samestep.shards.replicated.flat import FlatGradients
from samestep.shards.replicated.inside_backward import GradientHooks, LaunchOrder
from samestep.shards.replicated.reduction import BucketReductions
from samestep.shards.replicated.replicated import ReplicatedShards


@mutant("hang", "dist_adamw_muon", replaces=(BucketReductions, "launch"))
def no_presence_mask(original: Any, self: BucketReductions, number: int) -> None:
    """a rank without gradients skips their reduction, and the others wait for it"""
    params = [self.local.params[index] for index in self.members[number]]
    if number < self.launched or any(param.grad is not None for param in params):
        original(self, number)
        return
    size = self._plan.buckets[number].segment_sizes[self._group.rank]
    nothing = torch.zeros(size)
    self._flying[number] = Pending(None, (), lambda: nothing)
    self.launched += 1


@mutant("reference", RANDOM, replaces=(PresenceAgreement, "agree"))
def absent_is_not_untouched(
    original: Any, self: PresenceAgreement, here: Any, *others: Any, **named: Any
) -> list[bool]:
    """zeros stand in for a gradient that no rank has, so momentum and decay move the parameter"""
    return [True] * len(original(self, here, *others, **named))


@mutant("reference", "fixed_capacity", replaces=(BucketReductions, "end_round"))
def zeros_are_absent(original: Any, self: BucketReductions, problem: Any) -> None:
    """a gradient of zeros counts as none, so momentum no longer moves the parameter"""
    for param in self.local.params:
        if param.grad is not None and not param.grad.any():
            param.grad = None
    original(self, problem)


@mutant("state", RANDOM, replaces=(ReplicatedShards, "operands"))
def step_counted_for_absent(
    original: Any, self: ReplicatedShards, number: int, *window: Any
) -> Any:
    """the step count of a parameter goes on while it has no gradient on any rank"""
    # Bias correction then is that of another step.
    for piece in self.plan.buckets[number].owned(self.places.rank).pieces:
        state = self._shards[piece].state
        if self._present[piece.param] is False and "step" in state:
            state["step"] += 1
    return original(self, number, *window)


@mutant("state", RANDOM)
def mean_over_present_ranks() -> list[Any]:
    """the mean is taken over the ranks that have a gradient, not over all"""
    # The divisor changes from step to step.
    counts: dict[int, list[float]] = {}

    def agree(original: Any, self: ReplicatedShards, problem: Any) -> None:
        here = torch.tensor(self.reductions.sent.here, dtype=torch.float32)
        counts[id(self)] = total("ranks present", here, self.group).wait().tolist()
        original(self, problem)

    def average(original: Any, self: ReplicatedShards, number: int) -> None:
        original(self, number)
        for piece, grad in self._grads[number]:
            grad.mul_(self.group.size / max(counts[id(self)][piece.param], 1.0))

    return [(ReplicatedShards, "agree", agree), (ReplicatedShards, "average", average)]


@mutant("reference", "uneven_accumulation", replaces=(RuleOptimizer, "_pause_reductions"))
def last_micro_batch_only(original: Any, self: RuleOptimizer, paused: bool) -> None:
    """only the last micro-batch counts: what came under no_sync() is forgotten"""
    original(self, paused)
    if not paused:
        self.zero_grad()


@mutant("reference", "uneven_accumulation", replaces=(RuleOptimizer, "_pause_reductions"))
def step_per_micro_batch(original: Any, self: RuleOptimizer, paused: bool) -> None:
    """Newton-Schulz runs once per micro-batch instead of once per step"""
    original(self, paused)
    if not paused:
        with torch.no_grad():
            self._run_step()
        self.zero_grad()


@mutant("state", RANDOM, replaces=(BucketReductions, "end_round"))
def reduced_twice(original: Any, self: BucketReductions, problem: Any) -> None:
    """the gradients were reduced already, and are reduced again"""
    # Summed before the optimizer averages them.
    for param in self.local.params:
        here = torch.tensor([param.grad is not None], dtype=torch.int32)
        if maximum("is it there", here, self._group).wait().item():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            param.grad = total("first reduction", grad.detach().clone(), self._group).wait()
    original(self, problem)


@mutant("state", RANDOM, replaces=(BucketReductions, "mean"))
def sum_for_mean(original: Any, self: BucketReductions, number: int) -> Any:
    """the sum over ranks is taken for the mean"""
    # Invisible in what Muon does with it, not in AdamW's moments.
    return original(self, number).mul_(self._divisor)


@mutant("plan", "frozen_and_added")
def stale_chunk_size() -> list[Any]:
    """a rank keeps its old chunk size when a group is added"""
    plans = 0

    def plan(original: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal plans
        plans += 1
        if plans > 1 and dist.get_rank() == dist.get_world_size() - 1:
            kwargs["bucket_elements"] //= 4
        return original(*args, **kwargs)

    return [(placement_plan, "plan_sharding", plan)]


@mutant("plan", RANDOM, replaces=(sharding, "balanced_owners"))
def owner_order_differs(original: Any, *args: Any, **kwargs: Any) -> Any:
    """owners are given out in another order on one rank"""
    # A set or dict was walked.
    chosen = list(original(*args, **kwargs))
    return chosen[::-1] if dist.get_rank() == 1 else chosen


@mutant("layouts", RANDOM, world=3, replaces=(collectives, "sum_in_order"))
def sums_in_another_order(original: Any, contributions: Any, **how: Any) -> Any:
    """sums are taken in another order than that of the ranks,
    so that layouts differ in a last bit
    """  # noqa: D205
    # Two numbers have but one sum; three have several, in floating point.
    return original(list(contributions)[::-1], **how)


@mutant("collectives", RANDOM, replaces=(reduction, "add_up"))
def collectives_misnamed(original: Any, transfer: Transfer, *args: Any, **how: Any) -> Any:
    """a rank counts its buckets from another start, so that logs of collectives do not match"""
    # All goes well, until somebody reads the log of a hang.
    if dist.get_rank() == 1:
        name = re.sub(r"\d+", lambda number: str(int(number[0]) + 1), transfer.name, count=1)
        transfer = transfer._replace(name=name)
    return original(transfer, *args, **how)


@mutant("hang", "conditional_compute", replaces=(ReplicatedShards, "_gather"))
def empty_collective_skipped(original: Any, self: ReplicatedShards, number: int) -> None:
    """a rank that owns nothing in a bucket does not take part in its gather"""
    # Nothing to send, so it seems.
    bucket = self.plan.buckets[number]
    if bucket.replicated or bucket.segments[self.places.rank].pieces:
        original(self, number)


@mutant("reference", RANDOM, layout="zero1")
def buffer_reused_before_wait() -> list[Any]:
    """a buffer is packed anew while its last content is still on its way"""
    kept = torch.empty(1 << 16)

    def packed(original: Any, self: BucketReductions, number: int, *args: Any) -> Tensor:
        buffer: Tensor = original(self, number, *args)
        view = kept[: buffer.numel()]
        view.copy_(buffer)
        return view

    return [(BucketReductions, "_packed", packed)]


@mutant("replicas", "different_start", layout="none", replaces=(ReplicatedShards, "mend_replicas"))
def different_from_the_start(original: Any, self: ReplicatedShards) -> None:
    """replicas differ from the start, and nobody looks"""
    # No comparison at construction.


@mutant("hang", "conditional_compute", layout="zero2_overlap")
def sums_sent_on_arrival() -> list[Any]:
    """the sums of small parameters are sent on when they arrive, which is at another place of the
    order on every rank
    """  # noqa: D205
    # Met on the way: a collective must be launched at a place that all ranks share.

    def land(original: Any, self: BucketReductions, number: int) -> None:
        arrives = number in self._flying
        original(self, number)
        bucket, part = self._plan.buckets[number], self._sums[number]
        if arrives and bucket.replicated and part is not None:
            sums = self._exchanges[number].sums
            assert sums is not None
            self._sums[number] = self._gathered(sums.transfer, part, self._group)

    def mean(original: Any, self: BucketReductions, number: int) -> Any:
        if not self._plan.buckets[number].replicated:
            return original(self, number)
        self._land(number)
        whole, self._sums[number] = self._sums[number], None
        assert whole is not None
        return whole.div_(self._divisor)

    return [(BucketReductions, "_land", land), (BucketReductions, "mean", mean)]


@mutant("hang", "frozen_and_added", layout="zero2_overlap")
def no_order_between_plans() -> list[Any]:
    """each plan launches its buckets as they become complete, in no common order"""
    # Met on the way: found by this harness.

    def launch_complete(original: Any, self: LaunchOrder) -> None:
        for hooks in {id(turn.hooks): turn.hooks for turn in self._turns}.values():
            own = hooks.reductions
            while own.launched < len(own.members) and hooks.is_complete(own.launched):
                own.launch(own.launched)

    return [(LaunchOrder, "launch_complete", launch_complete)]


@mutant(
    "error", "frozen_and_added", layout="zero2_overlap", replaces=(GradientHooks, "begin_round")
)
def unfrozen_not_awaited(original: Any, self: GradientHooks) -> None:
    """a parameter that is unfrozen between steps is not waited for"""
    # Met on the way: found by this harness.
    original(self)
    self._await()


@mutant("hang", "megatron_conditional_live", layout="zero2_overlap", reduction="fast")
def reduction_chosen_at_launch() -> list[Any]:
    """how a bucket is reduced depends on whether backward has launched it, which differs by rank"""
    # Met on the way: a choice must be the same on every rank.

    def choose(self: BucketReductions, *, frugal: bool) -> None:
        dtypes = [each.reduce.transfer.dtype for each in self._exchanges]
        policy = self._policy._replace(frugal=frugal)
        self._exchanges = bucket_exchanges(self._plan, policy, dtypes, dtypes)

    def arrived(original: Any, self: GradientHooks, index: int) -> None:
        choose(self.reductions, frugal=True)
        try:
            original(self, index)
        finally:
            choose(self.reductions, frugal=False)

    return [(GradientHooks, "arrived", arrived)]


@mutant(
    "reference",
    "uneven_accumulation_sharded",
    layout="flat_zero1",
    replaces=(FlatGradients, "set_aside"),
)
def kept_sum_overwritten(original: Any, self: FlatGradients, total: Tensor) -> Tensor:
    """the sum kept in the gradient buffer is overwritten by the next micro-batch"""
    return total
