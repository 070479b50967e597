"""`samestep inspect`."""

from __future__ import annotations

import json

import pytest

import samestep
from samestep import cli
from tests.checkpoint.training import Case, build

pytestmark = pytest.mark.usefixtures("no_torchrun")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    model, opt = build(Case("one", 1, "bf16"))
    samestep.save(folder / "a", model, opt, extra={"step": 7, "note": "[bold]"})
    return folder


def test_table(saved, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["inspect", str(saved), "--verify"]) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "head.weight" in line)
    for word in ("adamw", "13 x 5", "bfloat16", "exp_avg", "exp_avg_sq", "master_weight"):
        assert word in line
    assert 'extra: {"step": 7, "note": "[bold]"}' in out
    assert "every checksum is right" in out
    assert "saved by 1 ranks" in out


def test_json(saved, capsys):
    assert cli.main(["inspect", str(saved / "a"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["extra"]["step"] == 7
    assert facts["world_size"] == 1
    assert facts["verified"] is False
    head = facts["parameters"]["head.weight"]
    assert head["rule"] == "adamw"
    assert head["shape"] == [13, 5]
    assert head["dtype"] == "bfloat16"
    assert head["state"]["exp_avg"] == {"dtype": "float32", "shape": [13, 5]}
    assert facts["parameters"]["experts"]["rule"] == "muon"
    assert facts["parameters"]["seen"]["rule"] is None
    sizes = sum(entry["bytes"] for entry in facts["parameters"].values())
    assert sizes <= facts["bytes"]


def test_errors(saved, tmp_path, capsys):
    assert cli.main(["inspect", str(tmp_path / "no")]) == 2
    assert "does not exist" in capsys.readouterr().err
    model, opt = build(Case("one", 1))
    samestep.save(tmp_path / "a", model, opt)
    with (tmp_path / "a" / "rank_0.bin").open("r+b") as file:
        file.write(b"\xff")
    assert cli.main(["inspect", str(tmp_path)]) == 0
    capsys.readouterr()
    assert cli.main(["inspect", str(tmp_path), "--verify"]) == 2
    assert "rank_0.bin is damaged" in capsys.readouterr().err
