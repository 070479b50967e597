"""How long a collective takes, on all ranks of a grid."""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, maximum

from samestep.estimate.collectives import Collective
from samestep.estimate.grid import Grid, per_peer
from samestep.estimate.hardware import RINGS, Hardware
from samestep.plan.links import Fabric
from samestep.plan.transfers import Transfer


def seconds_of(each: Collective, grid: Grid, hardware: Hardware) -> Tensor:
    """Of the busiest direction of any peer, by group of peers; the shape of the grid."""
    carried = maximum(each.sent_by_all(), each.received_by_all())
    spread = grid.maximum(each.spread(carried, grid), each.peers)
    fabric = hardware.fabric(each.peers, grid)
    if each.levels == 2:
        return grid.zeros() + sum(seconds_in_two(each.of(0), fabric))
    fixed = hardware.seconds(each.traffic.kind, 0.0, fabric)
    per_byte = hardware.seconds(each.traffic.kind, 1e9, fabric) - fixed
    return fixed + spread * (per_byte / 1e9)


def seconds_in_two(transfer: Transfer | None, fabric: Fabric) -> tuple[float, float]:
    """Of the busiest rank inside a host, and across hosts.

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
        across = maximum(segments * (hosts - 1), column - segments)
    return (
        fabric.inside.seconds(here, float(inside.max())),
        fabric.between.seconds(hosts, float(across.max())),
    )


Counted = tuple[tuple[Collective, int], ...]  # and how many of them there are


def counted(collectives: Sequence[Collective]) -> Counted:
    """Those that differ: layers are alike."""
    known = {(each.transfers, each.peers): each for each in collectives}
    counts = Counter((each.transfers, each.peers) for each in collectives)
    return tuple((each, counts[key]) for key, each in known.items())
