"""AdamW in one pass over memory on CPU: torch's own kernel, the one behind `fused=True`.

The kernel has no public name. It rounds otherwise than separate operations do, by an ulp or so;
a slice of a parameter gets the same bits as the whole.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def fused_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One step into each parameter and its state, whose counts are those of this step already."""
    moments = [[state[key] for state in states] for key in MOMENTS if key in states[0]]
    tensors = [list(params), *moments]
    # With strides the kernel writes where it should not.
    dense = [[tensor.contiguous() for tensor in alike] for alike in tensors]
    torch._fused_adamw_(
        dense[0],
        [grad.contiguous() for grad in grads],
        dense[1],
        dense[2],
        dense[3] if len(dense) > 3 else [],
        [state["step"].float() for state in states],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=len(dense) > 3,
        maximize=False,
    )
    for alike, results in zip(tensors, dense, strict=True):
        for tensor, result in zip(alike, results, strict=True):
            if result is not tensor:
                tensor.copy_(result)
