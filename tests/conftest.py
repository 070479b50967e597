"""One thread per process: the tensors here are small, and ranks share the cores."""

import os
import signal

os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")  # or each process leaves a file behind

import pytest
import torch
from hypothesis import settings

from samestep.comm.groups import registry

torch.set_num_threads(1)
# A job in the background ignores Ctrl-C, and so would all that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Time per example depends on the machine's load; `make soak` looks at many more examples.
settings.register_profile("test", deadline=None, max_examples=30, derandomize=True)
settings.register_profile("soak", deadline=None, max_examples=1000)
settings.load_profile("soak" if os.environ.get("SAMESTEP_SOAK") else "test")


@pytest.fixture(scope="module")
def no_torchrun():
    """Commands start ranks of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def no_group_outlives_its_test():
    """Ranks are forked from here, and a child cannot end a gloo group of its parent."""
    yield
    registry.forget()
