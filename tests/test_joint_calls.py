"""Calls that all ranks make together: an error of one reaches all, and other calls are told."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import samestep
from samestep.comm.integrity.agreement import RanksDisagreeError
from samestep.comm.presence import RankProblemError
from tests.ranks import run_cases, run_forked
from tests.soak import twin_cases

OPTIONS = {"lr": 0.1, "crossover": 8}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))


def step(params, opt):
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()


def extra(**options):
    return {"params": [("extra", nn.Parameter(torch.ones(3, 3)))], "rule": "adamw", **options}


def build_with(**options):
    return lambda: samestep.MuonAdamW(model(), **OPTIONS | options)


# Constructions that fail on rank 1; on others they are in order.
CONSTRUCTIONS = {
    "an unknown keyword": (build_with(learning_rate=1), "learning_rate"),
    "a bad value": (build_with(momentum=2.0), "momentum"),
    "a bad rank option": (build_with(sharding="zero4"), "sharding"),
    "a bad group": (lambda: samestep.AdamW([{"params": []}], lr=0.1), "no parameters"),
    "a preset": (build_with(preset="none such"), "preset"),
    "integers": (
        lambda: samestep.AdamW([nn.Parameter(torch.ones(3).long(), requires_grad=False)], lr=0.1),
        "integer",
    ),
}


def test_errors_at_construction():
    """All ranks raise, at once; then all of them build one together."""

    def job(rank, case):
        build, words = CONSTRUCTIONS[case]
        if rank == 1:
            with pytest.raises((TypeError, ValueError), match=words):
                build()
        else:
            with pytest.raises(RankProblemError, match="rank 1 failed in the construction of Muon"):
                build_with()()
        whole = model()
        step(whole.parameters(), samestep.MuonAdamW(whole, **OPTIONS))

    run_cases(3, CONSTRUCTIONS, job)


# Whether (rank 1 of four, the others) have DTensors on a mesh of two, and plain parameters.
KINDS = {
    "rank 1 with plain parameters (the first is 'plain'), ranks 0, 2, 3 with none": (
        (True, True),
        (True, False),
    ),
    "ranks 0, 2, 3 with DTensors (the first is 'cut'), rank 1 with none": (
        (False, True),
        (True, True),
    ),
    "ranks 0, 2, 3 with plain parameters (the first is 'plain'), rank 1 with none": (
        (True, False),
        (True, True),
    ),
}


@twin_cases("True")
@pytest.mark.parametrize("added", [False, True])
def test_kinds_of_parameters_that_some_ranks_lack(added):
    """They would compare plans with ranks that make none. Later all build one together."""

    def job(rank, told):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))["model"]
        cut = [("cut", nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)])))]
        plain = [("plain", nn.Parameter(torch.ones(5)))]
        has_cut, has_plain = KINDS[told][int(rank != 1)]
        params = cut * has_cut + plain * has_plain
        opt = samestep.AdamW([("first", nn.Parameter(torch.ones(3)))], lr=0.1)
        build = opt.add_param_group if added else partial(samestep.AdamW, lr=0.1)
        with pytest.raises(RanksDisagreeError, match=re.escape(told)):
            build({"params": params} if added else params)
        step([param for group in opt.param_groups for param in group["params"]], opt)
        again = samestep.AdamW(cut + plain, lr=0.1)
        step([param for group in again.param_groups for param in group["params"]], again)

    run_cases(4, KINDS, job)


def test_dtensors_that_some_ranks_lack_beside_those_of_all():
    """An FSDP2 model over all ranks, and a part of it on a mesh of ranks 0 and 1."""

    def job(rank):
        pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "of"))["of"]
        whole = model()
        if rank < 2:
            whole.append(fully_shard(nn.Linear(4, 4), mesh=pair))
        fully_shard(whole, mesh=init_device_mesh("cpu", (4,)))
        told = "ranks 0, 1 with DTensors (the first is '2.weight'), ranks 2, 3 with none"
        with pytest.raises(RanksDisagreeError, match=re.escape(told)):
            samestep.MuonAdamW(whole, **OPTIONS)

    run_forked(4, job)


def test_the_same_error_on_every_rank_is_its_own():
    def job(rank):
        for build, words in CONSTRUCTIONS.values():
            with pytest.raises((TypeError, ValueError), match=words):
                build()

    run_forked(2, job)


# Calls that fail on rank 1, and the same calls in order.
CALLS = {
    "load_state_dict()": (
        lambda opt: opt.load_state_dict({"nothing": 1}),
        lambda opt: opt.load_state_dict(opt.state_dict()),
    ),
    "add_param_group()": (
        lambda opt: opt.add_param_group(extra(lr=-1.0)),
        lambda opt: opt.add_param_group(extra()),
    ),
    "full_parameter('0.weight')": (
        lambda opt: opt.full_parameter("none such"),
        lambda opt: opt.full_parameter("0.weight"),
    ),
    "set_full_parameter('0.bias')": (
        lambda opt: opt.set_full_parameter("0.bias", torch.ones(1)),
        lambda opt: opt.set_full_parameter("0.bias", torch.ones(8)),
    ),
    "full_state('0.bias')": (
        lambda opt: opt.full_state("0.bias", "none such"),
        lambda opt: opt.full_state("0.bias", "exp_avg"),
    ),
    "full_gradient('0.bias')": (
        lambda opt: opt.full_gradient("none such"),
        lambda opt: opt.full_gradient("0.bias"),
    ),
}


def everything(params, opt):
    state = (tensor for own in opt.state.values() for tensor in own.values())
    return [tensor.detach().clone() for tensor in (*params, *state)]


@twin_cases("True")
@pytest.mark.parametrize("sharded", [False, True])
def test_errors_of_one_rank(sharded):
    """Nothing has changed on any rank, and the same call then succeeds."""

    def job(rank, name):
        bad, good = CALLS[name]
        whole = model()
        if sharded:
            fully_shard(whole, mesh=init_device_mesh("cpu", (3,)))
        opt = samestep.MuonAdamW(whole, **OPTIONS, sharding="none")
        params = list(whole.parameters())
        step(params, opt)
        before = everything(params, opt)
        if rank == 1:
            with pytest.raises((KeyError, ValueError)):
                bad(opt)
        else:
            with pytest.raises(RankProblemError) as caught:
                good(opt)
            assert str(caught.value).startswith(f"rank 1 failed in {name}, so no rank goes on")
        after = everything(params, opt)
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        good(opt)
        step(params, opt)

    run_cases(3, CALLS, job)


def test_ranks_in_different_calls():
    """Also one that is in a step, whatever the order; nothing was sent that others took for it."""
    calls = {**{name: good for name, (_, good) in CALLS.items()}, "step()": lambda opt: opt.step()}

    def job(rank, pair):
        whole = model()
        opt = samestep.MuonAdamW(whole, **OPTIONS, sharding="none")
        step(whole.parameters(), opt)
        name = pair[0] if rank == 2 else pair[1]
        with pytest.raises(RanksDisagreeError) as caught:
            calls[name](opt)
        assert f"call is {pair[1]} on ranks 0, 1 and {pair[0]} on rank 2" in str(caught.value)
        opt.zero_grad()
        step(whole.parameters(), opt)

    names = list(calls)
    run_cases(3, list(zip(names, names[1:] + names[:1], strict=True)), job)


def test_ranks_that_put_plans_off():
    """Their first step makes the plans: an error of one rank there reaches all."""

    def job(rank):
        whole = model()
        opt = samestep.MuonAdamW(whole, **OPTIONS, deferred=True)
        if rank == 1:
            whole[0].weight = nn.Parameter(torch.ones(2, 2))
            opt.param_groups[0]["params"][0] = whole[0].weight
        with pytest.raises(RuntimeError, match="of shape" if rank == 1 else "rank 1 failed in the"):
            step(whole.parameters(), opt)

    run_forked(2, job)


def test_ranks_without_the_parameters_hear_of_it():
    """A group that some of the ranks share: the others load with them."""

    def job(rank):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        dense, expert = (nn.Parameter(torch.ones(4)) for _ in range(2))
        opt = samestep.AdamW(
            [
                {"params": [("dense", dense)]},
                {"params": [(f"expert {rank // 2}", expert)], "process_group": pairs[rank // 2]},
            ],
            lr=0.1,
            state_dict_form="part",
        )
        step([dense, expert], opt)
        state = opt.state_dict()
        if rank == 3:
            del state["param_groups"]
        with pytest.raises(ValueError if rank == 3 else RankProblemError):
            opt.load_state_dict(state)
        step([dense, expert], opt)

    run_forked(4, job)
