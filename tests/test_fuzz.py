"""Random trainings: those of the first seeds, and that a case which goes wrong is found."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import samestep
from samestep.comm.integrity.agreement import RanksDisagreeError
from tests import fuzz
from tests.ranks import run_forked

# Between them every layout, option, rule and event of the first 30; `make fuzz` has a thousand.
SEEDS = (2, 3, 4, 9, 11, 15, 16, 17, 18, 19, 21, 22, 24, 25, 27, 28, 29)


def test_random_cases_keep_what_the_design_promises():
    wrong = [
        "\n".join([f"seed {case.seed}:", *problems, fuzz.script(case)])
        for case, problems, _ in fuzz.findings([fuzz.case_of(seed) for seed in SEEDS])
        if problems
    ]
    assert not wrong, "\n\n".join(wrong)


def test_seeds_reach_every_layout_rule_and_event():
    cases = [fuzz.case_of(seed) for seed in SEEDS]
    assert {case.world for case in cases} == {1, 2, 3, 4}
    assert {case.layout.kind for case in cases} == {"plain", "reduced", "fsdp2", "hsdp", "tp"}
    assert {group["rule"] for case in cases for group in case.groups} == {
        "muon",
        "adamw",
        "adamuon",
    }
    assert any(case.then for case in cases)
    assert any(case.infinities for case in cases)
    assert any(case.edits for case in cases)
    assert any(not all(param.shape) for case in cases for param in case.params)


def test_a_case_is_its_seed_and_survives_as_text():
    for seed in SEEDS:
        case = fuzz.case_of(seed)
        assert fuzz.case_from(case.text()).text() == fuzz.case_of(seed).text()


@pytest.fixture
def one_step():
    """AdamW alone on one rank: a case that can be read."""
    params = (fuzz.Param("p0", (3,), 0), fuzz.Param("p1", (2,), 0, pattern="never"))
    layout = fuzz.Layout("plain", 1, {"sharding": "none", "reduction": "ordered"})
    return fuzz.Case(1, 1, layout, params, ({"rule": "adamw", "lr": 0.1},), {}, steps=2)


def test_what_is_wrong_is_told(one_step):
    right = fuzz.play(one_step, 0)
    assert fuzz.judge(one_step, [right]) == []
    moved = fuzz.play(one_step, 0)
    moved.params["p0"] = moved.params["p0"] + 1e-4
    assert "other bits than in one process" in fuzz.judge(one_step, [moved])[0]
    assert "off the reference" in fuzz.judge(one_step, [moved])[1]
    raised = fuzz.Played(error=("RuntimeError", "shape '[2]' is invalid", ""))
    assert "not clear" in fuzz.judge(one_step, [raised])[0]
    refused = fuzz.Played(error=("ValueError", "sharding is not known", ""))
    assert fuzz.judge(one_step, [refused]) == []
    assert "have no error" in fuzz.judge(one_step, [refused, right])[0]


def test_an_absent_parameter_that_changes_is_told(one_step, monkeypatch):
    step = samestep.MuonAdamW.step

    def decays_everything(self, closure=None):
        step(self, closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(0.99)

    monkeypatch.setattr(samestep.MuonAdamW, "step", decays_everything)
    assert "p1 has changed, and it is absent" in fuzz.judge(one_step, [fuzz.play(one_step, 0)])[0]


# --- what seeds have found -----------------------------------------------------------------------


def test_one_row_of_a_tall_block_goes_back_alone():
    """It is a column of what was computed, and collectives take no strides."""
    groups = ({"rule": "muon", "lr": 0.1, "split_sizes": [1, 1, 4]},)
    layout = fuzz.Layout("fsdp2", 2, {"chunk_size": 1})
    params = (fuzz.Param("p0", (6, 3), 0),)
    case = fuzz.Case(1, 2, layout, params, groups, {}, steps=1)
    assert [problems for _, problems, _ in fuzz.findings([case])] == [[]]


def test_a_scaler_takes_dtensors_beside_plain_parameters():
    """On one rank too, where nothing is averaged: torch's own cannot unscale both at once."""
    params = (fuzz.Param("p0", (4, 2), 0, cut="rows"), fuzz.Param("p1", (3,), 0))
    groups = ({"rule": "adamw", "lr": 0.1},)
    layout = fuzz.Layout("tp", 1)
    for infinities in ((), ((1, 0, "p1"),)):
        case = fuzz.Case(1, 1, layout, params, groups, {}, scaler=True, infinities=infinities)
        assert [problems for _, problems, _ in fuzz.findings([case])] == [[]]


def test_fsdp_leaves_no_rows_of_a_matrix_without_columns():
    """Not even on the ranks that should have some by its placements."""

    def job(rank):
        model = nn.Module()
        model.empty, model.full = nn.Parameter(torch.zeros(2, 0)), nn.Parameter(torch.ones(5, 2))
        fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
        opt = samestep.MuonAdamW(model, lr=0.1)
        model.full.grad = torch.ones_like(model.full)
        opt.step()
        return opt.full_parameter("empty").shape, opt.full_parameter("full")

    (shape, full), *others = run_forked(3, job)
    assert shape == (2, 0)
    assert bool((full < 1).all())
    assert all(torch.equal(full, other) for _, other in others)


def test_a_part_of_another_shape_on_one_rank_is_told_on_all():
    def job(rank):
        mesh = init_device_mesh("cpu", (2,))
        rows = 3 if rank else 2
        part = DTensor.from_local(
            torch.zeros(rows, 2), mesh, [Shard(0)], run_check=False, shape=(4, 2), stride=(2, 1)
        )
        with pytest.raises((ValueError, RanksDisagreeError)) as told:
            samestep.AdamW([("weight", nn.Parameter(part))])
        return type(told.value).__name__, str(told.value)

    first, second = run_forked(2, job)
    assert second[0] == "ValueError"
    assert first[0] == "RanksDisagreeError"
    for _, text in (first, second):
        assert "parameter 'weight': rank 1 holds a shard of shape (3, 2)" in text
