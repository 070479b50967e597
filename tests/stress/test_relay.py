"""Runs that are saved, ended, and go on: the harness would notice if they did not."""

from contextlib import contextmanager
from unittest import mock

import pytest

import samestep
from samestep.lab.stress.campaign import Campaign
from samestep.lab.stress.layouts import LAYOUTS
from samestep.lab.stress.rank import Case, Relay, Work
from samestep.lab.stress.ranks import ForkedRanks
from samestep.lab.stress.scenarios import SCENARIOS
from tests.limits import HANG

load = samestep.load


def only_the_model(path, model, optimizer):
    return load(path, model)


@contextmanager
def with_load(replacement):
    with mock.patch.object(samestep, "load", replacement):
        yield


@pytest.mark.parametrize(
    ("layout", "replacement", "checks"),
    [
        ("zero1", lambda *_: None, ["reference", "state", "layouts"]),
        ("fsdp2_parallel", only_the_model, ["state", "layouts"]),
    ],
)
def test_what_is_not_loaded_is_noticed(tmp_path, monkeypatch, layout, replacement, checks):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    campaign = Campaign(ForkedRanks(2, watchdog=HANG))
    cases = [Case("resume_midrun", name, 2, 10, 10) for name in ("one_process", layout)]
    results = []
    campaign.run_all(cases, results.append, patch=lambda: with_load(replacement))
    assert results[0].status == "exact"  # the run that is not interrupted
    assert set(checks) <= {finding.check for finding in results[1].findings}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_layout_has_another_to_go_on_in(world):
    scenario = SCENARIOS["resume_midrun"](0, world)
    there = {}
    for layout in LAYOUTS.values():
        if not layout.one_process and layout.reason_against(type(scenario), world) is None:
            work = Work(Case("resume_midrun", layout.name, world, 1, 1), scenario)
            there[layout.name] = Relay(work, 0)._another_layout()
    assert all(name != other.name for name, other in there.items())
    assert {other.parameters for other in there.values()} >= {"plain", "fsdp2", "tp_fsdp2"}
    assert there["zero2"].parameters != "plain"


@pytest.mark.parametrize(("steps", "begun"), [(1, 0), (3, 2), (20, 5)])
def test_one_process_begins_before_the_first_sample(tmp_path, steps, begun):
    seen = []

    class Ranks:
        def aside(self, compute):
            return compute(None)

        def run(self, works, on_sample, on_end):
            (work,) = works
            seen.append((work.begun, (work.folder / "begun" / "index.json").exists()))

    Campaign(Ranks()).run_all([Case("resume_midrun", "zero2", 2, steps, steps)], seen.append)
    assert seen == [(begun, begun > 0)]
