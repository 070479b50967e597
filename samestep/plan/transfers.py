"""Collectives as data: decided in plans once, run by `comm.collectives`, counted by `estimate`."""

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import torch


class Traffic(Enum):
    """A kind of collective, with the least number of bytes that a rank must send.

    The number is computed from the bytes of the whole, of this rank's segment, and the ranks.
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
    """One collective: its kind, its name (the same on every rank), and the sizes of its data.

    elements: number of elements of the whole operation, the same on every rank.
    sizes: elements per rank; None if every rank has all of them.
    incoming: elements that each rank gets, where that does not follow from the sizes.
    levels: 2 if it is sent inside hosts and across them, in two collectives; else 1.
    """

    traffic: Traffic
    name: str
    dtype: torch.dtype
    elements: int
    sizes: Sequence[int] | None = None
    incoming: Sequence[int] | None = None
    levels: int = 1

    def sent(self, rank: int, ranks: int) -> int:
        """Return the least number of bytes that a rank must send."""
        mine = self.elements if self.sizes is None else self.sizes[rank]
        width = self.dtype.itemsize
        return round(self.traffic.sent(self.elements * width, mine * width, ranks))


def of_segments(traffic: Traffic, name: str, dtype: torch.dtype, sizes: Sequence[int]) -> Transfer:
    """Return a transfer in which every rank has one segment."""
    return Transfer(traffic, name, dtype, sum(sizes), sizes)


def gather_of(
    name: str, dtype: torch.dtype, sizes: Sequence[int], *, on_cpu: bool, uneven: bool
) -> Transfer:
    """Return a transfer that gives all ranks the segments of all ranks.

    `uneven`: the backend gathers unequal lengths in one call, as NCCL does by broadcasts in a ring
    (torch.distributed.all_gather). Other backends need an all-to-all of copies, with which
    gloo is faster for equal lengths too.
    """
    if on_cpu or (not uneven and len(set(sizes)) > 1):
        return of_segments(Traffic.COPIES, name, dtype, sizes)
    equal = len(set(sizes)) == 1
    return of_segments(Traffic.ALL_GATHER if equal else Traffic.UNEVEN_GATHER, name, dtype, sizes)


class CollectivePolicy(NamedTuple):
    """The facts that choose the collectives of a plan's buckets; the same on every rank.

    outer: number of groups of ranks that reduce the same buckets; 1: there are no others.
    ordered: gradients are added up in rank order.
    frugal: memory is saved: a reduction gets no buffer to receive into. The choice must not depend
        on when a bucket is launched: some ranks may launch it later than others.
    uneven: the backend gathers unequal lengths in one call.
    levels: 2 if segments are sent inside hosts and across them; else 1.
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
        """Whether segments are exchanged all-to-all, and summed by the ranks that receive them."""
        return prefers_exchange(on_cpu=self.on_cpu, ordered=self.ordered, frugal=self.frugal)

    def gather(self, name: str, dtype: torch.dtype, sizes: Sequence[int]) -> Transfer:
        """Return a gather of segments of these sizes."""
        return gather_of(name, dtype, sizes, on_cpu=self.on_cpu, uneven=self.uneven)


def prefers_exchange(*, on_cpu: bool, ordered: bool, frugal: bool = False) -> bool:
    """Whether segments are better exchanged than left to the backend's reduce-scatter.

    On CPU an exchange is twice as fast, but needs a buffer to receive into: not if `frugal`.
    """
    return ordered or (on_cpu and not frugal)


def divides_first(dtype: torch.dtype, ranks: int, *, exchange: bool) -> bool:
    """Whether gradients are divided before they are added up, and the sum is multiplied after.

    A backend adds in the dtype that travels, and float16 ends at 65504: four times 20,000 is inf.
    Divided by the least power of two that is no smaller than the number of ranks, no sum is larger
    than the largest gradient. Division is exact down to the normal numbers (6e-5) and sends no
    byte more; a smaller gradient loses up to log2(divisor) bits, as in DDP, and
    `reduce_dtype=torch.float32` keeps them. An exchange adds in float32, and bfloat16 has the
    range of float32.
    """
    return dtype == torch.float16 and ranks > 1 and not exchange


def even_sizes(elements: int, parts: int) -> list[int]:
    """Return the sizes of `parts` parts of `elements` that are as equal as possible."""
    bounds = [elements * part // parts for part in range(parts + 1)]
    return [stop - start for start, stop in pairwise(bounds)]
