"""Scalars of a step as Python's numbers, where reading them waits for nothing."""

from typing import Any

import torch
from torch import Tensor


def on_host(tensor: Tensor) -> bool:
    """Whether the math on a tensor may read scalars: it is on CPU, and not being compiled."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def number(scalar: Tensor, like: Tensor) -> Any:
    """A 0-D tensor as Python's number if `like` is on the host, else as it is.

    Python's arithmetic costs a tenth of that among 0-D tensors, and gives the same.
    """
    return scalar.item() if on_host(like) else scalar


def in_dtype(value: float | Tensor, like: Tensor) -> Any:
    """A 0-D tensor in the dtype of another; Python's numbers fit any."""
    return value.to(like.dtype) if isinstance(value, Tensor) else value
