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
    """Return the seconds in flight after which an operation counts as stuck.

    Torch's watchdog aborts the process at the time-out, so the roll call comes before: after 70%
    of it, at most 15 s earlier.
    """
    limit = 600.0 if timeout is None else timeout.total_seconds()
    return limit - min(15.0, 0.3 * limit)


@dataclass(slots=True)
class Operation:
    """A collective as this rank launches it.

    work: torch's work; None if nothing is sent, or during the launch, which waits for other ranks
        where a communicator is made first.
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
        """Whether the collective has ended; False if the device does not answer in time."""
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
    """An operation of a group: its number there, and a digest of all operations up to it."""

    number: int
    digest: int
    name: str
    elements: int


class Launches:
    """The last operations of each group that this rank has launched, as ranks compare them."""

    def __init__(self) -> None:
        self._groups: dict[str, deque[Launched]] = {}

    def add(self, group: str, transfer: Transfer) -> None:
        """Record the launch of an operation in a group."""
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = deque([Launched(0, 0, "", 0)], maxlen=LAUNCHES_KEPT)
        # Whole numbers only: their hash is the same in every process.
        digest = hash((known[-1].digest, number_of(transfer.name), transfer.elements))
        known.append(Launched(known[-1].number + 1, digest, transfer.name, transfer.elements))

    def digests(self) -> dict[str, list[tuple[int, int]]]:
        """Return number and digest of each operation, by group; other threads may launch."""
        return {
            group: [each[:2] for each in list(known)] for group, known in list(self._groups.items())
        }

    def difference(self, theirs: Mapping[str, Sequence[tuple[int, int]]]) -> Launched | None:
        """Return this rank's first operation that differs from another rank's digests, or None."""
        for group, known in list(self._groups.items()):
            digests = dict(theirs.get(group, ()))
            for mine in list(known):
                if digests.get(mine.number, mine.digest) != mine.digest:
                    return mine
        return None


@cache
def number_of(name: str) -> int:
    """Return a number for an operation's name, the same in every process."""
    return zlib.crc32(name.encode())
