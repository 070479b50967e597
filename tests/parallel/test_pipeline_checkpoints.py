"""Checkpoints of pipelines load with any number of stages; a stage that dies ends the others."""

import os

import pytest
import torch

import samestep
from tests.limits import HANG, limit
from tests.parallel.pipelines import (
    OPTIONS,
    axes,
    batch,
    gpt,
    gradients_alone,
    optimizer_of,
    pipeline_of,
    train_alone,
)
from tests.ranks import RanksFailed, run_forked
from tests.soak import SOAK, twin

BEFORE, AFTER = 2 if SOAK else 1, 1
RATE = 5e-3  # another one than the optimizers are built with
BAD = {"lr": 0.5, "weight_decay": 0.7}  # what a load must replace


def go_on(rank, stages, load, save, steps, first, options, schedule):
    stage, pipe, dp_rank = axes(stages)
    torch.manual_seed(5)
    pipeline = pipeline_of(gpt(), pipe, **schedule)
    opt = optimizer_of(pipeline, stage, **options)
    extra = None
    if load is not None:
        extra = samestep.load(load, pipeline.model, opt).extra
    losses = []
    for step in range(first, first + steps):
        losses.append(pipeline.step(*batch(step, dp_rank)).item())
        opt.step()
        opt.zero_grad()
    if save is not None:
        samestep.save(save, pipeline.model, opt, extra={"step": first + steps})
    params = {name: p.detach() for name, p in pipeline.model.named_parameters()}
    return losses, params, [group["lr"] for group in opt.param_groups], extra


def merged(found):
    return {name: value for _, params, *_ in found for name, value in params.items()}


@twin
def test_interleaved_stages_to_one_process_and_back(tmp_path):
    """Saved by 4 stages on 2 x 2 ranks, loaded by one process, saved there, loaded by 2 stages."""
    _, _, wanted = train_alone(BEFORE + 2 * AFTER, 2, lr=RATE)
    asked = {"schedule": "interleaved"}
    run_forked(4, go_on, 2, None, tmp_path / "a", BEFORE, 0, {"lr": RATE}, asked)
    model = gpt()
    opt = samestep.MuonAdamW(model, **OPTIONS | BAD)
    assert samestep.load(tmp_path / "a", model, opt).extra == {"step": BEFORE}
    assert {group["lr"] for group in opt.param_groups} == {RATE}  # of groups of both stages
    for step in range(BEFORE, BEFORE + AFTER):
        gradients_alone(2, step, model)
        opt.step()
        opt.zero_grad()
    samestep.save(tmp_path / "b", model, opt, extra=7)
    found = run_forked(4, go_on, 2, tmp_path / "b", None, AFTER, BEFORE + AFTER, BAD, {})
    for _, _, rates, extra in found:
        assert set(rates) == {RATE}
        assert extra == 7
    for name, value in merged(found).items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-5, msg=name)


@twin
def test_two_stages_to_four(tmp_path):
    _, _, wanted = train_alone(BEFORE + AFTER)
    first = run_forked(2, go_on, 2, None, tmp_path / "a", BEFORE, 0, {}, {})
    second = run_forked(4, go_on, 4, tmp_path / "a", None, AFTER, BEFORE, BAD, {})
    assert merged(first).keys() == merged(second).keys() == wanted.keys()
    for name, value in merged(second).items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-5, msg=name)


def load_less(rank, path):
    """A model without one of the stored layers: still a surplus, though stages have others too."""
    stage, pipe, _ = axes(2)
    pipeline = pipeline_of(gpt(), pipe)
    if rank == 1:
        del pipeline.model.blocks[3]
    opt = optimizer_of(pipeline, stage)
    with pytest.raises(samestep.CheckpointError) as raised:
        samestep.load(path, pipeline.model, opt)
    with pytest.raises(
        samestep.CheckpointError, match="a rank of a pipeline knows only those of its"
    ):
        samestep.save(path.parent / "b", pipeline.model, opt, format="fsdp_dtensor")
    return str(raised.value)


def test_what_no_stage_has_is_still_a_surplus(tmp_path):
    model = gpt()
    samestep.save(tmp_path / "a", model, samestep.MuonAdamW(model, **OPTIONS))
    for text in run_forked(2, load_less, tmp_path / "a"):
        assert "the checkpoint has more than is here: model.blocks.3." in text
    assert not (tmp_path / "b").exists()


def die(rank, victim):
    stage, pipe, dp_rank = axes(3)
    pipeline = pipeline_of(gpt(), pipe)
    opt = optimizer_of(pipeline, stage)
    for step in range(3):
        if step == 2 and rank == victim:
            os._exit(3)
        pipeline.step(*batch(step, dp_rank))
        opt.step()


@pytest.mark.parametrize("victim", [2, 1] if SOAK else [2])
def test_a_stage_that_dies_ends_the_others(victim, monkeypatch):
    """Also those that are not its neighbours, long before the timeout of the group."""
    monkeypatch.setattr("samestep.comm.diagnosis.roll_call.ANSWER_S", 2.0)
    with pytest.raises(RanksFailed) as raised:
        run_forked(3, die, victim, collective_timeout=HANG, grace=limit(60.0))
    reports = raised.value.reports
    for rank in {0, 1, 2} - {victim}:
        assert "CollectiveError: pipeline step failed: " in reports[rank], reports[rank]
    assert f"rank {victim} did not answer: its process has ended" in reports[victim - 1]


class Broken(torch.nn.Module):
    def forward(self, x, cos, sin):
        raise ValueError("this layer cannot")


def break_down(rank):
    pipeline = pipeline_of(gpt(), axes(2)[1])
    if rank == 1:
        pipeline.model.blocks[2] = Broken()
    pipeline.step(*batch(0))


def test_an_error_of_the_model_is_told_as_it_is():
    with pytest.raises(RanksFailed) as raised:
        run_forked(2, break_down)
    assert "ValueError: this layer cannot" in raised.value.reports[1]
    assert "CollectiveError" not in raised.value.reports[1]
