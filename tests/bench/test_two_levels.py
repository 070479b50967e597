"""The benchmark of two levels between hosts: what it makes of what ranks tell."""

import json

import pytest

from benchmarks import two_levels
from benchmarks.namespaces import refused
from benchmarks.plan_time import MODELS
from benchmarks.two_levels import Options, main, on_rank, problems_of
from tests.ranks import run_forked
from tests.soak import SOAK


@pytest.mark.skipif(not SOAK, reason="takes minutes: make soak runs it")
def test_cards_count_what_crosses(tmp_path):
    reason = refused()
    if reason is not None:
        pytest.skip(f"there can be no hosts of our own here: {reason}")
    assert main(Options(ranks_per_host=2, steps=1, pace=2e7, out=tmp_path)) == 0
    rows = json.loads((tmp_path / "receipt.json").read_text())["rows"]
    for one, two in zip(rows[::2], rows[1::2], strict=True):
        assert one["over_least"] == pytest.approx(2, rel=0.05)  # as many as ranks of a host
        assert 1 <= two["over_least"] <= 1.05


def test_levels_and_ranks_have_the_same_bits(monkeypatch):
    monkeypatch.setattr(two_levels, "MODEL", MODELS["small"])
    told = run_forked(4, lambda rank: on_rank(2, 1, shaped=False))
    assert problems_of(told) == []
    told[1][0]["checksum"] = told[1][0]["checksum"][::-1]
    told[0][-1]["checksum"] = []
    assert problems_of(told) == [
        "zero2, levels 1: ranks differ",
        "flat zero1, ordered, levels 2: ranks differ",
        "ordered sums have other bits in another layout, or in two levels",
    ]
