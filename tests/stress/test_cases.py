"""Every scenario on real ranks, at worlds 2, 3 and 4, in layouts that take turns; also hangs."""

import itertools
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest

from samestep.lab.stress import ranks
from samestep.lab.stress.campaign import Campaign
from samestep.lab.stress.layouts import LAYOUTS, Layout, register
from samestep.lab.stress.rank import Case
from samestep.lab.stress.ranks import ForkedRanks
from samestep.lab.stress.scenarios import SCENARIOS
from samestep.optimizer.rule_optimizer import RuleOptimizer
from tests.limits import HANG, TEST, limit
from tests.soak import SOAK, twin

# So that everything happens that a scenario has in store, which in most is soon.
LATE = {"resume": 12, "resume_midrun": 16, "frozen_and_added": 16}
LATE |= {"not_finite": 16, "overflow_scaler": 16}
STEPS = {name: 22 if SOAK else LATE.get(name, 6) for name in SCENARIOS}
# Where parameters lie elsewhere: patterns of presence have come once, and one bad gradient.
FEWER = dict.fromkeys(SCENARIOS, 22 if SOAK else 4)
if not SOAK:
    FEWER |= {"resume": 12, "frozen_and_added": 16, "overflow_scaler": 8}
PLAIN = [name for name, layout in LAYOUTS.items() if layout.parameters == "plain"][1:]
PAIRS = list(itertools.pairwise([*PLAIN, "none"]))


