"""What is alive at every moment of a step, and the moment when that is most."""

from typing import NamedTuple

GRADIENTS, BUFFERS, TEMPORARIES = "gradients", "buffers", "temporaries"


class Then(NamedTuple):
    """Bytes at one moment."""

    gradients: int
    buffers: int
    temporaries: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


class Passing(NamedTuple):
    """Gradients when backward is over, and the moment when most is alive."""

    gradients: int
    then: Then


class Ledger:
    """What is alive, by key, and the moment when that is most."""

    def __init__(self) -> None:
        self._alive: dict[object, tuple[str, int]] = {}
        self.now = dict.fromkeys((GRADIENTS, BUFFERS, TEMPORARIES), 0)
        self.most = Then(0, 0, 0)

    def add(self, key: object, size: int, kind: str = BUFFERS) -> None:
        """Something is allocated."""
        self.drop(key)
        self._alive[key] = kind, size
        self.now[kind] += size
        then = Then(*self.now.values())
        if then.total > self.most.total:
            self.most = then

    def drop(self, key: object) -> None:
        """It is let go of; nothing, if it was not there."""
        if key in self._alive:
            kind, size = self._alive.pop(key)
            self.now[kind] -= size

    def passing(self, size: int) -> None:
        """Something is allocated and let go of at once."""
        self.add("passing", size, TEMPORARIES)
        self.drop("passing")

    def size(self, key: object) -> int | None:
        """Bytes of what is alive; None if it is not."""
        return self._alive[key][1] if key in self._alive else None
