"""What `check_gradients` puts into an FSDP2 model, and takes out again."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import samestep
from samestep.shards.dtensor.checked_reduction import CheckedReduceScatter
from samestep.shards.dtensor.fsdp_units import units_beside
from tests.ranks import run_cases


def model_of_two_units() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    fully_shard(model[0])
    return fully_shard(model)


def found(model: nn.Module) -> tuple[list[object], int, int]:
    """The reduce-scatter of each unit; hooks on modules, and those on parameters."""
    comms = [unit.reduce_scatter for unit in units_beside(model.parameters())]
    on_modules = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    on_params = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return comms, on_modules, on_params


def test_nothing_is_there_that_was_not_asked_for():
    def job(rank, checks):
        model = model_of_two_units()
        before = found(model)
        opt = samestep.MuonAdamW(model, lr=0.1, check_gradients=checks)
        comms, *hooks = found(model)
        assert len(comms) == 2
        assert hooks == [before[1], 0]
        if not checks:
            assert all(map(lambda own, other: own is other, comms, before[0]))
            return
        assert all(isinstance(comm, CheckedReduceScatter) for comm in comms)
        assert [comm.inner for comm in comms] == before[0]
        model(torch.full((2, 4), math.nan)).sum().backward()
        with pytest.raises((FloatingPointError, samestep.comm.presence.RankProblemError)):
            opt.step()
        opt.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        assert found(model) == (comms, before[1], 0)
        assert [comm.void_sums for comm in comms] == [[], []]

    run_cases(2, [False, True], job)
