"""How long a collective takes, on all ranks of a grid."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, maximum

from samestep.estimate.collectives import Collective
from samestep.estimate.grid import Grid, per_peer
from samestep.estimate.hardware import RINGS, Hardware
from samestep.plan.links import Fabric
from samestep.plan.transfers import Traffic, Transfer


def seconds_of(each: Collective, grid: Grid, hardware: Hardware) -> Tensor:
    """Of the busiest direction of any peer, by group of peers; the shape of the grid."""
    carried = maximum(each.sent_by_all(), each.received_by_all())
    spread = grid.maximum(each.spread(carried, grid), each.peers)
    fabric = hardware.fabric(each.peers, grid)
    if each.levels == 2:
        return sum((leg.seconds for leg in legs_of(each, grid, hardware)), grid.zeros())
    fixed = hardware.seconds(each.traffic.kind, 0.0, fabric)
    per_byte = hardware.seconds(each.traffic.kind, 1e9, fabric) - fixed
    return fixed + spread * (per_byte / 1e9)


INSIDE, ACROSS = "inside", "across"
BOTH = INSIDE, ACROSS


class Leg(NamedTuple):
    """A part of a collective, after which the next begins."""

    name: str
    seconds: Tensor  # the shape of the grid
    latest: Callable[[Tensor], Tensor]  # of times of all ranks: the last among those who meet
    links: tuple[str, ...] = BOTH  # that a rank cannot use for anything else meanwhile


def legs_of(each: Collective, grid: Grid, hardware: Hardware) -> list[Leg]:
    """One; in two levels sums begin inside hosts, gathers across them.

    GPUs have links of their own inside hosts. CPUs have one link, whatever it is for.
    """
    if each.levels == 1:
        seconds = seconds_of(each, grid, hardware)
        return [Leg(each.name, seconds, lambda times: grid.maximum(times, each.peers))]
    fabric = hardware.fabric(each.peers, grid)
    inside, across = seconds_in_two(each.of(0), fabric)
    columns = across.expand(fabric.hosts, fabric.per_host).reshape(-1)
    legs = [
        Leg(
            f"{each.name}, in hosts",
            grid.zeros() + inside,
            lambda times: grid.maximum_of(times, each.peers, fabric.per_host, -1),
            BOTH if hardware.on_cpu else (INSIDE,),
        ),
        Leg(
            f"{each.name}, across hosts",
            grid.spread(columns, each.peers),
            lambda times: grid.maximum_of(times, each.peers, fabric.per_host, -2),
            BOTH if hardware.on_cpu else (ACROSS,),
        ),
    ]
    return legs if each.traffic in (Traffic.REDUCE_SCATTER, Traffic.EXCHANGE) else legs[::-1]


def seconds_in_two(transfer: Transfer | None, fabric: Fabric) -> tuple[float, Tensor]:
    """Of the busiest rank inside a host; and across hosts, of each column: (ranks of a host,).

    A column, the ranks at one place of every host, has neighbouring segments.
    """
    assert transfer is not None
    assert transfer.sizes is not None
    hosts, here, width = fabric.hosts, fabric.per_host, transfer.dtype.itemsize
    segments = (per_peer(transfer.sizes) * width).reshape(here, hosts)
    columns = segments.sum(1)
    whole, column = columns.sum(), columns[:, None]
    if transfer.traffic.kind in RINGS:  # everything passes by everyone
        inside, across = whole * (here - 1) / here, columns * (hosts - 1) / hosts
    else:  # a rank's own, to each; and of what the others have, theirs
        inside = maximum(columns * (here - 1), whole - columns)
        across = maximum(segments * (hosts - 1), column - segments).amax(1)
    begin = fabric.between.seconds(hosts, 0.0)
    return (
        fabric.inside.seconds(here, float(inside.max())),
        begin + across / fabric.between.bandwidth,
    )


Counted = tuple[tuple[Collective, int], ...]  # and how many of them there are


def counted(collectives: Sequence[Collective]) -> Counted:
    """Those that differ: layers are alike."""
    known = {(each.transfers, each.peers): each for each in collectives}
    counts = Counter((each.transfers, each.peers) for each in collectives)
    return tuple((each, counts[key]) for key, each in known.items())
