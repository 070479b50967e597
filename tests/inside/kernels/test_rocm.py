"""Without a device: what is of NVIDIA alone is off where torch is built for ROCm."""

import pytest
import torch

from samestep.doctor import checks
from samestep.kernels import choice
from samestep.parallel import grouped

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _rocm(monkeypatch):
    """A torch for ROCm: devices are called cuda, and have capabilities of their own numbers."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4))
    caches = choice.missing, choice.missing_products
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_no_kernel_runs_and_the_plan_says_why():
    reason = "kernels were not tried on ROCm"
    assert choice.missing(DEVICE) == choice.missing_products(DEVICE) == reason
    assert choice.describe_kernels(DEVICE) == f"without kernels: {reason}"


class OnGpu:
    """What grouped products ask of a batch before they take it."""

    is_cuda, dtype, device = True, torch.bfloat16, DEVICE


def test_products_of_experts_are_a_loop(monkeypatch):
    stack = torch.empty(2, 16, 16, dtype=torch.bfloat16)
    assert not grouped._pays(OnGpu(), stack)
    monkeypatch.setattr(torch.version, "hip", None)
    assert grouped._pays(OnGpu(), stack) == (grouped.grouped_mm is not None)


def test_the_doctor_names_the_platform():
    told = {check.name: check.value for check in checks.versions()}
    assert told["torch"].endswith("built for ROCm 6.4.43482")
