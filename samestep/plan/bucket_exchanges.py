"""The exchanges of a bucket in a step: the layouts that its buffer passes through.

    gradients    every rank has an addend of all of it
      reduce
    sums         each rank has the sum of its segment, or every rank has all sums
      gather
    parameters   every rank has all of it

Where every rank needs all sums, added up in rank order, each rank first adds up one stretch of
elements, and the stretches are then all-gathered. Where several groups of ranks reduce the same
bucket, the sums of each rank are added up over these groups once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from samestep.layout.boxes import Box
from samestep.plan.exchanges import Exchange
from samestep.plan.layouts import Holding, Holdings, Key, whole
from samestep.plan.sharding import Bucket, ShardingPlan
from samestep.plan.transfers import CollectivePolicy, Transfer, even_sizes

BUFFER: Key = (0, "")  # the one tensor of these exchanges


@dataclass(frozen=True, eq=False)
class BucketExchanges:
    """The exchanges of one bucket.

    reduce: gradients to sums, or to stretches of them.
    sums: stretches of sums to all sums on every rank; None: `reduce` has done it.
    outer: by place of a rank in its group, the exchanges that add up its sums over all groups
        that reduce the bucket; (): there is one group.
    gather: updated segments to all parameters on every rank; None: every rank updates all.
    """

    reduce: Exchange
    sums: Exchange | None
    outer: tuple[tuple[Exchange, ...], ...]
    gather: Exchange | None

    @cached_property
    def outer_transfers(self) -> tuple[tuple[Transfer, ...], ...]:
        """Return the collectives of `outer`; ranks with equally large sums have the same ones."""
        known = {id(way): tuple(each.transfer for each in way) for way in self.outer}
        return tuple(known[id(way)] for way in self.outer)


def bucket_exchanges(
    plan: ShardingPlan,
    policy: CollectivePolicy,
    gradient_dtypes: Sequence[torch.dtype],
    dtypes: Sequence[torch.dtype],
) -> tuple[BucketExchanges, ...]:
    """Make the exchanges of every bucket of a plan.

    gradient_dtypes, dtypes: by bucket the dtype in which gradients and parameters are sent.
    """
    return tuple(
        _of_bucket(number, bucket, plan, policy, gradients, dtype)
        for number, (bucket, gradients, dtype) in enumerate(
            zip(plan.buckets, gradient_dtypes, dtypes, strict=True)
        )
    )


def _of_bucket(
    number: int,
    bucket: Bucket,
    plan: ShardingPlan,
    policy: CollectivePolicy,
    gradient_dtype: torch.dtype,
    dtype: torch.dtype,
) -> BucketExchanges:
    label = f"bucket {number} ({plan.params[bucket.params[0]].name}, ...)"
    size, ranks = bucket.size, policy.ranks
    wide = torch.promote_types(gradient_dtype, torch.float32)
    gradients, everywhere = addends_on_all(size, ranks), copies_on_all(size, ranks)
    # Every rank needs all sums of a replicated bucket; they are spread evenly for adding them up.
    in_order = bucket.replicated and policy.ordered and ranks > 1
    sizes = even_sizes(size, ranks) if bucket.replicated else bucket.segment_sizes
    segments = stretches(sizes)
    summed = everywhere if bucket.replicated and not in_order else segments

    def exchange(
        name: str, source: Holdings, target: Holdings, travels_as: torch.dtype
    ) -> Exchange:
        name = f"{name} of {label}"
        return Exchange(name, {BUFFER: source}, {BUFFER: target}, ranks, travels_as, policy)

    kept = [size] * ranks if bucket.replicated else sizes
    outer: tuple[tuple[Exchange, ...], ...] = ()
    if policy.outer > 1:
        of_size = {own: outer_exchanges(number, own, wide, policy) for own in set(kept)}
        outer = tuple(of_size[own] for own in kept)
    return BucketExchanges(
        exchange("reduction", gradients, summed, gradient_dtype),
        exchange("sums", segments, everywhere, wide) if in_order else None,
        outer,
        None if bucket.replicated else exchange("gather", segments, everywhere, dtype),
    )


def outer_exchanges(
    number: int, elements: int, dtype: torch.dtype, policy: CollectivePolicy
) -> tuple[Exchange, ...]:
    """Return the exchanges that sum `elements` of a bucket over groups of ranks."""
    name, groups = f"outer sum of bucket {number}", policy.outer
    policy = policy._replace(ranks=groups, levels=1)
    gradients, everywhere = addends_on_all(elements, groups), copies_on_all(elements, groups)
    if not policy.ordered or groups == 1:
        steps = [(gradients, everywhere)]
    else:
        segments = stretches(even_sizes(elements, groups))
        steps = [(gradients, segments), (segments, everywhere)]
    return tuple(
        Exchange(name, {BUFFER: source}, {BUFFER: target}, groups, dtype, policy)
        for source, target in steps
    )


# --- layouts of a buffer --------------------------------------------------------------------------


def addends_on_all(size: int, ranks: int) -> Holdings:
    """Return the layout in which every rank has an addend of all elements."""
    return Holdings([Holding(whole((size,)), (_everyone(ranks),))])


def copies_on_all(size: int, ranks: int) -> Holdings:
    """Return the layout in which every rank has a copy of all elements."""
    return Holdings([Holding(whole((size,)), _each(ranks))])


def stretches(sizes: Sequence[int]) -> Holdings:
    """Return the layout of consecutive stretches, in which rank i has `sizes[i]` elements."""
    found, start = [], 0
    for rank, size in enumerate(sizes):
        if size:
            found.append(Holding(Box((start,), (size,)), ((rank,),)))
            start += size
    return Holdings(found)


@cache
def _everyone(ranks: int) -> tuple[int, ...]:
    return tuple(range(ranks))


@cache
def _each(ranks: int) -> tuple[tuple[int, ...], ...]:
    return tuple((rank,) for rank in range(ranks))
