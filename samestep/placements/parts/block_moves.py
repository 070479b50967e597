"""A chunk of spread blocks on its way: to the owners, and back to those who hold parts."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.comm.collectives import Pending, move_parts
from samestep.comm.groups import RankGroup
from samestep.layout.blocks import Shape
from samestep.plan.block_exchange import ChunkTransfers, Item, Key, Route, from_owners, to_owners
from samestep.plan.transfers import Transfer


class Travelling(NamedTuple):
    """A part of a block on its way, as a step needs it: plans count and slice once.

    start: where it begins in the buffer that travels.
    beside: elements that belong to the whole block, and travel with it, after it.
    """

    rank: int
    key: Key
    sizes: Shape | None  # None: no part, only what is beside
    slices: tuple[slice, ...]  # in the block
    start: int
    numel: int
    beside: int

    @property
    def size(self) -> int:
        return self.numel + self.beside


class Way(NamedTuple):
    """What goes out to other ranks, and what comes in from them."""

    out: list[Travelling]
    into: list[Travelling]
    outgoing: list[int]  # elements to each rank
    incoming: list[int]


class BlockMoves:
    """One chunk of blocks, each known by its key: (parameter, number among its blocks)."""

    def __init__(
        self,
        transfers: ChunkTransfers,
        chunk: Sequence[Route],
        group: RankGroup,
        device: torch.device,
    ) -> None:
        self.chunk = chunk
        self.dtype = transfers.to.dtype
        self._transfers = transfers
        self._group = group
        self._wide = transfers.wide
        self._device = device
        self.nothing = torch.empty(0, dtype=self.dtype, device=device)
        self.to = self._way(*to_owners(chunk, group.rank), beside=False)
        self.back = self._way(
            *from_owners(chunk, group.rank, group.size, to_all=any(transfers.extra)), beside=True
        )
        self._owned = [
            (route, [part.in_block.slices for part in route.parts if part.rank == group.rank])
            for route in chunk
            if route.owner == group.rank
        ]
        self._waiting: Pending[Tensor] | None = None

    def _way(self, out: Sequence[Item], into: Sequence[Item], *, beside: bool) -> Way:
        outgoing, incoming = [0] * self._group.size, [0] * self._group.size
        travelling_out, travelling_in = (self._travelling(x, beside) for x in (out, into))
        for item in travelling_out:
            outgoing[item.rank] += item.size
        for item in travelling_in:
            incoming[item.rank] += item.size
        return Way(travelling_out, travelling_in, outgoing, incoming)

    def _travelling(self, items: Sequence[Item], beside: bool) -> list[Travelling]:
        found, start = [], 0
        for item in items:
            found.append(
                Travelling(
                    item.rank,
                    self.chunk[item.route].key,
                    None if item.part is None else item.part.in_block.sizes,
                    () if item.part is None else item.part.in_block.slices,
                    start,
                    item.numel,
                    self._transfers.extra[item.route] if beside else 0,
                )
            )
            start += found[-1].size
        return found

    def collect(self, prepared: dict[Key, Tensor]) -> None:
        """Start sending this rank's parts to the owners."""
        pieces = [self._packed(prepared[item.key]) for item in self.to.out]
        self.send_there(self._joined(pieces))

    def blocks(self, prepared: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Wait, and give the whole blocks that this rank owns, in the shapes of their boxes."""
        arrived = _taken_apart(self.to, self.arrived())
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
        for item in self.back.out:
            if item.sizes is not None:
                pieces.append(self._packed(directions[item.key][item.slices]))
            if item.beside:
                pieces.append(self.packed_beside(extra[item.key]))
        self.send_back(self._joined(pieces))

    def parts(self) -> dict[Key, tuple[Tensor | None, Tensor | None]]:
        """Wait, and give this rank's part of each direction that came, and the block's extra."""
        found: dict[Key, tuple[Tensor | None, Tensor | None]] = {}
        for item, values in _taken_apart(self.back, self.arrived()):
            part = None if item.sizes is None else values[: item.numel].view(item.sizes)
            extra = None
            if item.beside:
                extra = self.beside(values[item.numel :])
            found[item.key] = part, extra
        return found

    def send_there(self, buffer: Tensor) -> None:
        """Start sending a buffer with all that goes to the owners."""
        self._send(self._transfers.to, buffer, self.to)

    def send_back(self, buffer: Tensor) -> None:
        """Start sending a buffer with all that goes back."""
        assert self._transfers.back is not None
        self._send(self._transfers.back, buffer, self.back)

    def _send(self, transfer: Transfer, buffer: Tensor, way: Way) -> None:
        self._waiting = move_parts(transfer, buffer, way.outgoing, way.incoming, self._group)

    def arrived(self) -> Tensor:
        """Wait, and give the buffer that has come."""
        assert self._waiting is not None
        received, self._waiting = self._waiting.wait(), None
        return received

    def packed_beside(self, extra: Tensor) -> Tensor:
        """What belongs to a whole block, unrounded, as elements that travel."""
        return extra.reshape(-1).to(self._wide).view(self.dtype)

    def beside(self, elements: Tensor) -> Tensor:
        """The same taken out of a buffer that came."""
        return elements.clone().view(self._wide)  # at a place for wide ones

    def _packed(self, part: Tensor) -> Tensor:
        return part.reshape(-1).to(self.dtype)

    def _joined(self, pieces: list[Tensor]) -> Tensor:
        if not pieces:
            return self.nothing
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _taken_apart(way: Way, received: Tensor) -> Iterable[tuple[Travelling, Tensor]]:
    return zip(way.into, torch.split(received, [item.size for item in way.into]), strict=True)
