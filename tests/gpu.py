"""For tests that need a GPU: `make test-gpu`.

Most fork ranks, and so must not use CUDA in the process of the test; those that do are marked
`own_process`.
"""

import warnings
from contextlib import contextmanager

import pytest
import torch

needs_gpu = pytest.mark.gpu


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
