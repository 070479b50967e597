"""How long a collective takes, on all ranks of a grid."""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, maximum

from samestep.estimate.collectives import Collective
from samestep.estimate.grid import Grid
from samestep.estimate.hardware import Hardware


def seconds_of(each: Collective, grid: Grid, hardware: Hardware) -> Tensor:
    """Of the busiest direction of any peer, by group of peers; the shape of the grid."""
    carried = maximum(each.sent_by_all(), each.received_by_all())
    spread = grid.maximum(each.spread(carried, grid), each.peers)
    fabric = hardware.fabric(each.peers, grid)
    if each.levels == 2:
        return grid.zeros() + fabric.seconds_in_two(each.size)
    fixed = hardware.seconds(each.traffic.kind, 0.0, fabric)
    per_byte = hardware.seconds(each.traffic.kind, 1e9, fabric) - fixed
    return fixed + spread * (per_byte / 1e9)


Counted = tuple[tuple[Collective, int], ...]  # and how many of them there are


def counted(collectives: Sequence[Collective]) -> Counted:
    """Those that differ: layers are alike."""
    known = {(each.transfers, each.peers): each for each in collectives}
    counts = Counter((each.transfers, each.peers) for each in collectives)
    return tuple((each, counts[key]) for key, each in known.items())
