"""Means of float16 gradients whose sum is larger than float16 can tell (65504)."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import samestep
from samestep.shards.replicated import reduction
from tests.ranks import run_forked
from tests.soak import twin

RANKS = 4
LAYOUTS = {
    "none": {"sharding": "none"},
    "zero1": {"sharding": "zero1"},
    "zero2": {"sharding": "zero2"},
    "zero1 overlap": {"sharding": "zero1", "overlap_grad_reduce": True},
    "zero2 overlap": {"sharding": "zero2", "overlap_grad_reduce": True},
    "flat zero1": {"buffers": "flat", "sharding": "zero1"},
    "flat zero2": {"buffers": "flat", "sharding": "zero2"},
    "flat zero2 overlap": {"buffers": "flat", "overlap_grad_reduce": True},
    "ordered": {"reduction": "ordered"},
    "in pairs": {},
}
# What ranks have is exact in float16, and so is every sum of a quarter of it.
OWN = {"weight": [20_000.0, 20_000.0, 24_000.0, 16_000.0], "bias": [20_000.0, 0.0, 60_000.0, -64.0]}
SMALL = 2.0**-14  # the smallest normal number


def layer(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 40).to(dtype)  # a bias that every rank updates, and a matrix


def gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Of a rank: 20,000 with a sign of its own in the last row, and small ones beside it."""
    weight = torch.full((40, 48), OWN["weight"][(rank + step) % RANKS])
    weight[-1] *= (-1) ** rank
    weight[0] = SMALL * (rank + 1)
    return {"weight": weight, "bias": torch.full((40,), OWN["bias"][(rank + step) % RANKS])}


def trained(opt, model, rank):
    """Two steps; the moments after each, and the parameters in float32."""
    moments = []
    for step in range(2):
        own = gradients(rank, step)
        for name, param in model.named_parameters():
            (param * own[name].half()).sum().backward()
        opt.step()
        moments.append({name: opt.full_state(name, "exp_avg") for name in own})
        opt.zero_grad()
    return moments, {name: opt.full_state(name, "master_weight") for name in own}


def optimizer(model: nn.Module, **layout: object) -> samestep.AdamW:
    return samestep.AdamW(
        model, lr=2.0**-8, betas=(0.5, 0.75), master_weights=True, max_grad_norm=math.inf, **layout
    )


def one_process():
    model = layer(torch.float16).float()
    opt = samestep.AdamW(model, lr=2.0**-8, betas=(0.5, 0.75), max_grad_norm=math.inf)
    means = []
    for step in range(2):
        of_ranks = [gradients(other, step) for other in range(RANKS)]
        for name, param in model.named_parameters():
            param.grad = torch.stack([own[name] for own in of_ranks]).mean(0)
        opt.step()
        means.append({name: opt.full_state(name, "exp_avg") for name in ("weight", "bias")})
    return means, {name: param.detach() for name, param in model.named_parameters()}


def run_layouts(rank, names):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    found = {}
    for name in names:
        own = dict(LAYOUTS[name])
        if name == "in pairs":
            own = {"process_group": pairs[rank // 2], "outer_group": across[rank % 2]}
        model = layer(torch.float16)
        found[name] = trained(optimizer(model, **own), model, rank)
    return found


@pytest.fixture(scope="module")
def found():
    return run_forked(RANKS, run_layouts, list(LAYOUTS))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_mean_is_that_of_float32(found, name):
    """Exactly: every number here is a float16."""
    means, values = one_process()
    assert all(mean.isfinite().all() and mean.ne(0).any() for own in means for mean in own.values())
    for of_rank in found:
        own_means, own_values = of_rank[name]
        for step, expected in enumerate(means):
            for key, mean in expected.items():
                assert torch.equal(own_means[step][key], mean), (key, step)
        for key, value in values.items():
            assert torch.equal(own_values[key], value), key


@twin
def test_sums_of_float16_would_overflow(monkeypatch):
    """Where a backend adds: without the division the step is skipped."""
    monkeypatch.setattr(reduction, "divides_first", lambda *_, **__: False)
    names = ["none", "zero2 overlap", "flat zero2 overlap"]
    for of_rank in run_forked(RANKS, run_layouts, names):
        for name in names:
            means, _ = of_rank[name]
            assert means[0]["weight"].eq(0).all(), name


@pytest.mark.parametrize(
    ("dtype", "ranks", "exchange"),
    [
        (torch.float32, 4, False),
        (torch.bfloat16, 4, False),
        (torch.float16, 4, True),
        (torch.float16, 1, False),
    ],
)
def test_nothing_is_divided_where_sums_have_room(dtype, ranks, exchange):
    assert not reduction.divides_first(dtype, ranks, exchange=exchange)
