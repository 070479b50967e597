"""Whether kernels can be used, or why not."""

import importlib.util
import os
from functools import cache
from importlib.metadata import version

import torch

from samestep.kernels.ways import settled_line
from samestep.version import __version__

SWITCH = "SAMESTEP_KERNELS"  # set to 0: plain torch everywhere


@cache
def missing(device: torch.device) -> str | None:
    """Why no kernel runs on a device; None if they do."""
    if device.type != "cuda":
        return f"kernels are for CUDA, and the device is {device.type}"
    if os.environ.get(SWITCH, "1") == "0":
        return f"{SWITCH}=0 is set"
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


def line_of(device: torch.device) -> str:
    """What runs there, for the plan that ranks compare: kernels round otherwise than torch."""
    reason = missing_products(device)
    if reason is not None:
        return f"without kernels: {reason}"
    name = torch.cuda.get_device_name(device)
    versions = f"samestep {__version__} with triton {version('triton')} on {name}"
    return f"kernels of {versions}; {settled_line()}"
