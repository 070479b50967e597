"""The table of layouts, without ranks."""

import json
from dataclasses import asdict

from samestep.lab.stress import matrix
from samestep.lab.stress.matrix import Options, Outcome, cases, table
from samestep.mesh import Degrees

ROW = {"ranks": 2, "verdict": "pass", "why": []}


def row(**changes):
    return {**ROW, **asdict(Outcome(trace={"mesh": "data2"}, steps=20)), **changes}


def test_every_axis_and_pair_is_there():
    rows = {case.name: case for case in cases(Options())}
    assert len(rows) == len(list(cases(Options())))
    for case in rows.values():
        degrees = Degrees(case.ranks, **case.mesh)
        assert case.sequences % degrees.batch_ranks == 0
        assert degrees.ep == 1 or case.model.experts
    active = {
        frozenset(axis for axis, size in Degrees(c.ranks, **c.mesh).sizes.items() if size > 1)
        for c in rows.values()
    }
    axes = ("pipe", "replicate", "data", "expert", "model")
    # Copies need something to shard: alone they are no layout of their own.
    alone = {frozenset([axis]) for axis in axes if axis != "replicate"}
    pairs = {frozenset([a, b]) for a in axes for b in axes if a < b and "replicate" not in (a, b)}
    assert alone | pairs <= active
    assert {"LoRA, TP x EP", "lane, 8 ranks", "TP, SP x PP", "HSDP x TP"} <= rows.keys()
    assert rows.keys() >= matrix.LONG


def test_the_table_says_what_failed():
    shown = table(
        {
            "good": row(gradient=2e-8, copies=9),
            "bad": row(verdict="fail", why=["loss 1.0e-03 > 1e-04"], loss=1e-3),
            "dead": {**ROW, "verdict": "fail", "why": ["a rank died"]},
        }
    )
    assert "| good | 2 | data2 | 2.0e-08 | 0.0e+00 | 0.0e+00 | 0.0e+00 | 0 | 9, 20 steps |" in shown
    assert "| bad **loss 1.0e-03 > 1e-04** |" in shown
    assert "| dead | 2 | failed: see the receipt |" in shown


def test_rows_are_added_to_a_receipt(tmp_path, monkeypatch, capsys):
    ran = []

    def run(case, timeout):
        ran.append(case.name)
        return row(verdict="fail" if case.name == "TP" else "pass")

    monkeypatch.setattr(matrix, "_run", run)
    files = {"table": tmp_path / "table.md", "receipt": tmp_path / "receipt.json"}
    assert matrix.run(Options(only="PP", **files)) == 0
    assert matrix.run(Options(only="[TP]P", missing=True, **files)) == 1
    assert ran == ["PP", "TP"]
    content = json.loads(files["receipt"].read_text())
    assert list(content["rows"]) == ["TP", "PP"]  # in the order of the table
    assert content["verdict"] == "fail"
    assert capsys.readouterr().out == "PP: pass\nTP: fail\n"


def test_a_difference_beyond_its_bound_is_a_failure():
    assert Outcome().failures() == []
    assert Outcome(gradient=2e-5).failures() == ["gradient 2.0e-05 > 1e-05"]
    assert Outcome(muon=float("nan")).failures() == ["muon nan > 3e-04"]
    assert Outcome(overflow=3).failures() == ["3 tokens found no room"]
    worse = Outcome(gradient=1.0, gradient_of="a", clipped=2).merged(Outcome(loss=2.0, clipped=1))
    assert (worse.gradient, worse.gradient_of, worse.loss, worse.clipped) == (1.0, "a", 2.0, 1)
