"""DTensors of which other ranks hold copies: who averages them, and what is refused."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import samestep
from samestep.shards import planner
from samestep.stress import check
from tests.ranks import run_cases, run_forked
from tests.soak import SOAK, some, twin

AXES = ("data", "model")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False), nn.LayerNorm(8)
    return nn.Sequential(*layers)


def tensor_parallel(axis) -> nn.Module:
    """The matrices; the norm stays a plain module."""
    return parallelize_module(net(), axis, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def train(model, opt, rank, steps=3):
    """Ranks with the same number have the same data."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(4, 8, generator=generator)
        (model(x) - x).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()


def refused(make) -> str:
    with pytest.raises(ValueError, match="nobody is known to average") as caught:
        make()
    return str(caught.value)


# --- averaged ------------------------------------------------------------------------------------

OPTIONS = {
    "default": {},
    "both overlaps": {
        "buffers": "flat",
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "none": {"sharding": "none"},
    "ordered": {"reduction": "ordered"},
}
if SOAK:
    OPTIONS["zero1, flat"] = {"sharding": "zero1", "buffers": "flat"}
    OPTIONS["overlap"] = {"overlap_grad_reduce": True}


def one_process(ranks, steps=3):
    """What data ranks train together."""
    model = net()
    opt = samestep.MuonAdamW(model, lr=0.1)
    for step in range(steps):
        for rank in range(ranks):
            generator = torch.Generator().manual_seed(100 * step + rank)
            x = torch.randn(4, 8, generator=generator)
            ((model(x) - x).pow(2).mean() / ranks).backward()
        opt.step()
        opt.zero_grad()
    return [param.detach() for param in model.parameters()]


def whole(model):
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def assert_near(found, expected):
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own.detach(), other, rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", some([(2, 2), (4, 1), (2, 1)], 3), ids=str)
def test_tensor_parallel_beside_data_parallel(shape):
    """Of plain `parallelize_module`: matrices are DTensors, the norm is a plain module."""

    def job(rank, own):
        axis = init_device_mesh("cpu", shape, mesh_dim_names=AXES)["model"]
        model = tensor_parallel(axis)
        opt = samestep.MuonAdamW(model, lr=0.1, crossover=4, bucket_size=40, **OPTIONS[own])
        train(model, opt, rank // shape[1], steps=2)
        opt.wait_for_parameters()
        assert check(model, opt) == []
        return whole(model)

    expected = one_process(shape[0], steps=2)
    for _, of_ranks in run_cases(shape[0] * shape[1], OPTIONS, job):
        assert_near(of_ranks[0], expected)
        for found in of_ranks:
            assert all(map(torch.equal, found, of_ranks[0]))


READS = {
    "to_local": lambda param: param.to_local(),
    "full_tensor": lambda param: param.full_tensor(),
    "redistribute": lambda param: param.redistribute(placements=[Replicate()]).to_local(),
    "detach": lambda param: param.detach().to_local(),
}


def test_parts_of_parameters_on_their_way_are_waited_for():
    """Methods of DTensor are no torch functions; each is called first after a step of its own."""

    def job(rank):
        axis = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)["model"]
        found = []
        for overlap in ({}, {"overlap_param_gather": True, "poison_early_reads": True}):
            model = tensor_parallel(axis)
            opt = samestep.MuonAdamW(model, lr=0.1, buffers="flat", bucket_size=40, **overlap)
            read = []
            for step, look in enumerate(READS.values()):
                train(model, opt, 10 * step + rank // 2, steps=1)
                for param in model.parameters():
                    read.append(
                        (look(param) if isinstance(param, DTensor) else param).detach().clone()
                    )
            found.append(read)
        return found

    for plain, overlapped in run_forked(4, job):
        assert all(map(torch.equal, plain, overlapped))


def test_what_fsdp_ignores_is_averaged_beside_it():
    def job(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
        model = tensor_parallel(mesh["model"])
        fully_shard(model, mesh=mesh["data"], ignored_params={model[0].weight})
        opt = samestep.MuonAdamW(model, lr=0.1)
        train(model, opt, rank // 2)
        assert check(model, opt) == []
        return whole(model)

    expected = one_process(2)
    for found in run_forked(4, job):
        assert_near(found, expected)


@twin
def test_a_group_that_is_added_later():
    def job(rank):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=AXES)
        model = tensor_parallel(mesh["model"])
        opt = samestep.AdamW([("cut", model[0].weight)], crossover=1)
        opt.add_param_group({"params": [("other", model[2].weight)]})
        opt.add_param_group({"params": [("scale", model[3].weight), ("shift", model[3].bias)]})
        plans = [plan.plan for plan in opt.shared_parameters]
        assert not any(bucket.replicated for plan in plans for bucket in plan.buckets)
        train(model, opt, rank)
        assert check(model, opt) == []
        return whole(model)

    first, second = run_forked(2, job)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], net()[0].weight)


@twin
def test_no_sync_and_synchronize_accumulate():
    """Two micro-batches: kept local, and reduced one by one; with and without overlap."""

    def job(rank, way):
        overlap, synchronize = way
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
        model = tensor_parallel(mesh["model"])
        opt = samestep.MuonAdamW(model, lr=0.1, overlap_grad_reduce=overlap)
        for step in range(3):
            for micro in range(2):
                generator = torch.Generator().manual_seed(100 * step + 2 * (rank // 2) + micro)
                x = torch.randn(4, 8, generator=generator)
                loss = (model(x) - x).pow(2).mean() / 2
                if micro == 0 and not synchronize:
                    with opt.no_sync():
                        loss.backward()
                else:
                    loss.backward()
                if micro == 0 and synchronize:
                    opt.synchronize()
            opt.step()
            opt.zero_grad()
        return whole(model)

    expected = one_process(4)
    ways = [(False, False), (True, False), (False, True), (True, True)]
    for _, of_ranks in run_cases(4, ways, job):
        for found in of_ranks:
            assert_near(found, expected)


# --- refused -------------------------------------------------------------------------------------


def test_copies_that_fsdp_does_not_know_are_refused():
    def job(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
        shards_alone = fully_shard(net(), mesh=mesh["model"])
        return refused(lambda: samestep.AdamW(shards_alone))

    for shards_alone in run_forked(4, job):
        assert "ranks 0, 1; ranks 2, 3" in shards_alone
        assert "FSDP2 averages" in shards_alone
        assert "HSDP" in shards_alone
        assert 'grads="reduced"' in shards_alone
        assert "process_group=" in shards_alone


# --- silent --------------------------------------------------------------------------------------


def test_what_is_known_to_be_right_is_silent():
    """And takes no collective: nothing is compared where a mesh has all ranks."""

    def job(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
        cut = fully_shard(tensor_parallel(mesh["model"]), mesh=mesh["data"])
        samestep.MuonAdamW(cut)
        samestep.AdamW(cut[3])  # its norms alone, of which the model axis has copies
        samestep.Muon([cut[0].weight])
        samestep.MuonAdamW(fully_shard(net(), mesh=mesh))  # HSDP
        samestep.MuonAdamW(fully_shard(net()))
        whole = init_device_mesh("cpu", (4,))
        samestep.MuonAdamW(tensor_parallel(whole))
        samestep.MuonAdamW(tensor_parallel(mesh["model"]), grads="reduced")
        group = mesh["model"].get_group()
        samestep.MuonAdamW(tensor_parallel(mesh["model"]), process_group=group)
        return True

    assert all(run_forked(4, job))


def test_stages_with_other_parameters_are_silent():
    def job(rank):
        stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "model"))
        stage = nn.ModuleDict({f"layer{rank // 2}": nn.Linear(8, 8, bias=False)})
        plan = {"layer0": ColwiseParallel(), "layer1": ColwiseParallel()}
        own = {f"layer{rank // 2}": plan[f"layer{rank // 2}"]}
        samestep.MuonAdamW(parallelize_module(stage, stages["model"], own))
        return True

    assert all(run_forked(4, job))


# --- found where it was not refused --------------------------------------------------------------


@twin
def test_check_finds_copies_that_drift_on_other_meshes(monkeypatch):
    monkeypatch.setattr(planner, "find_copies", lambda *_: {})

    def job(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
        model = tensor_parallel(mesh["model"])
        opt = samestep.MuonAdamW(model, lr=0.1)
        before = check(model, opt)
        train(model, opt, rank // 2)
        values = [model[0].weight.to_local(), model[2].weight.to_local()]
        return before, check(model, opt, raise_on_drift=False), values

    results = run_forked(4, job)
    for before, drifts, _ in results:
        assert before == []
        assert drifts == results[0][1]
        found = {(drift.name, drift.kind, drift.first_rank): drift for drift in drifts}
        for place, name in enumerate(("0.weight", "2.weight")):
            for rank in (0, 1):
                drift = found[name, "parameter", rank]
                first, other = (results[at][2][place] for at in (rank, rank + 2))
                assert drift.ranks == (rank + 2,)
                assert drift.count == first.ne(other).sum()
                assert drift.max_abs_diff == pytest.approx((first - other).abs().max().item())
                assert (drift.first, drift.other) == (first[drift.index], other[drift.index])
        assert ("0.weight.momentum_buffer", "state", 0) in found
        assert not any(drift.name.startswith("3.") for drift in drifts)  # the norm is averaged


def test_check_finds_copies_that_differ_inside_of_a_mesh():
    """Of HSDP, and of norms that tensor parallel keeps whole beside FSDP2."""

    def job(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
        found = []
        cut = fully_shard(tensor_parallel(mesh["model"]), mesh=mesh["data"])
        for model, name in ((fully_shard(net(), mesh=mesh), "0.weight"), (cut, "3.bias")):
            opt = samestep.MuonAdamW(model, lr=0.1)
            train(model, opt, 0)
            silent = check(model, opt)
            param = dict(model.named_parameters())[name]
            assert isinstance(param, DTensor)
            if rank == 3:
                param.to_local().data[0] += 1
            found.append((silent, check(model, opt, raise_on_drift=False)))
        return found

    for hsdp, cut in run_forked(4, job):
        for (silent, drifts), name, first in ((hsdp, "0.weight", 1), (cut, "3.bias", 2)):
            assert silent == []
            (drift,) = drifts
            told = (drift.name, drift.kind, drift.ranks, drift.first_rank, drift.index[0])
            assert told == (name, "parameter", (3,), first, 0)


def test_the_table_and_the_assumptions_tell_who_averages():
    def job(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
        opt = samestep.MuonAdamW(tensor_parallel(mesh["model"]), crossover=4)
        managed = fully_shard(tensor_parallel(mesh["model"]), mesh=mesh["data"])
        return opt.table(), opt.explain(), samestep.MuonAdamW(managed).table()

    for rank, (table, told, managed) in enumerate(run_forked(4, job)):
        copies = f"ranks {rank % 2}, {rank % 2 + 2}"
        (row,) = [line for line in table.splitlines() if line.startswith("0.weight")]
        assert f"us: {copies}" in row
        assert re.search(r"rank \d, in 2 parts  ", row)
        (row,) = [line for line in table.splitlines() if line.startswith("3.weight")]
        assert "us: ranks 0, 1, 2, 3" in row
        told = " ".join(told.split())
        assert f"2 DTensors on ranks {rank // 2 * 2}, {rank // 2 * 2 + 1}, of which" in told
        assert f"averaged by samestep over {copies}" in told
        (row,) = [line for line in managed.splitlines() if line.startswith("0.weight")]
        assert " FSDP2 " in row


@twin
def test_check_finds_copies_of_parts_that_differ():
    """Tampered with on one rank, in a parameter and in state that copies have alike."""

    def job(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
        model = tensor_parallel(mesh["model"])
        opt = samestep.MuonAdamW(model, lr=0.1, sharding="none")
        train(model, opt, rank // 2)
        silent = check(model, opt)
        if rank == 3:
            model[0].weight.to_local().data[1, 2] += 1
            opt.state[model[2].weight]["momentum_buffer"][0] += 1
        return silent, check(model, opt, raise_on_drift=False)

    for silent, drifts in run_forked(4, job):
        assert silent == []
        found = {drift.name: drift for drift in drifts}
        assert found.keys() == {"0.weight", "2.weight.momentum_buffer"}
        for drift in found.values():
            assert (drift.first_rank, drift.ranks, drift.count) == (1, (3,), 1)
            assert abs(drift.other - drift.first) == pytest.approx(1)
