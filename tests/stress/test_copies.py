"""Layouts of DTensors whose copies the optimizer averages: the bits of one process."""

from functools import reduce

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from samestep.lab.stress.command import Session
from samestep.lab.stress.dtensor_training import KINDS, share_out
from samestep.lab.stress.layouts import EVERY_LAYOUT, LAYOUT_SETS, LAYOUTS
from samestep.lab.stress.options import Options
from samestep.lab.stress.scenarios import EVERY_SCENARIO, SCENARIOS
from samestep.lab.stress.sharded_training import new_training
from samestep.tooling.request import BadRequestError
from tests.ranks import run_forked
from tests.soak import SOAK, twin
from tests.stress.test_cases import FEWER, run

pytestmark = pytest.mark.usefixtures("no_torchrun")

COPIES = [name for name in LAYOUT_SETS["copies"] if name != "one_process"]
# Presence by hand and by models, stacks, groups that come, saving, sums of micro-batches, a scaler:
# each in the layouts that it is tried in here. `make soak` has all scenarios in all layouts.
TELLING = {
    "expert_stacks": ("ep_tp_dp_flat_gather_overlap", "ep_dp_zero1", "tp_dp_zero2", "tp_dp_none"),
    "conditional_compute": (
        "tp_dp_zero2_overlap",
        "ep_dp_zero2",
        "tp_dp_flat_zero1",
        "tp_dp_zero1",
    ),
    "megatron_conditional_live": ("tp_dp_flat_gather_overlap",),
    "frozen_and_added": ("tp_dp_flat_zero2",),
    "resume": ("ep_dp_flat_gather_overlap",),
    "uneven_accumulation_sharded": ("tp_dp_gather", "ep_dp_none"),
    "overflow_scaler": ("ep_tp_dp_zero2",),
}


def test_every_layout_is_tried():
    tried = {layout for layouts in TELLING.values() for layout in layouts}
    assert tried | {"tp4_dp_zero2"} == set(COPIES)  # which needs eight ranks


@pytest.mark.parametrize("scenario", [*SCENARIOS, "expert_stacks"] if SOAK else TELLING)
def test_every_layout_is_exact_on_four_ranks(scenario):
    steps = FEWER.get(scenario, 22 if SOAK else 2)
    layouts = COPIES if SOAK else TELLING[scenario]
    first, *results = run(scenario, ["one_process", *layouts], 4, steps)
    ran = [result for result in results if result.status != "does_not_apply"]
    assert ran or scenario == "different_start"
    for result in (first, *ran):
        assert (result.status, result.findings) == ("exact", []), result.case
        assert [sample.step for sample in result.samples] == [steps // 2, steps]


@twin
@pytest.mark.parametrize("world", [2, *([3, 6, 8] if SOAK else [])])
def test_every_layout_is_exact_on_other_numbers_of_ranks(world):
    layouts = COPIES if SOAK else ["tp_dp_zero2_overlap", "ep_dp_flat_gather_overlap"]
    for result in run("expert_stacks", ["one_process", *layouts], world, 8 if SOAK else 2):
        if result.status != "does_not_apply":
            assert (result.status, result.findings) == ("exact", []), result.case


def test_where_they_apply():
    def ranks(name, world):
        layout = EVERY_LAYOUT[name]
        if layout.reason_against(SCENARIOS["clipped"], world) is not None:
            return None
        return tuple(layout.mesh_sizes(world).values())

    assert [ranks("tp_dp_zero2", world) for world in (2, 3, 4, 6, 8)] == [
        (2, 1), (3, 1), (2, 2), (3, 2), (4, 2)
    ]  # fmt: skip
    assert [ranks("tp4_dp_zero2", world) for world in (2, 4, 6, 8)] == [None, None, None, (2, 4)]
    both = [ranks("ep_tp_dp_zero2", world) for world in (2, 4, 6, 8)]
    assert both == [None, (1, 2, 2), None, (2, 2, 2)]
    assert EVERY_LAYOUT["tp_dp_none"].reason_against(SCENARIOS["different_start"], 4) is not None


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [1, 2, 4])
@pytest.mark.parametrize("ranks", [0, 1, 3, 8])
def test_shares_add_up_to_the_same_bits_and_leave_out_everyone_at_times(ranks, copies):
    torch.manual_seed(0)
    given = [torch.randn(50) * 10**power for power in range(ranks)]
    patterns = set()
    for turn in range(24):
        shares = share_out(given, copies, turn)
        assert len(shares) == copies
        patterns.add(tuple(share is not None for share in shares))
        if given:
            parts = [torch.zeros(50) if share is None else share for share in shares]
            assert torch.equal(reduce(torch.add, parts), reduce(torch.add, given))
    if ranks == 0:
        assert patterns == {(False,) * copies}
        return
    for copy in range(copies):
        seen = {pattern[copy] for pattern in patterns}
        assert seen == ({True, False} if copies > 1 else {True})


@twin
def test_parameters_are_cut_in_every_way_and_ranks_lack_gradients_in_every_way():
    """Of meshes 2 x 2: copies that lack a gradient, and ranks of a mesh that lack a summand."""

    def job(rank):
        found = {}
        for name in ("tp_dp_zero1", "ep_dp_zero1"):
            scenario = EVERY_SCENARIO["expert_stacks"](0, 4)
            training = new_training(scenario, EVERY_LAYOUT[name], rank)
            grads = [
                [scenario.known_gradients(training._twin, step, other, 0) for other in range(4)]
                for step in range(12)
            ]
            given = [training._shares(step, own) for step, own in enumerate(grads)]
            present = {p: [p in shares for shares in given] for p in training._cuts}
            found[name] = training._cuts, present
        return found

    of_ranks = run_forked(4, job)
    for name, axis in (("tp_dp_zero1", "model"), ("ep_dp_zero1", "expert")):
        cuts = of_ranks[0][name][0]
        assert all(found[name][0] == cuts for found in of_ranks)
        assert {cut.axes for cut in cuts.values()} == {(axis,), ()}
        kinds = {(cut.placements, cut.summands) for cut in cuts.values()}
        wanted = {(Shard(0),), (Replicate(),), ()}
        assert {placements for placements, _ in kinds} >= wanted
        assert ((Replicate(),), True) in kinds
        first, beside, across = (of_ranks[rank][name][1] for rank in (0, 1, 2))
        summands = [p for p, cut in cuts.items() if cut.summands]
        assert any(first[p] != beside[p] for p in summands)  # of one mesh
        for param, cut in cuts.items():
            if cut.axes:
                assert first[param] != across[param], param  # of two copies
    assert len(KINDS) == 5


# --- the command and its page --------------------------------------------------------------------


def cases(tmp_path, **options):
    session = Session(Options(out=tmp_path, **options), None, console=None)
    return [(case.scenario, case.layout) for case in session.cases()]


def test_they_are_run_when_they_are_named(tmp_path):
    named = cases(tmp_path, world_size=4, scenario="clipped,resume", layout="copies")
    layouts = ["one_process", *COPIES]
    assert named == [(scenario, own) for scenario in ("clipped", "resume") for own in layouts]
    assert cases(tmp_path, world_size=4, scenario="expert_stacks") == [
        ("expert_stacks", layout) for layout in layouts
    ]
    assert not set(COPIES) & set(LAYOUTS)


@pytest.mark.parametrize("name", ["clipped,all", "clipped,", "clipped,none_such"])
def test_scenarios_that_are_not_known_are_refused(name):
    with pytest.raises(BadRequestError, match=r"--scenario .* is unknown"):
        Options(scenario=name).check()
