"""Layouts: the ranks that hold each box of each tensor.

A *holding* says where the values of a box are, as a list of sources of which any one will do. A
source is a tuple of ranks whose values are summed in that order:

    ((0,), (1,), (2,))    ranks 0, 1 and 2 have copies
    ((0, 1, 2),)          ranks 0, 1 and 2 have addends
    ((0, 2), (1, 3))      ranks 0 and 2 have addends, and 1 and 3 have addends of the same sum

A *layout* has the holdings of several tensors. The boxes of one tensor do not overlap, and
together cover it. Ranks are counted in the process group of the exchange.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Self

from samestep.layout.boxes import Box

Key = tuple[int, str]  # index of a parameter or block, and key of its state; "": itself


class Holding(NamedTuple):
    """A box and the ranks with its values; ranks of one source hold addends."""

    box: Box
    sources: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return all ranks that hold the box, in order."""
        return tuple(sorted(rank for source in self.sources for rank in source))


class Holdings(tuple[Holding, ...]):
    """All holdings of one tensor; tensors that lie alike share one object and its caches.

    near: a number by rank, or nothing. Of several ranks with copies those with the number of the
        rank that asks are preferred, such as its host, or which copy of the whole tensor it is in.
    """

    near: Sequence[int]

    def __new__(cls, holdings: Iterable[Holding], near: Sequence[int] = ()) -> Self:
        self = super().__new__(cls, holdings)
        self.near = near
        return self

    def of_rank(self, rank: int) -> Sequence[Holding]:
        """Return the holdings that a rank is a source of."""
        return self._by_rank.get(rank, ())

    def box_of(self, rank: int) -> Box | None:
        """Return the box of a rank, for a tensor of which no rank has several boxes."""
        held = self.of_rank(rank)
        return held[0].box if held else None

    @cached_property
    def _by_rank(self) -> Mapping[int, Sequence[Holding]]:
        found: dict[int, list[Holding]] = {}
        for holding in self:
            for source in holding.sources:
                for rank in source:
                    found.setdefault(rank, []).append(holding)
        return found

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """Return the number of elements by rank, without ranks that hold none."""
        found: dict[int, int] = {}
        for holding in self:
            for source in holding.sources:
                for rank in source:
                    found[rank] = found.get(rank, 0) + holding.box.numel
        return found

    @cached_property
    def has_one_rank_each(self) -> bool:
        """Whether every box has one rank: no copies and no addends."""
        return all(len(sources) == 1 == len(sources[0]) for _, sources in self)


Layout = Mapping[Key, Holdings]


class RankBoxes(NamedTuple):
    """The box, possibly empty, that each rank of a mesh holds of one tensor.

    replicas: which copy of the tensor a rank is in; copy 0 counts in sums over ranks.
    """

    boxes: tuple[Box, ...]
    replicas: tuple[int, ...]

    def divided(self, per: int) -> "RankBoxes":
        """Return the boxes of a tensor with one element for `per` neighbours in the last dim."""
        return self._replace(boxes=tuple(box.divided(per) for box in self.boxes))

    def within(self, outer: Box) -> Holdings:
        """Return the holdings of `outer`, such as a block, relative to its start."""
        parts = (box.overlap(outer).within(outer) for box in self.boxes)
        return by_box(enumerate(parts), near=self.replicas)


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def copies(box: Box, ranks: Iterable[int]) -> Holding:
    """Return the holding of a box with a copy on each of the ranks."""
    return Holding(box, tuple((rank,) for rank in ranks))


def addends(box: Box, ranks: Iterable[int]) -> Holding:
    """Return the holding of a box with an addend on each of the ranks."""
    return Holding(box, (tuple(ranks),))


def whole_on(shape: Sequence[int], ranks: Iterable[int]) -> Holdings:
    """Return holdings with a whole tensor on each rank; none if it has no elements."""
    everything = whole(shape)
    return Holdings([copies(everything, ranks)] if everything.numel else ())


def by_box(held: Iterable[tuple[int, Box]], near: Sequence[int] = ()) -> Holdings:
    """Return the holdings of a tensor from (rank, box) pairs; equal boxes are copies.

    A mesh with thousands of ranks has one holding for each different box. Empty boxes are left out.
    """
    ranks: dict[Box, list[int]] = {}
    for rank, box in held:
        if box.numel:
            ranks.setdefault(box, []).append(rank)
    return Holdings((copies(box, of_box) for box, of_box in ranks.items()), near)
