"""Averaging gradients over ranks, bucket by bucket, in the same order on every rank.

A *round* is what one reduction covers: the gradients since the last one. With overlap, a bucket
is reduced inside backward once all its gradients have arrived and every bucket before it was
launched; what never came is launched as zeros when the round ends. So all ranks launch the same
buckets in the same order, whatever order autograd has and whatever it leaves out.

Where a gradient that was reduced is dropped (`sent_gradients`), the round is finished all the same,
since others may be in it. All ranks hear of it when they agree on presence or in `synchronize()`,
void the sum, and reduce what has come since in one more round.
"""

import weakref
from collections.abc import Container, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from samestep.comm.collectives import Pending, add_up, gather_segments
from samestep.comm.groups import GroupReduction, RankGroup
from samestep.comm.presence import RankFailure
from samestep.groups.distribution import Distribution
from samestep.groups.pipelines import PipelineStages
from samestep.plan.bucket_exchanges import BucketExchanges, outer_exchanges
from samestep.plan.sharding import Bucket, ShardingPlan
from samestep.plan.transfers import (
    CollectivePolicy,
    Traffic,
    Transfer,
    divides_first,
)
from samestep.shards.replicated.buffers import GradientBuffers
from samestep.shards.replicated.flat import FlatGradientBuffers
from samestep.shards.replicated.launch_order import LaunchOrder
from samestep.shards.replicated.local_tensors import REPLICATED, LocalTensors
from samestep.shards.replicated.sent_gradients import SentGradients

# One per parameter: of two optimizers that have it, the last one reduces it inside backward.
_hooks: MutableMapping[Tensor, RemovableHandle] = WeakTensorKeyDictionary()
# Parameters whose gradients come from several backward passes, and have not come from the last.
_unfinished: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()


@contextmanager
def more_to_come(params: Iterable[Tensor]) -> Iterator[None]:
    """Backward passes in it are not the last ones of these parameters in their step.

    As `no_sync()`, for whoever runs micro-batches and does not know the optimizer.
    """
    waiting = list(params)
    _unfinished.update(dict.fromkeys(waiting, True))
    try:
        yield
    finally:
        for param in waiting:
            del _unfinished[param]


