"""Scenarios on ranks that share a GPU, over gloo."""

from __future__ import annotations

import pytest

from samestep.lab.stress.campaign import Campaign
from samestep.lab.stress.rank import Case
from samestep.lab.stress.ranks import ForkedRanks
from tests.gpu import needs_gpu
from tests.limits import HANG

pytestmark = needs_gpu


@pytest.mark.parametrize("scenario", ["dist_adamw_muon_random", "megatron_conditional", "clipped"])
def test_layouts_are_the_same_to_the_bit(scenario):
    layouts = ["one_process", "none", "zero2_overlap", "flat_gather_overlap", "fsdp2_parallel"]
    results = []
    campaign = Campaign(ForkedRanks(2, HANG, "cuda"))
    campaign.run_all([Case(scenario, layout, 2, 20, 5) for layout in layouts], results.append)
    found = {result.case.layout: (result.status, result.findings) for result in results}
    assert {status for status, _ in found.values()} == {"exact"}, found
