"""What ranks tell each other about a checkpoint: small things, on a group of any backend."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from samestep.checkpoint.errors import CheckpointError
from samestep.comm.diagnosis.flight import attempt
from samestep.comm.groups import RankGroup, rank_group
from samestep.comm.messages import gather_everywhere, gather_on_first, scatter_from_first

T = TypeVar("T")


class Ranks(NamedTuple):
    """The ranks that save or load together. If one of them dies, the others' error names it."""

    group: RankGroup | None = None  # None: this process alone
    task: str = ""  # what they do, for the error

    @property
    def rank(self) -> int:
        """My place."""
        return 0 if self.group is None else self.group.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return 1 if self.group is None else self.group.size

    def everywhere(self, act: Callable[[], T]) -> T:
        """Do something; if it fails on any rank, raise on all of them."""
        return self.agreed(lambda: (act(), True))[0]

    def agreed(self, act: Callable[[], tuple[T, bool]]) -> tuple[T, list[bool]]:
        """The same, and what every rank has answered beside its result."""
        problem: Exception | None = None
        yes = False
        try:
            result, yes = act()
        except Exception as error:
            problem = error
        answers = self.all_of(("" if problem is None else _words(problem), yes))
        if problem is not None:
            if isinstance(problem, CheckpointError):
                raise problem
            raise CheckpointError(_words(problem)) from problem
        for rank, (text, _) in enumerate(answers):
            if text:
                raise CheckpointError(f"rank {rank}: {text}")
        return result, [answer for _, answer in answers]

    def all_of(self, value: T) -> list[T]:
        """What every rank gives, on every rank; for small things."""
        group = self.group
        if group is None:
            return [value]
        return attempt(self.task, group, lambda: gather_everywhere(value, group.handle))

    def to_first(self, value: T) -> list[T]:
        """What every rank gives, on the first; nothing elsewhere."""
        group = self.group
        if group is None:
            return [value]
        return attempt(self.task, group, lambda: gather_on_first(value, group.handle)) or []

    def from_first(self, values: list[T]) -> T:
        """One of the values that the first rank gives."""
        group = self.group
        if group is None:
            return values[0]
        found: T = attempt(self.task, group, lambda: scatter_from_first(values, group.handle))
        return found


def all_ranks(task: str) -> Ranks:
    """Those of the default group."""
    return Ranks(rank_group(), task)


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror or error}"
    return str(error) or type(error).__name__
