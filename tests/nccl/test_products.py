"""Layouts with kernels over NCCL: the same bits, with norms that are replayed as CUDA graphs."""

from functools import partial

import pytest
import torch

from samestep.comm.nccl import sharing_problem
from samestep.launch.forked import NCCL, run_forked
from tests import test_cuda_layouts
from tests.limits import HANG

pytestmark = pytest.mark.gpu
TESTS = (
    test_cuda_layouts.test_layouts_have_the_same_bits,
    test_cuda_layouts.test_layouts_with_products_in_bfloat16,
    test_cuda_layouts.test_layouts_with_factors_per_block,
    test_cuda_layouts.test_copies_of_parts_have_the_same_bits,
)


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.__name__)
def test_over_nccl(test, monkeypatch):
    reason = sharing_problem()
    if torch.cuda.device_count() < 2 and reason is not None:
        pytest.skip(reason)
    limits = {"timeout": HANG, "collective_timeout": 60.0}
    over_nccl = partial(run_forked, backend=NCCL, **limits)
    monkeypatch.setattr(test_cuda_layouts, "run_forked", over_nccl)
    test()
