"""The verdict on measured times, as a pure function."""

from collections.abc import Sequence
from typing import NamedTuple


class Measurement(NamedTuple):
    """Milliseconds of both ways for a parameter of `size` elements: medians over rounds."""

    size: int
    all_reduce_ms: float
    shard_ms: float

    @property
    def ratio(self) -> float:
        """Below 1 sharding is faster."""
        return self.shard_ms / self.all_reduce_ms


def crossover_of(measurements: Sequence[Measurement]) -> int:
    """The smallest size from which on sharding is at least as fast at every measured size.

    If it is slower at the largest, there is none: one more than the largest.
    """
    crossover = max(each.size for each in measurements) + 1
    for each in sorted(measurements, reverse=True):
        if each.shard_ms > each.all_reduce_ms:
            break
        crossover = each.size
    return crossover
