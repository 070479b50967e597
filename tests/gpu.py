"""For tests that need a GPU. `conftest` sees to it that looking for one does not initialize CUDA.

Tests that fork ranks need a process that has not used CUDA; those that use it in their own are
marked `own_process`.
"""

import warnings
from contextlib import contextmanager

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@contextmanager
def no_host_wait():
    """What runs in here may not wait for the GPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