def run(scenario, layouts, world, steps=12, reduction="ordered", watchdog=HANG, **options):
    campaign = Campaign(ForkedRanks(world, watchdog))
    cases = [Case(scenario, name, world, steps, (steps + 1) // 2, reduction) for name in layouts]
    results = []
    campaign.run_all(cases, results.append, **options)
    return results


# Here each on one number of ranks; the harness itself has them on any.
CASES = [(name, world) for name in SCENARIOS for world in (2, 3, 4)]
ONCE = [(name, 2 + place % 2) for place, name in enumerate(SCENARIOS)]
ONCE[-1] = ONCE[-1][0], 4
# Which test_copies has on four ranks.
THERE = {"frozen_and_added", "megatron_conditional_live", "resume", "uneven_accumulation_sharded"}
ONCE = [(name, world) for name, world in ONCE if name not in THERE]


@pytest.mark.parametrize(("scenario", "world"), CASES if SOAK else ONCE)
def test_every_scenario_is_exact(scenario, world):
    """Replicas, layouts and one process to the bit, the reference within its limits."""
    pair = PAIRS[(list(SCENARIOS).index(scenario) + world // 2) % len(PAIRS)]
    for result in run(
        scenario, ["one_process", *pair[: 4 // world if SOAK else 1]], world, STEPS[scenario]
    ):
        assert (result.status, result.findings) == ("exact", []), result.case
        assert [sample.step for sample in result.samples] == [STEPS[scenario] // 2, STEPS[scenario]]
        for sample in result.samples:
            assert sample.reference is not None
            assert 0 < sample.reference.params < 2e-5  # another arithmetic, so never zero
            assert sample.replicas.largest == 0.0
            first = result.case.layout == "one_process"
            assert (sample.layouts is None) == first
            assert first or sample.layouts.largest == 0.0
            assert first or sample.collectives > 0
        assert {ending.step for ending in result.endings.values()} == {STEPS[scenario]}


@twin
def test_fast_sums_are_flagged_where_they_are_not_zero():
    results = run("dist_adamw_muon_random", ["one_process", "zero2_overlap"], 3, reduction="fast")
    assert [result.status for result in results] == ["exact", "within_tolerance"]
    assert results[1].findings == []
    assert 0 < results[1].samples[-1].layouts.largest < 2e-5
    assert results[1].samples[-1].replicas.largest == 0.0


def test_collectives_and_plans_are_told():
    (result,) = run("megatron_conditional", ["zero2_overlap"], 2, steps=4)
    endings = result.endings
    assert endings[0].fingerprint == endings[1].fingerprint != ""
    assert endings[0].schedule[0] == "Reduce 0.0"
    assert "Agree 0" in endings[0].schedule
    calls = sum(total["calls"] for total in endings[0].totals.values())
    assert calls == endings[0].flights["count"] == result.samples[-1].collectives
    assert all(total["sent"] > 0 for total in endings[0].totals.values())


def test_layouts_register_themselves():
    layout = Layout("mine", "a test", {"sharding": "zero1"})
    with mock.patch.dict(LAYOUTS):
        register(layout)
        with pytest.raises(ValueError, match="there is a layout 'mine' already"):
            register(layout)
        (result,) = run("clipped", ["mine"], 2, steps=3)
        assert result.status == "exact"


def patched(name, replacement):
    """A patch of RuleOptimizer for `Campaign.run`."""
    original = getattr(RuleOptimizer, name)

    @contextmanager
    def patch():
        def patched_method(self, *args, **kwargs):
            return replacement(lambda: original(self, *args, **kwargs), self)

        with mock.patch.object(RuleOptimizer, name, patched_method):
            yield

    return patch


def at_step(number, rank, act):
    """Do something on one rank before one step."""
    count = itertools.count()

    def replacement(original, optimizer):
        if next(count) == number and optimizer.ranks.rank == rank:
            act(optimizer)
        return original()

    return patched("_run_step", replacement)


def test_a_hang_is_a_result_that_names_the_collectives():
    """Rank 1 does not come to the step; then the next case runs."""
    case = Case("dist_adamw_muon", "zero2", 2, 6, 2)
    ranks = ForkedRanks(2, watchdog=limit(2.0))
    campaign = Campaign(ranks)
    hung = campaign.run(case, patch=at_step(3, 1, lambda _: time.sleep(2 * TEST)))
    assert [finding.check for finding in hung.findings] == ["hang"]
    assert "presence failed: rank 1 did not answer" in hung.findings[0].message
    assert hung.findings[0].step == 3
    assert [sample.step for sample in hung.samples] == [2]
    assert hung.positions[0] == "presence"
    assert hung.positions[1].startswith("gather of bucket")  # where it was seen last
    assert hung.endings[0].flights["in_flight"][-1]["name"] == "presence"
    with pytest.raises(ChildProcessError):  # no process is left behind
        os.waitpid(-1, os.WNOHANG)
    ranks.watchdog = HANG
    assert campaign.run(case).status == "exact"


def test_a_case_that_fails_ends_itself_and_no_other():
    """Ranks go on from case to case; where one fails, the rest gets new ones."""
    layouts = ["one_process", "none", "zero1", "zero2", "zero1_overlap"]
    cases = [Case("dist_adamw_muon", name, 2, 4, 2) for name in layouts]

    def fail_in_zero1(original, optimizer):
        how = optimizer.plan.distribution
        if how.sharding == "zero1" and not how.overlap_grad_reduce and optimizer.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return original()

    results = []
    patch = patched("_run_step", fail_in_zero1)
    Campaign(ForkedRanks(2, HANG)).run_all(cases, results.append, patch=patch)
    assert [result.case.layout for result in results] == layouts
    assert [result.status for result in results] == ["exact", "exact", "failed", "exact", "exact"]
    assert results[2].findings[0].message.startswith("rank 1: died of SIGKILL")
    assert [sample.step for sample in results[3].samples] == [2, 4]
    assert results[3].samples[0].layouts.largest == 0.0  # against one_process, from before


@twin
def test_ranks_are_forked_once_for_cases_that_pass(monkeypatch):
    forked = []

    def run_forked(world, *args, **options):
        forked.append(world)
        return launch(world, *args, **options)

    launch = ranks.run_forked
    monkeypatch.setattr(ranks, "run_forked", run_forked)
    run("dist_adamw_muon", ["one_process", "none", "zero1", "zero2"], 2, steps=3)
    assert forked == [1, 2]


def test_what_was_found_before_ctrl_c_is_kept():
    class Interrupted:
        def aside(self, compute):
            return compute(None)

        def run(self, works, on_sample, on_end):
            first = campaign._expected.samples[2]
            moved = {name: value + 1 for name, value in first.params.items()}
            on_sample([first, replace(first, params=moved)])
            raise KeyboardInterrupt

    campaign, results = Campaign(Interrupted()), []
    with pytest.raises(KeyboardInterrupt):
        campaign.run_all([Case("clipped", "zero2", 2, 4, 2)], results.append)
    (found,) = results
    assert (found.status, found.ended) == ("failed", False)
    assert [finding.check for finding in found.findings] == ["replicas"]
    assert [sample.step for sample in found.samples] == [2]


def test_a_killed_rank_is_a_result():
    def die(_):
        os.kill(os.getpid(), signal.SIGKILL)

    (result,) = run("dist_adamw_muon", ["zero2"], 3, patch=at_step(2, 1, die))
    assert result.status == "failed"
    assert result.findings[0].check == "error"
    assert "rank 1: died of SIGKILL" in result.findings[0].message
    assert set(result.endings) == {0, 1, 2}


def test_an_error_of_one_rank_is_told_before_the_hang_of_the_others():
    def fail(_):
        raise ZeroDivisionError("of rank 2")

    # The others end when it has ended, and not by their watchdog.
    (result,) = run("dist_adamw_muon", ["zero2"], 3, patch=at_step(2, 2, fail), watchdog=2 * TEST)
    assert result.findings[0].check == "error"
    assert result.findings[0].message.startswith("rank 2: ZeroDivisionError: of rank 2")
