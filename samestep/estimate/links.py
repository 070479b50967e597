"""How long a collective takes, on all ranks of a grid."""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, maximum

from samestep.estimate.blueprint import Grid, Peers
from samestep.estimate.collectives import Collective
from samestep.estimate.hardware import Hardware


def seconds_of(each: Collective, grid: Grid, hardware: Hardware) -> Tensor:
    """Of the busiest direction of any peer, by group of peers; the shape of the grid."""
    carried = maximum(each.sent_by_all(), each.received_by_all())
    spread = grid.maximum(each.spread(carried, grid), each.peers)
    kind, ranks = each.traffic.kind, each.peers.size
    inside = spans(grid, each.peers) <= hardware.ranks_per_host
    fixed = hardware.seconds(kind, ranks, 0.0, inside=inside)
    per_byte = hardware.seconds(kind, ranks, 1e9, inside=inside) - fixed
    return fixed + spread * (per_byte / 1e9)


Counted = tuple[tuple[Collective, int], ...]  # and how many of them there are


def counted(collectives: Sequence[Collective]) -> Counted:
    """Those that differ: layers are alike."""
    known = {(each.transfers, each.peers): each for each in collectives}
    counts = Counter((each.transfers, each.peers) for each in collectives)
    return tuple((each, counts[key]) for key, each in known.items())


def spans(grid: Grid, peers: Peers) -> int:
    """How many neighbouring ranks hold a whole group: those of its outermost axis and inside."""
    reach = 1
    for axis, size in reversed(
        [*((a, b.size) for a, b in grid.beside.items()), *grid.sizes.items()]
    ):
        reach *= size
        if axis == (peers.axes[0] if peers.axes else None):
            return reach
    return 1
