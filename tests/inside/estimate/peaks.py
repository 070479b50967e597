"""The peak of tensor bytes, without the list of operations that takes most of its time."""

from contextlib import contextmanager

import torch

from tests import memory


@contextmanager
def peak_bytes():
    """As `tests.memory` has it: what the allocator reports does not depend on what else is told."""
    with memory.peak_bytes() as peak:
        torch.autograd._enable_record_function(False)
        try:
            yield peak
        finally:
            torch.autograd._enable_record_function(True)
