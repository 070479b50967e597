"""Parse `split_sizes`: the rows of a stored matrix that are matrices of their own.

    split_sizes=(64, 16, 16)             rows after rows: Q, K, V
    split_sizes="halves"                 two of equal size: gate, up
    split_sizes="heads:16"               16 of equal size
    split_sizes="interleaved:3x16"       3 matrices, of each of which every one of 16 groups has
                                         rows: Q, K, V of head 0, then of head 1, ...
    split_sizes="interleaved:64+16+16x8" the same with unequal ones: 64, 16 and 16 rows in each of
                                         8 groups, as queries that share keys and values have
    transposed=True                      stored as (in, out): rows of a matrix are columns there

Rows are counted in the usual orientation (out, in), also where a matrix is stored as (in, out).
"""

import re
from collections.abc import Sequence
from typing import NamedTuple, cast

from torch import Tensor

_SPELLINGS = (
    'a list of row counts, "halves", "heads:16", "interleaved:3x16" or "interleaved:64+16+16x8"'
)
_INTERLEAVED = re.compile(r"interleaved:(?P<parts>\d+(\+\d+)*)x(?P<groups>\d+)")


class Split(NamedTuple):
    """Row counts of the matrices, repeated in `groups` groups."""

    sizes: tuple[int, ...]  # rows of each matrix in one group
    groups: int = 1


class Form(NamedTuple):
    """A block whose matrices are not contiguous rows of it."""

    split: Split
    transposed: bool

    def shapes(self, stored: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        """Return the shape (out, in) of each matrix of a block that is stored as (rows, cols)."""
        cols = stored[0 if self.transposed else 1]
        return tuple((size * self.split.groups, cols) for size in self.split.sizes)

    def views(self, block: Tensor) -> list[Tensor]:
        """Return each matrix of a block as a view (out, in) or (groups, out per group, in).

        For a stack of blocks (B, rows, cols) each view has a leading dim B.
        """
        whole = block.mT if self.transposed else block
        sizes, groups = self.split
        if groups > 1:
            *stack, rows, cols = whole.shape
            whole = whole.view(*stack, groups, rows // groups, cols)
        return list(whole.split_with_sizes(list(sizes), dim=-2))

    @property
    def dim(self) -> int:
        """Return the stored dim along which the matrices are interleaved."""
        return int(self.transposed)

    def numbers(self) -> list[int]:
        """Return for each index of `dim` the number of the matrix that has it."""
        sizes, groups = self.split
        return [number for number, size in enumerate(sizes) for _ in range(size)] * groups


def _brief(sizes: tuple[object, ...]) -> str:
    return f"{str(sizes[:9])[:-1]}, ...)" if len(sizes) > 99 else str(sizes)


def split_of(given: Sequence[int] | str | None, rows: int) -> Split:
    """Parse `split_sizes` for matrices with this number of rows; raise with a remedy."""
    if given is None:
        return Split((rows,))
    if isinstance(given, str):
        return _spelled(given, rows)
    if not isinstance(given, Sequence):
        raise ValueError(f"has split_sizes {given!r}: give {_SPELLINGS}")
    sizes = tuple(cast("Sequence[int]", given))
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"has split_sizes {_brief(sizes)}: they must be whole numbers above 0")
    if sum(sizes) != rows:
        raise ValueError(
            f"has split_sizes {_brief(sizes)}, which add up to {sum(sizes)}, but each "
            f"of its matrices has {rows} rows: change the sizes or the number of groups "
            f"rows: make them add up to {rows}"
        )
    return Split(sizes)


def _spelled(given: str, rows: int) -> Split:
    if given == "halves":
        return Split(_equal(given, rows, 2))
    kind, _, rest = given.partition(":")
    if kind == "heads" and rest.isdecimal() and int(rest):
        return Split(_equal(given, rows, int(rest)))
    found = _INTERLEAVED.fullmatch(given)
    if found is None:
        raise ValueError(f"has split_sizes {given!r}, which has an unknown form: give {_SPELLINGS}")
    sizes, groups = tuple(map(int, found["parts"].split("+"))), int(found["groups"])
    if not groups or 0 in sizes:
        raise ValueError(f"has split_sizes {given!r}: its numbers must be above 0")
    if len(sizes) == 1:  # so many, of equal size
        parts = sizes[0]
        return _whole_if_one(Split((_equal(given, rows, parts * groups)[0],) * parts, groups))
    if sum(sizes) * groups != rows:
        raise ValueError(
            f"has split_sizes {given!r}, which are {sum(sizes) * groups} rows, but each "
            f"of its matrices has {rows} rows: change the sizes or the number of groups"
        )
    return _whole_if_one(Split(sizes, groups))


def _equal(given: str, rows: int, parts: int) -> tuple[int, ...]:
    if rows % parts:
        raise ValueError(
            f"has split_sizes {given!r}, but the {rows} rows of each of its matrices "
            f"are no multiple of {parts}: choose a number of parts that divides the rows"
        )
    return (rows // parts,) * parts


def _whole_if_one(split: Split) -> Split:
    """Return a split without groups if only one matrix has rows in them, else the split."""
    if len(split.sizes) == 1:
        return Split((split.sizes[0] * split.groups,))
    return split
