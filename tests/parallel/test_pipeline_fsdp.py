"""FSDP2 inside each stage of a pipeline."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import samestep
from tests.parallel.pipelines import (
    OPTIONS,
    batch,
    gpt,
    gradients_alone,
    optimizer_of,
    pipeline_of,
    train_alone,
)
from tests.ranks import run_forked
from tests.soak import SOAK


def shard(rank, schedule, path, steps):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    pipeline = pipeline_of(gpt(), mesh["pipe"], schedule=schedule)
    for part in pipeline.parts:
        for block in part.blocks:
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=mesh["data"])
        fully_shard(part, mesh=mesh["data"])
    opt = optimizer_of(pipeline, mesh["data"].get_group())
    found = None
    losses = []
    for step in range(steps):
        losses.append(pipeline.step(*batch(step, rank % 2)).item())
        names = [name for name, _ in pipeline.model.named_parameters()]
        found = found or {name: opt.full_gradient(name) for name in names}
        opt.step()
        opt.zero_grad()
    samestep.save(path, pipeline.model, opt)
    norm = opt.metrics()["grad_norm"].item()
    return found, losses, norm, {name: opt.full_parameter(name) for name in found}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"] if SOAK else ["interleaved"])
def test_gradients_steps_and_checkpoints_are_those_of_one_process(schedule, tmp_path):
    _, wanted = gradients_alone(2)
    steps = 3 if SOAK else 2
    losses, norms, after = train_alone(steps, 2)
    found = run_forked(4, shard, schedule, tmp_path / "a", steps)
    seen = set()
    for grads, _, norm, params in found:
        seen |= grads.keys()
        assert norm == pytest.approx(norms[-1], rel=1e-4)
        for name in grads:
            torch.testing.assert_close(grads[name], wanted[name], rtol=0, atol=1e-6, msg=name)
            torch.testing.assert_close(params[name], after[name], rtol=0, atol=1e-4, msg=name)
    assert seen == wanted.keys()
    mean = [sum(of_ranks) / 4 for of_ranks in zip(*(one[1] for one in found), strict=True)]
    assert mean == pytest.approx(losses, abs=1e-5)
    model = gpt()
    samestep.load(tmp_path / "a", model, samestep.MuonAdamW(model, **OPTIONS))
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.detach(), after[name], rtol=0, atol=1e-4, msg=name)
