"""Each collective through the counting group: its result, and its bytes by hand."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import samestep
from tests.counting_group import CountingGroup, counted
from tests.limits import limit
from tests.ranks import run_forked
from tests.soak import SOAK

# The new names since torch 2.13, where the old ones warn.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

N = 3

# The first optimizer of a process imports for more than a second; forked ranks inherit that.
torch.optim.SGD([torch.zeros(1)])


def filled(rank, size, dtype=torch.float32):
    """Small whole numbers, different on every rank, so that every sum is exact."""
    return torch.arange(size).add(100 * rank).to(dtype)


def do_all_reduce(rank):
    x = filled(rank, 5)
    dist.all_reduce(x)
    return x


def do_all_reduce_maximum(rank):
    x = filled(rank, 6, torch.int64)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def do_reduce_scatter(rank):
    out = torch.empty(2)
    reduce_scatter(out, filled(rank, 6))
    return out


def do_uneven_reduce_scatter(rank):
    out = torch.empty([3, 0, 4][rank])
    dist.reduce_scatter(out, list(filled(rank, 7).split([3, 0, 4])))
    return out


def do_all_gather(rank):
    out = torch.empty(6, dtype=torch.bfloat16)
    all_gather(out, filled(rank, 2, torch.bfloat16))
    return out


def do_all_gather_list(rank):
    out = [torch.empty(2, dtype=torch.float64) for _ in range(N)]
    dist.all_gather(out, filled(rank, 2, torch.float64))
    return torch.cat(out)


def do_all_to_all(rank):
    out = torch.empty(6)
    dist.all_to_all_single(out, filled(rank, 6))
    return out


def do_uneven_all_to_all(rank):
    # Rank r gets r + 1 rows of two from each, so hands in 1 + 2 + 3 rows.
    out = torch.empty(N * (rank + 1), 2)
    dist.all_to_all_single(out, filled(rank, 12).view(6, 2), [rank + 1] * N, [1, 2, 3])
    return out


def do_all_to_all_list(rank):
    out = list(torch.empty(6).split(2))
    dist.all_to_all(out, list(filled(rank, 6).split(2)))
    return torch.cat(out)


def do_broadcast(rank):
    x = filled(rank, 4)
    dist.broadcast(x, src=1)
    return x


def do_reduce(rank):
    x = filled(rank, 4)
    dist.reduce(x, dst=1)
    return x if rank == 1 else None


def do_gather(rank):
    out = [torch.empty(2) for _ in range(N)] if rank == 1 else None
    dist.gather(filled(rank, 2), out, dst=1)
    return out


def do_scatter(rank):
    out = torch.empty(2)
    dist.scatter(out, list(filled(rank, 6).split(2)) if rank == 1 else None, src=1)
    return out


def do_send_and_receive(rank):
    if rank == 0:
        dist.send(filled(rank, 3), 2)
        return None
    x = torch.empty(3)
    if rank == 2:
        dist.recv(x, 0)
    return x if rank == 2 else None


def do_barrier(rank):
    dist.barrier()


# By rank: operations, dtype, elements, bytes sent, bytes received.
f32, f64, bf16, i64 = torch.float32, torch.float64, torch.bfloat16, torch.int64
EXPECTED = {
    # 2 x 20 x 2/3 bytes
    do_all_reduce: [("all_reduce", f32, 5, 80 / 3, 80 / 3)] * 3,
    do_all_reduce_maximum: [("all_reduce", i64, 6, 64, 64)] * 3,
    # 24 bytes, 8 of them mine
    do_reduce_scatter: [("reduce_scatter", f32, 6, 16, 16)] * 3,
    # 28 bytes, of which 12, 0 and 16 are the ranks' own
    do_uneven_reduce_scatter: [
        ("reduce_scatter", f32, 7, 16, 24),
        ("reduce_scatter", f32, 7, 28, 0),
        ("reduce_scatter", f32, 7, 12, 32),
    ],
    do_all_gather: [("all_gather", bf16, 2, 8, 8)] * 3,
    do_all_gather_list: [("all_gather", f64, 2, 32, 32)] * 3,
    do_all_to_all: [("all_to_all", f32, 6, 16, 16)] * 3,
    # Rows of 8 bytes: sent 6 - (r + 1), received 2 (r + 1)
    do_uneven_all_to_all: [
        ("all_to_all", f32, 12, 40, 16),
        ("all_to_all", f32, 12, 32, 32),
        ("all_to_all", f32, 12, 24, 48),
    ],
    do_all_to_all_list: [("all_to_all", f32, 6, 16, 16)] * 3,
    do_broadcast: [("broadcast", f32, 4, 32 / 3, 0 if rank == 1 else 16) for rank in range(N)],
    do_reduce: [("reduce", f32, 4, 0 if rank == 1 else 16, 32 / 3) for rank in range(N)],
    do_gather: [("gather", f32, 2, 8, 0), ("gather", f32, 2, 0, 16), ("gather", f32, 2, 8, 0)],
    do_scatter: [("scatter", f32, 2, 0, 8), ("scatter", f32, 6, 16, 0), ("scatter", f32, 2, 0, 8)],
    do_send_and_receive: [("send", f32, 3, 12, 0), None, ("recv", f32, 3, 0, 12)],
    do_barrier: [("barrier", None, 0, 0, 0)] * 3,
}
if torch.__version__.startswith("2.11."):
    del EXPECTED[do_all_to_all_list]  # its gloo has none


def test_every_collective_is_counted_and_its_result_unchanged():
    def run_all(rank):
        plain = [collective(rank) for collective in EXPECTED]
        logs, results = [], []
        for collective in EXPECTED:
            with counted() as log:
                results.append(collective(rank))
            logs.append(log)
        torch.testing.assert_close(results, plain, rtol=0, atol=0)
        return logs

    by_rank = run_forked(N, run_all)
    for number, (collective, expected) in enumerate(EXPECTED.items()):
        logs = [logs[number] for logs in by_rank]
        for log, call in zip(logs, expected, strict=True):
            seen = [(c.op, c.dtype, c.elements, float(c.sent), float(c.received)) for c in log]
            assert seen == ([] if call is None else [call]), collective.__name__
        assert sum(log.sent for log in logs) == sum(log.received for log in logs)


def test_asynchronous_calls_are_told_apart_and_wait_as_usual():
    def launch(rank):
        with counted() as log:
            x = filled(rank, 4)
            dist.all_reduce(x.clone())
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            assert work.is_completed()
            dist.barrier(async_op=True).wait()
        return x, log

    for x, log in run_forked(2, launch):
        assert x.tolist() == [100, 102, 104, 106]
        assert [call.asynchronous for call in log] == [False, True, True]


def test_a_failing_collective_raises_from_wait():
    def fail(rank):
        CountingGroup.install(timeout=timedelta(seconds=limit(1.0)))
        if rank == 0:
            work = dist.all_reduce(torch.zeros(1), async_op=True)
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                work.wait()

    run_forked(2, fail)


def test_groups_know_their_ranks_and_log_under_their_names():
    def make_groups(rank):
        log = CountingGroup.install()
        pair = dist.new_group([0, 2])  # of the default group's kind
        named = dist.new_group([0, 1, 2], backend="counting")
        if rank != 1:
            assert isinstance(pair, CountingGroup)
            assert (dist.get_rank(pair), dist.get_world_size(pair)) == (rank // 2, 2)
            assert dist.get_process_group_ranks(pair) == [0, 2]
            assert dist.get_global_rank(pair, 1) == 2
            pair.get_group_store().set(f"from {rank}", "hello")
            assert pair.get_group_store().get(f"from {2 - rank}") == b"hello"
            dist.all_reduce(torch.zeros(2), group=pair)
        dist.broadcast(torch.zeros(3), src=2, group=named)
        dist.barrier(dist.group.WORLD)
        assert dist.get_backend() == dist.get_backend(named) == "counting"
        return log, dist.group.WORLD.group_name, named.group_name, rank != 1 and pair.group_name

    (log, world, named, pair), (other, *_), _ = run_forked(N, make_groups)
    seen = [(call.op, call.group, call.sent) for call in log]
    # In a pair, all_reduce sends 2 x 8 x 1/2 bytes; a broadcast to three 12 x 2/3.
    assert seen == [("all_reduce", pair, 8), ("broadcast", named, 8), ("barrier", world, 0)]
    assert len({world, named, pair}) == 3
    assert [call.op for call in other] == ["broadcast", "barrier"]


def test_ddp_is_counted_though_it_calls_from_cpp():
    def train(rank):
        CountingGroup.install()
        model = DistributedDataParallel(torch.nn.Linear(3, 2))
        with counted() as log:
            model(torch.ones(1, 3)).sum().backward()
        return log

    for log in run_forked(2, train):
        assert [(call.op, call.elements, call.sent) for call in log] == [("all_reduce", 8, 32)]


def test_calls_that_cannot_be_counted_raise():
    def call_from_cpp(rank):
        CountingGroup.install()
        name, x = dist.group.WORLD.group_name, torch.ones(2)
        with pytest.raises(RuntimeError, match="backend"):
            torch.ops._c10d_functional.all_gather_into_tensor(x, 2, name)
        with counted() as log:
            total = torch.ops._c10d_functional.all_reduce(x, "sum", name)
            assert torch.ops._c10d_functional.wait_tensor(total).tolist() == [2, 2]
        assert [call.op for call in log] == ["all_reduce"]

    run_forked(2, call_from_cpp)


def model_and_gradients(rank):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 33), torch.nn.Tanh(), torch.nn.Linear(33, 47))
    inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(rank))
    model(inputs).square().sum().backward()
    return model


@pytest.mark.parametrize(
    ("size", "sharding", "reduction"),
    [(2, "none", "fast"), (2, "zero1", "ordered"), (2, "zero2", "fast"),
     *([(3, "none", "ordered"), (3, "zero1", "fast"), (3, "zero2", "ordered")] * SOAK)],
)  # fmt: skip
def test_an_optimizer_steps_as_on_gloo(size, sharding, reduction):
    def step(rank):
        ends = []
        for group in (None, dist.new_group(backend="counting")):
            model = model_and_gradients(rank)
            opt = samestep.MuonAdamW(
                model, process_group=group, sharding=sharding, reduction=reduction
            )
            with counted(default=False) as log:
                opt.step()
            ends.append([p.detach() for p in model.parameters()])
        torch.testing.assert_close(*ends, rtol=0, atol=0)
        return log, sum(p.numel() * p.element_size() for p in model.parameters())

    logs, [total, *_] = zip(*run_forked(size, step), strict=True)
    # Every float is reduced and given back once, whoever owns it: on average, 2 P (N-1)/N.
    floats = [call for log in logs for call in log if call.dtype == torch.float32]
    assert sum(call.sent for call in floats) == 2 * total * (size - 1)
    # Besides them, only a few integers: which of the four parameters have a gradient.
    rest = [call for log in logs for call in log if call.dtype != torch.float32]
    assert sum(call.sent for call in rest) < 500 * size


def test_an_extra_collective_is_seen():
    def step(rank, *extra):
        CountingGroup.install()
        opt = samestep.MuonAdamW(model_and_gradients(rank))
        opt.register_step_post_hook(lambda *_: [collective() for collective in extra] and None)
        with counted() as log:
            opt.step()
        return [(call.op, call.sent) for call in log]

    plain = run_forked(2, step)
    more = run_forked(2, step, lambda: dist.all_reduce(torch.zeros(7)))
    assert more == [[*calls, ("all_reduce", 28)] for calls in plain]
    assert run_forked(2, step, dist.barrier) == [[*calls, ("barrier", 0)] for calls in plain]
