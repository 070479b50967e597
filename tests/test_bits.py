"""The floor for bits sees any change of a parameter or of state, and any case that is gone."""

import json
from pathlib import Path

import pytest
import torch

from samestep.lab.stress.judge import fingerprint
from samestep.lab.stress.rank import Sample
from tests.bits import compare, differences


def sample(value: torch.Tensor, key: str = "momentum") -> Sample:
    """Parameters and state of one matrix after a step."""
    return Sample(1, {"w": torch.ones(2, 2)}, {"w": {key: value}})


def test_equal_bits_give_one_digest_and_ranks_that_differ_two() -> None:
    one, same, other = sample(torch.zeros(2)), sample(torch.zeros(2)), sample(torch.ones(2))
    assert fingerprint([one, same]) == fingerprint([one])
    assert len(fingerprint([one, same]).split()) == 1
    assert len(fingerprint([one, other]).split()) == 2


@pytest.mark.parametrize(
    "changed",
    [
        sample(torch.tensor([0.0, -0.0])),
        sample(torch.zeros(2, dtype=torch.float64)),
        sample(torch.zeros(2, 1)),
        sample(torch.zeros(2), key="exp_avg"),
        sample(torch.tensor([0.0, 2.0**-149])),
    ],
    ids=["sign of zero", "dtype", "shape", "key", "last bit"],
)
def test_digest_changes(changed: Sample) -> None:
    assert fingerprint([changed]) != fingerprint([sample(torch.zeros(2))])


def test_first_step_that_differs_is_named() -> None:
    before = {"a": {25: "x", 50: "y"}, "b": {25: "x"}, "gone": {25: "x"}}
    after = {"a": {25: "x", 50: "z"}, "b": {25: "x"}, "empty": {}}
    assert list(differences(before, after)) == [
        "a: differs at step 50",
        "empty: only after",
        "gone: only before",
    ]


def test_folders_without_receipts_are_not_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing compared is no success, and a case that was not sampled is none either."""
    assert compare(tmp_path / "a", tmp_path / "b") == 1
    for name in ("a", "b"):
        case = {"scenario": "s", "layout": "l", "status": "exact", "samples": []}
        (tmp_path / name / "ranks_2").mkdir(parents=True)
        (tmp_path / name / "ranks_2" / "receipt.json").write_text(json.dumps({"cases": [case]}))
    assert compare(tmp_path / "a", tmp_path / "b") == 1
    assert "ranks_2 · s · l: has no samples" in capsys.readouterr().out
