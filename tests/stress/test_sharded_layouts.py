"""DTensor layouts: the bits of one process, and what does not apply to them."""

import io
import json

import pytest
from rich.console import Console

from samestep.lab.stress.campaign import Campaign
from samestep.lab.stress.command import closing_sentence, left_out, results_table
from samestep.lab.stress.layouts import LAYOUTS
from samestep.lab.stress.rank import Case
from samestep.lab.stress.ranks import ForkedRanks
from samestep.lab.stress.receipt import case_entry
from samestep.lab.stress.scenarios import SCENARIOS
from tests.limits import HANG
from tests.soak import SOAK, some, twin
from tests.stress.test_cases import FEWER, run

SHARDED = [name for name, layout in LAYOUTS.items() if layout.parameters != "plain"]
# Real forward passes with layers apart; presence; groups; saving; sums of micro-batches; a scaler.
TELLING = (
    "megatron_conditional_live",
    "conditional_compute",
    "frozen_and_added",
    "resume",
    "uneven_accumulation_sharded",
    "overflow_scaler",
)


def test_there_are_five():
    assert SHARDED == ["fsdp2_gather", "fsdp2_parallel", "hsdp", "tp_fsdp2", "ep_fsdp2"]


def chosen(layout):
    """Scenarios that take turns: each in a layout at least."""
    place = SHARDED.index(layout)
    return TELLING[place % 3 :: 3] if SOAK else TELLING[place::5]


def test_every_scenario_has_a_layout():
    assert {scenario for layout in SHARDED for scenario in chosen(layout)} == set(TELLING)


@pytest.mark.parametrize("layout", SHARDED)
def test_every_sharded_layout_is_exact(layout):
    world = 4 if layout == "hsdp" else 2
    for scenario in chosen(layout):
        for result in run(scenario, ["one_process", layout], world, FEWER[scenario]):
            assert (result.status, result.findings) == ("exact", []), result.case
            assert [sample.step for sample in result.samples] == [
                FEWER[scenario] // 2,
                FEWER[scenario],
            ]


@pytest.mark.parametrize(
    ("world", "scenario"), some([(3, "uneven_accumulation_sharded"), (4, "normuon_cautious")])
)
def test_uneven_and_strided_shards(world, scenario):
    layouts = [name for name in SHARDED if world % 2 == 0 or name != "hsdp"]
    for result in run(scenario, ["one_process", *layouts], world, steps=8 if SOAK else 4):
        assert (result.status, result.findings) == ("exact", []), result.case


@twin
def test_sums_that_are_not_divided_work_on_gloo_with_fast_reduction():
    layouts = ["fsdp2_gather", "fsdp2_parallel"]
    results = run("uneven_accumulation_sharded", layouts, 2, steps=4, reduction="fast")
    assert [result.status for result in results] == ["exact", "exact"]


@twin
def test_sums_of_the_backend_are_near():
    first, *others = run(
        "clipped", ["one_process", "hsdp"], 4, steps=8 if SOAK else 4, reduction="fast"
    )
    assert first.status == "exact"
    for result in others:
        assert (result.status, result.findings) == ("within_tolerance", []), result.case


def test_what_does_not_apply_is_told_and_not_run():
    assert {
        (scenario, layout)
        for scenario, kind in SCENARIOS.items()
        for layout in LAYOUTS.values()
        if layout.reason_against(kind, 4) is not None
        for layout in [layout.name]
    } == {("different_start", layout) for layout in SHARDED}
    applies = [LAYOUTS["hsdp"].reason_against(SCENARIOS["clipped"], n) is None for n in range(2, 9)]
    assert applies == [False, False, True, False, True, False, True]
    results = run("different_start", ["ep_fsdp2", "none"], 2, steps=3)
    assert [(r.case.layout, r.status) for r in results] == [
        ("ep_fsdp2", "does_not_apply"),
        ("none", "exact"),
    ]
    text = io.StringIO()
    Console(file=text, width=200).print(results_table(list(map(case_entry, results))))
    assert "0 in 1 layout" in text.getvalue()
    (reason,) = left_out(list(map(case_entry, results)))
    assert "does not apply to ep_fsdp2 in different_start: each rank begins with its own" in reason
    assert closing_sentence("clean", list(map(case_entry, results)), []) == (
        "[green]All 1 cases are clean: every difference is exactly 0.[/]"
    )
    alone = Campaign(ForkedRanks(2, HANG)).run(Case("different_start", "tp_fsdp2", 2, 3, 1))
    assert "Nothing was run" in closing_sentence("clean", [case_entry(alone)], [])


def test_what_does_not_apply_is_in_receipt_and_report(tmp_path):
    from samestep.cli import main

    arguments = ["stress", "--scenario", "different_start", "--layout", "tp_fsdp2", "--steps", "2"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    (case,) = json.loads((tmp_path / "receipt.json").read_text())["cases"]
    assert case["status"] == "does_not_apply"
    assert case["reason"].startswith("each rank begins with its own part")
    report = (tmp_path / "report.html").read_text()
    assert "does not apply" in report
    assert "No scenario applies to the layout" in report
