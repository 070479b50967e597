"""Copies of DTensors that the optimizer averages: every collective and byte of them is foreseen."""

import pytest
import torch

import samestep
from samestep.comm.groups import registry
from samestep.lab.estimate.collectives import Launches
from samestep.lab.estimate.memory import rank_memory
from samestep.plan.schedule import describe_operation
from tests.counting_group import CountingGroup
from tests.inside.estimate.parts import foreseen, training
from tests.inside.estimate.peaks import peak_bytes
from tests.inside.estimate.test_memory import parameters_of, storages
from tests.ranks import run_forked
from tests.soak import SOAK

OVERLAP = {"overlap_grad_reduce": True}
LAYOUTS = {
    "none": {"sharding": "none"},
    "zero1": {"sharding": "zero1"},
    "zero2": {},
    "zero2 overlap": {**OVERLAP},
    "ordered": {"reduction": "ordered"},
    "ordered none": {"reduction": "ordered", "sharding": "none"},
    "clipped": {"max_grad_norm": 1e-3},
    "measured": {"max_grad_norm": 1e-3, "update_rms": True},
    "bfloat16": {"dtype": torch.bfloat16, "master_weights": True},
    "gather": {"muon_schedule": "gather"},
    "cyclic": {"owners": "cyclic", "chunks_ahead": 0},
    "flat zero1": {"buffers": "flat", "sharding": "zero1"},
    "flat zero2": {"buffers": "flat", **OVERLAP},
    "flat zero1, both overlaps": {
        "buffers": "flat", "sharding": "zero1", **OVERLAP, "overlap_param_gather": True,
    },
}  # fmt: skip


def measured(rank, sizes, layouts):
    """Per layout: schedule, what a step launches, and bytes."""
    torch.set_num_threads(1)
    CountingGroup.install()
    found = {}
    for name in layouts:
        model, optimizer = training(sizes, LAYOUTS[name])
        step(model, optimizer, 0, rank)
        with samestep.FlightRecorder(last=4096) as recorder:
            step(model, optimizer, 1, rank)
        records = [(r.name, r.kind, r.elements, r.dtype, r.sent, r.ranks) for r in recorder.records]
        params = storages(parameters_of(optimizer))
        state = storages(t for own in optimizer.state.values() for t in own.values())
        before, passing = storages(buffers_of(optimizer)), 0
        for number in (2, 3):  # what is in flight at once is up to other ranks, too
            with peak_bytes() as peak:
                step(model, optimizer, number, rank)
            passing = max(passing, peak.value)
        bytes_of = sum(params.values()), sum(state.values()), sum(before.values()) + passing
        found[name] = optimizer.schedule_lines(), records, bytes_of
        registry.forget()
    return found


def step(model, optimizer, number, rank):
    model(10 * number + rank).backward()
    optimizer.step()
    optimizer.wait_for_parameters()
    optimizer.zero_grad()


def buffers_of(optimizer):
    """What flat gradients keep."""
    for placement in optimizer.shared_parameters:
        gradients = placement.reductions.gradients
        yield from getattr(gradients, "_buffers", {}).values()
        for spares in getattr(gradients, "_spare", {}).values():
            yield from spares


def ranks_of(grid, rank, peers):
    """The global ranks of a group."""
    mine = [grid.place(rank, grid.peers(axis)) for axis in grid.sizes]
    found = []
    for other in range(grid.ranks):
        places = [grid.place(other, grid.peers(axis)) for axis in grid.sizes]
        apart = [a for a, m, p in zip(grid.sizes, mine, places, strict=True) if m != p]
        if set(apart) <= set(peers.axes):
            found.append(other)
    return tuple(found)


def expected(plan, rank):
    grid = plan.grid
    records = []
    for each in Launches(plan).of_step(rank):
        transfer = each.of_rank(rank, grid)
        dtype = str(transfer.dtype).removeprefix("torch.")
        sent = transfer.sent(grid.place(rank, each.peers), each.peers.size)
        ranks = ranks_of(grid, rank, each.peers)
        records.append((each.name, each.traffic.kind, transfer.elements, dtype, sent, ranks))
    return records


def check(sizes, layouts):
    """Hold all of it against ranks; gives the largest share by which a peak was missed."""
    world = sizes[0] * sizes[1] * sizes[2]
    ranks = run_forked(world, measured, sizes, layouts)
    worst = {}
    for name in layouts:
        plan = foreseen(sizes, LAYOUTS[name])
        for rank, of_rank in enumerate(ranks):
            schedule, records, (params, state, passing) = of_rank[name]
            about = name, rank
            assert schedule == tuple(map(describe_operation, plan.schedule(rank))), about
            assert records == expected(plan, rank), about
            assert len(records) > 8, about
            memory = rank_memory(plan, rank)
            assert params == memory.parameters, (*about, memory)
            assert state == memory.state + memory.main_parameters, (*about, memory)
            if not plan.measures:  # sums for `metrics()` are not in it
                whole = params + state + passing
                worst[name] = max(worst.get(name, 0), abs(whole / memory.peak - 1))
    return worst


CASES = [((2, 1, 2), ["zero2", "flat zero1, both overlaps", "ordered"])]
if SOAK:
    CASES += [(sizes, list(LAYOUTS)) for sizes in ((2, 1, 2), (2, 2, 1), (3, 1, 1), (2, 2, 2))]


@pytest.mark.parametrize(("sizes", "layouts"), CASES, ids=str)
def test_everything_is_foreseen(sizes, layouts, record_property):
    worst = check(sizes, layouts)
    record_property("worst", worst)
    # As found: some bytes; bfloat16 with experts under tensor parallel 0.9%.
    assert max(worst.values()) < (0.01 if SOAK else 0.001), worst


@pytest.mark.parametrize("name", ["zero2", "ordered none", "flat zero2"])
def test_numbers_of_all_ranks_are_those_of_each(name):
    """What tables add up over a grid, against one rank after the other."""
    plan = foreseen((2, 2, 2), LAYOUTS[name])
    grid = plan.grid
    every = Launches(plan).of_step()
    together = sum(each.spread(each.sent_by_all(), grid) for each in every).flatten().tolist()
    for rank in range(grid.ranks):
        alone = sum(sent for _, _, _, _, sent, _ in expected(plan, rank))
        assert together[rank] == alone, (name, rank)
    assert len(set(together)) > 1
