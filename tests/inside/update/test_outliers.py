"""Updates that no orthogonalization gives are counted and told, never written in silence."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import samestep
import samestep.rules.muon
from samestep.update.metrics import Outliers
from tests.ranks import run_forked


def layers(count=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


def give_gradients(model, bad=None):
    for place, param in enumerate(model.parameters()):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(place))
    if bad is not None:
        model[bad].weight.grad[2, 3] = math.nan


def test_a_usual_training_has_none():
    model = layers()
    optimizer = samestep.MuonAdamW(model, preset="nanochat")
    for _ in range(3):
        give_gradients(model)
        optimizer.step()
    assert optimizer.metrics()["outliers"].tolist() == [0] * len(optimizer.param_groups)


def test_an_update_that_is_not_finite_is_told_once():
    model = layers()
    optimizer = samestep.MuonAdamW(model)
    matrices = next(i for i, g in enumerate(optimizer.param_groups) if g["rule"] == "muon")
    give_gradients(model, bad=1)
    with pytest.warns(
        UserWarning, match=r"param_groups\[\d\] \('0.weight' and others\) was not fin"
    ):
        optimizer.step()
    assert optimizer.metrics()["outliers"][matrices] == 1
    give_gradients(model, bad=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert optimizer.metrics()["outliers"][matrices] == 2


def test_a_skipped_step_is_none():
    model = layers()
    optimizer = samestep.MuonAdamW(model, max_grad_norm=math.inf)
    give_gradients(model, bad=1)
    optimizer.step()
    assert optimizer.metrics()["outliers"].sum() == 0


def test_an_orthogonalization_that_goes_too_far_is_seen(monkeypatch):
    usual = samestep.rules.muon.orthogonalize
    monkeypatch.setattr(samestep.rules.muon, "orthogonalize", lambda *a, **k: 1.5 * usual(*a, **k))
    model = layers()
    optimizer = samestep.MuonAdamW(model)
    give_gradients(model)
    with pytest.warns(UserWarning, match="larger than an orthogonalized update can be"):
        optimizer.step()
    assert optimizer.metrics()["outliers"].sum() == 3


def test_blocks_of_dtensors_are_looked_at_by_their_owners():
    def job(rank):
        model = layers()
        fully_shard(model)
        optimizer = samestep.MuonAdamW(model)
        for param in model.parameters():
            assert isinstance(param, DTensor)
            param.grad = param.detach().clone()
        model[1].weight.grad.to_local()[0, 0] = math.nan
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            optimizer.step()
        said = sum("was not finite" in str(one.message) for one in told)
        return said, int(optimizer.metrics()["outliers"].sum())

    found = run_forked(2, job)
    assert sum(count for _, count in found) == 1  # each block has one owner
    assert [said for said, _ in found] == [count for _, count in found]


def test_flags_of_kernels_are_read_where_they_are_written():
    outliers, flags = Outliers(), torch.zeros(3, dtype=torch.int32)
    outliers.watch(1, [flags])
    assert outliers.new() is None
    flags[2] = 1
    assert outliers.new() == 1
    assert outliers.new() is None  # once
    assert outliers.counts(2).tolist() == [0, 1]
