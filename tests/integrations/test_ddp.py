"""DistributedDataParallel alone: the wrapped model or the one inside, and files of rank 0."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import samestep
from tests.integrations.ranks import assert_same, values
from tests.ranks import run_forked
from tests.soak import some, twin_cases


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.hidden = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.hidden(x))


def loss_of(model, step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(0, 16, (3, 6), generator=generator)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(model, opt, steps, rank):
    for step in steps:
        loss_of(model, step, rank).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()


def alone(steps, world=2):
    """One process with the data of all ranks."""
    model = Net()
    opt = samestep.MuonAdamW(model, lr=1e-2)
    for step in range(steps):
        for rank in range(world):
            (loss_of(model, step, rank) / world).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
    return values(model)


@twin_cases("zero2-inside", "none-ddp")
@pytest.mark.parametrize("given", ["ddp", "inside"])
@pytest.mark.parametrize("sharding", some(["none", "zero1", "zero2"]))
def test_a_run_that_goes_on_from_a_file_of_rank_0(given, sharding, tmp_path):
    def job(rank):
        def build():
            model = Net()
            ddp = DistributedDataParallel(model)
            opt = samestep.MuonAdamW(
                ddp if given == "ddp" else model, lr=1e-2, sharding=sharding, crossover=1
            )
            return ddp, opt

        ddp, opt = build()
        train(ddp, opt, range(3), rank)
        opt.consolidate_state_dict()
        if rank == 0:
            content = {"model": ddp.module.state_dict(), "opt": opt.state_dict()}
            torch.save(content, tmp_path / "saved.pt")
        dist.barrier()
        train(ddp, opt, range(3, 6), rank)

        again, opt = build()
        saved = torch.load(tmp_path / "saved.pt", weights_only=True)
        again.module.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        train(again, opt, range(3, 6), rank)
        assert_same(values(again), values(ddp))
        return values(ddp.module)

    here, there = run_forked(2, job)
    assert_same(here, there)
    for name, value in alone(6).items():
        assert torch.allclose(here[name], value, rtol=0, atol=2e-5), name
