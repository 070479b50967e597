"""State that stays on the host is foreseen: windows, staging buffers, and bytes of the host."""

import pytest
import torch

import samestep
from samestep.comm.groups import registry
from samestep.lab.estimate.grid import one_axis
from samestep.lab.estimate.grid_plan import SpreadOver, plan_on_grid
from samestep.lab.estimate.hardware import PRESETS
from samestep.lab.estimate.memory import rank_memory
from samestep.lab.estimate.timeline import simulate
from samestep.layout.boxes import Cut
from samestep.plan import windows
from samestep.plan.schedule import Fetch, describe_operation, staging_bytes
from tests.inside.estimate.parts import foreseen, training
from tests.ranks import run_forked
from tests.test_offload import LAYOUTS, OPTIONS, WINDOW, Net, assert_same, build, train

BITS = {"dtype": torch.bfloat16, "master_weights": True}


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch):
    monkeypatch.setattr(windows, "WINDOW_BYTES", WINDOW)


def seen(optimizer):
    """Of a rank that has taken a step."""
    state = [getattr(t, "_local_tensor", t) for s in optimizer.state.values() for t in s.values()]
    on_host = sum(tensor.nbytes for tensor in state)
    return optimizer.schedule_lines(), optimizer._runner.staging.nbytes, on_host


def check(plan, rank, found):
    schedule, memory = plan.schedule(rank), rank_memory(plan, rank)
    assert tuple(map(describe_operation, schedule)) == found[0]
    assert sum(staging_bytes(schedule)) == memory.staging == found[1]
    assert (memory.on_host, memory.state, memory.main_parameters) == (found[2], 0, 0)


def planned(**options):
    """The same optimizer on two ranks that are not there."""
    own = {**OPTIONS, **options, "offload": "state"}
    dtype, fsdp = own.pop("dtype", torch.float32), own.pop("fsdp", False)
    with torch.device("meta"):
        model = Net().to(dtype)

    def spread(name, param):
        over = SpreadOver((("data",),), (Cut(0),), padded=True, by_fsdp=True)
        return over if fsdp and param.ndim else None

    return plan_on_grid(samestep.MuonAdamW(model, **own), one_axis(2), spread=spread)


def test_windows_of_two_ranks():
    def job(rank):
        return [seen(train(*build("state", **own), rank, [0])[1]) for own in LAYOUTS.values()]

    for rank, layouts in enumerate(run_forked(2, job)):
        for own, found in zip(LAYOUTS.values(), layouts, strict=True):
            check(planned(**own), rank, found)


def test_windows_of_one_process():
    _, optimizer = train(*build("state", torch.bfloat16), 0, [0])
    with torch.device("meta"):
        model = Net().to(torch.bfloat16)
    plan = plan_on_grid(samestep.MuonAdamW(model, offload="state", **OPTIONS), one_axis(1))
    check(plan, 0, seen(optimizer))


def test_copies_of_parts():
    """DTensors of a mesh of which another mesh has copies: the same bits, and foreseen."""

    def job(rank):
        found = []
        for offload in (None, "state"):
            model, optimizer = training((2, 1, 2), {**BITS, "offload": offload})
            for number in range(3):
                model(10 * number + rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append((model, optimizer))
        assert_same(*found)
        result = seen(optimizer)
        registry.forget()
        return result

    plan = foreseen((2, 1, 2), {**BITS, "offload": "state"})
    for rank, found in enumerate(run_forked(4, job)):
        check(plan, rank, found)
        assert any("chunk" in line for line in found[0])


def test_a_step_takes_at_least_as_long_as_its_bytes():
    plan = planned(sharding="none", dtype=torch.bfloat16)
    hardware = PRESETS["h200x8"]
    plain = plan_on_grid(build(None, torch.bfloat16, sharding="none")[1], one_axis(2))
    one_way = sum(op.nbytes for op in plan.schedule() if isinstance(op, Fetch))
    slow = simulate(plan, hardware.__class__(**{**vars(hardware), "host_rate": 1e6}))
    fast = simulate(plan, hardware.__class__(**{**vars(hardware), "host_rate": 1e15}))
    alone = simulate(plain, hardware).seconds
    assert one_way / 1e6 < slow.seconds < 1.5 * one_way / 1e6 + alone
    assert alone * 0.99 < fast.seconds < alone * 1.01
