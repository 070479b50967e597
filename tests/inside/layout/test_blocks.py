"""How a parameter is cut into blocks: every element in exactly one, or a clear refusal."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.layout.blocks import Block, blocks_of, matrices, views

sizes = st.integers(1, 5)


@pytest.mark.parametrize(
    ("shape", "split_sizes", "flatten", "expected"),
    [
        ((4, 6), None, False, [Block(None, 0, 4, 6)]),
        ((1, 1), None, False, [Block(None, 0, 1, 1)]),
        # All rows as one size says "this is one matrix" and means the same as no split.
        ((4, 6), (4,), False, [Block(None, 0, 4, 6)]),
        ((6, 3), [2, 2, 2], False, [Block(None, row, 2, 3) for row in (0, 2, 4)]),
        # Grouped-query attention: more rows of queries than of keys and values.
        ((8, 3), (4, 2, 2), False, [Block(None, *b, 3) for b in ((0, 4), (4, 2), (6, 2))]),
        ((3, 2), (1, 1, 1), False, [Block(None, row, 1, 2) for row in range(3)]),
        # A stack of experts, and one whose matrices each hold a gate and an up projection.
        ((2, 4, 3), None, False, [Block(0, 0, 4, 3), Block(1, 0, 4, 3)]),
        (
            (2, 4, 3), (1, 3), False,
            [Block(0, 0, 1, 3), Block(0, 1, 3, 3), Block(1, 0, 1, 3), Block(1, 1, 3, 3)],
        ),
        # A convolution (out, in, height, width) is the matrix (out, in * height * width).
        ((4, 3, 2, 2), None, True, [Block(None, 0, 4, 12)]),
        ((4, 3, 5), None, True, [Block(None, 0, 4, 15)]),
        ((4, 3, 5), (1, 3), True, [Block(None, 0, 1, 15), Block(None, 1, 3, 15)]),
        ((4, 6), None, True, [Block(None, 0, 4, 6)]),
    ],
)  # fmt: skip
def test_examples(shape, split_sizes, flatten, expected):
    assert blocks_of(shape, split_sizes, flatten) == expected


def test_the_view_of_a_block_is_the_parameter_itself():
    """Updates are written through the views, so these may not be copies."""
    param = torch.arange(24.0).view(2, 4, 3)
    second_gate = blocks_of((2, 4, 3), (1, 3))[2]
    view = second_gate.view(param)
    assert view.tolist() == [[12.0, 13.0, 14.0]]
    view.zero_()
    assert param[1, 0].tolist() == [0, 0, 0]
    assert param.sum() == sum(range(24)) - (12 + 13 + 14)


def test_the_view_of_a_flattened_block_keeps_the_other_dims():
    """A convolution weight may lie in memory so that no (out, rest) view of it exists."""
    weight = torch.zeros(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    first, second = blocks_of((4, 3, 2, 2), (1, 3), flatten=True)
    second.view(weight).fill_(1)
    assert first.view(weight).shape == (1, 3, 2, 2)
    assert second.view(weight).shape == (3, 3, 2, 2)
    assert weight.sum(dim=(1, 2, 3)).tolist() == [0, 12, 12, 12]


@st.composite
def cuts(draw):
    """A shape that can be cut, its split_sizes or None, and whether it is flattened."""
    flatten = draw(st.booleans())
    split = draw(st.none() | st.lists(sizes, min_size=1, max_size=4))
    rows = draw(sizes) if split is None else sum(split)
    if flatten:
        shape = (rows, *draw(st.lists(sizes, min_size=1, max_size=3)))
    else:
        shape = (*draw(st.lists(sizes, max_size=1)), rows, draw(sizes))
    return shape, split, flatten


@given(cuts())
def test_every_element_is_in_exactly_one_block(cut):
    shape, split, flatten = cut
    painted = torch.zeros(shape, dtype=torch.int64)
    blocks = blocks_of(shape, split, flatten)
    for block in blocks:
        view = block.view(painted)
        assert view.shape[0] == block.rows
        assert view.shape[1:].numel() == block.cols
        assert block.shape == (block.rows, block.cols)
        view += 1
    assert (painted == 1).all()
    assert sum(block.rows * block.cols for block in blocks) == prod(shape)


@given(cuts())
def test_all_views_at_once_are_those_of_the_blocks(cut):
    shape, split, flatten = cut
    order = torch.arange(prod(shape)).view(shape)
    blocks = blocks_of(shape, split, flatten)
    assert views([], order) == []
    for block, view in zip(blocks, views(blocks, order), strict=True):
        assert view.equal(block.view(order))
        assert view.data_ptr() == block.view(order).data_ptr()


@given(cuts())
def test_blocks_come_in_the_order_of_the_rows(cut):
    """Saved state lies block after block, so the order is part of the file format."""
    shape, split, flatten = cut
    order = torch.arange(prod(shape)).view(shape)
    blocks = blocks_of(shape, split, flatten)
    walked = torch.cat([block.view(order).reshape(-1) for block in blocks])
    assert walked.equal(order.reshape(-1))
    per_matrix = [None] if flatten or len(shape) == 2 else range(shape[0])
    assert [(b.matrix, b.rows) for b in blocks] == [
        (matrix, rows)
        for matrix in per_matrix
        for rows in (split or [shape[0] if flatten else shape[-2]])
    ]


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_a_parameter_without_elements_has_no_blocks(shape, flatten):
    assert blocks_of(shape, None, flatten) == []


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("split_sizes", [None, (2, 2)])
@pytest.mark.parametrize("shape", [(), (4,), (0,)])
def test_less_than_a_matrix_is_refused(shape, split_sizes, flatten):
    with pytest.raises(ValueError, match=rf"is {len(shape)}-D, not a matrix.*'adamw'"):
        blocks_of(shape, split_sizes, flatten)


@pytest.mark.parametrize(
    ("shape", "as_matrix"),
    [((4, 3, 2, 2), r"\(4, 12\)"), ((4, 3, 2, 2, 5), r"\(4, 60\)"), ((0, 1, 2, 3), r"\(0, 6\)")],
)
def test_more_than_a_stack_is_refused_without_flatten(shape, as_matrix):
    with pytest.raises(ValueError, match=rf"is {len(shape)}-D.*flatten=True.*{as_matrix}.*'adamw'"):
        blocks_of(shape)


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3)])
@pytest.mark.parametrize(
    "split_sizes",
    [(), (0, 4), (4, 0), (-1, 5), (2.0, 2.0), (2, None), (True, 3), ("2", "2")],
    ids=str,
)
def test_sizes_that_are_no_positive_whole_numbers_are_refused(shape, split_sizes):
    with pytest.raises(ValueError, match=r"split_sizes .*whole numbers above 0") as caught:
        blocks_of(shape, split_sizes)
    assert str(tuple(split_sizes)) in str(caught.value)


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3)])
@pytest.mark.parametrize("split_sizes", [4, 4.0], ids=str)
def test_a_bare_number_is_refused_with_its_value(shape, split_sizes):
    """`split_sizes=64`, meaning "in pieces of 64" as in torch.split, is an easy mistake."""
    with pytest.raises((ValueError, TypeError), match=rf"split_sizes.*{split_sizes}"):
        blocks_of(shape, split_sizes)


@pytest.mark.parametrize(
    ("shape", "split_sizes", "flatten", "rows"),
    [
        ((4, 3), (4, 4), False, 4),
        # The columns, or the matrices of a stack, are never what is split.
        ((4, 3), (2, 1), False, 4),
        ((2, 4, 3), (1, 1), False, 4),
        ((4, 3, 2), (1, 2), True, 4),
    ],
)
def test_sizes_that_do_not_add_up_are_refused(shape, split_sizes, flatten, rows):
    with pytest.raises(ValueError, match=f"add up to {sum(split_sizes)}.*add up to {rows}") as e:
        blocks_of(shape, split_sizes, flatten)
    assert str(split_sizes) in str(e.value)


@given(cuts(), st.integers(-8, 8).filter(bool))
def test_any_wrong_sum_is_refused(cut, error):
    shape, split, flatten = cut
    split = [*(split or [shape[0] if flatten else shape[-2]])]
    split[-1] += error
    with pytest.raises(ValueError, match="split_sizes"):
        blocks_of(shape, split, flatten)


@pytest.mark.parametrize("shape", [(6, 8), (3, 6, 8)])
@pytest.mark.parametrize("split", ["interleaved:2x2", (2, 6), None])
def test_all_matrices_at_once_are_those_of_the_blocks(shape, split):
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    blocks = blocks_of(shape, split, transposed=True)
    wanted = [m for block in blocks for m in block.form.views(block.view(tensor))]
    found = matrices(blocks, tensor)
    assert len(found) == len(wanted) == sum(len(block.matrices) for block in blocks)
    for matrix, own in zip(found, wanted, strict=True):
        assert torch.equal(matrix, own)
        assert matrix.data_ptr() == own.data_ptr()
