"""Run an exchange: pack the boxes to send, issue one collective, unpack the boxes received.

`launch_gather` is an all-gather. `PackedExchange` is an all-to-all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from samestep.comm.collectives import Pending, gather_segments, move_parts
from samestep.comm.groups import RankGroup
from samestep.layout.boxes import Box
from samestep.plan.exchanges import Exchange, Hop
from samestep.plan.layouts import Key
from samestep.plan.packing import PackedPart

# What a rank has of each tensor, by key and box; every tensor has the sizes of its box.
Values = Mapping[Key, Mapping[Box, Tensor]]


def launch_gather(
    exchange: Exchange, held: Values, into: Values, group: RankGroup, like: Tensor
) -> Callable[[], None]:
    """Start an exchange that gathers all boxes on every rank. Collective.

    Args:
        exchange: The same on every rank; `is_gather` holds.
        held: This rank's boxes of the source layout. They may stay on another device than `like`.
        into: The boxes of the target layout, to be written.
        group: Process group; places in the group are the ranks of the exchange.
        like: Any tensor of the dtype and on the device that the collective sends.

    Returns:
        A function that waits and writes `into`. Until it was called `held` must not change.
    """
    segments: Pending[list[Tensor]] | None = None
    if any(exchange.segments):
        mine = _packed(exchange.gathered[group.rank], held, like)
        segments = gather_segments(exchange.name, mine, exchange.segments, group)

    def land() -> None:
        for hop in exchange.held_by_all():
            _put(hop, _piece(hop, held), into)
        arrived = [] if segments is None else segments.wait()
        for hops, segment in zip(exchange.gathered, arrived, strict=False):
            sizes = [hop.box.numel for hop in hops]
            for hop, values in zip(hops, torch.split(segment, sizes), strict=True):
                _put(hop, values.view(hop.box.sizes), into)

    return land


def _packed(hops: Sequence[Hop], held: Values, like: Tensor) -> Tensor:
    """Return the boxes of all hops one after the other, flat."""
    if not hops:
        return like.new_empty(0)
    return torch.cat([_piece(hop, held).to(like.device).reshape(-1) for hop in hops])


def _piece(hop: Hop, held: Values) -> Tensor:
    """Return the part of a held box that travels, with the shape of `hop.box`."""
    tensor = held[hop.key][hop.held]
    return tensor if hop.box == hop.held else tensor[hop.box.within(hop.held).slices]


def _put(hop: Hop, values: Tensor, into: Values) -> None:
    """Write received values into the box that this rank needs."""
    tensor = into[hop.key][hop.needed]
    place = tensor if hop.box == hop.needed else tensor[hop.box.within(hop.needed).slices]
    place.copy_(values)


class PackedExchange:
    """One rank's side of an exchange between any ranks, which is launched again and again.

    All that this rank sends lies in one buffer, packed as `out`; all that it receives lies in
    another, packed as `into`. Parts that it both holds and needs are in neither.
    """

    def __init__(self, exchange: Exchange, group: RankGroup, device: torch.device) -> None:
        self.out, self.into = exchange.packed_from(group.rank), exchange.packed_to(group.rank)
        self._transfer, self._group = exchange.transfer, group
        self._nothing = torch.empty(0, dtype=exchange.transfer.dtype, device=device)
        self._sizes = [part.numel for part in self.into.parts]
        self._waiting: Pending[Tensor] | None = None

    def send(self, parts: Iterable[Tensor]) -> None:
        """Start sending one tensor for each part of `out`."""
        flat = [part.reshape(-1).to(self._nothing.dtype) for part in parts]
        if len(flat) == 1:
            self.send_packed(flat[0].contiguous())  # a row of a transposed matrix is not
        else:
            self.send_packed(torch.cat(flat) if flat else self._nothing)

    def send_packed(self, buffer: Tensor) -> None:
        """Start sending a buffer of shape (sum(out.sizes),)."""
        sizes = self.out.sizes, self.into.sizes
        self._waiting = move_parts(self._transfer, buffer, *sizes, self._group)

    def new_buffer(self) -> Tensor:
        """Return an empty send buffer, (sum(out.sizes),)."""
        return self._nothing.new_empty(sum(self.out.sizes))

    def arrived(self) -> Tensor:
        """Wait, and return the received buffer, (sum(into.sizes),)."""
        assert self._waiting is not None
        received, self._waiting = self._waiting.wait(), None
        return received

    def arrived_parts(self) -> Iterable[tuple[PackedPart, Tensor]]:
        """Wait, and return each part of `into` with its elements, (part.numel,)."""
        return zip(self.into.parts, torch.split(self.arrived(), self._sizes), strict=True)
