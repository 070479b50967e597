"""Reductions during backward: hooks on parameters, and one launch order on all ranks.

`GradientHooks` hears of the gradients of one plan as backward finishes them. A bucket is complete
when all its gradients are there. `LaunchOrder` launches complete buckets in the one order of all
plans of an optimizer: of groups that were added later, or that live on fewer ranks. Backward
completes their buckets in an order that ranks need not share.

Two optimizers that launch inside one backward have no common order. Which ones take part in a
backward is not known before it: an optimizer may replace another, or two models have one each.
So where one is made beside another on the same ranks, both hold their launches back until a step
of theirs has shown that the other had no gradients in the same backward, on any rank. If it had,
both go on holding them back: each launches in its own step, in the order in which these are called.
Two that meet later, when they launch inside backward already, are refused.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from samestep.comm.presence import RankFailure
from samestep.groups.pipelines import PipelineStages
from samestep.plan.schedule import launch_order
from samestep.tooling.warn import warn_user

if TYPE_CHECKING:
    from samestep.shards.replicated.reduction import BucketReductions

# One per parameter: of two optimizers that have it, the last one reduces it inside backward.
_hooks: MutableMapping[Tensor, RemovableHandle] = WeakTensorKeyDictionary()
# Parameters whose gradients come from several backward passes, and have not come from the last.
_unfinished: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()


@contextmanager
def more_to_come(params: Iterable[Tensor]) -> Iterator[None]:
    """Context for backward passes that are not the last of a step.

    As `no_sync()`, for whoever runs micro-batches and does not know the optimizer.
    """
    waiting = list(params)
    _unfinished.update(dict.fromkeys(waiting, True))
    try:
        yield
    finally:
        for param in waiting:
            del _unfinished[param]


class GradientHooks:
    """Hooks of one plan, which launch each bucket when it is complete.

    Args:
        reductions: Of the same plan; it begins and ends rounds.
        order: Of all plans of the optimizer.
        overlap: Whether buckets are launched inside backward. Otherwise gradients are only moved
            into flat buffers.

    Attributes:
        paused: Gradients that arrive are kept on this rank, as inside `no_sync()`.
    """

    def __init__(
        self, reductions: "BucketReductions", order: "LaunchOrder", *, overlap: bool
    ) -> None:
        self.reductions = reductions
        self._params = reductions.local.params
        self._order = weakref.proxy(order)  # which holds these hooks
        self._overlap = overlap
        self._hooked: set[int] = set()
        self._trainable: set[int] = set()
        self.paused = False
        self.begin_round()

    def begin_round(self) -> None:
        """Wait for the gradients of another round."""
        if self._overlap:
            self._order.restart()
        self._awaited: list[set[int]] | None = None  # per bucket; see `_await`
        self._hook_trainable()

    def _hook_trainable(self) -> set[int]:
        trainable = {i for i, param in enumerate(self._params) if param.requires_grad}
        for index in sorted(trainable - self._hooked):
            self._hook(index)
        return trainable

    def _hook(self, index: int) -> None:
        hooks = weakref.ref(self)  # a dropped optimizer must not go on reducing

        def arrived(_: Tensor) -> None:
            alive = hooks()
            if alive is not None:
                alive.arrived(index)

        param = self._params[index]
        before = _hooks.get(param)
        if before is not None:  # of an optimizer that this one replaces
            before.remove()
        _hooks[param] = param.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        self._hooked.add(index)

    def arrived(self, index: int) -> None:
        """Record a finished gradient, and launch complete buckets in order."""
        sent = self.reductions.sent
        is_sent = index in sent.launched
        # With create_graph autograd adds by making a new tensor: as if the old one were dropped.
        if not (is_sent and torch.is_grad_enabled()):
            sent.look_for_drops([index])
        if index not in sent.dropped:  # or its place has what was sent
            self.reductions.gradients.arrived(index)
            if not is_sent:
                sent.renew(index)
        if not self._overlap:
            return
        self._order.gradient_arrived()
        if self.paused or not self._is_last(self._params[index]):
            return
        if is_sent:
            if index in sent.dropped:
                return  # it goes in the next round
            raise sent.came_late(index)
        awaited = self._await()
        for number in self.reductions.buckets_of(index):
            awaited[number].discard(index)
        self._order.launch_complete()

    def _is_last(self, param: Tensor) -> bool:
        """Whether this may be a parameter's last backward of the step."""
        return param not in _unfinished and param not in self.unannounced

    @cached_property
    def unannounced(self) -> set[Tensor]:
        """Parameters whose schedule does not mark the last backward pass.

        Those of torch's own pipeline stages, whose schedule divides gradients after it: they are
        reduced in the step.
        """
        return PipelineStages(self._params).silent()

    def is_complete(self, bucket: int) -> bool:
        """Whether all expected gradients of a bucket have arrived.

        One that has arrived is gone if a backward pass broke off and its gradients were dropped.
        """
        if self._await()[bucket]:
            return False
        return all(
            self.reductions.local.has_gradient(index)
            for index in self.reductions.members[bucket]
            if index in self._trainable
        )

    def _await(self) -> list[set[int]]:
        """Parameters that each bucket waits for in this round.

        Not sooner: parameters may be frozen and unfrozen between steps.
        """
        if self._awaited is None:
            self._trainable = trainable = self._hook_trainable()
            self._awaited = [trainable.intersection(of) for of in self.reductions.members]
        return self._awaited

    def step_finished(self) -> None:
        """Note that the optimizer has taken a step."""
        self._order.stepped()

    def rival(self, rank: int) -> RankFailure | None:
        """Another optimizer that launches in the same backward, if any."""
        rival = self._order.rival()
        if rival is None:
            return None
        message = (
            f"two optimizers reduce gradients inside the same backward: {self._order} and {rival}, "
            f"seen on rank {rank}, which they did not do in their first steps. Ranks on "
            "which a gradient is missing launch their reductions in another order than others, "
            "which hangs or mixes tensors. Take one MuonAdamW for all parameters (its groups have "
            "rules of their own), or leave overlap_grad_reduce=True out of one of them and call "
            "step() of the other first"
        )
        return RankFailure(RuntimeError(message))


