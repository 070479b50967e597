"""Ranks on named axes, and the groups along some of them."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class Peers(NamedTuple):
    """Ranks that differ at most in these axes of a grid, in the order of the grid."""

    axes: tuple[str, ...]
    size: int

    @property
    def name(self) -> str:
        """For tables: "data x expert"."""
        return " x ".join(self.axes)


class Beside(NamedTuple):
    """An axis along which a grid has one place of several: others have grids of their own."""

    place: int
    size: int


class Grid:
    """All ranks that train one model (or one stage of it); the last axis varies fastest.

    beside: axes outside of it, such as the stages of a pipeline.
    """

    def __init__(
        self, sizes: Mapping[str, int], beside: Mapping[str, Beside] | None = None
    ) -> None:
        self.sizes = dict(sizes)
        self.beside = dict(beside or {})
        self.ranks = prod(self.sizes.values())

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(self.sizes.values())

    def peers(self, *axes: str) -> Peers:
        """The group of a rank along some axes: the same ranks are the same peers."""
        sizes = {**{axis: size for axis, (_, size) in self.beside.items()}, **self.sizes}
        ordered = tuple(axis for axis, size in sizes.items() if axis in axes and size > 1)
        return Peers(ordered, prod(sizes[axis] for axis in ordered))

    def place(self, rank: int, peers: Peers) -> int:
        """Which one of its peers a rank is."""
        places, sizes = {}, dict(self.sizes)
        for axis, size in reversed(self.sizes.items()):
            rank, places[axis] = divmod(rank, size)
        for axis, (own, size) in self.beside.items():
            places[axis], sizes[axis] = own, size
        return row_major([sizes[axis] for axis in peers.axes], [places[a] for a in peers.axes])

    def spread(self, values: Tensor, peers: Peers) -> Tensor:
        """What each peer has, (peers.size,), for all ranks: the shape of the grid."""
        for axis in peers.axes:
            if axis in self.beside:
                place, size = self.beside[axis]
                values = values.reshape(size, -1)[place]
        inner = [self.sizes[axis] if axis in peers.axes else 1 for axis in self.sizes]
        return values.reshape(inner).expand(self.shape)

    def maximum(self, values: Tensor, peers: Peers) -> Tensor:
        """The largest among the peers of each rank; `values` has the shape of the grid."""
        dims = [dim for dim, axis in enumerate(self.sizes) if axis in peers.axes]
        return values.amax(dim=dims, keepdim=True).expand(self.shape) if dims else values

    def zeros(self) -> Tensor:
        """A number per rank."""
        return torch.zeros(self.shape, dtype=torch.float64)


def one_axis(ranks: int, name: str = "data") -> Grid:
    """So many ranks in a row."""
    return Grid({name: ranks})


def row_major(sizes: Sequence[int], place: Sequence[int]) -> int:
    """The number of a place."""
    number = 0
    for size, at in zip(sizes, place, strict=True):
        number = number * size + at
    return number
