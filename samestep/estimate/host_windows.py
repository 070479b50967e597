"""State that stays on the host: the windows in which it comes to the device of a rank."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from samestep.estimate.placed import OnRank, Sharing
from samestep.groups.param_groups import rule_of
from samestep.layout.blocks import Shape
from samestep.placements.whole.piece_state import StateLayout
from samestep.plan.schedule import PlacementShape
from samestep.plan.windows import Cut, TensorSize, UnitSize, Window, aligned, window_bytes, windows
from samestep.rules.state import StoredTensors, block_state_shapes, state_shapes

Groups = Sequence[Mapping[str, Any]]


class HostUnit(NamedTuple):
    """What `placements.windows.Unit` is of a placement: whose state, and what it is updated as."""

    size: UnitSize
    group: int
    param: Tensor
    matrices: tuple[tuple[int, int], ...] | None  # None: any range of its elements

    def shapes(self, cut: Cut) -> list[tuple[int, ...]]:
        """What rules are run on, of a range of it."""
        return [(cut.stop - cut.start,)] if self.matrices is None else list(self.matrices)


class BucketWindows(NamedTuple):
    """The state of a bucket in its windows."""

    units: list[HostUnit]
    cut: list[Window]

    @property
    def sizes(self) -> tuple[int, ...]:
        units = [unit.size for unit in self.units]
        return tuple(window_bytes(window, units) for window in self.cut)


def bucket_windows(units: list[HostUnit]) -> BucketWindows:
    return BucketWindows(units, windows([unit.size for unit in units]))


def with_windows(own: OnRank, groups: Groups) -> PlacementShape:
    """What the schedule of a rank depends on, with the windows of its state."""
    blocks = own.spreading
    chunks = () if blocks is None else range(len(blocks.plan.chunks))
    return own.shape._replace(
        windows=tuple(each.sizes for each in windows_of(own, groups)),
        chunk_windows=tuple(_chunk_bytes(own, number, groups) for number in chunks),
    )


def windows_of(own: OnRank, groups: Groups) -> list[BucketWindows]:
    """Of every bucket, as `placements.whole` and `placements.parts` cut them."""
    sharing, place, spreading, mesh_place = own
    if sharing is not None:
        layout = StateLayout(sharing.plan, place, list(map(dict, groups)))
        return [
            bucket_windows(_pieces(sharing, number, place, layout))
            for number in range(len(sharing.plan.buckets))
        ]
    assert spreading is not None
    units = []
    for param, spec, held in zip(spreading.params, spreading.specs, spreading.held, strict=True):
        if spec.blocks is None:
            box, group = held.boxes[mesh_place], groups[spec.group]
            shapes = state_shapes(rule_of(group), box.sizes, group, spec.stored)
            size = UnitSize(box.numel, _tensors(shapes, spec.stored), True)
            units.append(HostUnit(size, spec.group, param, None))
    return [bucket_windows(units)]


def _tensors(shapes: Mapping[str, Shape], stored: StoredTensors) -> tuple[TensorSize, ...]:
    return tuple(
        TensorSize(prod(shape), stored[key].dtype.itemsize) for key, shape in shapes.items()
    )


def _pieces(sharing: Sharing, number: int, place: int, layout: StateLayout) -> list[HostUnit]:
    found = []
    for piece in sharing.owned(number, place).pieces:
        if piece.block is not None and sharing.even:
            continue  # comes with its chunk
        spec = sharing.specs[piece.param]
        shapes = {key: shape for key, (_, shape) in layout.spans[piece].items()}
        size = UnitSize(piece.size, _tensors(shapes, spec.stored), piece.block is None)
        matrices = None if piece.block is None else piece.block.matrices
        found.append(HostUnit(size, spec.group, sharing.params[piece.param], matrices))
    return found


def _chunk_bytes(own: OnRank, number: int, groups: Groups) -> int:
    """Of the parts that a rank holds, and of what belongs to whole blocks, which all have."""
    total, spreading = 0, own.spreading
    assert spreading is not None
    for route in {route.key: route for route in spreading.plan.chunks[number]}.values():
        spec = spreading.specs[route.param]
        group, part = groups[spec.group], route.parts.of_rank.get(own.mesh_place)
        held = 0 if part is None else part.in_block.numel
        shapes = block_state_shapes(rule_of(group), route.block, group, spec.stored)
        for key, how in spec.stored.items():
            elements = prod(shapes[key]) if how.per is None else held // how.per
            total += aligned(elements * how.dtype.itemsize)
    return total
