"""Ranks on a grid of mesh axes: the peers of each rank, and tensors with a number per rank."""

from array import array
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
        """Return the axes as text for tables, such as "data x expert"."""
        return " x ".join(self.axes) or "one rank"


class Beside(NamedTuple):
    """An axis along which a grid has one of `size` places; other places have their own grids."""

    place: int
    size: int


class Grid:
    """All ranks that train one model (or one stage of it); the last axis varies fastest.

    beside: axes outside of the grid, such as the stages of a pipeline.
    """

    def __init__(
        self, sizes: Mapping[str, int], beside: Mapping[str, Beside] | None = None
    ) -> None:
        self.sizes = dict(sizes)
        self.beside = dict(beside or {})
        self.ranks = prod(self.sizes.values())

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes.values())

    def peers(self, *axes: str) -> Peers:
        """Return the process group along some axes; equal groups compare equal."""
        sizes = {**{axis: size for axis, (_, size) in self.beside.items()}, **self.sizes}
        ordered = tuple(axis for axis, size in sizes.items() if axis in axes and size > 1)
        return Peers(ordered, prod(sizes[axis] for axis in ordered))

    def place(self, rank: int, peers: Peers) -> int:
        """Return the place of a rank among its peers, from 0."""
        places = dict(self.beside)
        for axis, size in reversed(self.sizes.items()):
            rank, at = divmod(rank, size)
            places[axis] = Beside(at, size)
        number = 0
        for axis in peers.axes:
            number = number * places[axis].size + places[axis].place
        return number

    def rank_at(self, peers: Peers, place: int) -> int:
        """Return the first rank that has this place among its peers."""
        places = {}
        for axis in reversed(peers.axes):
            place, places[axis] = divmod(place, self.sizes[axis])
        rank = 0
        for axis, size in self.sizes.items():
            rank = rank * size + places.get(axis, 0)
        return rank

    def spread(self, values: Tensor, peers: Peers) -> Tensor:
        """Spread figures of each peer, (peers.size,), over all ranks: the shape of the grid."""
        for axis in peers.axes:
            if axis in self.beside:
                place, size = self.beside[axis]
                values = values.reshape(size, -1)[place]
        inner = [self.sizes[axis] if axis in peers.axes else 1 for axis in self.sizes]
        return values.reshape(inner).expand(self.shape)

    def spread_both(self, values: Tensor, outer: Peers, inner: Peers) -> Tensor:
        """Spread figures of shape (outer.size, inner.size) over all ranks: the grid's shape."""
        axes = (*outer.axes, *inner.axes)
        together = self.peers(*axes)
        values = values.reshape([self.sizes[axis] for axis in axes])
        ordered = values.permute([axes.index(axis) for axis in together.axes])
        return self.spread(ordered.reshape(-1), together)

    def maximum(self, values: Tensor, peers: Peers) -> Tensor:
        """Return the maximum over each rank's peers; `values` has the shape of the grid."""
        dims = [dim for dim, axis in enumerate(self.sizes) if axis in peers.axes]
        return values.amax(dim=dims, keepdim=True).expand(self.shape) if dims else values

    def maximum_of(self, values: Tensor, peers: Peers, per_host: int, dim: int) -> Tensor:
        """Return the maximum over some peers of each rank; `per_host` neighbours share a host.

        dim: -1: the peers on the rank's host, -2: the peers at the rank's place on every host.
        """
        if any(axis in self.beside for axis in peers.axes):  # of those only one place is here
            return self.maximum(values, peers)
        dims = [number for number, axis in enumerate(self.sizes) if axis in peers.axes]
        order = [number for number in range(len(self.sizes)) if number not in dims] + dims
        moved = values.permute(order)
        by_host = moved.reshape(*moved.shape[: -len(dims)], -1, per_host)
        largest = by_host.amax(dim, keepdim=True).expand_as(by_host).reshape(moved.shape)
        return largest.permute([order.index(number) for number in range(len(order))])

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=torch.float64)


def one_axis(ranks: int) -> Grid:
    return Grid({"data": ranks})


def per_peer(numbers: Sequence[float]) -> Tensor:
    """Make a float64 tensor of one number per peer, ten times as fast as `torch.tensor`."""
    return torch.frombuffer(array("d", numbers), dtype=torch.float64)
