"""A chunk of spread blocks on its way: to the owners, and back to those who hold parts."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from samestep.comm.collectives import Pending, move_parts
from samestep.comm.groups import RankGroup
from samestep.plan.block_exchange import (
    Item,
    Key,
    Route,
    elements_from_owners,
    elements_to_owners,
    from_owners,
    to_owners,
)


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
        self._to = to_owners(chunk, group.rank)
        self._back = from_owners(chunk, group.rank, group.size, to_all=any(extra))
        self._waiting: Pending[Tensor] | None = None

    def collect(self, prepared: dict[Key, Tensor]) -> None:
        """Start sending this rank's parts to the owners."""
        out, into = self._to
        buffer = self._joined([self._packed(prepared[self.chunk[item.route].key]) for item in out])
        self._waiting = self._launch(
            f"collection of {self._name}", buffer, out, into, lambda item: item.numel, self._sent_to
        )

    def blocks(self, prepared: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Wait, and give the whole blocks that this rank owns, in the shapes of their boxes."""
        assert self._waiting is not None
        received, self._waiting = self._waiting.wait(), None
        into = self._to[1]
        arrived = dict(zip(into, torch.split(received, [i.numel for i in into]), strict=True))
        found = {}
        for route in self.chunk:
            if route.owner == self._group.rank:
                block = torch.empty(route.box.sizes, dtype=self._wide, device=self._device)
                for part in route.parts:
                    if part.rank == self._group.rank:
                        block[part.in_block.slices] = prepared[route.key]
                found[route.key] = block
        for item, values in arrived.items():
            assert item.part is not None
            box = item.part.in_block
            found[self.chunk[item.route].key][box.slices] = values.view(box.sizes)
        return found

    def give_back(self, directions: dict[Key, Tensor], extra: dict[Key, Tensor]) -> None:
        """Start sending every holder its parts of the directions, and the extra of each block."""
        out, into = self._back
        pieces = []
        for item in out:
            key = self.chunk[item.route].key
            if item.part is not None:
                pieces.append(self._packed(directions[key][item.part.in_block.slices]))
            if self._extra[item.route]:
                pieces.append(extra[key].reshape(-1).to(self._wide).view(self._dtype))
        self._waiting = self._launch(
            f"return of {self._name}",
            self._joined(pieces),
            out,
            into,
            self._size_back,
            self._sent_back,
        )

    def parts(self) -> dict[Key, tuple[Tensor | None, Tensor | None]]:
        """Wait, and give this rank's part of each direction that came, and the block's extra."""
        assert self._waiting is not None
        received, self._waiting = self._waiting.wait(), None
        into = self._back[1]
        found: dict[Key, tuple[Tensor | None, Tensor | None]] = {}
        arrived = torch.split(received, [self._size_back(item) for item in into]) if into else ()
        for item, values in zip(into, arrived, strict=True):
            part = (
                None if item.part is None else values[: item.numel].view(item.part.in_block.sizes)
            )
            extra = None
            if self._extra[item.route]:
                extra = values[item.numel :].clone().view(self._wide)  # at a place for wide ones
            found[self.chunk[item.route].key] = part, extra
        return found

    def _size_back(self, item: Item) -> int:
        return item.numel + self._extra[item.route]

    def _launch(
        self,
        name: str,
        buffer: Tensor,
        out: Sequence[Item],
        into: Sequence[Item],
        size: Callable[[Item], int],
        sent: Sequence[int],
    ) -> Pending[Tensor]:
        outgoing, incoming = [0] * self._group.size, [0] * self._group.size
        for item in out:
            outgoing[item.rank] += size(item)
        for item in into:
            incoming[item.rank] += size(item)
        return move_parts(name, buffer, outgoing, incoming, sent, self._group)

    def _packed(self, part: Tensor) -> Tensor:
        return part.reshape(-1).to(self._dtype)

    def _joined(self, pieces: list[Tensor]) -> Tensor:
        if not pieces:
            return torch.empty(0, dtype=self._dtype, device=self._device)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
