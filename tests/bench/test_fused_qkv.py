"""Trainings with fused queries, keys and values: every arm trains, and what breaks is told."""

import torch

from benchmarks import fused_qkv
from benchmarks.fused_qkv import Options, measure, table
from samestep.train.corpus import Corpus

TINY = Options(rates=(0.02,), seeds=2, steps=3, width=16, layers=1, context=8, batch=2)


def text():
    data = torch.arange(4000, dtype=torch.int64).sin().mul(99).add(100).to(torch.uint8)
    return Corpus(data[:3000], data[3000:], ("a",), ("b",))


def test_all_arms_of_a_seed_start_alike():
    found = measure(TINY, text(), lambda line: None)
    arms = {row["arm"]: [run["loss"] for run in row["runs"]] for row in found["rows"]}
    assert len(arms) == 3
    assert all(len(losses) == 2 and None not in losses for losses in arms.values())
    assert len({tuple(losses) for losses in arms.values()}) == len(arms)  # each does something
    for seed in (0, 1):  # and three small steps lead to about the same
        losses = [each[seed] for each in arms.values()]
        assert max(losses) - min(losses) < 0.1
    assert len(table(found)) == 2 + len(arms)


def test_a_training_that_breaks_is_told(monkeypatch):
    monkeypatch.setattr(fused_qkv, "TOO_LARGE", 0.0)
    found = measure(TINY, text(), lambda line: None)
    assert {run["not_finite_at"] for row in found["rows"] for run in row["runs"]} == {0}
    assert table(found)[-1].endswith("| - | - | 2 of 2 (step 0, 0) |")
