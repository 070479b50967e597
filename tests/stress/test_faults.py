"""`samestep stress --faults` on gloo: what torch's own collectives leave unsaid is said."""

import json
import multiprocessing
import os
import tempfile
from multiprocessing import forkserver
from typing import ClassVar

import pytest

from samestep import cli
from samestep.lab.stress import faults
from samestep.lab.stress.faults import (
    FAULTS,
    LAYOUTS,
    Asked,
    FaultResult,
    Report,
    cases,
    run_faults,
)
from tests.limits import limit
from tests.ranks import run_forked

# What every rank would import for itself.
MODULES = ["samestep.lab.stress.faults", "torch._dynamo", "pytest"]


def kill_and_raise(rank: int, folder: str) -> list[FaultResult]:
    """In a process of its own, which takes along what multiprocessing keeps for further ranks."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    multiprocessing.get_context("forkserver").set_forkserver_preload(MODULES)
    forkserver.ensure_running()
    found: list[FaultResult] = []
    run_faults(cases(("kill", "in_backward"), ("fsdp2",), 2, "gloo", limit(5.0)), 2, found.append)
    return found


def test_ranks_in_collectives_of_torch_name_who_is_gone(tmp_path) -> None:
    """FSDP2's all-gather and reduce-scatter fail with the backend's text alone."""
    (found,) = run_forked(1, kill_and_raise, str(tmp_path))
    results = {result.fault: result for result in found}
    assert results.keys() == {"kill", "in_backward"}
    for result in results.values():
        (report,) = result.reports
        assert report.status == 1, report.message
        assert report.named, report.message
        assert "rank 0 ends, in " in report.message
    raised = results["in_backward"].reports[0].message
    assert "rank 1 has ended by RuntimeError: a fault inside backward" in raised


def test_every_fault_is_tried_in_every_layout() -> None:
    found = cases(tuple(FAULTS), tuple(LAYOUTS), 2, "gloo", 5.0)
    assert len(found) == len(FAULTS) * len(LAYOUTS)
    assert {each.world for each in found if each.layout == "tp_fsdp2"} == {4}


class Started:
    """A case in place of its processes; those of `slow` end before the fault, so often."""

    slow: ClassVar[dict[str, int]] = {}
    started: ClassVar[list[str]] = []

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.started.append(asked.fault)
        self.reached_fault = self.started.count(asked.fault) > self.slow.get(asked.fault, 0)

    def look(self) -> bool:
        return True

    def result(self) -> FaultResult:
        return FaultResult(*self.asked, passed=self.reached_fault)


def test_case_that_does_not_come_to_its_fault_is_run_once_more(monkeypatch) -> None:
    monkeypatch.setattr(faults, "Running", Started)
    monkeypatch.setattr(faults, "POLL_S", 0.0)
    monkeypatch.setattr(Started, "slow", {"kill": 1, "stop": 9})
    monkeypatch.setattr(Started, "started", [])
    found: list[FaultResult] = []
    run_faults(cases(("kill", "stop", "skip"), ("zero2",), 2, "gloo", 5.0), 1, found.append)
    assert Started.started == ["kill", "stop", "skip", "kill", "stop"]
    assert [(each.fault, each.passed) for each in found] == [
        ("skip", True),
        ("kill", True),
        ("stop", False),
    ]


@pytest.mark.parametrize(
    "report",
    [
        Report(0, 0, 1.0, True, ""),
        Report(0, None, None, True, ""),
        Report(0, 1, 16.0, True, ""),
        Report(0, 1, 1.0, False, ""),
    ],
    ids=["status 0", "never ended", "too late", "nobody named"],
)
def test_reports_that_do_not_pass(report: Report) -> None:
    assert Report(0, 1, 1.0, True, "").good(15.0)
    assert not report.good(15.0)


def test_rank_that_has_to_tell() -> None:
    kill, extra = Asked("kill", "zero2", 3, "gloo", 5.0), Asked("extra", "zero2", 3, "gloo", 5.0)
    assert (kill.to_tell, kill.to_name) == ([0, 1], 2)
    assert (extra.to_tell, extra.to_name) == ([2], 0)


def test_command_refuses_what_has_no_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stress", "--faults", "--layout", "hsdp"]) == 2
    told = capsys.readouterr().err
    assert "--layout 'hsdp' is unknown; choose from all, zero2, flat_overlap" in told
    assert cli.main(["stress", "--faults", "--mutants"]) == 2
    assert "--faults cannot be combined with" in capsys.readouterr().err


def test_receipt_has_every_message(tmp_path, monkeypatch, capsys) -> None:
    def one(asked, lanes, on_result):
        report = Report(0, 1, 1.5, True, "rank 1 did not answer: its process has ended")
        for each in asked:
            on_result(FaultResult(each.fault, each.layout, 2, "gloo", 10.0, True, [report]))

    monkeypatch.setattr("samestep.lab.stress.command.run_faults", one)
    assert cli.main(["stress", "--faults", "--layout", "zero2", "--out", str(tmp_path)]) == 0
    receipt = json.loads((tmp_path / "faults.json").read_bytes())
    assert receipt["verdict"] == "clean"
    assert [case["fault"] for case in receipt["cases"]] == list(FAULTS)
    assert receipt["cases"][0]["reports"][0]["seconds"] == 1.5
    assert "All 12 faults were named by every other rank" in capsys.readouterr().out
