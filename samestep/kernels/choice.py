"""Choices of kernels: whether a device can use them, and how symmetric products are computed.

The way of a product depends on its shape; `update.measure` settles it.
"""

import importlib.util
import os
from functools import cache
from importlib.metadata import version
from typing import Literal

import torch

from samestep.version import __version__

SWITCH = "SAMESTEP_KERNELS"  # set to 0: plain torch everywhere

Way = Literal["large", "small", "torch"]  # tiles of `kernels.symmetric`, or the whole by cuBLAS
Shape = tuple[int, int]  # of (m, k) whose product with itself is wanted
WAYS: tuple[Way, ...] = ("large", "small", "torch")

ALIGNMENT = 8  # elements: TMA wants rows that begin at multiples of 16 bytes

settled: dict[Shape, Way] = {}  # of this process, for good: bits depend on it


@cache
def missing(device: torch.device) -> str | None:
    """Return the reason why no kernel runs on a device; None if kernels run."""
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
    """Return the reason why symmetric products do not run on a device; None if they run."""
    reason = missing(device)
    if reason is None and torch.cuda.get_device_capability(device) < (9, 0):
        return "symmetric products read tiles as Hopper and newer do"
    return reason


def describe_kernels(device: torch.device) -> str:
    """Describe a device's kernels for the plan that ranks compare: they round unlike torch."""
    reason = missing_products(device)
    if reason is not None:
        return f"without kernels: {reason}"
    name = torch.cuda.get_device_name(device)
    versions = f"samestep {__version__} with triton {version('triton')} on {name}"
    return f"kernels of {versions}; {settled_line()}"


def way_of(size: int, depth: int) -> Way:
    """Return the settled way, or else the best one on an H200 (docs/dev/kernels.md)."""
    # Wide tiles feed the matrix units best, but lose more where they end: for long sums only.
    return settled.get((size, depth), "large" if size >= 1024 and depth >= 4096 else "small")


def settled_line() -> str:
    """Describe all settled ways of products, for the plan that ranks compare."""
    return "products " + ", ".join(f"{m}x{k} {way}" for (m, k), way in sorted(settled.items()))


def products_of(rows: int, cols: int) -> tuple[Shape, Shape]:
    """Return the shapes (m, k) of a block's symmetric products: of X X^T, of its Gram matrices."""
    short, long = sorted((padded(rows), padded(cols)))
    return (short, long), (short, short)


def padded(size: int) -> int:
    """Return the next multiple of ALIGNMENT, in elements."""
    return -(-size // ALIGNMENT) * ALIGNMENT
