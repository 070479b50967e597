"""What travels, as data: decided here once, run by `comm.collectives`, counted by `estimate`.

Of a bucket:

    reduce   the gradients of all ranks -> every rank's sum of its segment, or of all of it
    sums     those sums -> everyone, where each rank has added up a stretch of what all need
    outer    this rank's sum -> the sum over groups of ranks that do the same
    gather   updated segments -> everyone

`plan.chunks` has those of blocks whose parts are spread over ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import torch

from samestep.plan.sharding import Bucket, ShardingPlan


class Traffic(Enum):
    """A kind of collective, and the bytes that a rank must send at least.

    From the bytes of the whole, of this rank's segment, and the number of ranks.
    """

    PARTS = "all_to_all", lambda whole, mine, ranks: mine
    EXCHANGE = "all_to_all", lambda whole, mine, ranks: whole - mine
    COPIES = "all_to_all", lambda whole, mine, ranks: mine * (ranks - 1)
    REDUCE_SCATTER = "reduce_scatter", lambda whole, mine, ranks: whole - mine
    ALL_GATHER = "all_gather", lambda whole, mine, ranks: mine * (ranks - 1)
    # Of unequal lengths, passed on from rank to rank: whoever has little sends as much as others.
    UNEVEN_GATHER = "all_gather", lambda whole, mine, ranks: whole * (ranks - 1) / ranks
    ALL_REDUCE = "all_reduce", lambda whole, mine, ranks: 2 * whole * (ranks - 1) / ranks
    BROADCAST = "broadcast", lambda whole, mine, ranks: whole * (ranks - 1) / ranks

    def __init__(self, kind: str, sent: Callable[[int, int, int], float]) -> None:
        self.kind = kind
        self.sent = sent


class Transfer(NamedTuple):
    """One collective: its kind, its name (the same on every rank), and what it moves.

    elements: of the whole operation, the same on every rank.
    sizes: elements per rank; None if every rank has all.
    incoming: elements that each rank gets, where that does not follow from the sizes.
    levels: 2: it goes inside hosts and across them, in two collectives.
    """

    traffic: Traffic
    name: str
    dtype: torch.dtype
    elements: int
    sizes: Sequence[int] | None = None
    incoming: Sequence[int] | None = None
    levels: int = 1

    def sent(self, rank: int, ranks: int) -> int:
        """Bytes that one of so many ranks must send at least."""
        mine = self.elements if self.sizes is None else self.sizes[rank]
        width = self.dtype.itemsize
        return round(self.traffic.sent(self.elements * width, mine * width, ranks))


def of_segments(traffic: Traffic, name: str, dtype: torch.dtype, sizes: Sequence[int]) -> Transfer:
    """A transfer in which every rank has one segment."""
    return Transfer(traffic, name, dtype, sum(sizes), sizes)


def gather_of(
    name: str, dtype: torch.dtype, sizes: Sequence[int], *, on_cpu: bool, uneven: bool
) -> Transfer:
    """Everyone gets the segments of all ranks.

    `uneven`: the backend gathers unequal lengths in one call, as NCCL does by broadcasts in a ring
    (torch.distributed.all_gather). Others do so only as an all-to-all of copies, and gloo is
    faster that way with equal ones too.
    """
    if on_cpu or (not uneven and len(set(sizes)) > 1):
        return of_segments(Traffic.COPIES, name, dtype, sizes)
    equal = len(set(sizes)) == 1
    return of_segments(Traffic.ALL_GATHER if equal else Traffic.UNEVEN_GATHER, name, dtype, sizes)


# --- buckets ---------------------------------------------------------------------------------


class BucketPolicy(NamedTuple):
    """What decides how the buckets of a plan travel; the same for all of them, on every rank.

    outer: groups of ranks that do the same; 1: there are no others.
    ordered: gradients are added up in rank order.
    frugal: memory counts so much that a reduction gets no buffer to receive into. Not by when a
        bucket is launched: some ranks may launch it later than others.
    uneven: the backend gathers unequal lengths in one call.
    levels: 2: segments go inside hosts and across them.
    """

    ranks: int
    outer: int
    ordered: bool
    frugal: bool
    on_cpu: bool
    uneven: bool
    levels: int = 1

    def gather(self, name: str, dtype: torch.dtype, sizes: Sequence[int]) -> Transfer:
        """Of segments of these sizes."""
        return gather_of(name, dtype, sizes, on_cpu=self.on_cpu, uneven=self.uneven)


@dataclass(frozen=True, eq=False)
class BucketTransfers:
    """What one bucket sends in a step; `outer[place]`: what a rank at that place of its group does.

    `gather` is None where every rank updates all of it.
    """

    reduce: Transfer
    sums: Transfer | None
    outer: tuple[tuple[Transfer, ...], ...]
    gather: Transfer | None


def bucket_transfers(
    plan: ShardingPlan,
    policy: BucketPolicy,
    gradient_dtypes: Sequence[torch.dtype],
    dtypes: Sequence[torch.dtype],
) -> tuple[BucketTransfers, ...]:
    """Of every bucket, by the dtypes in which its gradients and its parameters travel."""
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
    policy: BucketPolicy,
    gradients: torch.dtype,
    dtype: torch.dtype,
) -> BucketTransfers:
    label = f"bucket {number} ({plan.params[bucket.params[0]].name}, ...)"
    name = f"reduction of {label}"
    segments = bucket.segment_sizes
    if bucket.replicated:  # spread evenly for adding it up
        segments = even_sizes(bucket.size, policy.ranks)
    wide = torch.promote_types(gradients, torch.float32)
    frugal = policy.frugal or bucket.replicated
    if prefers_exchange(on_cpu=policy.on_cpu, ordered=policy.ordered, frugal=frugal):
        reduce = of_segments(Traffic.EXCHANGE, name, gradients, segments)
    elif bucket.replicated:
        reduce = Transfer(Traffic.ALL_REDUCE, name, gradients, bucket.size)
    else:
        reduce = of_segments(Traffic.REDUCE_SCATTER, name, gradients, segments)
    sums = gather = None
    if bucket.replicated and policy.ordered:
        sums = policy.gather(f"sums of {label}", wide, segments)
    if not bucket.replicated:
        gather = policy.gather(f"gather of {label}", dtype, segments)
    kept = [bucket.size] * policy.ranks if bucket.replicated else segments
    outer: tuple[tuple[Transfer, ...], ...] = ()
    if policy.outer > 1:
        of_size = {size: outer_transfers(number, size, wide, policy) for size in set(kept)}
        outer = tuple(of_size[size] for size in kept)
    if reduce.sizes is not None:
        reduce = reduce._replace(levels=policy.levels)
    if gather is not None:
        gather = gather._replace(levels=policy.levels)
    if sums is not None:
        sums = sums._replace(levels=policy.levels)
    return BucketTransfers(reduce, sums, outer, gather)


def outer_transfers(
    number: int, elements: int, wide: torch.dtype, policy: BucketPolicy
) -> tuple[Transfer, ...]:
    """How so many elements of a bucket are added up over groups that do the same."""
    name = f"outer sum of bucket {number}"
    if not policy.ordered:
        return (Transfer(Traffic.ALL_REDUCE, name, wide, elements),)
    sizes = even_sizes(elements, policy.outer)
    exchange = of_segments(Traffic.EXCHANGE, name, wide, sizes)
    return exchange, policy.gather(name, wide, sizes)


def prefers_exchange(*, on_cpu: bool, ordered: bool, frugal: bool = False) -> bool:
    """Whether segments are better exchanged than left to the backend's reduce-scatter.

    On CPU that is twice as fast, but needs a buffer to receive into: not if `frugal`.
    """
    return ordered or (on_cpu and not frugal)


def divides_first(dtype: torch.dtype, ranks: int, *, exchange: bool) -> bool:
    """Whether gradients are divided before they are added up, and the sum is multiplied after.

    A backend adds in the dtype that travels, and float16 ends at 65504: four times 20,000 is inf.
    Divided by the least power of two that is no smaller than the number of ranks, no sum is larger
    than the largest gradient. That is exact down to the normal numbers (6e-5) and sends no byte
    more; what is smaller loses up to as many bits as were divided by, as in DDP, and
    `reduce_dtype=torch.float32` keeps them. An exchange adds in float32, and bfloat16 has the
    range of float32.
    """
    return dtype == torch.float16 and ranks > 1 and not exchange


def even_sizes(elements: int, parts: int) -> list[int]:
    """Elements of parts that are as equal as can be."""
    bounds = [elements * part // parts for part in range(parts + 1)]
    return [stop - start for start, stop in pairwise(bounds)]
