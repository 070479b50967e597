"""Stretches of a contiguous tensor as boxes of it."""

from collections.abc import Iterator
from math import prod

from samestep.layout.dtensor_shards import Box, Shape


def range_boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Boxes, in order, that make up elements start..stop-1 of a contiguous tensor.

    At most two per dim but the first, and one more: in (4, 10), 7..32 is 7..9 of row 0, rows 1
    and 2, and 0..2 of row 3.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:  # inside one row
        yield from _in_row(shape, last, start - last * inner, stop - last * inner)
        return
    if start < first * inner:
        yield from _in_row(shape, first - 1, start - (first - 1) * inner, inner)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last * inner < stop:
        yield from _in_row(shape, last, 0, stop - last * inner)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Box]:
    for box in range_boxes(shape[1:], start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes))
