"""Collectives in flight on a GPU, as the watch of a rank keeps them."""

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import NamedTuple

import torch.distributed as dist

from samestep.comm.diagnosis.roll_call import (
    Background,
    ranks_text,
)
from samestep.plan.transfers import Transfer

LAUNCHES_KEPT = 64  # of a group, that are compared between ranks
DEVICE_S = 2.0  # for an answer of the device, which may not come while it is stuck


def patience_of(timeout: timedelta | None) -> float:
    """Seconds in flight after which an operation counts as stuck.

    Torch's watchdog aborts the process at the time-out, so the roll call comes before: after 70%
    of it, at most 15 s earlier.
    """
    limit = 600.0 if timeout is None else timeout.total_seconds()
    return limit - min(15.0, 0.3 * limit)


@dataclass(slots=True)
class Operation:
    """A collective as this rank launches it.

    work: torch's; None while it is being launched, which waits for others where a communicator is
        made first, and where nothing is sent.
    """

    number: int  # 1, 2, ... in this process
    step: int
    name: str
    elements: int
    ranks: tuple[int, ...]
    begun: float  # time.monotonic()
    patience: float
    work: dist.Work | None = None
    launched: bool = False
    waited: bool = False  # some stream waits for it

    def has_arrived(self) -> bool:
        """Whether the device is done with it; False if the device does not say so in time."""
        if not self.launched or self.work is None:
            return self.launched
        asked = Background(self.work.is_completed)
        return asked.ended(DEVICE_S) and bool(asked.value)

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.elements} elements, operation {self.number}, "
            f"step {self.step}, among {ranks_text(self.ranks, most=8)})"
        )


class Launched(NamedTuple):
    """An operation of one group: its number there, and a digest of all up to it, in order."""

    number: int
    digest: int
    name: str
    elements: int


class Launches:
    """The last operations of each group that this rank has launched, as ranks compare them."""

    def __init__(self) -> None:
        self._groups: dict[str, deque[Launched]] = {}

    def add(self, group: str, transfer: Transfer) -> None:
        """Take note of a launch."""
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = deque([Launched(0, 0, "", 0)], maxlen=LAUNCHES_KEPT)
        # Whole numbers only: their hash is the same in every process.
        digest = hash((known[-1].digest, number_of(transfer.name), transfer.elements))
        known.append(Launched(known[-1].number + 1, digest, transfer.name, transfer.elements))

    def digests(self) -> dict[str, list[tuple[int, int]]]:
        """Number and digest of each, by group; another thread may launch meanwhile."""
        return {
            group: [each[:2] for each in list(known)] for group, known in list(self._groups.items())
        }

    def difference(self, theirs: Mapping[str, Sequence[tuple[int, int]]]) -> Launched | None:
        """The first operation of this rank that another rank, with these digests, has not."""
        for group, known in list(self._groups.items()):
            digests = dict(theirs.get(group, ()))
            for mine in list(known):
                if digests.get(mine.number, mine.digest) != mine.digest:
                    return mine
        return None


@cache
def number_of(name: str) -> int:
    """A number of an operation's name, the same in every process."""
    return zlib.crc32(name.encode())
