"""Runs an exchange: packs what this rank gives, issues one collective, unpacks what it gets."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from samestep.comm.collectives import Pending, gather_segments
from samestep.comm.groups import RankGroup
from samestep.layout.boxes import Box
from samestep.plan.exchanges import Exchange, Hop
from samestep.plan.layouts import Key

# What a rank has of each tensor, by key and box; every tensor has the sizes of its box.
Values = Mapping[Key, Mapping[Box, Tensor]]


def launch_gather(
    exchange: Exchange, held: Values, into: Values, group: RankGroup, like: Tensor
) -> Callable[[], None]:
    """Start an exchange after which every rank has everything. Collective.

    Args:
        exchange: The same on every rank; `is_gather` holds.
        held: This rank's boxes of the source layout. They may stay on another device than `like`.
        into: The boxes of the target layout, to be written.
        group: Its places are the ranks of the exchange.
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
    """The boxes of all hops one after the other."""
    if not hops:
        return like.new_empty(0)
    return torch.cat([_piece(hop, held).to(like.device).reshape(-1) for hop in hops])


def _piece(hop: Hop, held: Values) -> Tensor:
    """What travels of the box that this rank holds."""
    tensor = held[hop.key][hop.held]
    return tensor if hop.box == hop.held else tensor[hop.box.within(hop.held).slices]


def _put(hop: Hop, values: Tensor, into: Values) -> None:
    """Write what has come into the box that this rank needs."""
    tensor = into[hop.key][hop.needed]
    place = tensor if hop.box == hop.needed else tensor[hop.box.within(hop.needed).slices]
    place.copy_(values)
