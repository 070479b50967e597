"""Tracks which gradients were reduced, and whether they were edited since.

A gradient that was reduced counts as long as `.grad` is what it was then, or what stands there in
its place. Where it is gone (`zero_grad()`, `.grad = None`), this rank's part of the sum is void.
One that was edited after it was reduced would count in silence without the edit: that is an error.
"""

import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor

from samestep.comm.presence import Drops, RankFailure
from samestep.groups.gradient_writes import Look, look
from samestep.groups.mistakes import EDITS_LOOKED_FOR
from samestep.layout.boxes import clone_in_place
from samestep.shards.replicated.buckets import gradient_dtype
from samestep.shards.replicated.local_tensors import LocalTensors
from samestep.shards.replicated.reduced_gradient import ReducedGradient


class SentGradients:
    """Reduced gradients of a plan since the last step, by parameter index.

    here: whether there was a gradient on this rank.
    dropped: the sums have a gradient that does not count any more.
    launched: in this round a reduction has taken some of the gradient.
    taken: in this round all of it was sent, or there was none.
    steps: how many steps there were.
    """

    def __init__(self, local: LocalTensors, names: Sequence[str], rank: int) -> None:
        self._local, self._params = local, local.params
        self._names, self._rank = names, rank
        # What `.grad` is while the sums have a gradient of this rank that counts.
        self._counted: dict[int, Tensor] = {}
        self.dropped: set[int] = set()
        self._stand_ins: dict[int, ReducedGradient] = {}
        self.here = [False] * len(self._params)
        self.steps = 0
        self.begin_round()

    def begin_round(self) -> None:
        """Begin a round in which nothing was reduced yet."""
        self._looks: dict[int, Look] = {}  # at gradients that were packed and are still there
        self.launched: set[int] = set()
        self.taken: set[int] = set()

    def forget(self) -> None:
        """Forget all gradients after a step."""
        for index, counted in self._counted.items():
            if type(counted) is ReducedGradient and self._params[index].grad is counted:
                self._params[index].grad = None
        self._counted.clear()
        self.dropped.clear()
        self.here = [False] * len(self._params)

    # --- gradients that are reduced --------------------------------------------------------

    def count(self, index: int) -> None:
        """Record a gradient as reduced."""
        grad = self._params[index].grad
        assert grad is not None
        self._counted[index] = grad

    def renew(self, index: int) -> None:
        """Update the record after backward added to a gradient."""
        if index in self._counted:
            self.count(index)

    def take(self, index: int, *, travels: bool, gives_back: bool, ended: bool) -> None:
        """Mark a gradient as completely sent.

        travels: this rank has one to send. gives_back: nobody keeps it.
        ended: no gradient comes any more, so nobody looks for it either.
        """
        if travels:
            self.here[index] = True
        if travels and gives_back and ended:
            self._params[index].grad = None
            self._counted.pop(index, None)
        elif travels and gives_back:
            self._put_stand_in(index)
        self.taken.add(index)
        grad = self._params[index].grad
        if grad is not None and type(grad) is not ReducedGradient:
            self._looks[index] = look(grad, values=self.steps < EDITS_LOOKED_FOR)

    def free(self) -> None:
        """Free gradients whose sums are kept."""
        for index in self._counted:
            self._params[index].grad = None
        self.show_as_reduced()

    def show_as_reduced(self) -> None:
        """Put a placeholder into `.grad` of a freed gradient."""
        for index, here in enumerate(self.here):
            if here and not self._local.has_gradient(index):
                self._put_stand_in(index)

    def only_here(self) -> str | None:
        """Name of a parameter whose reduced gradient was replaced on this rank."""
        for index, here in enumerate(self.here):
            if here and not self._local.has_gradient(index):
                return self._names[index]
        return None

    def _put_stand_in(self, index: int) -> None:
        """Put a tensor without memory into `.grad`."""
        stand_in = self._stand_ins.get(index)
        if stand_in is None:
            sent, param = weakref.ref(self), self._params[index]

            def accumulates(grad: Tensor) -> None:
                alive = sent()
                if alive is not None:
                    alive._goes_on_with(index, grad)

            name = self._names[index]
            stand_in = ReducedGradient(param, gradient_dtype(param), name, accumulates)
            self._stand_ins[index] = stand_in
        self._params[index].grad = self._counted[index] = stand_in

    def _goes_on_with(self, index: int, grad: Tensor) -> None:
        """Allow backward to add to a reduced gradient, after its round."""
        if index in self.launched:
            raise self.came_late(index)
        self._counted[index] = grad

    def came_late(self, index: int) -> RuntimeError:
        """Error for a gradient that arrives after its bucket was reduced."""
        return RuntimeError(
            f"parameter {self._names[index]!r} got a gradient on rank {self._rank} after its "
            "bucket was reduced: run all backward passes of a step but the last inside "
            "no_sync(), or call synchronize() after each (and clip_grad_norm_() after the last)"
        )

    # --- gradients that were dropped -----------------------------------------------------------

    def look_for_drops(self, indices: Iterable[int] | None = None) -> None:
        """Find reduced gradients that are gone from `.grad`."""
        for index in list(self._counted) if indices is None else indices:
            counted = self._counted.get(index)
            if counted is not None and self._params[index].grad is not counted:
                self._drop(index)

    def _drop(self, index: int) -> None:
        del self._counted[index]
        self.dropped.add(index)
        self.here[index] = False

    def drop_all(self) -> None:
        """Drop all reduced gradients."""
        for index, counted in list(self._counted.items()):
            self._drop(index)
            if self._params[index].grad is counted and type(counted) is not ReducedGradient:
                # It may lie where a sum will come.
                self._params[index].grad = clone_in_place(counted)

    def drops(self) -> Drops:
        """Dropped gradients of this rank, for other ranks."""
        everything = range(len(self._params))
        return Drops(
            dropped=[index in self.dropped for index in everything],
            counted=[index in self._counted for index in everything],
            again=bool(self.launched) and any(map(self._local.has_gradient, self.dropped)),
        )

    def take_dropped(self) -> set[int]:
        """Take the dropped gradients, whose sums are void."""
        dropped, self.dropped = self.dropped, set()
        return dropped

    # --- gradients that were edited --------------------------------------------------------

    def changed(self) -> RankFailure | None:
        """Error for a gradient edited after it was packed, if any."""
        for index, param in enumerate(self._params):
            if type(param.grad) is ReducedGradient and index not in self._counted:
                message = (
                    f"the gradient of {self._names[index]!r} on rank {self._rank} was reduced for "
                    "another step or by another optimizer, and is not there any more: call "
                    "zero_grad() and backward() anew"
                )
                return RankFailure(RuntimeError(message), index)
        for index, taken in self._looks.items():
            grad = self._params[index].grad
            if index not in self._counted or grad is None or taken.writes(grad) == 0:
                continue
            found = self._local.gradient(index)
            if found is not None and not found.any():  # zeroed, as by the model's zero_grad()
                self._drop(index)
                self.here[index] = True
                continue
            message = (
                f"the gradient of {self._names[index]!r} was changed on rank {self._rank} after it "
                "was reduced inside backward: call opt.clip_grad_norm_(max_norm) or pass "
                "max_grad_norm= to clip, or build the optimizer with overlap_grad_reduce=False to "
                "edit gradients"
            )
            return RankFailure(RuntimeError(message), index)
        return None
