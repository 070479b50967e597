"""Whether kernels can be used, or why not."""

import importlib.util
import os
from functools import cache

import torch

SWITCH = "SAMESTEP_KERNELS"  # set to 0: plain torch everywhere


@cache
def missing(device: torch.device) -> str | None:
    """Why no kernel runs on a device; None if they do."""
    if os.environ.get(SWITCH, "1") == "0":
        return f"{SWITCH}=0 is set"
    if device.type != "cuda":
        return f"kernels are for CUDA, and the device is {device.type}"
    if torch.version.hip is not None:
        return "kernels were not tried on ROCm"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


@cache
def missing_products(device: torch.device) -> str | None:
    """Why symmetric products do not run on a device; None if they do."""
    reason = missing(device)
    if reason is None and torch.cuda.get_device_capability(device) < (9, 0):
        return "symmetric products read tiles as Hopper and newer do"
    return reason
