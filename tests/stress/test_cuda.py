"""Scenarios on ranks that share a GPU, over gloo."""

from __future__ import annotations

import os

import pytest
import torch

from samestep.stress.campaign import Campaign, Case
from samestep.stress.ranks import ForkedRanks

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # or forked ranks cannot use CUDA
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("scenario", ["dist_adamw_muon_random", "megatron_conditional", "clipped"])
def test_layouts_are_the_same_to_the_bit(scenario):
    layouts = ["one_process", "none", "zero2_overlap", "flat_gather_overlap", "fsdp2_parallel"]
    results = []
    campaign = Campaign(ForkedRanks(2, 60.0, "cuda"))
    campaign.run_all([Case(scenario, layout, 2, 20, 5) for layout in layouts], results.append)
    found = {result.case.layout: (result.status, result.findings) for result in results}
    assert {status for status, _ in found.values()} == {"exact"}, found
