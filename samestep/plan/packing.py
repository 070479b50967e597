"""Places of boxes in a buffer.

    tensor a  [ 0 1 2 3 4 5 ]        buffer  [ a: 2 3 | b: 0 1 2 | a: 4 5 | gap ]
    tensor b  [ 0 1 2 ]

Buckets, flat buffers, send and receive buffers of exchanges, and the tables of kernels are
packings. A packing is pure data: code that has the buffer and the tensors copies values.
"""

from collections.abc import Sequence
from typing import NamedTuple

from samestep.layout.boxes import Shape
from samestep.plan.layouts import Key


class PackedPart(NamedTuple):
    """A box of a tensor and its range in a buffer.

    rank: the owner of a part of a bucket; the receiver or sender of a part of an exchange.
    slices: slices of the tensor that the rank with the buffer holds or needs; one slice of the
        flattened parameter, if that is cut anywhere.
    """

    rank: int
    key: Key
    sizes: Shape
    slices: tuple[slice, ...]
    start: int
    numel: int

    @property
    def place(self) -> slice:
        """Return the range of the part in the buffer."""
        return slice(self.start, self.start + self.numel)

    @property
    def elements(self) -> slice:
        """Return the range of the part in the flattened tensor; for parts of buckets."""
        (elements,) = self.slices
        return elements


class Packing(NamedTuple):
    """All parts of a buffer in order; gaps may follow any of them.

    sizes: elements of the buffer by rank, gaps included; parts of one rank are contiguous.
    """

    parts: Sequence[PackedPart]
    sizes: Sequence[int]
