"""Layouts: which ranks hold which box of which tensor, at one moment.

A *holding* says where the values of a box are, as a list of sources of which any one will do. A
source is a tuple of ranks whose values are summed in that order:

    ((0,), (1,), (2,))    ranks 0, 1 and 2 have copies
    ((0, 1, 2),)          ranks 0, 1 and 2 have addends
    ((0, 2), (1, 3))      ranks 0 and 2 have addends, and 1 and 3 have addends of the same sum

A *layout* says it for several tensors. The boxes of one tensor do not overlap, and together they
are all of it. Ranks are places in the group that exchanges.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from samestep.layout.boxes import Box

Key = tuple[int, str]  # index of a parameter, and key of its state; "": the parameter itself


class Holding(NamedTuple):
    """A box, and the sources of its values; several ranks in one source have addends."""

    box: Box
    sources: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that hold the box, in order."""
        return tuple(sorted(rank for source in self.sources for rank in source))


Layout = Mapping[Key, tuple[Holding, ...]]


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def copies(box: Box, ranks: Iterable[int]) -> Holding:
    """Each of the ranks has the values."""
    return Holding(box, tuple((rank,) for rank in ranks))


def addends(box: Box, ranks: Iterable[int]) -> Holding:
    """The values are the sum over the ranks, in this order."""
    return Holding(box, (tuple(ranks),))


def by_box(held: Iterable[tuple[int, Box]]) -> tuple[Holding, ...]:
    """Holdings of one tensor from what each rank has; ranks with the same box have copies.

    A mesh with thousands of ranks has one holding for each different box. Empty boxes are left out.
    """
    ranks: dict[Box, list[int]] = {}
    for rank, box in held:
        if box.numel:
            ranks.setdefault(box, []).append(rank)
    return tuple(copies(box, of_box) for box, of_box in ranks.items())
