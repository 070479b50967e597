"""DTensors: FSDP2, HSDP and tensor parallel, against one process that sees all gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import samestep
from tests.ranks import run_cases, run_forked
from tests.soak import SOAK, twin, twin_cases

STEPS = 6 if SOAK else 4  # every expert, and one of them again
OPTIONS = {
    "lr": 1e-2,
    "variance_beta2": 0.9,
    "cautious": True,
    "max_grad_norm": 0.7,
    "overrides": {"*.up.weight": {"split_sizes": (9, 10, 14)}, "experts": {"rule": "muon"}},
    "bucket_size": 700,
}


class Block(nn.Module):
    """Tensor parallel needs a width that it divides; FSDP2 does not."""

    def __init__(self, hidden):
        super().__init__()
        self.up = nn.Linear(5, hidden)
        self.down = nn.Linear(hidden, 5, bias=False)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    """Two blocks, a stack of experts, a row vector as matrix, and what goes to AdamW."""

    def __init__(self, hidden=33):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(13, 5)
        self.blocks = nn.ModuleList([Block(hidden), Block(hidden)])
        self.experts = nn.Parameter(torch.zeros(3, 5, 5))
        self.row = nn.Linear(5, 1, bias=False)
        self.scale = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(5, 13, bias=False)
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(std=0.3, generator=generator)

    def forward(self, tokens, expert):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = x + x @ self.experts[expert]
        return self.head(x * self.scale * self.row(x).sigmoid())


def loss_of(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(13, (6,), generator=generator)
    logits = model(tokens, step % 3)
    return nn.functional.cross_entropy(logits, tokens.roll(-1))


def alone(ranks, hidden=33, **options):
    """One process with the mean of all ranks' losses."""
    model = Net(hidden)
    opt = samestep.MuonAdamW(model, **{**OPTIONS, **options})
    for step in range(STEPS):
        sum(loss_of(model, rank, step) for rank in range(ranks)).div(ranks).backward()
        opt.step()
        metrics = opt.metrics()
        opt.zero_grad()
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    return values, opt.whole_state(), metrics


def train(model, opt, rank):
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        opt.step()
        metrics = opt.metrics()
        opt.zero_grad()
    values = {name: opt.full_parameter(name) for name, _ in model.named_parameters()}
    return values, opt.whole_state(), metrics


def near(found, expected):
    values, state, metrics = found
    for name, value in expected[0].items():
        assert (values[name] - value).abs().max() < 3e-4, name
    for name, entries in expected[1].items():
        for key, value in entries.items():
            assert state[name][key].shape == value.shape
            assert (state[name][key] - value).abs().max() < 2e-5, (name, key)
    assert torch.equal(metrics["present"], expected[2]["present"])
    for key in expected[2]:
        assert torch.allclose(metrics[key].double(), expected[2][key].double(), rtol=1e-4), key


def fsdp(model, mesh=None):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


SCHEDULES = ["parallel", "gather"]
FORMATS = ["fully_reshardable", "fsdp_dtensor"]


def test_state_that_was_replaced_is_found_in_the_next_step():
    def job(rank):
        found = []
        for replaces in (False, True):
            model = fully_shard(Net(), mesh=init_device_mesh("cpu", (2,)))
            opt = samestep.MuonAdamW(model, **OPTIONS)
            for step in range(STEPS):
                if replaces and step == 2:
                    before = [dict(state) for state in opt.state.values()]
                    for state in opt.state.values():
                        state.update({key: tensor.clone() for key, tensor in state.items()})
                    for tensor in (tensor for state in before for tensor in state.values()):
                        tensor.zero_()
                loss_of(model, rank, step).backward()
                opt.step()
                opt.zero_grad()
            found.append({name: opt.full_parameter(name) for name, _ in model.named_parameters()})
        return found

    for kept, replaced in run_forked(2, job):
        for name, value in kept.items():
            assert torch.equal(replaced[name], value), name


@pytest.mark.parametrize("world", [2, 3, 4] if SOAK else [3])
def test_fsdp2(world):
    expected = alone(world, update_rms=True)

    def job(rank, schedule):
        model = fsdp(Net())
        opt = samestep.MuonAdamW(model, muon_schedule=schedule, update_rms=True, **OPTIONS)
        return train(model, opt, rank)

    for _, results in run_cases(world, SCHEDULES, job):
        for found in results:
            near(found, expected)
            assert all(torch.equal(found[0][name], results[0][0][name]) for name in expected[0])


