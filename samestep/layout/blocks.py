"""Blocks: the parts of a parameter that a matrix rule treats as whole matrices.

A block is one matrix, or several interleaved ones (`layout.splits`). Interleaved matrices are sent
and kept as they are stored, and only the rank that orthogonalizes them takes them apart.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from torch import Tensor

from samestep.layout.splits import Form, split_of

Shape = tuple[int, ...]


class Block(NamedTuple):
    """Consecutive rows of one matrix of a parameter: `rows` rows from `row` on."""

    matrix: int | None  # which matrix of a 3-D stack; None: the parameter is one matrix
    row: int
    rows: int
    cols: int
    form: Form | None = None  # how its matrices lie in it; None: it is one

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the block as it is stored."""
        return (self.rows, self.cols)

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Return the shape (out, in) of each matrix in the block."""
        return (self.shape,) if self.form is None else self.form.shapes(self.shape)

    def view(self, tensor: Tensor) -> Tensor:
        """Return the block as a view (rows, cols), or (rows, ...), of a parameter-shaped tensor."""
        whole = tensor if self.matrix is None else tensor[self.matrix]
        return whole.narrow(0, self.row, self.rows)


def views(blocks: Sequence[Block], tensor: Tensor) -> list[Tensor]:
    """Return `block.view(tensor)` for all blocks of a parameter, with few calls for stacks."""
    if not blocks:
        return []
    first = blocks[0].matrix
    matrices = [tensor] if first is None else list(tensor.unbind())
    sizes = [block.rows for block in blocks if block.matrix == first]
    if len(sizes) == 1:
        return matrices
    return [part for matrix in matrices for part in matrix.split_with_sizes(sizes)]


def matrices(blocks: Sequence[Block], tensor: Tensor) -> list[Tensor]:
    """Return the matrices of all blocks of a parameter: (rows, ...), or as their form has them."""
    form = blocks[0].form if blocks else None  # one parameter has blocks of one form
    if form is None:
        return views(blocks, tensor)
    found = form.views(tensor)  # of a whole stack at once
    if blocks[0].matrix is None:
        return found
    return [
        matrix
        for of_block in zip(*(each.unbind() for each in found), strict=True)
        for matrix in of_block
    ]


def blocks_of(
    shape: Shape,
    split_sizes: Sequence[int] | str | None = None,
    flatten: bool = False,
    transposed: bool = False,
) -> list[Block]:
    """Cut a parameter of `shape` into blocks; raise ValueError with a remedy if impossible.

    A 2-D parameter is one matrix, a 3-D one a stack of matrices, and with `flatten` an N-D
    one is the matrix (out, all the rest), as for convolution weights. Each matrix is one
    block, or is cut into the row blocks `split_sizes` (Q, K, V; gate, up; one per head). Row
    blocks that are not contiguous (interleaved, or stored as (in, out)) form one block together.
    """
    if flatten and transposed:
        raise ValueError(
            "has flatten=True and transposed=True: a convolution is flattened to (out, all the "
            "rest); leave one of them out"
        )
    if flatten and len(shape) > 2:
        shape = (shape[0], prod(shape[1:]))
    if len(shape) < 2:
        raise ValueError(f"is {len(shape)}-D, not a matrix: give it to the rule 'adamw'")
    if len(shape) > 3:
        raise ValueError(
            f"is {len(shape)}-D, not a matrix: set flatten=True for it to be treated as "
            f"{(shape[0], prod(shape[1:]))}, or give it to the rule 'adamw'"
        )
    if 0 in shape:
        return []
    rows, cols = shape[-2:]
    split = split_of(split_sizes, cols if transposed else rows)
    form, sizes = None, split.sizes
    if transposed or split.groups > 1:
        form, sizes = Form(split, transposed), (rows,)
    starts = list(accumulate(sizes, initial=0))[:-1]
    matrices = [None] if len(shape) == 2 else range(shape[0])
    return [
        Block(matrix, start, size, cols, form)
        for matrix in matrices
        for start, size in zip(starts, sizes, strict=True)
    ]