class GradientReducer:
    """Turns local gradients into this rank's part of their mean.

    sent: the gradients of this rank since the last step.
    """

    def __init__(
        self,
        held: LocalTensors,
        plan: ShardingPlan,
        reduction: GroupReduction,
        distribution: Distribution,
        policy: CollectivePolicy,
        exchanges: Sequence[BucketExchanges],
        order: LaunchOrder,
    ) -> None:
        group, divisor, outer = reduction
        flat = distribution.buffers == "flat"
        self._order = weakref.proxy(order)  # which holds this reducer
        self._held = held
        self._params = params = held.params
        self._plan = plan
        self._group = group
        self.outer = outer
        self._distribution = distribution
        self._policy = policy
        self._exchanges = exchanges
        self._divisor = policy.ranks * policy.outer if divisor is None else divisor
        # Where sums take the place of gradients, nobody shall take them for gradients.
        self._gives_back = distribution.frees_gradients or flat
        if flat:
            keep = not distribution.frees_gradients
            self._gradients: GradientBuffers = FlatGradientBuffers(
                held, plan, distribution.reduce_dtype, rank=group.rank, keep=keep
            )
        else:
            self._gradients = GradientBuffers(held, plan, distribution.reduce_dtype)
        self._reuses = distribution.sums_in_place(policy)
        self._listens = flat or distribution.overlap_grad_reduce
        self._members = [bucket.params for bucket in plan.buckets]
        self._headroom = 1 << (group.size - 1).bit_length()  # a power of two: the division is exact
        self._divides = [
            divides_first(reduce.dtype, group.size, exchange=reduce.traffic is Traffic.EXCHANGE)
            for reduce in (of_bucket.reduce.transfer for of_bucket in exchanges)
        ]
        self._first_bucket = [len(plan.buckets)] * len(params)
        self._last_bucket = [-1] * len(params)  # of a parameter without elements: none
        for number, members in enumerate(self._members):
            for index in members:
                self._first_bucket[index] = min(self._first_bucket[index], number)
                self._last_bucket[index] = number
        self._sums: list[Tensor | None] = [None] * len(plan.buckets)  # of the rounds so far
        self._flying: dict[int, Pending[Tensor]] = {}
        self._divided: set[int] = set()  # buckets on their way that were divided first
        self._hooked: set[int] = set()
        self._unannounced: set[Tensor] | None = None  # see `unannounced`
        self.paused = False
        self.is_looked_at = False  # what `take` gives is taken once more
        self.problem: RankFailure | None = None
        self.sent = SentGradients(held, [spec.name for spec in plan.params], self._rank)
        # Of DTensors: what gradients were along the axes of their mesh, once there was one.
        self.kinds: list[tuple[int, ...]] = [()] * len(params)
        self._begin_round()

    # --- one round ---------------------------------------------------------------------------

    def _begin_round(self) -> None:
        self.launched = 0  # buckets
        self._order.restart()
        self.sent.begin_round()
        self._awaited: list[set[int]] | None = None  # per bucket; see `_await`
        self._ended = False  # no gradient comes any more
        self._again: set[int] | None = None  # in a round after a drop: the only ones that travel
        if self._listens:
            self._hook_trainable()

    def _hook_trainable(self) -> set[int]:
        trainable = {i for i, param in enumerate(self._params) if param.requires_grad}
        for index in sorted(trainable - self._hooked):
            self._hook(index)
        return trainable

    def _hook(self, index: int) -> None:
        reducer = weakref.ref(self)  # a dropped optimizer must not go on reducing

        def arrived(_: Tensor) -> None:
            alive = reducer()
            if alive is not None:
                alive.arrived(index)

        param = self._params[index]
        before = _hooks.get(param)
        if before is not None:  # of an optimizer that this one replaces
            before.remove()
        _hooks[param] = param.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        self._hooked.add(index)

    def arrived(self, index: int) -> None:
        """Backward has finished a gradient: launch what is complete, in order."""
        is_sent = index in self.sent.launched
        # With create_graph autograd adds by making a new tensor: as if the old one were dropped.
        if not (is_sent and torch.is_grad_enabled()):
            self.sent.look_for_drops([index])
        if index not in self.sent.dropped:  # or its place has what was sent
            self._gradients.arrived(index)
            if not is_sent:
                self.sent.renew(index)
        if not self._distribution.overlap_grad_reduce:
            return
        self._order.gradient_arrived()
        if self.paused or not self._is_last(self._params[index]):
            return
        if is_sent:
            if index in self.sent.dropped:
                return  # it goes in the next round
            raise self.sent.came_late(index)
        awaited = self._await()
        for number in self._buckets_of(index):
            awaited[number].discard(index)
        self._order.launch_complete()

    def _is_last(self, param: Tensor) -> bool:
        """Whether this may be the last backward pass of a parameter in its step."""
        return param not in _unfinished and param not in self.unannounced

    @property
    def unannounced(self) -> set[Tensor]:
        """Parameters of which nobody says which backward pass is the last, once there was one.

        Those of torch's own pipeline stages, whose schedule divides gradients after it: they are
        reduced in the step.
        """
        if self._unannounced is None:
            self._unannounced = PipelineStages(self._params).silent()
        return self._unannounced

    def is_complete(self, bucket: int) -> bool:
        """Whether every gradient of a bucket that backward may give has arrived, and is there.

        One that has arrived is gone if a backward pass broke off and its gradients were dropped.
        """
        if self._await()[bucket]:
            return False
        return all(
            self._held.has_gradient(index)
            for index in self._members[bucket]
            if index in self._trainable
        )

    def _await(self) -> list[set[int]]:
        """What each bucket waits for, looked up when a round's first gradient has arrived.

        Not sooner: parameters may be frozen and unfrozen between steps.
        """
        if self._awaited is None:
            self._trainable = trainable = self._hook_trainable()
            self._awaited = [trainable.intersection(members) for members in self._members]
        return self._awaited

    def make_room(self) -> None:
        """One bucket in flight, where memory counts: its buffers go before the next is packed."""
        if self._distribution.one_in_flight:
            self._land_all()

    def launch_through(self, number: int) -> None:
        """Launch every bucket up to this one, and those of others whose turn comes before."""
        self._order.launch_through(self, number)

    def launch_next(self) -> None:
        """Pack and reduce the next bucket; zero2 frees each gradient once it is packed."""
        number = self.launched
        self._advance()
        transfer = self._exchanges[number].reduce.transfer
        members = self._members[number]
        self.sent.look_for_drops(members)
        self._look_at_placements(members)
        buffer = self._packed(number)
        if self._divides[number]:
            buffer = self._gradients.divided(number, buffer, self._headroom)
            self._divided.add(number)
        self.launched += 1
        self.sent.launched.update(members)
        for index in members:
            if self._travels(index):
                self.sent.count(index)
            if self._last_bucket[index] == number:
                self._take(index)
        self._flying[number] = add_up(transfer, buffer, self._group, reuse=self._reuses)
        if self.launched == len(self._plan.buckets):
            self._advance()

    def _advance(self) -> None:
        """What goes in two levels goes on when the next bucket is launched, or the last one was."""
        for pending in self._flying.values():
            pending.advance()

    def _look_at_placements(self, indices: Iterable[int]) -> None:
        """Remember what gradients of DTensors are, and refuse those that cannot be added up."""
        for index in indices:
            if self._plan.params[index].whole is None:
                return
            try:
                kinds = self._held.kinds_along_axes(index)
                if kinds and self.kinds[index] not in ((), kinds):
                    raise ValueError(f"is another summand than before ({self.kinds[index]})")
            except ValueError as error:
                message = (
                    f"the gradient of {self._name(index)!r} on rank {self._rank} {error}, and the "
                    f"parameter {self._params[index].placements}: redistribute it first"  # type: ignore[attr-defined]
                )
                self.problem = self.problem or RankFailure(RuntimeError(message), index)
            else:
                self.kinds[index] = kinds or self.kinds[index]
            self.sent.renew(index)  # it may have been cut

    def _travels(self, index: int) -> bool:
        """Whether this rank has a gradient to send in this round."""
        held_back = index in self.sent.dropped if self._again is None else index not in self._again
        return not held_back and self._held.has_gradient(index)

    def _take(self, index: int) -> None:
        """A gradient is all sent, or there was none."""
        gives_back = self._gives_back and self.problem is None  # or only zeros were sent
        travels = self._travels(index)
        self.sent.take(index, travels=travels, gives_back=gives_back, ended=self._ended)

    def void(self, indices: Iterable[int], *, again: bool) -> None:
        """What was reduced of these parameters so far is dropped, on every rank.

        again: what has come since is reduced in one more round of this step, and nothing else.
        """
        self._land_all()
        for index in indices:
            for kept, place, _ in self._kept_of(index):
                kept[place] = 0
        dropped = self.sent.take_dropped()
        if again:
            self._set_sums_aside()
            self._begin_round()
            self._ended, self._again = True, dropped
            self.launch_through(len(self._plan.buckets) - 1)

    def is_whole_along(self, index: int, axis: int) -> bool:
        """Whether there was a gradient on this rank, and of a DTensor no summand along an axis."""
        kinds = self.kinds[index]
        return self.sent.here[index] and (not kinds or kinds[axis] == REPLICATED)

    def _packed(self, number: int) -> Tensor:
        buffer = self._gradients.packed(number, without=self._without())
        if self._distribution.check_gradients and not buffer.isfinite().all():
            self._report_not_finite(self._plan.buckets[number], buffer)
        return buffer

    def _without(self) -> Container[int]:
        """Parameters of which zeros travel, whatever is in `.grad`."""
        if self.problem is not None:
            return range(len(self._params))
        if self._again is None:
            return self.sent.dropped
        return set(range(len(self._params))) - self._again

    def _report_not_finite(self, bucket: Bucket, buffer: Tensor) -> None:
        """Remember the culprit, and send zeros in place of the bucket."""
        for index in bucket.params:
            grad = self._held.gradient(index)
            if grad is not None and not grad.isfinite().all():
                kind = "NaN" if grad.isnan().any() else "inf"
                count = int((~grad.isfinite()).sum())
                message = (
                    f"the gradient of {self._name(index)!r} on rank {self._rank} has {count} "
                    f"values that are not finite ({kind}), before it was averaged with those of "
                    "other ranks"
                )
                self.problem = self.problem or RankFailure(FloatingPointError(message), index)
        buffer.zero_()

    # --- the end of a round ------------------------------------------------------------------

    def end_round(self, problem: RankFailure | None) -> None:
        """No gradient comes any more: see whether this rank can use those it has."""
        sent = self.sent
        sent.look_for_drops()
        self._look_at_placements(i for i in range(len(self._params)) if not sent.is_taken(i))
        self.problem = self.problem or problem or self._rival() or sent.changed()
        self._ended = True
        for index, last in enumerate(self._last_bucket):
            if last < 0:
                self._take(index)
            elif not sent.is_taken(index) or index in sent.dropped:
                sent.here[index] |= self._held.has_gradient(index)

    def _rival(self) -> RankFailure | None:
        """Another optimizer that launches inside the same backward, in no common order."""
        rival = self._order.rival() if self._distribution.overlap_grad_reduce else None
        if rival is None:
            return None
        message = (
            f"two optimizers reduce gradients inside the same backward: {self._order} and {rival}, "
            f"seen on rank {self._rank}, which they did not do in their first steps. Ranks on "
            "which a gradient is missing launch their reductions in another order than others, "
            "which hangs or mixes tensors. Take one MuonAdamW for all parameters (its groups have "
            "rules of their own), or leave overlap_grad_reduce=True out of one of them and call "
            "step() of the other first"
        )
        return RankFailure(RuntimeError(message))

    def accumulate(self) -> None:
        """Finish a round of which all is launched: keep the sums, free the gradients."""
        self._land_all()
        self._set_sums_aside()
        self.sent.free()
        self._begin_round()

    def _set_sums_aside(self) -> None:
        for number, kept in enumerate(self._sums):
            if kept is not None:
                self._sums[number] = self._gradients.set_aside(kept)

    def take(self, number: int) -> Tensor:
        """Wait for a bucket and give the mean of this rank's segment, in fp32 or wider."""
        self._land(number)
        result = self._sums[number]
        assert result is not None
        if self.is_looked_at:
            result = result.clone()
        else:
            self._sums[number] = None
        exchanges = self._exchanges[number]
        if exchanges.sums is not None:
            # Not sooner: ranks wait for their reductions at different times, and collectives
            # must be launched in one order.
            result = self._gathered(exchanges.sums.transfer, result, self._group)
        if exchanges.outer:
            result = self._over_outer(exchanges.outer_transfers[self._group.rank], result)
        return result.div_(self._divisor)

    def _over_outer(self, transfers: Sequence[Transfer], summed: Tensor) -> Tensor:
        """The sum over the groups that do the same: at once, or added up and gathered."""
        assert self.outer is not None
        reduce, *gather = transfers
        summed = add_up(reduce, summed, self.outer).wait()
        return self._gathered(gather[0], summed, self.outer) if gather else summed

    @staticmethod
    def _gathered(transfer: Transfer, part: Tensor, group: RankGroup) -> Tensor:
        assert transfer.sizes is not None
        return torch.cat(gather_segments(transfer.name, part, transfer.sizes, group).wait())

    def mean_of(self, index: int) -> Tensor:
        """The mean gradient of a parameter over the rounds so far: (numel,). Collective."""
        mean = torch.zeros(
            self._plan.params[index].numel,
            dtype=torch.promote_types(self._params[index].dtype, torch.float32),
            device=self._params[index].device,
        )
        for number in self._buckets_of(index):
            bucket, kept = self._plan.buckets[number], self._sums[number]
            assert kept is not None
            sizes = self._exchanges[number].reduce.transfer.sizes  # None: every rank has all sums
            if sizes is not None:
                parts = gather_segments(f"sums of bucket {number}", kept, sizes, self._group)
                kept = torch.cat(parts.wait())
            if self._policy.outer > 1:
                outer = outer_exchanges(number, kept.numel(), kept.dtype, self._policy)
                kept = self._over_outer([each.transfer for each in outer], kept.clone())
            for piece, start in bucket.places():
                if piece.param == index:
                    part = kept[start : start + piece.size]
                    mean[piece.start : piece.stop] = part / self._divisor
        return mean

    def set_mean_of(self, index: int, mean: Tensor) -> None:
        """Put a mean in place of that of the rounds so far, in this rank's part."""
        share = self._divisor / (1 if self.outer is None else self.outer.size)
        for kept, place, elements in self._kept_of(index):
            kept[place] = mean[elements] * share
        self.sent.here[index] = True
        self.sent.show_as_reduced()

    def _kept_of(self, index: int) -> Iterator[tuple[Tensor, slice, slice]]:
        """This rank's sums of a parameter: where they lie, and which of its elements they are."""
        for number in self._buckets_of(index):
            bucket, kept = self._plan.buckets[number], self._sums[number]
            if kept is None:
                continue
            sizes = self._exchanges[number].reduce.transfer.sizes  # None: every rank has all sums
            first = 0 if sizes is None else sum(sizes[: self._group.rank])
            for piece, place in bucket.places():
                if piece.param == index:
                    start = max(place, first)
                    stop = min(place + piece.size, first + kept.numel())
                    if start < stop:
                        elements = slice(piece.start + start - place, piece.start + stop - place)
                        yield kept, slice(start - first, stop - first), elements

    def scale(self, factor: Tensor) -> None:
        """Multiply what was reduced so far."""
        for kept in self._sums:
            if kept is not None:
                kept.mul_(factor.to(kept))

    def _buckets_of(self, index: int) -> range:
        return range(self._first_bucket[index], self._last_bucket[index] + 1)

    def finish_step(self) -> None:
        """The step has taken everything: start afresh."""
        self._order.stepped()
        self.sent.steps += 1
        self.begin_step()

    def begin_step(self) -> None:
        self.sent.forget()
        self._gradients.end_step()
        self._begin_round()

    def abandon(self) -> None:
        """The step failed on all ranks: drop what was reduced for it."""
        self._land_all()
        self._sums = [None] * len(self._plan.buckets)
        self.problem = None
        self.begin_step()

    def _land_all(self) -> None:
        for number in list(self._flying):
            self._land(number)

    def _land(self, number: int) -> None:
        """Wait for a reduction, and add it to the rounds before it."""
        if number in self._flying:
            arrived = self._flying.pop(number).wait()
            if arrived.dtype.itemsize < 4:
                arrived = arrived.to(torch.float32)
            if number in self._divided:
                self._divided.remove(number)
                arrived = arrived.mul_(self._headroom)
            arrived = self._gradients.landed(number, arrived)
            before = self._sums[number]
            self._sums[number] = arrived if before is None else before.add_(arrived)

    @property
    def _rank(self) -> int:
        return self._group.members[self._group.rank]

    def _name(self, index: int) -> str:
        return self._plan.params[index].name
