"""On a GPU: ranks that lack gradients, and a host that never waits.

Needs one GPU. Ranks that are processes share it, with gloo between them.
"""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import samestep
from tests.gpu import needs_gpu, no_host_wait
from tests.limits import HANG
from tests.ranks import run_forked

pytestmark = needs_gpu

WIDTH = 64


class Net(nn.Module):
    def __init__(self, width=WIDTH, layers=3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 101, bias=False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(std=0.1, generator=generator)


def gradient(param, place, rank, step):
    if (place + step) % 5 == 4 or (place + 2 * step + rank) % 3 == 0:
        return None
    generator = torch.Generator().manual_seed(1000 * place + 10 * step + rank)
    return torch.randn(param.shape, generator=generator).cuda()


def mean(param, grads):
    if all(grad is None for grad in grads):
        return None
    total = torch.zeros_like(param)
    for grad in grads:
        total = total + (torch.zeros_like(param) if grad is None else grad)
    return total / len(grads)


OPTIONS = {"lr": 1e-2, "compute_dtype": torch.float32, "crossover": 70, "bucket_size": 3000}


@pytest.mark.parametrize("sharding", ["none", "zero2"])
def test_ranks_that_lack_gradients_agree_with_one_process(sharding):
    world, steps = 3, 6

    def single(rank):
        model = Net().cuda()
        opt = samestep.MuonAdamW(model, lr=1e-2, compute_dtype=torch.float32, sharding="none")
        for step in range(steps):
            for place, param in enumerate(model.parameters()):
                param.grad = mean(param, [gradient(param, place, r, step) for r in range(world)])
            opt.step()
        return [param.detach().cpu() for param in model.parameters()]

    def job(rank):
        model = Net().cuda()
        opt = samestep.MuonAdamW(
            model, **OPTIONS, sharding=sharding, reduction="ordered", max_grad_norm=1e9
        )
        untouched = True
        for step in range(steps):
            before = [param.detach().clone() for param in model.parameters()]
            for place, param in enumerate(model.parameters()):
                param.grad = gradient(param, place, rank, step)
            opt.step()
            for place, (old, param) in enumerate(zip(before, model.parameters(), strict=True)):
                absent = all(gradient(param, place, r, step) is None for r in range(world))
                untouched &= torch.equal(old, param) == absent
        counts = opt.metrics()["present"].tolist()
        return [param.detach().cpu() for param in model.parameters()], untouched, counts

    (expected,) = run_forked(1, single)
    results = run_forked(world, job)
    for found, untouched, counts in results:
        assert untouched
        assert counts == results[0][2]
        for value, first, reference in zip(found, results[0][0], expected, strict=True):
            assert torch.equal(value, first)
            assert (value - reference).abs().max() <= 3e-5


def in_fake_world(queue, overlap, missing):
    """One of eight ranks, with collectives that do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    model = Net(512, 12).cuda()
    opt = samestep.MuonAdamW(
        model, lr=1e-2, overlap_grad_reduce=overlap, max_grad_norm=1.0, update_rms=True
    )
    scaler = samestep.GradScaler("cuda")

    def step():
        x = model.embedding(torch.arange(8, device="cuda"))
        for number, layer in enumerate(model.layers):
            x = x if missing and number % 4 == 1 else layer(x).relu()
        loss = scaler.scale(model.head(x).square().mean())
        with no_host_wait():
            loss.backward()
            scaler.step(opt)
            numbers = opt.metrics()
        scaler.update()
        return numbers

    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        numbers = step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    queue.put((sorted(times)[len(times) // 2], sorted(numbers)))


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_host_never_waits_for_the_gpu(overlap, missing):
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.SimpleQueue()
    process = spawn.Process(target=in_fake_world, args=(queue, overlap, missing))
    process.start()
    process.join(HANG)
    assert process.exitcode == 0
    milliseconds, names = queue.get()
    assert names == ["grad_norm", "outliers", "present", "update_rms"]
    print(f"overlap {overlap}, missing {missing}: {milliseconds:.1f} ms")  # noqa: T201
