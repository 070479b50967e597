"""One joint gradient norm over everything an optimizer updates, and what is decided by it."""

from collections.abc import Iterable

import torch
from torch import Tensor

from samestep.kernels.choice import missing as missing_kernels


def square_sum(grads: Iterable[Tensor]) -> Tensor | None:
    """The sum of all squares in float64, (); None if there is no gradient."""
    grads = list(grads)
    if not grads:
        return None
    device = grads[0].device
    if missing_kernels(device) is None and _are_plain(grads):
        from samestep.kernels import norm

        return norm.square_sum(grads)
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
    return torch.stack([norm.to(device) for norm in norms]).square().sum()


def _are_plain(grads: list[Tensor]) -> bool:
    """Whether the kernel can read them."""
    return (
        len({grad.device for grad in grads}) == 1
        and all(map(Tensor.is_contiguous, grads))
        and torch.float64 not in {grad.dtype for grad in grads}
    )


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are multiplied with: min(1, max_norm / (norm + 1e-6)), as torch clips."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
