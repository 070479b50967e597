"""On a GPU: a check finds the same there, and the host waits once.

Needs one GPU. Ranks that are processes share it, with gloo between them.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn

import samestep
from samestep.comm.integrity.checksum import checksum
from samestep.stress import check
from tests.gpu import needs_gpu
from tests.limits import HANG
from tests.ranks import run_forked

pytestmark = needs_gpu


class Net(nn.Module):
    def __init__(self, width=64, layers=3, vocabulary=101) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.register_buffer("table", torch.arange(10))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(std=0.1, generator=generator)


def train(model, opt, rank, steps=2):
    for step in range(steps):
        for place, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * place + 10 * step + rank)
            param.grad = torch.randn(param.shape, generator=generator).to(param)
        opt.step()
        opt.zero_grad()


def test_ranks_on_a_gpu_find_the_flipped_bit():
    def job(rank):
        model = Net().cuda()
        lr = torch.tensor(1e-2, device="cuda")
        opt = samestep.MuonAdamW(model, lr=lr, crossover=70)
        train(model, opt, rank)
        same = check(model, opt, buffers=True)
        if rank == 1:
            model.layers[1].weight.detach().view(torch.int32)[3, 5] ^= 1
            opt.param_groups[0]["lr"] += 1
            opt.state[model.layers[0].bias]["exp_avg"][7] = 3.0
        found = check(model, opt, raise_on_drift=False)
        state = opt.whole_state()
        on_gpu = all(t.is_cuda for entry in state.values() for t in entry.values())
        sums = [(int(checksum(p)), int(checksum(p.cpu()))) for p in model.parameters()]
        return same, [(d.name, d.ranks, d.index, d.count) for d in found], on_gpu, sums

    for same, found, on_gpu, sums in run_forked(2, job):
        assert same == []
        assert found == [
            ("layers.1.weight", (1,), (3, 5), 1),
            ("layers.0.bias.exp_avg", (1,), (7,), 1),
            ("param_groups[0]['lr']", (1,), (), 1),
        ]
        assert on_gpu
        assert all(gpu == cpu for gpu, cpu in sums)


def in_fake_world(queue, width, layers, vocabulary):
    """One of eight ranks, with collectives that do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    model = Net(width, layers, vocabulary).cuda()
    opt = samestep.MuonAdamW(model, lr=torch.tensor(1e-2, device="cuda"))
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                check(model, opt)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        times.append(1e3 * (time.perf_counter() - start))
    waits = [str(w.message) for w in caught if "synchroniz" in str(w.message)]
    queue.put((sorted(times)[len(times) // 2], waits))


def test_the_host_waits_once():
    spawn = multiprocessing.get_context("spawn")
    for shape in ((64, 3, 101), (768, 144, 32768)):
        queue = spawn.SimpleQueue()
        process = spawn.Process(target=in_fake_world, args=(queue, *shape))
        process.start()
        process.join(HANG)
        assert process.exitcode == 0
        milliseconds, waits = queue.get()
        print(f"{shape}: {milliseconds:.1f} ms")  # noqa: T201
        assert len(waits) == 1, waits