class _Turn(NamedTuple):
    hooks: GradientHooks
    bucket: int

    @property
    def is_over(self) -> bool:
        return self.hooks.reductions.launched > self.bucket


class LaunchOrder:
    """Order of all buckets, by when backward reaches them."""

    def __init__(self, owner: str = "optimizer") -> None:
        self._owner = owner
        self._plans: list[tuple[GradientHooks, Sequence[int]]] = []
        self._turns: list[_Turn] = []
        self._next = 0
        self._names: list[str] = []  # of parameters that are reduced inside backward
        self._ranks: set[int] = set()  # that take part in it
        # Launches are held back while it is not known of these, and as long as these are there:
        self._waits_for: weakref.WeakSet[LaunchOrder] = weakref.WeakSet()
        self._meets: weakref.WeakSet[LaunchOrder] = weakref.WeakSet()
        self._alone = False  # in the last step, as far as all ranks know
        self._backwards: set[int] = set()  # passes that gave gradients since the last step

    def __str__(self) -> str:
        return f"{self._owner} ({len(self._names)} parameters from {self._names[0]!r} on)"

    # --- beside other optimizers -------------------------------------------------------------

    def launch_inside_backward(self, names: Iterable[str], ranks: Iterable[int]) -> None:
        """Launch reductions of these parameters during backward from now on."""
        self._names += names
        self._ranks |= set(ranks)
        _inside_backward.orders.add(self)
        for other in self._others():
            self._waits_for.add(other)
            other._waits_for.add(self)

    def met(self) -> bool:
        """Whether another optimizer had gradients in the same backward on this rank."""
        return any(other in self._waits_for for other in self._beside())

    def told(self, any_rank_met: bool | None) -> None:
        """Record whether any rank has `met` another optimizer."""
        self._alone = any_rank_met is False
        if not any_rank_met:
            return
        for other in list(self._waits_for):
            if other not in self._meets:
                warn_user(
                    f"two optimizers have gradients of the same backward: {self} and {other}. So "
                    "that all ranks launch their reductions in one order, both wait for step(), "
                    "and overlap_grad_reduce does nothing: take one MuonAdamW for all parameters "
                    "(its groups have rules of their own)"
                )
            self._meets.add(other)
            other._meets.add(self)

    def stepped(self) -> None:
        """Note a step, which ends holding back if no other optimizer was met."""
        if self._alone:
            self._waits_for.clear()

    def rival(self) -> "LaunchOrder | None":
        """An optimizer with gradients in the same backward."""
        for other in self._beside():
            if other not in self._waits_for and other not in self._meets:
                # Whoever goes on all the same does so without overlap.
                self._meets.add(other)
                other._meets.add(self)
                return other
        return None

    def _beside(self) -> Iterator["LaunchOrder"]:
        """Other orders with gradients in the same backward."""
        for other in self._others():
            if not self._backwards.isdisjoint(other._backwards):
                yield other

    def _others(self) -> Iterator["LaunchOrder"]:
        if len(_inside_backward.orders) < 2:  # as in every step of nearly every run
            return
        for other in list(_inside_backward.orders):
            if other is not self and not self._ranks.isdisjoint(other._ranks):
                yield other

    # --- one round ---------------------------------------------------------------------------

    def add(self, hooks: GradientHooks, places: Sequence[int]) -> None:
        """Add the buckets of a plan, placed by when forward uses them."""
        self._plans.append((hooks, places))
        self._turns = [
            _Turn(self._plans[plan][0], bucket)
            for plan, bucket in launch_order([places for _, places in self._plans])
        ]
        self._next = 0

    def restart(self) -> None:
        """Note that a plan has begun a new round."""
        self._next = 0
        self._backwards.clear()

    def gradient_arrived(self) -> None:
        """Record a finished gradient."""
        self._backwards.add(torch._C._current_graph_task_id())

    def launch_complete(self) -> None:
        """Launch complete buckets, up to the first incomplete one."""
        if self._waits_for or self._meets:  # and is alive
            return
        while (turn := self._turn()) is not None and turn.hooks.is_complete(turn.bucket):
            turn.hooks.reductions.make_room()
            turn.hooks.reductions.launch(turn.bucket)

    def _turn(self) -> _Turn | None:
        """First bucket that is not launched yet."""
        while self._next < len(self._turns):
            turn = self._turns[self._next]
            if not turn.is_over:
                return turn
            self._next += 1
        return None


class _InsideBackward(threading.local):
    """All living launch orders, per thread."""

    def __init__(self) -> None:
        self.orders: weakref.WeakSet[LaunchOrder] = weakref.WeakSet()


_inside_backward = _InsideBackward()
