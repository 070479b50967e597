"""Scenarios side by side give what they give one after the other, and end as they should."""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from samestep import cli
from samestep.lab.stress import options
from samestep.lab.stress.campaign import Campaign, CaseResult, LaneDiedError, Lanes
from samestep.lab.stress.rank import Case
from tests.limits import eventually
from tests.stress.forked_command import running

SCENARIOS = ["dist_adamw_muon", "clipped", "schedules"]


def cases(steps=4):
    return [[Case(name, "none", 2, steps, 2)] for name in SCENARIOS]


class Instant(Campaign):
    """Results without ranks, each by the process that says so."""

    def __init__(self):
        super().__init__(ranks=None)

    def run_all(self, cases, on_result, progress=None, patch=None):
        for case in cases:
            progress(case, 1, 0.0)
            on_result(CaseResult(case, "exact", [], [], presence={"p": [os.getpid()]}))


def test_every_case_has_its_result_and_its_steps():
    results, steps = [], []
    lanes = Lanes(2, Instant)
    lanes.run(cases(), results.append, lambda *step: steps.append(step))
    assert sorted(r.case.scenario for r in results) == sorted(SCENARIOS)
    assert sorted(case.scenario for case, _, _ in steps) == sorted(SCENARIOS)
    assert os.getpid() not in {result.presence["p"][0] for result in results}


@pytest.mark.parametrize("end", [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: 1 / 0])
def test_a_lane_that_dies_or_fails_is_told(end):
    class Ends(Instant):
        def run_all(self, *arguments, **options):
            end()

    with pytest.raises(LaneDiedError, match=r"a process of --lanes (died|failed)"):
        Lanes(2, Ends).run(cases(), lambda result: None, lambda *step: None)


def test_receipts_are_those_of_one_lane(tmp_path, no_torchrun, monkeypatch):
    few = {name: options.SCENARIOS[name] for name in SCENARIOS}
    monkeypatch.setattr(options, "SCENARIOS", few)
    receipts = []
    for lanes in ("1", "2"):
        out = tmp_path / lanes
        arguments = ["--layout", "zero2", "--steps", "3", "--sample-every", "3", "--lanes", lanes]
        assert cli.main(["stress", *arguments, "--out", str(out)]) == 0
        receipts.append(json.loads((out / "receipt.json").read_text()))
    one, two = receipts
    assert one["scenarios"] == two["scenarios"]
    for a, b in zip(one["cases"], two["cases"], strict=True):
        for key in ("scenario", "status", "samples", "fingerprint", "bytes_per_step"):
            assert a[key] == b[key]


def test_a_signal_ends_all_lanes_and_writes_what_there_is(tmp_path):
    arguments = ["stress", "--layout", "zero2", "--lanes", "2", "--steps", "300"]
    with running([*arguments, "--out", str(tmp_path / "out")], tmp_path) as process:
        # Each rank makes this file once it can be ended as a rank.
        eventually(lambda: len(list(process.temporary.glob("ranks_*/stack_*"))) == 4)
        everyone = descendants(process.pid)
        assert len(everyone) == 6  # two lanes with two ranks each
        process.send_signal(signal.SIGINT)
        returned, shown, errors = process.ended()
    assert (returned, errors) == (130, "")
    assert "Stopped before the end" in shown
    content = json.loads((tmp_path / "out" / "receipt.json").read_text())
    assert content["verdict"] == "interrupted"
    assert [case["status"] for case in content["cases"]].count("interrupted") == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in everyone)


def descendants(pid):
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            for one in map(int, children.read_text().split()):
                found += [one, *descendants(one)]
    return found
