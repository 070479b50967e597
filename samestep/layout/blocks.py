"""Blocks: what a matrix rule works on at once, as boxes of a parameter."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from torch import Tensor

Shape = tuple[int, ...]


class Block(NamedTuple):
    """One matrix inside a parameter: `rows` rows from `row` on, of one matrix of a stack."""

    matrix: int | None  # which matrix of a 3-D stack; None: the parameter is one matrix
    row: int
    rows: int
    cols: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows, self.cols)

    def view(self, tensor: Tensor) -> Tensor:
        """The block's part of a parameter-shaped tensor: (rows, cols), or (rows, ...) flattened."""
        whole = tensor if self.matrix is None else tensor[self.matrix]
        return whole.narrow(0, self.row, self.rows)


def views(blocks: Sequence[Block], tensor: Tensor) -> list[Tensor]:
    """`block.view(tensor)` for all blocks of a parameter, by few calls: stacks hold hundreds."""
    if not blocks:
        return []
    first = blocks[0].matrix
    matrices = [tensor] if first is None else list(tensor.unbind())
    sizes = [block.rows for block in blocks if block.matrix == first]
    if len(sizes) == 1:
        return matrices
    return [part for matrix in matrices for part in matrix.split_with_sizes(sizes)]


def blocks_of(
    shape: Shape, split_sizes: Sequence[int] | None = None, flatten: bool = False
) -> list[Block]:
    """Cut a parameter of `shape` into blocks; raise ValueError with the way out if it cannot be.

    A 2-D parameter is one matrix, a 3-D one a stack of matrices, and with `flatten` an N-D
    one is the matrix (out, all the rest), as for convolution weights. Each matrix is one
    block, or is cut into the row blocks `split_sizes` (Q, K, V; gate, up; one per head).
    """
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
    if split_sizes is not None and not isinstance(split_sizes, Sequence):
        raise ValueError(f"has split_sizes {split_sizes!r}: give a list of row counts")
    sizes = (rows,) if split_sizes is None else tuple(split_sizes)
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"has split_sizes {sizes}: they must be whole numbers above 0")
    if sum(sizes) != rows:
        raise ValueError(
            f"has split_sizes {sizes}, which add up to {sum(sizes)}, but each of its matrices "
            f"has {rows} rows: make them add up to {rows}"
        )
    starts = list(accumulate(sizes, initial=0))[:-1]
    matrices = [None] if len(shape) == 2 else range(shape[0])
    return [
        Block(matrix, start, size, cols)
        for matrix in matrices
        for start, size in zip(starts, sizes, strict=True)
    ]
