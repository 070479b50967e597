"""`consolidate_state_dict`: what one rank gives is whole or refused, whatever ranks share."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import samestep
from samestep.comm.presence import RankProblemError
from samestep.optimizer import saved_state
from tests.ranks import run_forked, run_threaded
from tests.soak import SOAK, twin
from tests.test_replicated import SMALL, Model, Small, build, ranks_steps, single_steps
from tests.test_state_whole import CASES, LOADING, assert_same_bits, bits, exact_gradient

SHARED = {name: layout for name, layout in LOADING.items() if name != "none"}


def assert_same_state_dict(found, expected):
    assert found.keys() == expected.keys()
    assert found["param_groups"] == expected["param_groups"]
    assert_same_bits(found["state"], expected["state"])


def through_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("case", ["fp32", "bf16 master"] if SOAK else ["bf16 master"])
def test_one_rank_gives_the_state_dict_of_one_process(case, monkeypatch):
    """Built, after steps, after more; and it loads into one process and every layout."""
    world, (dtype, options) = 3, CASES[case]
    monkeypatch.setattr(saved_state, "AT_ONCE", 40)  # several bundles
    make = exact_gradient(world)
    single = Model().to(dtype)
    one = build(single, **options)
    expected = [copy.deepcopy(one.state_dict())]
    for first in (0, 2):
        single_steps(single, one, world, 2, make=make, first=first)
        expected.append(copy.deepcopy(one.state_dict()))
    whole = one.whole_state()

    def job(rank):
        for to, (_, layout) in enumerate(SHARED.items()):
            model = Model().to(dtype)
            opt = build(
                model, reduction="ordered", crossover=20, bucket_size=150, **layout, **options
            )
            assert_same_state_dict(opt.state_dict(), expected[0])  # on every rank, unasked
            for first in (0, 2):
                ranks_steps(model, opt, rank, 2, make=make, first=first)
                with pytest.raises(RuntimeError, match=f"rank {rank} of 3 has a part of the"):
                    opt.state_dict()
                opt.consolidate_state_dict(to)
                saved = opt.state_dict()
                if rank == to:
                    assert_same_state_dict(saved, expected[1 + first // 2])
                    refusal = pytest.raises(RankProblemError, match="load_state_dict")
                else:
                    assert saved["state"] == {}
                    words = f"remainder of rank {rank}, .* on rank {to}"
                    refusal = pytest.raises(ValueError, match=words)
                with refusal:
                    opt.load_state_dict(saved)
            files = [None] * world
            dist.all_gather_object(files, through_file(saved))
            for other in list(LOADING.values())[0 if SOAK else to :: 1 if SOAK else len(SHARED)]:
                again = build(Model().to(dtype), crossover=20, **other, **options)
                again.load_state_dict(files[to])
                assert_same_bits(again.whole_state(), whole)
        return files[to]

    for saved in run_forked(world, job):
        again = build(Model().to(dtype), **options)
        again.load_state_dict(saved)
        assert_same_bits(again.whole_state(), whole)


def test_what_was_gathered_is_good_until_the_state_changes(tmp_path):
    def job(rank):
        model = Small()
        opt = samestep.MuonAdamW(model, **SMALL, crossover=1)
        ranks_steps(model, opt, rank, 1)
        opt.consolidate_state_dict(to=None)
        saved = opt.state_dict()
        name = opt.param_groups[0]["param_names"][0]
        key = next(iter(opt.whole_state()[name]))
        samestep.save(tmp_path / "saved", optimizer=opt)
        changes = [
            lambda: samestep.load(tmp_path / "saved", optimizer=opt),
            lambda: ranks_steps(model, opt, rank, 1, first=1),
            lambda: opt.load_state_dict(saved),
            lambda: opt.set_full_state(name, key, opt.full_state(name, key) + 1),
            lambda: opt.set_full_parameter(name, opt.full_parameter(name) + 1),
            opt.refresh_master_weights,
        ]
        for change in changes:
            change()
            with pytest.raises(RuntimeError, match="loses the rest: call consolidate_state_dict"):
                opt.state_dict()
            opt.consolidate_state_dict(to=None)
            assert opt.state_dict()["state"]
        for wrong in (-1, 2, "0", True):
            with pytest.raises(ValueError, match="to must be a rank from 0 to 1, or None"):
                opt.consolidate_state_dict(wrong)
        return bits(saved["state"][0][key])

    here, there = run_forked(2, job)
    assert torch.equal(here, there)


def test_state_that_was_loaded_or_edited_is_not_as_built(tmp_path):
    def job(rank):
        def build():
            return samestep.MuonAdamW(model, **SMALL, crossover=1)

        model = Small()
        opt = build()
        ranks_steps(model, opt, rank, 1)
        samestep.save(tmp_path / "saved", optimizer=opt)
        loaded, edited = build(), build()
        samestep.load(tmp_path / "saved", optimizer=loaded)
        for state in edited.state.values():
            for tensor in state.values():
                tensor.add_(1)
        for each in (loaded, edited):
            with pytest.raises(RuntimeError, match="loses the rest: call consolidate_state_dict"):
                each.state_dict()
        return True

    assert run_forked(2, job) == [True] * 2


def test_where_every_rank_has_all_there_is_nothing_to_gather():
    one = samestep.MuonAdamW(Small(), **SMALL)
    one.consolidate_state_dict()
    assert len(one.state_dict()["state"]) == len(list(Small().parameters()))

    def job(rank):
        model = Small()
        opt = samestep.MuonAdamW(model, **SMALL, sharding="none")
        ranks_steps(model, opt, rank, 1)
        opt.consolidate_state_dict()
        return len(opt.state_dict()["state"])

    assert run_threaded(2, job) == [len(one.state_dict()["state"])] * 2


def test_plain_parameters_beside_dtensors():
    """What torch's checkpoints would lose is gathered with the rest."""
    single = Small()
    one = samestep.MuonAdamW(single, **SMALL)
    single_steps(single, one, 2, 2, make=exact_gradient(2))
    expected = one.whole_state()

    def job(rank):
        def build():
            model = Small()
            fully_shard(model.hidden, mesh=init_device_mesh("cpu", (2,)))
            return model, samestep.MuonAdamW(
                model, **SMALL, sharding="zero2", crossover=1, reduction="ordered"
            )

        _, opt = build()
        opt.load_state_dict(one.state_dict())
        with pytest.raises(RuntimeError, match="plain parameters beside DTensors"):
            opt.state_dict()
        opt.consolidate_state_dict()
        files = [None] * 2
        dist.all_gather_object(files, through_file(opt.state_dict()))
        assert_same_state_dict(files[0], one.state_dict())
        _, again = build()
        again.load_state_dict(files[0])
        assert_same_bits(again.whole_state(), expected)
        return True

    assert run_forked(2, job) == [True] * 2


