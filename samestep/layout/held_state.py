"""What a rank holds of each state tensor, as boxes of what one process would have."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from samestep.layout.dtensor_shards import Box, Shape
from samestep.layout.range_boxes import range_boxes


class HeldBox(NamedTuple):
    """A box of a larger tensor, and where this rank has it: a view of the box's sizes."""

    box: Box
    tensor: Tensor


class HeldState(NamedTuple):
    """This rank's boxes of one state tensor, which has `shape` in one process."""

    param: Tensor
    key: str
    shape: Shape
    boxes: list[HeldBox]


def whole_box(tensor: Tensor) -> HeldBox:
    """All of a tensor."""
    shape = tuple(tensor.shape)
    return HeldBox(Box((0,) * len(shape), shape), tensor)


def held_range(shape: Shape, start: int, values: Tensor) -> Iterator[HeldBox]:
    """The boxes of a stretch of a contiguous tensor that begins at `start`; views of `values`."""
    flat, done = values.view(-1), 0
    for box in range_boxes(shape, start, start + flat.numel()):
        yield HeldBox(box, flat[done : done + box.numel].view(box.sizes))
        done += box.numel
