"""The one order in which the buckets of an optimizer are launched, on every rank.

An optimizer may have several plans: of groups that were added later, or that live on fewer ranks.
Backward completes their buckets in an order that ranks need not share.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Launcher(Protocol):
    """The buckets of one plan, which are launched in their own order."""

    launched: int  # so many were, in this round

    def is_complete(self, bucket: int) -> bool:
        """Whether every gradient of a bucket has arrived."""
        ...

    def make_room(self) -> None:
        """Another bucket is about to be launched inside backward."""
        ...

    def launch_next(self) -> None:
        """Launch the first bucket that was not."""
        ...


class _Turn(NamedTuple):
    launcher: Launcher
    bucket: int


class LaunchOrder:
    """Buckets of all plans, from those that backward reaches first to those it reaches last."""

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        self._places: list[int] = []
        self._next = 0

    def add(self, launcher: Launcher, places: Sequence[int]) -> None:
        """Take in the buckets of a plan; `places` says how late forward uses each of them."""
        for bucket, place in enumerate(places):
            at = len(self._turns)
            while at > 0 and self._places[at - 1] < place:
                at -= 1
            self._turns.insert(at, _Turn(launcher, bucket))
            self._places.insert(at, place)
        self._next = 0

    def restart(self) -> None:
        """A plan has begun a new round."""
        self._next = 0

    def launch_complete(self) -> None:
        """Launch what is complete, up to the first bucket that is not."""
        while (turn := self._turn()) is not None and turn.launcher.is_complete(turn.bucket):
            turn.launcher.make_room()
            turn.launcher.launch_next()

    def launch_through(self, launcher: Launcher, bucket: int) -> None:
        """Launch everything up to this bucket, complete or not."""
        while launcher.launched <= bucket:
            turn = self._turn()
            assert turn is not None
            turn.launcher.launch_next()

    def _turn(self) -> _Turn | None:
        while self._next < len(self._turns):
            turn = self._turns[self._next]
            if turn.launcher.launched <= turn.bucket:
                return turn
            self._next += 1
        return None
