"""Collectives as data: decided in plans once, run by `comm.collectives`, counted by `estimate`."""

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import torch


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


class CollectivePolicy(NamedTuple):
    """The facts that choose the collectives of a plan's buckets; the same on every rank.

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

    @property
    def exchanges(self) -> bool:
        """Whether segments are exchanged, and added up by who gets them."""
        return prefers_exchange(on_cpu=self.on_cpu, ordered=self.ordered, frugal=self.frugal)

    def gather(self, name: str, dtype: torch.dtype, sizes: Sequence[int]) -> Transfer:
        """A gather of segments of these sizes."""
        return gather_of(name, dtype, sizes, on_cpu=self.on_cpu, uneven=self.uneven)


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
