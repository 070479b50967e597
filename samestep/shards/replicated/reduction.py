"""Averaging gradients over ranks, bucket by bucket, in the same order on every rank.

A *round* is what one reduction covers: the gradients since the last one. With overlap, a bucket
is reduced inside backward once all its gradients have arrived and every bucket before it was
launched (`inside_backward`); what never came is launched as zeros when the round ends. So all ranks
launch the same buckets in the same order, whatever order autograd has and whatever it leaves out.

Where a gradient that was reduced is dropped (`sent_gradients`), the round is finished all the same,
since others may be in it. All ranks hear of it when they agree on presence or in `synchronize()`,
void the sum, and reduce what has come since in one more round.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.comm.collectives import Pending, add_up, gather_segments
from samestep.comm.groups import GroupReduction, RankGroup
from samestep.comm.presence import RankFailure
from samestep.groups.distribution import Distribution
from samestep.plan.bucket_exchanges import BucketExchanges, outer_exchanges
from samestep.plan.sharding import ShardingPlan
from samestep.plan.transfers import CollectivePolicy, Traffic, Transfer, divides_first
from samestep.shards.not_finite import is_finite, not_finite
from samestep.shards.replicated.buckets import GradientBuckets
from samestep.shards.replicated.inside_backward import GradientHooks, LaunchOrder
from samestep.shards.replicated.local_tensors import REPLICATED, LocalTensors
from samestep.shards.replicated.sent_gradients import SentGradients


class BucketReductions:
    """Averages local gradients over ranks, and keeps this rank's part of the means.

    Args:
        local: The parameters, of which this rank has gradients.
        plan: The buckets, in the order in which they are launched.
        gradients: Packs them into buckets, and keeps their sums.
        reduction: The ranks, the divisor, and other groups of ranks that do the same.
        policy, exchanges: Which collectives carry the buckets.
        order: Of launches inside backward.

    Attributes:
        sent: The gradients of this rank since the last step.
        launched: How many buckets were launched in this round.
        problem: Why this rank cannot take the step; it sends zeros from then on.
        is_looked_at: What `mean` gives is asked for once more.
        kinds: Of DTensors what gradients were along the axes of their mesh, once there was one.
    """

    def __init__(
        self,
        local: LocalTensors,
        plan: ShardingPlan,
        gradients: GradientBuckets,
        reduction: GroupReduction,
        distribution: Distribution,
        policy: CollectivePolicy,
        exchanges: Sequence[BucketExchanges],
        order: LaunchOrder,
    ) -> None:
        group, divisor, self.outer, _ = reduction
        self.local, self.gradients = local, gradients
        self._plan, self._group, self._distribution = plan, group, distribution
        self._policy, self._exchanges = policy, exchanges
        self._divisor = policy.ranks * policy.outer if divisor is None else divisor
        flat = distribution.buffers == "flat"
        # Where sums take the place of gradients, nobody shall take them for gradients.
        self._gives_back = distribution.frees_gradients or flat
        self._reuses = distribution.sums_in_place(policy)
        self._of_dtensors = any(spec.whole is not None for spec in plan.params)
        self.members = [bucket.params for bucket in plan.buckets]
        self._headroom = 1 << (group.size - 1).bit_length()  # a power of two: the division is exact
        self._divides = [
            divides_first(reduce.dtype, group.size, exchange=reduce.traffic is Traffic.EXCHANGE)
            for reduce in (of_bucket.reduce.transfer for of_bucket in exchanges)
        ]
        self._first_bucket = [len(plan.buckets)] * len(plan.params)
        self._last_bucket = [-1] * len(plan.params)  # of a parameter without elements: none
        for number, members in enumerate(self.members):
            for index in members:
                self._first_bucket[index] = min(self._first_bucket[index], number)
                self._last_bucket[index] = number
        self._everything = frozenset(range(len(plan.params)))
        self._sums: list[Tensor | None] = [None] * len(plan.buckets)  # of the rounds so far
        self._flying: dict[int, Pending[Tensor]] = {}
        self._divided: set[int] = set()  # buckets on their way that were divided first
        self.is_looked_at = False
        self.problem: RankFailure | None = None
        self.sent = SentGradients(local, [spec.name for spec in plan.params], self._rank)
        self.kinds: list[tuple[int, ...]] = [()] * len(plan.params)
        self.hooks: GradientHooks | None = None  # where it matters when gradients arrive
        self._begin_round()
        overlap = distribution.overlap_grad_reduce
        if flat or overlap:
            self.hooks = GradientHooks(self, order, overlap=overlap)

    # --- one round ---------------------------------------------------------------------------

    def _begin_round(self) -> None:
        self.launched = 0
        self.sent.begin_round()
        self._ended = False  # no gradient comes any more
        self._again: set[int] | None = None  # in a round after a drop: the only ones that travel
        if self.hooks is not None:
            self.hooks.begin_round()

    def make_room(self) -> None:
        """Wait for reductions in flight where memory is short."""
        if self._distribution.one_in_flight:
            self._land_all()

    def launch(self, number: int) -> None:
        """Start adding up a bucket over ranks, unless backward has.

        All ranks launch all buckets, in order. zero2 frees a gradient once all of it is packed.
        """
        if number < self.launched:
            return
        assert number == self.launched, "buckets are launched in order"
        if self._group.levels is not None:
            self._advance()
        transfer, members = self._exchanges[number].reduce.transfer, self.members[number]
        self.sent.look_for_drops(members)
        if self._of_dtensors:
            self._look_at_placements(members)
        held_back = self.sent.dropped if self._again is None else self._everything - self._again
        buffer = self._packed(number, held_back)
        if self._divides[number]:
            buffer = self.gradients.divided(number, buffer, self._headroom)
            self._divided.add(number)
        self.launched += 1
        self.sent.launched.update(members)
        for index in members:
            travels = index not in held_back and self.local.has_gradient(index)
            if travels:
                self.sent.count(index)
            if self._last_bucket[index] == number:
                self._take(index, travels)
        self._flying[number] = add_up(transfer, buffer, self._group, reuse=self._reuses)
        if self._group.levels is not None and self.launched == len(self.members):
            self._advance()

    def _advance(self) -> None:
        """Start the second level of two-level reductions.

        They go when the next bucket is launched, or the last one was: the same on all ranks.
        """
        for pending in self._flying.values():
            pending.advance()

    def _packed(self, number: int, held_back: Container[int]) -> Tensor:
        """Gradients of a bucket to send, with zeros where there are none."""
        without = held_back if self.problem is None else self._everything
        buffer = self.gradients.packed(number, without)
        if self._distribution.check_gradients and not is_finite(buffer):
            self._report_not_finite(number, buffer)
            buffer.zero_()
        return buffer

    def _take(self, index: int, travels: bool) -> None:
        """Mark a gradient as sent."""
        gives_back = self._gives_back and self.problem is None  # or only zeros were sent
        self.sent.take(index, travels=travels, gives_back=gives_back, ended=self._ended)

    def _report_not_finite(self, number: int, buffer: Tensor) -> None:
        """Record the first gradient of a bucket that is not finite."""
        for index in self.members[number]:
            values, when = (
                self.local.gradient(index),
                "before it was averaged with those of other ranks",
            )
            if values is None:
                continue
            if is_finite(values):  # but perhaps not in the dtype in which it travels
                pieces = (at for at in self._plan.buckets[number].places() if at[0].param == index)
                found = [buffer[start : start + piece.size] for piece, start in pieces]
                values = torch.cat([buffer[:0], *found])  # of a shard there may be nothing here
                when = f"in {buffer.dtype}, {when}"
            if not is_finite(values):
                error = not_finite(self._name(index), self._rank, values, when)
                self.problem = self.problem or RankFailure(error, index)

    def _look_at_placements(self, indices: Iterable[int]) -> None:
        """Record placements of DTensor gradients, and refuse unsupported ones."""
        for index in indices:
            try:
                kinds = self.local.kinds_along_axes(index)
                if kinds and self.kinds[index] not in ((), kinds):
                    raise ValueError(f"is another summand than before ({self.kinds[index]})")
            except ValueError as error:
                param: Any = self.local.params[index]
                message = (
                    f"the gradient of {self._name(index)!r} on rank {self._rank} {error}, and the "
                    f"parameter {param.placements}: redistribute it first"
                )
                self.problem = self.problem or RankFailure(RuntimeError(message), index)
            else:
                self.kinds[index] = kinds or self.kinds[index]
            self.sent.renew(index)  # it may have been cut

    def void(self, indices: Iterable[int], *, again: bool) -> None:
        """Drop the sums of these parameters, on all ranks.

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
            for number in range(len(self.members)):
                self.launch(number)

    def is_whole_along(self, index: int, axis: int) -> bool:
        """Whether this rank has a gradient that is not Partial."""
        kinds = self.kinds[index]
        return self.sent.here[index] and (not kinds or kinds[axis] == REPLICATED)

    # --- the end of a round ------------------------------------------------------------------

    def end_round(self, problem: RankFailure | None) -> None:
        """End a round, and check that its gradients are usable."""
        sent = self.sent
        sent.look_for_drops()
        if self._of_dtensors:
            self._look_at_placements(i for i in sorted(self._everything - sent.taken))
        rival = None
        if self.hooks is not None and self._distribution.overlap_grad_reduce:
            rival = self.hooks.rival(self._rank)
        self.problem = self.problem or problem or rival or sent.changed()
        self._ended = True
        for index, last in enumerate(self._last_bucket):
            if last < 0:
                self._take(index, self.local.has_gradient(index))
            elif index not in sent.taken or index in sent.dropped:
                sent.here[index] |= self.local.has_gradient(index)

    def accumulate(self) -> None:
        """Finish a round: add its sums, and free its gradients."""
        self._land_all()
        self._set_sums_aside()
        self.sent.free()
        self._begin_round()

    def _set_sums_aside(self) -> None:
        for number, kept in enumerate(self._sums):
            if kept is not None:
                self._sums[number] = self.gradients.set_aside(kept)

    def mean(self, number: int) -> Tensor:
        """Wait for a bucket; returns the mean of this rank's segment."""
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
        """Sum over outer groups."""
        assert self.outer is not None
        reduce, *gather = transfers
        summed = add_up(reduce, summed, self.outer).wait()
        return self._gathered(gather[0], summed, self.outer) if gather else summed

    @staticmethod
    def _gathered(transfer: Transfer, part: Tensor, group: RankGroup) -> Tensor:
        assert transfer.sizes is not None
        return torch.cat(gather_segments(transfer.name, part, transfer.sizes, group).wait())

    def mean_of(self, index: int) -> Tensor:
        """A parameter's mean gradient so far, (numel,). Collective."""
        mean = torch.zeros(
            self._plan.params[index].numel,
            dtype=torch.promote_types(self.local.params[index].dtype, torch.float32),
            device=self.local.params[index].device,
        )
        for number in self.buckets_of(index):
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
        """Set this rank's part of a mean gradient."""
        share = self._divisor / (1 if self.outer is None else self.outer.size)
        for kept, place, elements in self._kept_of(index):
            kept[place] = mean[elements] * share
        self.sent.here[index] = True
        self.sent.show_as_reduced()

    def _kept_of(self, index: int) -> Iterator[tuple[Tensor, slice, slice]]:
        """This rank's sums of a parameter, with their elements."""
        for number in self.buckets_of(index):
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
        """Multiply the sums so far."""
        for kept in self._sums:
            if kept is not None:
                kept.mul_(factor.to(kept))

    def buckets_of(self, index: int) -> range:
        """Buckets that contain a parameter."""
        return range(self._first_bucket[index], self._last_bucket[index] + 1)

    def finish_step(self) -> None:
        """Reset after a step."""
        if self.hooks is not None and self._distribution.overlap_grad_reduce:
            self.hooks.step_finished()
        self.sent.steps += 1
        self._begin_step()

    def abandon(self) -> None:
        """Drop the reductions of a failed step."""
        self._land_all()
        self._sums = [None] * len(self.members)
        self.problem, self.is_looked_at = None, False
        self._begin_step()

    def _begin_step(self) -> None:
        self.sent.forget()
        self.gradients.end_step()
        self._begin_round()

    def _land_all(self) -> None:
        for number in list(self._flying):
            self._land(number)

    def _land(self, number: int) -> None:
        """Wait for a reduction, and add it to earlier rounds."""
        if number in self._flying:
            arrived = self._flying.pop(number).wait()
            if arrived.dtype.itemsize < 4:
                arrived = arrived.to(torch.float32)
            if number in self._divided:
                self._divided.remove(number)
                arrived = arrived.mul_(self._headroom)
            arrived = self.gradients.landed(number, arrived)
            before = self._sums[number]
            self._sums[number] = arrived if before is None else before.add_(arrived)

    @property
    def _rank(self) -> int:
        return self._group.members[self._group.rank]

    def _name(self, index: int) -> str:
        return self._plan.params[index].name
