"""Rows of a fused weight that are stored as a parameter of their own.

Under tensor parallel queries, keys and values of one matrix lie in parameters of their own, since
each is cut by itself. The name says where the rows are: `qkv.weight[64:96]` has rows 64 to 95 of
`qkv.weight`. The name is enough even if the parameter has been wrapped or replaced since:
patterns of the whole match the parts too, `split_sizes` are those of the whole, and checkpoints
hold only the whole.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from typing import NamedTuple

from samestep.layout.splits import split_of

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile and of checkpointing
_ROWS = re.compile(r"(?P<whole>.+)\[(?P<start>\d+):(?P<stop>\d+)\]")


class FusedRows(NamedTuple):
    """Rows `start` to `stop` - 1 of the parameter `whole`."""

    whole: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.whole}[{self.start}:{self.stop}]"

    @property
    def rows(self) -> int:
        return self.stop - self.start

    def own_splits(self, given: Sequence[int] | str, rows: int) -> tuple[int, ...]:
        """Return the `split_sizes` that fall on these rows; raise if a block crosses their end."""
        sizes: Sequence[int] = () if isinstance(given, str) else given
        if isinstance(given, str):
            sizes, groups = split_of(given, rows)
            if groups > 1:
                raise ValueError(
                    f"is rows {self.start} to {self.stop} of {rows}, and split_sizes "
                    f"{given!r} of {self.whole!r} mixes rows of all parts in every "
                    "group, so that no part is contiguous: give row counts instead"
                )
        ends = list(accumulate(sizes))
        if ends[-1:] != [rows] or not {self.start, self.stop} <= {0, *ends}:
            raise ValueError(
                f"is rows {self.start} to {self.stop} of {rows}, and split_sizes "
                f"{tuple(sizes)} of {self.whole!r} have no boundary there: give "
                "split_sizes with one entry or more for each part of the fused weight"
            )
        return tuple(n for n, end in zip(sizes, ends, strict=True) if self.start < end <= self.stop)


def rows_in(name: str) -> FusedRows | None:
    """Return the rows that a parameter's name encodes; None if the name has no rows."""
    found = _ROWS.fullmatch(name)
    return found and FusedRows(found["whole"], int(found["start"]), int(found["stop"]))


def without_wrappers(name: str) -> str:
    """Return a name without prefixes of torch.compile and checkpoint wrappers."""
    return ".".join(part for part in name.split(".") if part not in ("", *WRAPPERS))


def whole_name(name: str) -> str:
    """Return the name of the fused parameter that a name is a part of, or the name itself."""
    part = rows_in(name)
    return name if part is None else part.whole


def in_order(names: Iterable[str]) -> list[FusedRows]:
    """Return the parts of one fused parameter, sorted by row; raise if rows are missing."""
    parts = sorted((part for part in map(rows_in, names) if part), key=lambda part: part.start)
    end = 0
    for part in parts:
        if part.start != end:
            raise ValueError(
                f"rows {end} to {part.start} of {part.whole!r} are missing: the parts "
                "of a fused parameter must be trained or frozen, saved and loaded "
                "together"
            )
        end = part.stop
    return parts


_apart: ContextVar[bool] = ContextVar("parts of fused parameters stay apart", default=False)


@contextmanager
def parts_apart() -> Iterator[None]:
    """Enter a context in which state dicts keep parts of fused parameters apart."""
    before = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(before)


def are_apart() -> bool:
    """Whether state dicts keep parts of fused parameters apart now."""
    return _apart.get()
