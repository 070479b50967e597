"""What this device reaches: a large matrix product, a large copy."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from samestep.bench.gpu.timing import take_turn, times_of

TURNS = 10
HOT = 2.0  # seconds of products without a pause


class Ceilings(NamedTuple):
    """Rates that nothing on this device is expected to exceed."""

    flops: float  # per second, of a 16-bit product (32-bit on a CPU) of random values
    bytes: float  # per second, read and written by a copy
    hot_flops: float  # of the product when the chip draws all the power it may, and slows down


def measure_ceilings(device: torch.device) -> Ceilings:
    """A product of 8192^3 and a copy of 4 GiB; small ones on a CPU."""
    on_gpu = device.type == "cuda"
    size, elements = (8192, 1 << 30) if on_gpu else (256, 1 << 20)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=product)

    product_ms = _median(multiply, device)
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    copy_ms = _median(lambda: target.copy_(source), device)
    hot_ms = product_ms
    if on_gpu:
        take_turn(multiply, device, calls=round(HOT / (product_ms * 1e-3)))
        hot_ms = take_turn(multiply, device, calls=round(0.2 / (product_ms * 1e-3))).ms
    flops = 2 * size**3
    return Ceilings(
        flops=flops / (product_ms * 1e-3),
        bytes=8 * elements / (copy_ms * 1e-3),
        hot_flops=flops / (hot_ms * 1e-3),
    )


def _median(call: Callable[[], object], device: torch.device) -> float:
    turns = [take_turn(call, device).ms for _ in range(3 + TURNS)]
    return times_of(turns[3:]).median
