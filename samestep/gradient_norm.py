"""One joint gradient norm over everything an optimizer updates, and what is decided by it."""

from collections.abc import Iterable

import torch
from torch import Tensor


def square_sum(grads: Iterable[Tensor]) -> Tensor | None:
    """The sum of all squares in float64, (); None if there is no gradient."""
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
    if not norms:
        return None
    device = norms[0].device
    return torch.stack([norm.to(device) for norm in norms]).square().sum()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are multiplied with: min(1, max_norm / (norm + 1e-6)), as torch clips."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
