"""State that stays on the host: the windows in which it comes to the device of a rank.

They are those of the optimizer's placements, cut from state on the meta device.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from samestep.estimate.placed import OnRank, Updated
from samestep.groups.param_groups import rule_of
from samestep.layout.blocks import Shape
from samestep.placements.windows import Unit, Windows
from samestep.plan.schedule import PlacementShape, Stage
from samestep.rules.state import State, StoredTensors, block_state_shapes, state_shapes

Groups = Sequence[Mapping[str, Any]]


def with_windows(own: OnRank, groups: Groups) -> PlacementShape:
    """What the schedule of a rank depends on, with the windows of its state."""
    windows, shape = windows_of(own, groups), own.shape
    return shape._replace(
        windows=windows.sizes(len(shape.bucket_sizes)),
        chunk_windows=windows.chunk_sizes(shape.chunks),
    )


def windows_of(own: OnRank, groups: Groups) -> Windows:
    """Of every bucket and chunk, as `placements.whole` and `placements.parts` cut them."""
    units: dict[tuple[Stage, int], list[Unit]] = {}
    for number in range(len(own.shape.bucket_sizes)):
        units["update", number] = [_unit(each, groups) for each in own.updates(number)]
    for number in range(own.shape.chunks):
        units["chunk", number] = list(_of_chunk(own, number, groups))
    return Windows(units)


def _unit(updated: Updated, groups: Groups) -> Unit:
    group, stored, block = groups[updated.group], updated.stored, updated.block
    if block is None:
        shapes = state_shapes(rule_of(group), (updated.elements,), group, stored)
    else:
        shapes = block_state_shapes(rule_of(group), block, group, stored)
    return Unit(updated, _state(shapes, stored), updated.elements, may_be_cut=block is None)


def _of_chunk(own: OnRank, number: int, groups: Groups) -> Iterator[Unit]:
    """Of the parts that a rank holds, and of what belongs to whole blocks, which all have."""
    assert own.spreading is not None
    for route in {route.key: route for route in own.spreading.plan.chunks[number]}.values():
        spec = own.spreading.specs[route.param]
        group, part = groups[spec.group], route.parts.of_rank.get(own.mesh_place)
        held = 0 if part is None else part.in_block.numel
        shapes = block_state_shapes(rule_of(group), route.block, group, spec.stored)
        sizes = {
            key: (prod(shapes[key]) if how.per is None else held // how.per,)
            for key, how in spec.stored.items()
        }
        yield Unit(route.key, _state(sizes, spec.stored), elements=1)


def _state(shapes: Mapping[str, Shape], stored: StoredTensors) -> State:
    return {
        key: torch.empty(shape, dtype=stored[key].dtype, device="meta")
        for key, shape in shapes.items()
    }
