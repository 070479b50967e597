"""A ledger of the buffers that are alive in a step, and of the moment when most bytes are."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

from samestep.plan.memory import BUFFERS, TEMPORARIES, Allocation, Change, Passing, Release


class Then(NamedTuple):
    """Bytes at one moment, by kind."""

    gradients: int
    buffers: int
    temporaries: int

    @property
    def total(self) -> int:
        return sum(self)


class Ledger:
    """The buffers that are alive, by key, as operations allocate and free them."""

    def __init__(self) -> None:
        self._alive: dict[object, tuple[str, int]] = {}
        self._spare: dict[Hashable, list[object]] = defaultdict(list)  # by pool
        self.now = dict.fromkeys(Then._fields, 0)
        self.most = Then(0, 0, 0)
        self._total = 0  # of the most

    def replay(self, changes: Iterable[Change]) -> None:
        """Apply changes of memory in order."""
        for change in changes:
            match change:
                case Allocation(key, nbytes, kind, pool):
                    if pool is not None and self._spare[pool]:
                        self.drop(self._spare[pool].pop())
                    self.add(key, nbytes, kind)
                case Release(key, pool):
                    kind, nbytes = self._alive.get(key, (BUFFERS, 0))
                    self.drop(key)
                    if pool is not None:
                        spare = "spare", key
                        self.add(spare, nbytes, kind)
                        self._spare[pool].append(spare)
                case Passing(nbytes):
                    self.passing(nbytes)

    def add(self, key: object, size: int, kind: str = BUFFERS) -> None:
        """Count a buffer of so many bytes from now on, in place of one with the same key."""
        self.drop(key)
        self._alive[key] = kind, size
        self.now[kind] += size
        total = sum(self.now.values())
        if total > self._total:
            self._total, self.most = total, Then(**self.now)

    def drop(self, key: object) -> None:
        """Free a buffer, if it is alive."""
        if key in self._alive:
            kind, size = self._alive.pop(key)
            self.now[kind] -= size

    def passing(self, size: int) -> None:
        """Count bytes that are allocated and freed at once, for the peak."""
        self.add("passing", size, TEMPORARIES)
        self.drop("passing")

    def alive(self) -> Iterator[tuple[object, int]]:
        """Return pairs of a live buffer's key and its bytes."""
        return ((key, nbytes) for key, (_, nbytes) in self._alive.items())

    def size(self, key: object) -> int | None:
        """Return the bytes of a buffer; None: the buffer is not alive."""
        return self._alive[key][1] if key in self._alive else None
