"""The one order in which the buckets of an optimizer are launched, on every rank.

An optimizer may have several plans: of groups that were added later, or that live on fewer ranks.
Backward completes their buckets in an order that ranks need not share.

Two optimizers that launch inside one backward have no common order. Which ones take part in a
backward is not known before it: an optimizer may replace another, or two models have one each.
So where one is made beside another on the same ranks, both hold their launches back until a step
of theirs has shown that the other had no gradients in the same backward, on any rank. If it had,
both go on holding them back: each launches in its own step, in the order in which these are called.
Two that meet later, when they launch inside backward already, are refused.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from samestep.plan.schedule import launch_order
from samestep.tooling.warn import warn_user

if TYPE_CHECKING:
    from samestep.shards.replicated.reduction import GradientReducer


class _Turn(NamedTuple):
    launcher: "GradientReducer"
    bucket: int


class LaunchOrder:
    """Buckets of all plans, from those that backward reaches first to those it reaches last."""

    def __init__(self, owner: str = "optimizer") -> None:
        self._owner = owner
        self._plans: list[tuple[GradientReducer, Sequence[int]]] = []
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
        """From now on reductions of these parameters are launched as backward completes them."""
        self._names += names
        self._ranks |= set(ranks)
        _inside_backward.orders.add(self)
        for other in self._others():
            self._waits_for.add(other)
            other._waits_for.add(self)

    def met(self) -> bool:
        """Whether another has gradients of the same backward, on this rank, that it held back."""
        return any(other in self._waits_for for other in self._beside())

    def told(self, any_rank_met: bool | None) -> None:
        """What all ranks know of `met`; None: nothing yet."""
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
        """A step was taken; if no other optimizer was in use, nothing is held back from now on."""
        if self._alone:
            self._waits_for.clear()

    def rival(self) -> "LaunchOrder | None":
        """One with gradients of the same backward, where launches were not held back."""
        for other in self._beside():
            if other not in self._waits_for and other not in self._meets:
                # Whoever goes on all the same does so without overlap.
                self._meets.add(other)
                other._meets.add(self)
                return other
        return None

    def _beside(self) -> Iterator["LaunchOrder"]:
        """Others with gradients of a backward from which this one has some."""
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

    def add(self, launcher: "GradientReducer", places: Sequence[int]) -> None:
        """Take in the buckets of a plan; `places` says how late forward uses each of them."""
        self._plans.append((launcher, places))
        self._turns = [
            _Turn(self._plans[plan][0], bucket)
            for plan, bucket in launch_order([places for _, places in self._plans])
        ]
        self._next = 0

    def restart(self) -> None:
        """A plan has begun a new round."""
        self._next = 0
        self._backwards.clear()

    def gradient_arrived(self) -> None:
        """Backward has finished a gradient that is reduced inside of it."""
        self._backwards.add(torch._C._current_graph_task_id())

    def launch_complete(self) -> None:
        """Launch what is complete, up to the first bucket that is not."""
        if self._waits_for or self._meets:  # and is alive
            return
        while (turn := self._turn()) is not None and turn.launcher.is_complete(turn.bucket):
            turn.launcher.make_room()
            turn.launcher.launch_next()

    def launch_through(self, launcher: "GradientReducer", bucket: int) -> None:
        """Launch everything up to this bucket, complete or not."""
        while launcher.launched <= bucket:
            turn = self._turn()
            assert turn is not None
            turn.launcher.launch_next()

    def _turn(self) -> _Turn | None:
        while self._next < len(self._turns):
            turn = self._turns[self._next]
            if turn.launcher.launched <= turn.bucket:
                return turn
            self._next += 1
        return None


class _InsideBackward(threading.local):
    """Those that launch inside backward and are alive; per thread, as ranks are in tests."""

    def __init__(self) -> None:
        self.orders: weakref.WeakSet[LaunchOrder] = weakref.WeakSet()


_inside_backward = _InsideBackward()
