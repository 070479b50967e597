"""One thread per process: the tensors here are small, and ranks share the cores."""

import os
import signal

os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")  # or each process leaves a file behind
# Where there is a GPU, any backward pass starts threads for it, and ranks that are forked later
# cannot have one. So it is hidden but for `make test-gpu`, which looks for it without CUDA.
if os.environ.get("SAMESTEP_GPU"):
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
else:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch
from hypothesis import settings

from samestep.comm.groups import registry
from tests.own_process import reports_of_child

torch.set_num_threads(1)
# A job in the background ignores Ctrl-C, and so would all that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Time per example depends on the machine's load; `make soak` looks at many more examples.
settings.register_profile("test", deadline=None, max_examples=30, derandomize=True)
settings.register_profile("soak", deadline=None, max_examples=1000)
settings.load_profile("soak" if os.environ.get("SAMESTEP_SOAK") else "test")


def pytest_runtest_setup(item):
    """Say how tests that need a GPU are run."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a GPU, and is run by `make test-gpu`")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    """Run a test that is marked `own_process` in a child: what it does to CUDA ends with it."""
    if item.get_closest_marker("own_process") is None or not torch.cuda.is_available():
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports_of_child(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


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
