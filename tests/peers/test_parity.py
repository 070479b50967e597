"""Each class of theirs beside ours: 20 steps, zero and missing gradients, decay on."""

from __future__ import annotations

import pytest
import torch

from tests.peers.checkouts import FOLDER
from tests.peers.classes import ENTRIES, LIMITS, Entry, error

pytestmark = [
    pytest.mark.skipif(
        FOLDER is None, reason="checkouts of peers are needed: make test-peers PEERS=/path"
    ),
    pytest.mark.filterwarnings("ignore"),  # theirs
]
CASES = [(entry, shape) for entry in ENTRIES for shape in entry.shapes]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(("entry", "shape"), CASES, ids=str)
def test_ours_is_theirs(entry: Entry, shape: str, dtype: torch.dtype):
    assert error(entry, shape, dtype) <= entry.limits[dtype]


def test_a_difference_would_be_seen():
    """Another momentum, eps or scale is far above the limits."""
    (dion,) = [entry for entry in ENTRIES if str(entry) == "dion: NorMuon"]
    for other in (
        {"variance_axis": "long"}, {"variance_eps": 1e-6}, {"norm_factor": 1.01},
        {"adjust_lr": "original"}, {"momentum": 0.949}, {"nesterov": True},
    ):  # fmt: skip
        changed = Entry("dion", "changed", dion.theirs, {**dion.ours, **other}, "")
        assert error(changed, "wide", torch.float64) > 100 * LIMITS[torch.float64], other
