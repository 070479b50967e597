"""The hybrid stack in the harness: its layouts, when they run, and that they are right."""

from types import SimpleNamespace

import pytest

from samestep import FlightRecorder
from samestep.lab.stress.campaign import Campaign
from samestep.lab.stress.command import Session
from samestep.lab.stress.layouts import EVERY_LAYOUT, LAYOUTS, LAYOUTS_ON_REQUEST, Layout, register
from samestep.lab.stress.options import Options
from samestep.lab.stress.rank import Case
from samestep.lab.stress.ranks import ForkedRanks
from samestep.lab.stress.scenarios import EVERY_SCENARIO, SCENARIOS, SCENARIOS_ON_REQUEST
from samestep.lab.stress.sharded_training import GroupLogs
from tests.limits import HANG
from tests.ranks import run_forked
from tests.soak import SOAK

pytestmark = pytest.mark.usefixtures("no_torchrun")


def cases(tmp_path, **options):
    session = Session(Options(out=tmp_path, **options), None, console=None)
    return [(case.scenario, case.layout) for case in session.cases()]


def test_they_run_when_they_are_named_and_not_otherwise(tmp_path):
    usual = cases(tmp_path, world_size=8)
    assert {scenario for scenario, _ in usual} == set(SCENARIOS)
    assert {layout for _, layout in usual} == set(LAYOUTS)
    named = cases(tmp_path, world_size=8, scenario="hybrid_gpt")
    hybrid = [name for name in LAYOUTS_ON_REQUEST if name.startswith("hybrid_")]
    assert [layout for _, layout in named] == ["one_process", *hybrid]
    assert cases(tmp_path, scenario="hybrid_gpt", layout="zero2") == [("hybrid_gpt", "zero2")]
    refused = {"fsdp2_alone", "two_optimizers", "fused_qkv_cut"}
    hybrid = {"hybrid_gpt", "hybrid_conditional", "hybrid_lora"}
    alone = {"expert_stacks", "fused_qkv_groups", "options_of_peers", "schedules_to_zero"}
    alone.add("clipped_by_rule")
    small = {"small_state_8bit", "small_state_bf16", "small_state_remainder"}
    assert set(SCENARIOS_ON_REQUEST) == {*hybrid, *alone, *refused, *small}


def test_a_layout_has_one_name():
    with pytest.raises(ValueError, match="there is a layout 'hybrid_tp' already"):
        register(Layout("hybrid_tp", ""))


@pytest.mark.parametrize(
    ("scenario", "layout", "world", "reason"),
    [
        ("clipped", "hybrid_tp", 2, "its model has no plan that says what is cut"),
        ("hybrid_gpt", "hybrid_tp", 2, None),
        ("hybrid_gpt", "hybrid_tp", 3, "it needs a multiple of 2 ranks"),
        ("hybrid_gpt", "hybrid_tp_sp_ep", 6, "it needs a multiple of 4 ranks"),
        ("hybrid_gpt", "hybrid_hsdp_tp_sp", 4, "it needs a multiple of 8 ranks"),
        ("hybrid_lora", "hybrid_pp_tp_sp_ep", 8, None),
        ("hybrid_gpt", "zero2", 3, None),
    ],
)
def test_where_they_apply(scenario, layout, world, reason):
    assert EVERY_LAYOUT[layout].reason_against(EVERY_SCENARIO[scenario], world) == reason


# With the number of their layouts that fit four ranks.
FITTING = {"hybrid_gpt": 8, "hybrid_lora": 8, "fsdp2_alone": 2, "two_optimizers": 2}
FITTING |= {"fused_qkv_cut": 2, "hybrid_conditional": 5}


@pytest.mark.parametrize("scenario", FITTING if SOAK else ["hybrid_gpt"])
def test_layouts_are_near_the_reference_and_replicas_the_same(scenario):
    campaign = Campaign(ForkedRanks(4, watchdog=HANG))
    layouts = EVERY_SCENARIO[scenario].layouts if SOAK else ["hybrid_pp_ep"]
    results = []
    campaign.run_all([Case(scenario, layout, 4, 2, 2) for layout in layouts], results.append)
    ran = [result for result in results if result.status != "does_not_apply"]
    assert len(ran) == (FITTING[scenario] if SOAK else 1)
    for result in ran:
        assert result.findings == []
        assert all(verdict.replicas.largest == 0 for verdict in result.samples)
        assert all(verdict.same_collectives for verdict in result.samples)


def test_logs_are_compared_group_by_group():
    """Ranks 2 and 3 launch others than 0 and 1, which is fine; then rank 3 alone does."""

    def job(rank):
        logs = GroupLogs()
        pair = (0, 1) if rank < 2 else (2, 3)

        def launch(elements):
            logs._note(
                SimpleNamespace(
                    ranks=pair, kind="all_reduce", name="n", elements=elements, dtype="f"
                )
            )

        launch(pair[0])
        with FlightRecorder() as recorder:
            first = logs.compared(recorder)
            launch(7 if rank == 3 else 8)
            return first, logs.compared(recorder)

    found = run_forked(4, job)
    assert len({first for first, _ in found}) == 1
    assert len({second for _, second in found}) == 4
