"""Where state stays between steps: beside its parameter, or in the host's memory."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

OFFLOADED_FROM = ("cuda", "cpu", "meta")  # devices whose state may stay on the host


class Home(NamedTuple):
    """A device, and whether its memory is pinned, so that a GPU can copy while others compute."""

    device: torch.device
    pinned: bool

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device, pin_memory=self.pinned)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is there."""
        return tensor.device == self.device and (not self.pinned or tensor.is_pinned())

    def copy_of(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor with the same values."""
        return self.zeros(tensor.shape, tensor.dtype).copy_(tensor)


def home_of(device: torch.device, offload: str | None) -> Home:
    """Where the state of parameters on a device stays.

    Raises:
        ValueError: It shall be offloaded from a device that has no streams to copy beside it.
    """
    if offload is None:
        return Home(device, pinned=False)
    if device.type not in OFFLOADED_FROM:
        raise ValueError(
            f"offload={offload!r} is for parameters on a CUDA GPU, and there is one on "
            f"{device.type}: leave offload out"
        )
    if device.type == "meta":
        return Home(device, pinned=False)
    return Home(torch.device("cpu"), pinned=device.type == "cuda")
