"""What ranks tell each other about a checkpoint: small things, on a group of any backend."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from samestep.checkpoint.errors import CheckpointError
from samestep.comm.groups import rank_group
from samestep.comm.messages import gather_everywhere, gather_on_first, scatter_from_first

T = TypeVar("T")


class Ranks(NamedTuple):
    """The ranks that save or load together."""

    handle: dist.ProcessGroup | None  # None: this process alone
    rank: int
    size: int

    def everywhere(self, act: Callable[[], T]) -> T:
        """Do something; if it fails on any rank, raise on all of them."""
        return self.agreed(lambda: (act(), True))[0]

    def agreed(self, act: Callable[[], tuple[T, bool]]) -> tuple[T, bool]:
        """The same, and whether all ranks have given True beside their result."""
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
        return result, all(answer for _, answer in answers)

    def all_of(self, value: T) -> list[T]:
        """What every rank gives, on every rank; for small things."""
        if self.handle is None:
            return [value]
        return gather_everywhere(value, self.handle)

    def to_first(self, value: T) -> list[T]:
        """What every rank gives, on the first; nothing elsewhere."""
        if self.handle is None:
            return [value]
        return gather_on_first(value, self.handle) or []

    def from_first(self, values: list[T]) -> T:
        """One of the values that the first rank gives."""
        if self.handle is None:
            return values[0]
        found: T = scatter_from_first(list(values), self.handle)
        return found


def all_ranks() -> Ranks:
    """Those of the default group."""
    group = rank_group()
    return Ranks(None, 0, 1) if group is None else Ranks(group.handle, group.rank, group.size)


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror or error}"
    return str(error) or type(error).__name__