@twin
@pytest.mark.parametrize("shape", [(2, 2), (2, 3)] if SOAK else [(2, 2)])
def test_hsdp(shape):
    world = shape[0] * shape[1]
    expected = alone(world)

    def job(rank, schedule):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = fsdp(Net(), mesh)
        opt = samestep.MuonAdamW(model, muon_schedule=schedule, **OPTIONS)
        return train(model, opt, rank)

    for _, results in run_cases(world, SCHEDULES, job):
        for found in results:
            near(found, expected)


@pytest.mark.parametrize(
    ("data", "model_ranks"), [(1, 3), *([(2, 2), (3, 2), (1, 4)] if SOAK else [])]
)
def test_tensor_parallel_and_fsdp2(data, model_ranks):
    options = {**OPTIONS, "overrides": {"experts": {"rule": "muon"}}}
    expected = alone(data, 36, **options)

    def job(rank):
        mesh = init_device_mesh("cpu", (data, model_ranks), mesh_dim_names=("data", "model"))
        model = Net(36)
        for block in model.blocks:
            parallelize_module(
                block, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        if data > 1:
            fsdp(model, mesh["data"])
        opt = samestep.MuonAdamW(model, **options)
        return train(model, opt, rank // model_ranks)

    for found in run_forked(data * model_ranks, job):
        near(found, expected)


PERMUTED = [
    ([2, 0, 3, 1], ("shard",), False),
    ([0, 2, 1, 3], ("shard",), False),
    ([[2, 3], [0, 1]], ("replicate", "shard"), False),
    ([[3, 2], [1, 0]], ("data", "model"), True),
]


def read_by_torch(folder):
    """What torch's tools find in a checkpoint, in one process."""
    reader = dcp.FileSystemReader(folder)
    found = {
        key: torch.empty(entry.size)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if key.startswith("model.")
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return {key.removeprefix("model."): value for key, value in found.items()}


@twin
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_meshes_whose_ranks_are_permuted(tmp_path):
    """Torch shards by the order of ranks, and not by coordinates: so do we, uneven parts too."""
    plain = {**OPTIONS, "overrides": {"experts": {"rule": "muon"}}}
    options = {False: OPTIONS, True: plain}
    expected = {False: alone(4), True: alone(2, 36, **plain)}

    def job(rank, case):
        ranks, names, tensor_parallel = case
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        model = Net(36 if tensor_parallel else 33)
        wanted = {name: param.detach().clone() for name, param in model.named_parameters()}
        if tensor_parallel:
            for block in model.blocks:
                parallelize_module(
                    block, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
                )
            fsdp(model, mesh["data"])
        else:
            fsdp(model, mesh)
        opt = samestep.MuonAdamW(model, **options[tensor_parallel])
        for name, param in model.named_parameters():
            assert torch.equal(opt.full_parameter(name), wanted[name]), name
            even = all(size % 4 == 0 for size in param.shape)
            if even:
                assert torch.equal(param.full_tensor(), wanted[name]), name
        found = train(model, opt, mesh.get_local_rank("data") if tensor_parallel else rank)
        folders = [tmp_path / f"{ranks} {name}" for name in FORMATS]
        for folder, name in zip(folders, FORMATS, strict=True):
            samestep.save(folder, model, opt, format=name)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        samestep.load(folders[0], model, opt)
        for name, value in found[0].items():
            assert torch.equal(opt.full_parameter(name), value), name
        return found

    for (ranks, _, tensor_parallel), results in run_cases(4, PERMUTED[not SOAK :], job):
        for found in results:
            near(found, expected[tensor_parallel])
        values = results[0][0]
        for name, value in read_by_torch(tmp_path / f"{ranks} {FORMATS[1]}").items():
            assert torch.equal(value, values[name]), name
        model = Net(36 if tensor_parallel else 33)
        opt = samestep.MuonAdamW(model, **options[tensor_parallel])
        samestep.load(tmp_path / f"{ranks} {FORMATS[0]}", model, opt)
        for name, param in model.named_parameters():
            assert torch.equal(param, values[name]), name


@twin_cases("ranks0")
@pytest.mark.parametrize("ranks", [[[0, 1], [3, 2]], [[0, 3], [2, 1]]])
def test_meshes_of_which_axes_join_other_parts(ranks):
    """Every rank is told, at construction."""

    def job(rank):
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
        model = fsdp(Net(), mesh)
        with pytest.raises(ValueError, match="are in different orders along its axis"):
            samestep.MuonAdamW(model, **OPTIONS)

    run_forked(4, job)
