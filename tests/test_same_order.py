"""Ranks that hold more or less than others take part in the same collectives, in the same order."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import samestep
from tests.ranks import run_forked
from tests.soak import some, twin


@twin
@pytest.mark.parametrize("copies", some([1, 2]))
def test_waves_are_the_same_where_parts_are_not_equal(copies):
    """Plain parameters beside a large DTensor of which ranks hold different numbers of rows.

    The sums of small ones are sent on in the wave they are in, on the same group as what others
    gather: in different waves on different ranks, ranks would take one for the other.
    """

    def job(rank):
        mesh = init_device_mesh("cpu", (copies, 4 // copies), mesh_dim_names=("data", "model"))
        whole = torch.ones(5 if copies == 1 else 3, 400)
        cut = nn.Parameter(distribute_tensor(whole, mesh["model"], [Shard(0)]))
        plain = [nn.Parameter(torch.ones(10, 10 if n % 3 else 1)) for n in range(12)]
        named = [("cut", cut), *((f"plain_{n}", param) for n, param in enumerate(plain))]
        opt = samestep.MuonAdamW(
            [{"params": named, "rule": "adamw"}],
            reduction="ordered",
            sharding="zero2",
            bucket_size=200,
            crossover=20,
            waves=4,
        )
        for step in range(2):
            for n, param in enumerate(plain):
                param.grad = torch.full_like(param, rank + n + step)
            opt.step()
        return opt.schedule_lines(), [param.detach() for param in plain]

    (lines, values), *others = run_forked(4, job)
    for other_lines, other_values in others:
        assert other_lines == lines
        assert all(map(torch.equal, other_values, values))