def test_parameters_of_a_ranks_own_cannot_be_gathered():
    def job(rank):
        alone = [dist.new_group([member]) for member in range(2)][rank]
        expert = ("expert", nn.Parameter(torch.randn(4, 4)))
        groups = [
            {"params": [("shared", nn.Parameter(torch.ones(4, 4)))], "rule": "muon"},
            {"params": [expert], "rule": "muon", "process_group": alone},
        ]
        opt = samestep.MuonAdamW(groups)
        for ask in (opt.state_dict, opt.consolidate_state_dict):
            with pytest.raises(RuntimeError, match=r"save with samestep\.save"):
                ask()
        return True

    assert run_forked(2, job) == [True] * 2


@twin
def test_torchs_checkpoints_of_plain_parameters(tmp_path):
    """`get_state_dict`, `dcp.save`, `dcp.load`, `set_state_dict`: torch's own recipe."""
    single = Small()
    one = samestep.MuonAdamW(single, **SMALL)
    single_steps(single, one, 2, 2, make=exact_gradient(2))
    expected = one.whole_state()

    def job(rank):
        for layout in LOADING.values():
            path = tmp_path / "_".join(layout.values())
            model = Small()
            opt = samestep.MuonAdamW(model, **SMALL, crossover=1, reduction="ordered", **layout)
            ranks_steps(model, opt, rank, 2, make=exact_gradient(2))
            opt.consolidate_state_dict(to=None)
            dcp.save(
                dict(zip(("model", "optim"), get_state_dict(model, opt), strict=True)),
                checkpoint_id=path,
            )
            other = Small()
            again = samestep.MuonAdamW(other, **SMALL, sharding="zero2", crossover=1)
            content = dict(zip(("model", "optim"), get_state_dict(other, again), strict=True))
            dcp.load(content, checkpoint_id=path)
            set_state_dict(
                other, again, model_state_dict=content["model"], optim_state_dict=content["optim"]
            )
            assert_same_bits(again.whole_state(), expected)
            assert all(map(torch.equal, model.parameters(), other.parameters()))
        return True

    assert run_forked(2, job) == [True] * 2
