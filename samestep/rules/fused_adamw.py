"""AdamW in one pass over memory on CPU: torch's own kernel, the one behind `fused=True`.

The kernel has no public name. It rounds otherwise than separate operations do, by an ulp or so;
a slice of a parameter gets the same bits as the whole.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def fused_adamw_(
    param: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One step into `param` and `state`, whose count is that of this step already."""
    keys = [key for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if key in state]
    tensors = [param, *(state[key] for key in keys)]
    # With strides the kernel writes where it should not.
    dense = [tensor.contiguous() for tensor in tensors]
    torch._fused_adamw_(
        [dense[0]],
        [grad.contiguous()],
        [dense[1]],
        [dense[2]],
        dense[3:],
        [state["step"].float()],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=len(dense) > 3,
        maximize=False,
    )
    for tensor, result in zip(tensors, dense, strict=True):
        if result is not tensor:
            tensor.copy_(result)
