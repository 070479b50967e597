"""Chunks of spread blocks in plain torch: what `test_sharded*.py` do not see."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import samestep
from tests.ranks import run_forked


def test_copies_stay_the_same_where_blocks_travel_in_16_bits():
    """The owner of a block steps along what the others got: rounded."""

    def job(rank):
        mesh = init_device_mesh("cpu", (2, 1))
        generator = torch.Generator().manual_seed(0)

        def placed():
            whole = torch.randn(8, 12, generator=generator)
            return distribute_tensor(whole, mesh, [Replicate(), Shard(0)])

        params = [torch.nn.Parameter(placed()) for _ in range(3)]
        optimizer = samestep.Muon(params, lr=0.02, block_dtype=torch.bfloat16)
        for _ in range(2):
            for param in params:
                param.grad = placed()
            optimizer.step()
        return [param.to_local().detach() for param in params]

    first, second = run_forked(2, job)
    assert all(map(torch.equal, first, second))
