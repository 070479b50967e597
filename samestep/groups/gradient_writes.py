"""Whether somebody has written into a gradient since it was looked at.

torch counts writes per tensor, but not all: a write to a DTensor counts on the DTensor or on what
this rank holds of it, and one by a foreach function (of which `clip_grad_norm_` is one) on the CPU
on neither; nor does a write through `.data` or to a detached DTensor. So values are looked at too,
where that waits for no GPU.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

PART = 1 << 14  # elements that are converted to float64 at once


class Look(NamedTuple):
    """A look at a gradient: its address, its count of writes, and a digest of its values."""

    address: int
    written: int
    digest: bytes | None

    def writes(self, grad: Tensor) -> int | None:
        """The number of writes to a gradient since this look, or fewer.

        None if the gradient lies elsewhere by now. A gradient without elements has no memory of
        its own and cannot be written to.
        """
        if not grad.numel():
            return 0
        held = _held(grad)
        if Tensor.data_ptr(held) != self.address:
            return None
        digest = None if self.digest is None else _digest(held)
        return max(_count(grad, held) - self.written, int(digest != self.digest))


@torch.no_grad()
def look(grad: Tensor, *, values: bool) -> Look:
    """Look at a gradient that has memory; on a CPU also at the values of a DTensor, or if asked."""
    held = _held(grad)
    is_looked_at = (values or held is not grad) and held.device.type == "cpu"
    return Look(Tensor.data_ptr(held), _count(grad, held), _digest(held) if is_looked_at else None)


def _held(grad: Tensor) -> Tensor:
    """The local tensor of a DTensor, which has no public name outside of autograd."""
    held: Tensor = getattr(grad, "_local_tensor", grad)
    return held


def _count(grad: Tensor, held: Tensor) -> int:
    return grad._version if held is grad else grad._version + held._version


@torch.no_grad()
def _digest(values: Tensor) -> bytes:
    """The sum and the sum of squares in float64; a change of scale or sign changes one of them.

    The values are converted part after part: a whole copy would be twice as large as a gradient
    in float32.
    """
    total, squares = 0.0, 0.0
    for part in torch.split(values.reshape(-1), PART):
        wide = part.double()
        total += wide.sum().item()
        squares += torch.dot(wide, wide).item()
    return struct.pack("dd", total, squares)
