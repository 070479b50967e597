"""Check that ranks with copies along a mesh axis have gradients of the same parameters.

Ranks of a mesh that differ on one axis alone are a *line*. They hold the same part of a
parameter that is replicated along the axis. So either all ranks of the line must have a whole
gradient of it, or none: a rank that updates its copy with less than the others drifts apart from
them. Summands of a gradient may be missing on a rank: they are added up, with zeros in their place.

A rank says of each such parameter, in a bit, whether its gradient is whole along the axis. The
largest and the smallest numbers in a line, of these bits and the rank's place, tell whether
all have said the same; if not, the first bit in which they differ names a parameter, and their
places name two ranks that differ about it.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

_BITS = 62  # of a number, which has a sign


class LackedGradient(NamedTuple):
    """A parameter of which one rank has a whole gradient, and another one with a copy has not."""

    param: int
    has: int  # place among all ranks
    lacks: int


class ReplicatedAlong(NamedTuple):
    """The parameters that are replicated along one axis of a mesh.

    params: numbers of the parameters.
    lines: number of lines along the axis, in the mesh and in meshes that hold copies of it.
    ranks: number of ranks of all these meshes.
    """

    axis: int
    params: tuple[int, ...]
    lines: int
    ranks: int

    @property
    def _bits(self) -> int:
        return _BITS - (self.ranks - 1).bit_length()

    @property
    def _words(self) -> int:
        return -(-len(self.params) // self._bits)

    @property
    def elements(self) -> int:
        """Return the number of elements that a rank sends: two per word and line."""
        return 2 * self.lines * self._words

    def votes(self, whole: Sequence[bool], line: int, place: int) -> Tensor:
        """Return the votes of the rank at `place` of all ranks, of shape (elements,)."""
        largest = (1 << self._bits) - 1
        votes = torch.zeros(2, self.lines, self._words, dtype=torch.int64)
        for word in range(self._words):
            bits = 0
            for number, said in enumerate(whole[word * self._bits : (word + 1) * self._bits]):
                bits |= said << self._bits - 1 - number  # the first counts most
            votes[0, line, word] = bits * self.ranks + place
            votes[1, line, word] = (largest - bits) * self.ranks + place
        return votes.view(-1)

    def difference(self, votes: Tensor) -> LackedGradient | None:
        """Return the first difference in the largest votes of all ranks; None if they agree."""
        largest = (1 << self._bits) - 1
        highest, lowest = votes.view(2, -1)
        bits, places = highest // self.ranks, highest % self.ranks
        fewest, others = largest - lowest // self.ranks, lowest % self.ranks
        found = (bits > fewest).nonzero()  # it is less where nobody has said anything
        if not len(found):
            return None
        at = int(found[0])
        first = self._bits - (int(bits[at]) ^ int(fewest[at])).bit_length()
        param = self.params[at % self._words * self._bits + first]
        return LackedGradient(param, int(places[at]), int(others[at]))


def replicated_along(
    sizes: Sequence[int], replicated: Sequence[Sequence[int]], copies: int = 1
) -> tuple[ReplicatedAlong, ...]:
    """Return the parameters replicated along each mesh axis, from the axes of each parameter.

    copies: number of meshes that hold copies of all parameters.
    """
    found = []
    for axis, size in enumerate(sizes):
        params = tuple(index for index, axes in enumerate(replicated) if axis in axes)
        if size > 1 and params:
            ranks = prod(sizes) * copies
            found.append(ReplicatedAlong(axis, params, ranks // size, ranks))
    return tuple(found)


def replicated_by_all(params: int, ranks: int) -> tuple[ReplicatedAlong, ...]:
    """Return plain parameters, replicated by all ranks, as a mesh with one axis."""
    return replicated_along((ranks,), [[0]] * params)


def line_through(sizes: Sequence[int], coordinate: Sequence[int], axis: int, copy: int = 0) -> int:
    """Return the number of the line along an axis through a coordinate of mesh `copy`."""
    number = copy
    for other, size in enumerate(sizes):
        if other != axis:
            number = number * size + coordinate[other]
    return number
