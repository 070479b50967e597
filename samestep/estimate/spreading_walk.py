"""The memory of DTensors and of blocks on their way, operation by operation.

Follows `block_exchange`, `block_stages` and `block_moves` of `placements.parts`.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from samestep.estimate.blueprint import Blueprint, Spreading
from samestep.estimate.ledger import GRADIENTS, Ledger
from samestep.estimate.temporaries import kernel_peak, transform_peak
from samestep.groups.param_groups import rule_of
from samestep.placements.whole.buffers import gradient_dtype
from samestep.plan.block_exchange import Item, Route, from_owners, to_owners


class SpreadingWalk:
    """The DTensors of one mesh on one rank."""

    def __init__(
        self, number: int, spreading: Spreading, place: int, blueprint: Blueprint, ledger: Ledger
    ) -> None:
        self._number, self._spreading, self._place = number, spreading, place
        self._blueprint, self._ledger = blueprint, ledger

    def backward(self) -> None:
        """Gradients come reduced, in parts."""
        for index, param in enumerate(self._spreading.params):
            stored = self._spreading.stored(index, self._place)
            size = stored * gradient_dtype(param).itemsize
            self._ledger.add(("gradient", self._number, index), size, GRADIENTS)

    def begin(self) -> None:
        """Gradients of which ranks have summands are added up side by side, and stay there."""
        for number, (_, dtype, params) in enumerate(self._spreading.sums):
            elements = sum(map(self._local, params))
            key = ("gradient sum", self._number, number)
            self._ledger.add(key, elements * dtype.itemsize, GRADIENTS)
        for _, _, params in self._spreading.sums:
            for index in params:
                self._ledger.drop(("gradient", self._number, index))

    def _local(self, index: int) -> int:
        return self._spreading.held[index].boxes[self._place].numel

    def operands(self, number: int) -> list[tuple[int, torch.Tensor, tuple[int, ...]]]:
        """The local parts of elementwise parameters."""
        return [
            (spec.group, self._spreading.params[index], (self._local(index),))
            for index, spec in enumerate(self._spreading.specs)
            if spec.blocks is None
        ]

    def updated(self, number: int) -> None:
        """Gradients stay."""

    on_average = on_gather = on_place = on_reduce = updated

    def _chunk(self, number: int) -> tuple[tuple[Route, ...], torch.dtype, torch.dtype]:
        transfers = self._spreading.transfers[number]
        return self._spreading.plan.chunks[number], transfers.to.dtype, transfers.wide

    def _parts(self, chunk: tuple[Route, ...]) -> list[int]:
        """Elements of each block of which this rank holds a part, once."""
        found: dict[object, int] = {}
        for route in chunk:
            for part in route.parts:
                if part.rank == self._place:
                    found[route.key] = part.in_block.numel
        return list(found.values())

    def on_collect(self, number: int) -> None:
        """Directions of the parts, what is sent and what comes."""
        chunk, dtype, wide = self._chunk(number)
        parts = self._parts(chunk)
        self._ledger.add(self._key("prepared", number), sum(parts) * wide.itemsize)
        self._ledger.passing(max(parts, default=0) * wide.itemsize)
        out, into = (sum(item.numel for item in items) for items in to_owners(chunk, self._place))
        copied = out if len(to_owners(chunk, self._place)[0]) > 1 or dtype != wide else 0
        self._ledger.add(self._key("collected", number), copied * dtype.itemsize)
        self._ledger.add(self._key("coming", number), into * dtype.itemsize)

    def on_transform(self, number: int) -> None:
        """Whole blocks, stack by stack."""
        chunk, _, wide = self._chunk(number)
        owned = [route for route in chunk if route.owner == self._place]
        self._ledger.drop(self._key("collected", number))
        elements = sum(route.box.numel for route in owned)
        self._ledger.add(self._key("blocks", number), elements * wide.itemsize)
        self._ledger.drop(self._key("coming", number))
        self._ledger.drop(self._key("prepared", number))
        stacks: dict[object, list[Route]] = defaultdict(list)
        for route in owned:
            spec = self._spreading.specs[route.param]
            stacks[route.block.shape, spec.group, spec.dtype].append(route)
        done = 0
        for routes in stacks.values():
            group: Mapping[str, Any] = self._blueprint.groups[
                self._spreading.specs[routes[0].param].group
            ]
            rows, cols = routes[0].block.shape
            if self._blueprint.device.type == "cpu":
                size = transform_peak(
                    rule_of(group), group, len(routes), (rows, cols), wide, on_cpu=True,
                )  # fmt: skip
            else:
                size = kernel_peak(len(routes), rows, cols) + len(routes) * rows * cols * 4
            self._ledger.passing(size)
            done += len(routes) * rows * cols * wide.itemsize
            self._ledger.add(self._key("directions", number), done)
        self._ledger.drop(self._key("blocks", number))

    def on_giveback(self, number: int) -> None:
        """What is sent back, and what comes."""
        chunk, dtype, wide = self._chunk(number)
        ranks = self._spreading.peers.size
        out, into = from_owners(chunk, self._place, ranks, to_all=False)
        sent = sum(item.numel for item in out) * dtype.itemsize
        # Rows of a block lie together; of columns a copy is made before all are put side by side.
        copied = sum(
            item.numel
            for item in out
            if dtype != wide or not _lies_together(item, chunk[item.route])
        )
        copied *= dtype.itemsize
        self._ledger.add(self._key("returned", number), sent if len(out) > 1 else copied)
        self._ledger.add(
            self._key("returning", number), sum(item.numel for item in into) * dtype.itemsize
        )
        self._ledger.passing(copied if len(out) > 1 else 0)

    def on_apply(self, number: int) -> None:
        """One part after the other."""
        chunk, _, wide = self._chunk(number)
        self._ledger.drop(self._key("returned", number))
        self._ledger.passing(max(self._parts(chunk), default=0) * wide.itemsize)
        self._ledger.drop(self._key("returning", number))
        self._ledger.drop(self._key("directions", number))

    def _key(self, what: str, number: int) -> tuple[str, int, int]:
        return what, self._number, number


def _lies_together(item: Item, route: Route) -> bool:
    """Whether a part of a direction is one stretch: dims after the first long one are whole.

    A tall block is computed as a wide one, and its direction is the transpose of that.
    """
    if item.part is None or route.block.rows > route.block.cols:
        return item.part is None
    sizes = item.part.in_block.sizes
    first = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))
    return sizes[first + 1 :] == route.box.sizes[first + 1 :]
