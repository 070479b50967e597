"""What is promised for DTensors: steps are those of one process, a hundred too, in every layout.

Every data rank has batches of its own; the reference averages their losses. Dims are uneven:
33, 5, 3 and 1 rows do not divide by 2, 4 or 8.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import samestep
from tests.ranks import run_cases, run_forked
from tests.soak import SOAK
from tests.test_sharded import Net, fsdp, loss_of

STEPS = 100 if SOAK else 3
OF_MIXTURE = 20 if SOAK else 2  # the second has momentum
ADAMW, MUON = 2e-5, 3e-4  # how far parameters of either rule may be apart
OPTIONS = {
    "lr": 5e-3,
    "variance_beta2": 0.9,
    "cautious": True,
    "max_grad_norm": 1.0,
    "overrides": {
        "experts": {"rule": "muon"},
        "row.weight": {"rule": "muon", "variance_beta2": None},
    },
}
SPLIT = {"*.up.weight": {"split_sizes": (9, 10, 14)}, **OPTIONS["overrides"]}


def take_step(opt, losses):
    (sum(losses) / len(losses)).backward()
    opt.step()
    metrics = opt.metrics()
    opt.zero_grad()
    return metrics


def snapshot(opt):
    """Parameters and state by name, as one process has them, and the rule of each."""
    rules = {name: group["rule"] for group in opt.param_groups for name in group["param_names"]}
    return {name: opt.full_parameter(name) for name in rules}, opt.whole_state(), rules


def options_for(hidden):
    return {**OPTIONS, "overrides": SPLIT} if hidden == 33 else OPTIONS


@cache
def alone(ranks, hidden, steps):
    """One process with the mean of all losses."""
    model = Net(hidden)
    opt = samestep.MuonAdamW(model, **options_for(hidden))
    for step in range(steps):
        take_step(opt, [loss_of(model, rank, step) for rank in range(ranks)])
    return snapshot(opt)


def assert_near(found, expected, start, steps):
    values, state, rules = expected
    for name, value in values.items():
        limit = MUON if rules[name] == "muon" else ADAMW
        assert (found[0][name] - value).abs().max() < limit, name
        assert (value - start[name]).abs().max() > steps * limit, name  # it was trained
    for name, entries in state.items():
        for key, value in entries.items():
            assert found[1][name][key].shape == value.shape
            assert (found[1][name][key] - value).abs().max() < ADAMW, (name, key)


def sharded(model, mesh=None):
    """Block by block; as a whole on many ranks, which takes less time."""
    many = torch.distributed.get_world_size() > 4
    return fully_shard(model, mesh=mesh) if many else fsdp(model, mesh)


def fsdp2(rank):
    return sharded(Net()), rank


def hsdp(rank, *shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return sharded(Net(), mesh), rank


def tensor_parallel(rank, data, model_ranks):
    mesh = init_device_mesh("cpu", (data, model_ranks), mesh_dim_names=("data", "model"))
    model = Net(36)
    for block in model.blocks:
        parallelize_module(
            block, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    return sharded(model, mesh["data"]), rank // model_ranks


def train(world, layout, shape, hidden, steps, **options):
    def job(rank):
        model, data_rank = layout(rank, *shape)
        opt = samestep.MuonAdamW(model, **options_for(hidden), **options)
        for step in range(steps):
            take_step(opt, [loss_of(model, data_rank, step)])
        return snapshot(opt)

    return run_forked(world, job)


# Of which make test has those of data, experts and tensor parallel, below.
MORE = [
    (3, fsdp2, (), {"muon_schedule": "gather"}),
    (4, hsdp, (2, 2), {"bucket_size": 600}),
    (2, fsdp2, (), {"bucket_size": 300}),
    (4, fsdp2, (), {"bucket_size": 300, "chunks_ahead": 2}),
    (8, fsdp2, (), {}),
    (8, hsdp, (2, 4), {}),
    (8, tensor_parallel, (2, 4), {}),
] * SOAK


@pytest.mark.parametrize(
    ("world", "layout", "shape", "options"),
    [
        (2, fsdp2, (), {"bucket_size": 300, "chunks_ahead": 2}),
        (4, tensor_parallel, (2, 2), {"bucket_size": 600}),
        *MORE,
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_run_against_one_process(world, layout, shape, options):
    data, hidden = (shape[0], 36) if layout is tensor_parallel else (world, 33)
    start = {name: param.detach() for name, param in Net(hidden).named_parameters()}
    results = train(world, layout, shape, hidden, STEPS, **options)
    for found in results:
        assert_near(found, alone(data, hidden, STEPS), start, STEPS)
        for name, value in results[0][0].items():
            assert torch.equal(found[0][name], value), name


# --- data, experts and tensor parallel on three axes ---------------------------------------------


class Experts(nn.Module):
    """Four experts that see every token; with a mesh, its ranks share them."""

    def __init__(self, mesh=None):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        weight = 0.3 * torch.randn(4, 6, 6, generator=generator)
        self.mesh = mesh
        self.weight = nn.Parameter(
            weight if mesh is None else distribute_tensor(weight, mesh, [Shard(0)])
        )

    def forward(self, x):
        if self.mesh is None:
            return torch.bmm(x.expand(4, *x.shape), self.weight).tanh().sum(0)
        tokens = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        of_each = torch.bmm(tokens.expand(4, *x.shape), self.weight)
        return of_each.tanh().sum(0).full_tensor().clone()  # FSDP2 warns of views


class Mixture(nn.Module):
    """A dense block and experts, on tokens."""

    def __init__(self, mesh=None):
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6, bias=False)
        self.head = nn.Linear(6, 13, bias=False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(std=0.3, generator=generator)
        self.experts = Experts(mesh)

    def forward(self, tokens, _):
        x = self.embedding(tokens)
        x = x + self.down(self.up(x).tanh())
        return self.head(x + self.experts(x))


def train_mixture(model, data_ranks):
    own = {"experts.weight": {"rule": "muon"}}
    opt = samestep.MuonAdamW(model, **{**OPTIONS, "overrides": own}, update_rms=True)
    for step in range(OF_MIXTURE):
        metrics = take_step(opt, [loss_of(model, rank, step) for rank in data_ranks])
    return *snapshot(opt), metrics


def test_data_experts_and_tensor_parallel():
    """FSDP2 cuts what the expert axis has cut before: other experts, or rows of each."""
    plain = Mixture()
    start = {name: param.detach().clone() for name, param in plain.named_parameters()}
    *expected, metrics = train_mixture(plain, (0, 1))

    def job(rank, dim):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "expert", "model"))
        model = Mixture(mesh["expert"])
        parallelize_module(
            model, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        fully_shard(model.experts, mesh=mesh["data"], shard_placement_fn=lambda _: Shard(dim))
        fully_shard(model, mesh=mesh["data"])
        axes = {name: param.device_mesh.mesh_dim_names for name, param in model.named_parameters()}
        return axes, train_mixture(model, (rank // 4,))

    both = [found for _, results in run_cases(8, [0, 1], job) for found in results]
    for axes, found in both:
        assert axes["experts.weight"] == ("data", "expert")
        assert axes["up.weight"] == ("data", "model")
        assert axes["head.weight"] == ("data",)
        assert_near(found, expected, start, OF_MIXTURE)
        for key, value in metrics.items():
            assert torch.allclose(found[3][key].double(), value.double(), rtol=1e-4), key
