"""What a collective moves, before it is launched."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from samestep.comm.groups import RankGroup


class Traffic(Enum):
    """A kind of collective, and the bytes that a rank must send at least.

    From the bytes of the whole, of this rank's segment, and the number of ranks.
    """

    PARTS = "all_to_all", lambda whole, mine, ranks: mine
    EXCHANGE = "all_to_all", lambda whole, mine, ranks: whole - mine
    COPIES = "all_to_all", lambda whole, mine, ranks: mine * (ranks - 1)
    REDUCE_SCATTER = "reduce_scatter", lambda whole, mine, ranks: whole - mine
    ALL_GATHER = "all_gather", lambda whole, mine, ranks: mine * (ranks - 1)
    ALL_REDUCE = "all_reduce", lambda whole, mine, ranks: 2 * whole * (ranks - 1) / ranks
    BROADCAST = "broadcast", lambda whole, mine, ranks: whole * (ranks - 1) / ranks

    def __init__(self, kind: str, sent: Callable[[int, int, int], float]) -> None:
        self.kind = kind
        self.sent = sent


class Transfer(NamedTuple):
    """One collective: its kind, name and ranks, a tensor of its dtype and device, its segments.

    `sizes` are elements per rank, None if every rank has all of `buffer`.
    """

    traffic: Traffic
    name: str
    group: RankGroup
    buffer: Tensor
    sizes: Sequence[int] | None = None

    @property
    def elements(self) -> int:
        """Of the whole operation, the same on every rank."""
        return self.buffer.numel() if self.sizes is None else sum(self.sizes)

    def sent(self, elements: int) -> int:
        """Bytes that this rank must send at least, of so many elements of the whole operation."""
        mine = elements if self.sizes is None else self.sizes[self.group.rank]
        width = self.buffer.element_size()
        return round(self.traffic.sent(elements * width, mine * width, self.group.size))
