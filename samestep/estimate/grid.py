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


class Grid:
    """All ranks that train one model (or one stage of it); the last axis varies fastest."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.ranks = prod(self.sizes.values())

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(self.sizes.values())

    def peers(self, *axes: str) -> Peers:
        """The group of a rank along some axes."""
        ordered = tuple(axis for axis in self.sizes if axis in axes)
        return Peers(ordered, prod(self.sizes[axis] for axis in ordered))

    def place(self, rank: int, peers: Peers) -> int:
        """Which one of its peers a rank is."""
        places = {}
        for axis, size in reversed(self.sizes.items()):
            rank, places[axis] = divmod(rank, size)
        place = 0
        for axis in peers.axes:
            place = place * self.sizes[axis] + places[axis]
        return place

    def spread(self, values: Tensor, peers: Peers) -> Tensor:
        """What each peer has, (peers.size,), for all ranks: the shape of the grid."""
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
