"""Detects writes to a gradient since an earlier look.

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
    """State of a gradient at one moment: address, version counter and digest of values."""

    address: int
    written: int
    digest: bytes | None

    def writes(self, grad: Tensor) -> int | None:
        """Number of writes since this look, or a lower bound.

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
    """Record the state of a gradient; the digest only for DTensors on a CPU, or on request."""
    held = _held(grad)
    is_looked_at = (values or held is not grad) and held.device.type == "cpu"
    return Look(Tensor.data_ptr(held), _count(grad, held), _digest(held) if is_looked_at else None)


def _held(grad: Tensor) -> Tensor:
    """Local tensor of a DTensor, without autograd."""
    held: Tensor = getattr(grad, "_local_tensor", grad)
    return held


def _count(grad: Tensor, held: Tensor) -> int:
    return grad._version if held is grad else grad._version + held._version


@torch.no_grad()
def _digest(values: Tensor) -> bytes:
    """Sum and sum of squares in float64, which edits of scale or sign change.

    The values are converted part after part: a whole copy would be twice as large as a gradient
    in float32.
    """
    total, squares = 0.0, 0.0
    for part in torch.split(values.reshape(-1), PART):
        wide = part.double()
        total += wide.sum().item()
        squares += torch.dot(wide, wide).item()
    return struct.pack("dd", total, squares)
