"""DTensors of which other ranks hold copies: who averages them, and what is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import samestep
from samestep.placements import planner
from samestep.stress import check
from tests.ranks import run_forked

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
        model(x).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()


def refused(make) -> str:
    with pytest.raises(ValueError, match="nobody is known to average") as caught:
        make()
    return str(caught.value)


# --- refused -------------------------------------------------------------------------------------

OPTIONS = {
    "default": {},
    "zero1, flat": {"sharding": "zero1", "buffers": "flat"},
    "overlap": {"overlap_grad_reduce": True},
    "none": {"sharding": "none"},
}


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (4, 1)], ids=str)
def test_tensor_parallel_beside_data_parallel_is_refused_on_every_rank(shape):
    def job(rank):
        axis = init_device_mesh("cpu", shape, mesh_dim_names=AXES)["model"]
        return [
            refused(lambda own=own: samestep.MuonAdamW(tensor_parallel(axis), **own))
            for own in OPTIONS.values()
        ]

    world = shape[0] * shape[1]
    groups = {(2, 1): "rank 0; rank 1", (2, 2): "ranks 0, 1; ranks 2, 3"}
    for texts in run_forked(world, job):
        assert len(texts) == len(OPTIONS)
        for text in texts:
            assert groups.get(shape, "rank 0; rank 1; rank 2; rank 3") in text
            assert "'0.weight', '2.weight'" in text
            assert 'fully_shard(model, mesh=mesh["data"])' in text
            assert 'grads="reduced"' in text
            assert "process_group=" in text


def test_what_fsdp_ignores_and_copies_that_it_does_not_know_are_refused():
    def job(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
        model = tensor_parallel(mesh["model"])
        fully_shard(model, mesh=mesh["data"], ignored_params={model[0].weight})
        ignored = refused(lambda: samestep.MuonAdamW(model))
        shards_alone = fully_shard(net(), mesh=mesh["model"])
        return ignored, refused(lambda: samestep.AdamW(shards_alone))

    for ignored, shards_alone in run_forked(4, job):
        assert "each hold a copy of '0.weight': tensor parallel" in ignored
        assert "ranks 0, 1; ranks 2, 3" in shards_alone
        assert "FSDP2 averages" in shards_alone
        assert "HSDP" in shards_alone


def test_a_group_that_is_added_later_is_refused():
    def job(rank):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=AXES)
        opt = samestep.AdamW(nn.Linear(4, 4))
        model = tensor_parallel(mesh["model"])
        text = refused(lambda: opt.add_param_group({"params": [("cut", model[0].weight)]}))
        return text, len(opt.param_groups)

    assert all(groups == 1 for _, groups in run_forked(2, job))


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


def test_check_finds_copies_that_drift_on_other_meshes(monkeypatch):
    monkeypatch.setattr(planner, "refuse_copies_nobody_averages", lambda *_: None)

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
