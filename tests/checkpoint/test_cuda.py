"""Tensors on a GPU: saved from there, in the background too, and loaded anywhere."""

from __future__ import annotations

import pytest
import torch

import samestep
from samestep.checkpoint import saving, storage
from tests.checkpoint.training import Case, build, different, snapshot
from tests.gpu import needs_gpu
from tests.ranks import run_forked

pytestmark = needs_gpu


def on_gpu(seed):
    model, _ = build(Case("one", 1), seed=seed)
    model = model.cuda()
    return model, samestep.MuonAdamW(model, variance_beta2=0.9)


def on_host(values):
    return {name: value.cpu() for name, value in values.items()}


@pytest.mark.parametrize("way", ["save", "async_save"])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_from_a_gpu_to_a_gpu_and_to_the_host(tmp_path, monkeypatch, way):
    monkeypatch.setattr(storage, "AT_ONCE", 64)  # several copies per tensor
    # In a process of its own: others fork from this one, which must not use CUDA itself.
    run_forked(1, saved_and_loaded, tmp_path, way)


def saved_and_loaded(rank, tmp_path, way):
    model, opt = on_gpu(1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    opt.step()
    expected = on_host(snapshot(model, opt))
    made = getattr(samestep, way)(tmp_path / "a", model, opt)
    if way == "async_save":
        opt.step()  # while it writes
        made.wait()
        buffers = saving._stagings[opt]._buffers.values()
        assert all(buffer.is_pinned() for buffer in buffers if buffer.numel())
    found = on_gpu(2)
    samestep.load(tmp_path / "a", *found)
    assert different(on_host(snapshot(*found)), expected) == []
    host, _ = build(Case("one", 1), seed=3)
    host_opt = samestep.MuonAdamW(host, variance_beta2=0.9)
    samestep.load(tmp_path / "a", host, host_opt)
    assert different(snapshot(host, host_opt), expected) == []
