"""Stretches of a tensor as boxes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.layout.boxes import Box, held_range, range_boxes


@st.composite
def stretches(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=5)))
    size = torch.Size(shape).numel()
    start = draw(st.integers(0, size))
    return shape, start, draw(st.integers(start, size))


@given(stretches())
def test_every_element_once_and_in_order(stretch):
    shape, start, stop = stretch
    places = torch.arange(torch.Size(shape).numel()).view(shape)
    found = [places[box.slices].reshape(-1) for box in range_boxes(shape, start, stop)]
    assert torch.cat([torch.zeros(0, dtype=torch.int64), *found]).tolist() == [*range(start, stop)]


@given(stretches())
def test_few_boxes_and_none_empty(stretch):
    shape, start, stop = stretch
    boxes = list(range_boxes(shape, start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel and len(box.sizes) == len(shape) for box in boxes)


@given(stretches())
def test_boxes_are_views_of_the_values(stretch):
    shape, start, stop = stretch
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    values = whole.view(-1)[start:stop].clone()
    for box, tensor in held_range(shape, start, values):
        assert tensor.equal(whole[box.slices])
        tensor.fill_(-1)
    assert (values == -1).all()


def test_whole_tensors_and_rows_are_one_box():
    assert list(range_boxes((), 0, 1)) == [Box((), ())]
    assert list(range_boxes((3, 4, 5), 0, 60)) == [Box((0, 0, 0), (3, 4, 5))]
    assert list(range_boxes((3, 4, 5), 20, 60)) == [Box((1, 0, 0), (2, 4, 5))]
    assert list(range_boxes((4, 10), 7, 33)) == [
        Box((0, 7), (1, 3)),
        Box((1, 0), (2, 10)),
        Box((3, 0), (1, 3)),
    ]
    assert list(range_boxes((4, 10), 7, 7)) == []
