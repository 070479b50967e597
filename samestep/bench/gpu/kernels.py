"""Our kernels switched off for a while, to measure their twins in plain torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from samestep.kernels import choice


@contextmanager
def kernels(on: bool, device: torch.device) -> Iterator[None]:
    """Inside, kernels run as shipped, or not at all."""
    if on:
        yield
        return
    before = os.environ.get(choice.SWITCH)
    os.environ[choice.SWITCH] = "0"
    _decide_again(device)
    try:
        yield
    finally:
        if before is None:
            del os.environ[choice.SWITCH]
        else:
            os.environ[choice.SWITCH] = before
        _decide_again(device)


def _decide_again(device: torch.device) -> None:
    """Forget what was decided, and decide now: not while somebody measures."""
    choice.missing.cache_clear()
    choice.missing_products.cache_clear()
    choice.missing_products(device)
