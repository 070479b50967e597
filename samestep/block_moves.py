"""A chunk of spread blocks on its way: to the owners, and back to those who hold parts."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.comm.collectives import Pending, move_parts
from samestep.comm.groups import RankGroup
from samestep.layout.blocks import Shape
from samestep.plan.block_exchange import (
    Item,
    Key,
    Route,
    elements_from_owners,
    elements_to_owners,
    from_owners,
    to_owners,
)


class _Travelling(NamedTuple):
    """A part of a block on its way, as a step needs it: plans count and slice once.

    beside: elements that belong to the whole block, and travel with it.
    """

    rank: int
    key: Key
    sizes: Shape | None  # None: no part, only what is beside
    slices: tuple[slice, ...]  # in the block
    numel: int
    beside: int

    @property
    def size(self) -> int:
        """All elements."""
        return self.numel + self.beside


class _Way(NamedTuple):
    """What goes out to other ranks, and what comes in from them."""

    out: list[_Travelling]
    into: list[_Travelling]


class BlockMoves:
    """One chunk of blocks, each known by its key: (parameter, number among its blocks).

    Blocks are computed in `wide` and travel in `dtype`. `extra[i]` are numbers that belong to the
    whole of block i, beside its parts; they travel unrounded.
    """

    def __init__(
        self,
        name: str,
        chunk: Sequence[Route],
        extra: Sequence[int],
        group: RankGroup,
        *,
        dtype: torch.dtype,
        wide: torch.dtype,
        device: torch.device,
    ) -> None:
        self.chunk = chunk
        self._name = name
        self._group = group
        self._dtype = dtype
        self._wide = wide
        self._device = device
        self._extra = [count * wide.itemsize // dtype.itemsize for count in extra]
        self._sent_to = elements_to_owners(chunk, group.size)
        self._sent_back = elements_from_owners(chunk, self._extra, group.size)
        there = to_owners(chunk, group.rank)
        back = from_owners(chunk, group.rank, group.size, to_all=any(extra))
        self._to = _Way(*(self._travelling(items, beside=False) for items in there))
        self._back = _Way(*(self._travelling(items, beside=True) for items in back))
        self._owned = [
            (route, [part.in_block.slices for part in route.parts if part.rank == group.rank])
            for route in chunk
            if route.owner == group.rank
        ]
        self._waiting: Pending[Tensor] | None = None

    def _travelling(self, items: Sequence[Item], *, beside: bool) -> list["_Travelling"]:
        return [
            _Travelling(
                item.rank,
                self.chunk[item.route].key,
                None if item.part is None else item.part.in_block.sizes,
                () if item.part is None else item.part.in_block.slices,
                item.numel,
                self._extra[item.route] if beside else 0,
            )
            for item in items
        ]

    def collect(self, prepared: dict[Key, Tensor]) -> None:
        """Start sending this rank's parts to the owners."""
        pieces = [self._packed(prepared[item.key]) for item in self._to.out]
        self._launch(f"collection of {self._name}", pieces, self._to, self._sent_to)

    def blocks(self, prepared: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Wait, and give the whole blocks that this rank owns, in the shapes of their boxes."""
        arrived = self._arrived(self._to)
        found = {}
        for route, own in self._owned:
            block = torch.empty(route.box.sizes, dtype=self._wide, device=self._device)
            for slices in own:
                block[slices] = prepared[route.key]
            found[route.key] = block
        for item, values in arrived:
            assert item.sizes is not None
            found[item.key][item.slices] = values.view(item.sizes)
        return found

    def give_back(self, directions: dict[Key, Tensor], extra: dict[Key, Tensor]) -> None:
        """Start sending every holder its parts of the directions, and the extra of each block."""
        pieces = []
        for item in self._back.out:
            if item.sizes is not None:
                pieces.append(self._packed(directions[item.key][item.slices]))
            if item.beside:
                pieces.append(extra[item.key].reshape(-1).to(self._wide).view(self._dtype))
        self._launch(f"return of {self._name}", pieces, self._back, self._sent_back)

    def parts(self) -> dict[Key, tuple[Tensor | None, Tensor | None]]:
        """Wait, and give this rank's part of each direction that came, and the block's extra."""
        found: dict[Key, tuple[Tensor | None, Tensor | None]] = {}
        for item, values in self._arrived(self._back):
            part = None if item.sizes is None else values[: item.numel].view(item.sizes)
            extra = None
            if item.beside:
                extra = values[item.numel :].clone().view(self._wide)  # at a place for wide ones
            found[item.key] = part, extra
        return found

    def _launch(self, name: str, pieces: list[Tensor], way: "_Way", sent: Sequence[int]) -> None:
        outgoing, incoming = [0] * self._group.size, [0] * self._group.size
        for item in way.out:
            outgoing[item.rank] += item.size
        for item in way.into:
            incoming[item.rank] += item.size
        buffer = self._joined(pieces)
        self._waiting = move_parts(name, buffer, outgoing, incoming, sent, self._group)

    def _arrived(self, way: "_Way") -> Iterable[tuple["_Travelling", Tensor]]:
        """Wait, and give what has come."""
        assert self._waiting is not None
        received, self._waiting = self._waiting.wait(), None
        return zip(way.into, torch.split(received, [item.size for item in way.into]), strict=True)

    def _packed(self, part: Tensor) -> Tensor:
        return part.reshape(-1).to(self._dtype)

    def _joined(self, pieces: list[Tensor]) -> Tensor:
        if not pieces:
            return torch.empty(0, dtype=self._dtype, device=self._device)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
