"""`deferred=True`: plans and state are made for what the model is when it is first trained."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import samestep
from tests.ranks import run_forked
from tests.soak import twin, twin_cases
from tests.test_changed_models import steps, swap, two_layers
from tests.test_replicated import SMALL, Small, ranks_steps, single_steps
from tests.test_state_whole import assert_same_bits

OPTIONS = {"lr": 0.1, "crossover": 1, "reduction": "ordered"}


def same_parameters(model, other):
    return all(map(torch.equal, model.parameters(), other.parameters()))


def test_in_one_process_it_makes_no_difference():
    model, other = Small(), Small()
    now, later = (
        samestep.MuonAdamW(model, **SMALL),
        samestep.MuonAdamW(other, **SMALL, deferred=True),
    )
    assert later.state_dict()["state"] == {} != now.state_dict()["state"]
    assert later.table() == now.table()
    later.load_state_dict(later.state_dict())  # as accelerate does, to move it
    assert later.state_dict()["state"] == {}
    for opt, own in ((now, model), (later, other)):
        single_steps(own, opt, 2, 2)
    assert same_parameters(model, other)
    assert_same_bits(later.state_dict()["state"], now.state_dict()["state"])

    loaded = samestep.MuonAdamW(Small(), **SMALL, deferred=True)
    loaded.load_state_dict(now.state_dict())
    assert_same_bits(loaded.whole_state(), now.whole_state())
    assert_same_bits(copy.deepcopy(loaded).whole_state(), now.whole_state())


def test_a_group_that_is_added_before():
    model, other = two_layers(), two_layers()
    for own, deferred in ((model, False), (other, True)):
        opt = samestep.Muon([("first", own[0].weight)], lr=0.1, deferred=deferred)
        opt.add_param_group({"params": [("second", own[1].weight)], "lr": 0.2})
        steps(own, opt, [1, 2])
    assert same_parameters(model, other)


@twin_cases("none", "zero1")
@pytest.mark.parametrize("sharding", ["none", "zero1", "zero2"])
def test_ranks_that_find_each_other_later(sharding, tmp_path):
    """As with a trainer whose arguments start the process group; there is nothing to warn of."""

    def job(rank):
        dist.destroy_process_group()
        model, other = Small(), Small()
        opt = samestep.MuonAdamW(model, **SMALL, crossover=1, sharding=sharding, deferred=True)
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/{sharding}", rank=rank, world_size=2
        )
        now = samestep.MuonAdamW(other, **SMALL, crossover=1, sharding=sharding)
        for each, own in ((now, other), (opt, model)):
            ranks_steps(own, each, rank, 2)
        assert same_parameters(model, other)
        assert opt.fingerprint() == now.fingerprint() != ""
        assert_same_bits(opt.whole_state(), now.whole_state())
        return True

    assert run_forked(2, job) == [True] * 2


@twin
def test_samesteps_own_checkpoints(tmp_path):
    """Saved before a first step, loaded before one."""

    def job(rank):
        model, fresh = Small(), samestep.MuonAdamW(Small(), **SMALL, crossover=1, deferred=True)
        samestep.save(tmp_path / "fresh", optimizer=fresh)
        opt = samestep.MuonAdamW(model, **SMALL, crossover=1)
        ranks_steps(model, opt, rank, 2)
        samestep.save(tmp_path / "saved", model, opt)
        other = Small()
        again = samestep.MuonAdamW(other, **SMALL, crossover=1, deferred=True)
        samestep.load(tmp_path / "saved", other, again)
        assert_same_bits(again.whole_state(), opt.whole_state())
        for each, own in ((opt, model), (again, other)):
            ranks_steps(own, each, rank, 2, first=2)
        return same_parameters(model, other)

    assert run_forked(2, job) == [True] * 2


@pytest.mark.parametrize("scaled", [False, True])
def test_a_model_that_ddp_wraps_later_is_averaged_once(scaled):
    """Also with torch's own scaler, which is right for gradients that are averaged."""

    def job(rank):
        model = two_layers()
        opt = samestep.MuonAdamW(model, **OPTIONS, deferred=True)
        ddp = DistributedDataParallel(model)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + rank)
            loss = ddp(torch.randn(5, 6, generator=generator)).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            scaler.step(opt)  # in silence
            scaler.update()
            opt.zero_grad()
        return opt.plan.distribution.grads, [p.detach() for p in model.parameters()]

    (grads, here), (_, there) = run_forked(2, job)
    assert grads == "reduced"
    assert all(map(torch.equal, here, there))


@twin_cases("swapped")
@pytest.mark.parametrize("way", ["swapped", "adopted"])
def test_a_model_that_is_sharded_later(way):
    """As if the optimizer had been built afterwards, and nothing was ever kept of whole ones."""

    def job(rank):
        mesh = init_device_mesh("cpu", (2,))
        model, other = two_layers(), two_layers()
        opt = samestep.MuonAdamW(model, **OPTIONS, grads="reduced", deferred=True)
        old = list(model.parameters())
        for own in (model, other):
            fully_shard(own, mesh=mesh)
        if way == "swapped":
            swap(model, opt, dict(zip(old, model.parameters(), strict=True)))
        else:
            opt.adopt(model)
        assert not opt.state
        opt.table()
        after = samestep.MuonAdamW(other, **OPTIONS, grads="reduced")
        for own, each in ((model, opt), (other, after)):
            steps(own, each, [7, 8, 9])
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
        return True

    assert run_forked(2, job) == [True, True]


def test_what_is_refused():
    with pytest.raises(ValueError, match="deferred=True plans in the first step"):
        samestep.AdamW(two_layers(), overlap_grad_reduce=True, deferred=True)
    model = two_layers()
    opt = samestep.Muon(model, deferred=True)
    opt.param_groups[0]["params"][0] = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(RuntimeError, match=r"shape \(3, 3\)"):
        steps(model, opt, [1])

    def job(rank):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copy.deepcopy(samestep.AdamW(two_layers(), deferred=True))
        return True

    assert run_forked(2, job) == [True] * 2
