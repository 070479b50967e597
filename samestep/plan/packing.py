"""Places of boxes in a buffer.

    tensor a  [ 0 1 2 3 4 5 ]        buffer  [ a: 2 3 | b: 0 1 2 | a: 4 5 | gap ]
    tensor b  [ 0 1 2 ]

Buckets, flat buffers, what a rank sends in an exchange and what it gets, and the tables of kernels
are packings. A packing is pure data: whoever has the buffer and the tensors copies.
"""

from collections.abc import Sequence
from typing import NamedTuple

from samestep.layout.boxes import Shape
from samestep.plan.layouts import Key


class PackedPart(NamedTuple):
    """A box of a tensor and its range in a buffer.

    rank: whose it is: the owner of a part of a bucket; where a part goes to, or comes from.
    slices: of the tensor that the rank with the buffer holds, or needs; of a parameter that is cut
        anywhere, one slice of all its elements.
    """

    rank: int
    key: Key
    sizes: Shape
    slices: tuple[slice, ...]
    start: int
    numel: int

    @property
    def place(self) -> slice:
        """The stretch of the buffer that it takes."""
        return slice(self.start, self.start + self.numel)

    @property
    def elements(self) -> slice:
        """The elements that it has of a flattened tensor; for parts of buckets."""
        (elements,) = self.slices
        return elements


class Packing(NamedTuple):
    """All parts of a buffer in order; gaps may follow any of them.

    sizes: elements of the buffer by rank, gaps included: those of one rank lie together.
    """

    parts: Sequence[PackedPart]
    sizes: Sequence[int]
