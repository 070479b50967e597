"""What is planned is what ranks send: every collective of every layout, one by one."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import samestep
from samestep.comm.groups import registry
from samestep.lab.estimate.collectives import Launches
from samestep.lab.estimate.grid import Grid
from samestep.lab.estimate.grid_plan import SpreadOver, plan_on_grid
from samestep.lab.stress.models import Matrices
from samestep.lab.stress.sharded_training import new_training
from samestep.layout.boxes import Cut
from samestep.plan.schedule import describe_operation
from tests.inside.estimate.layouts import (
    MUON,
    SHAPES,
    AllPresent,
    Clipped,
    grid_plan_of,
    layouts_on,
    some_on,
)
from tests.ranks import run_forked
from tests.soak import SOAK, some, twin, twin_cases


def chosen(world):
    return layouts_on(world) if world == 2 else some_on(world)


def counted(rank, world, kind, reduction):
    """Per layout: lines of the plans, the schedule, and what the second step launched."""
    found = {}
    for layout in chosen(world):
        training = new_training(kind(3, world), layout, rank, reduction=reduction)
        training.step(0)
        training.optimizer.wait_for_parameters()
        with samestep.FlightRecorder(last=4096) as recorder:
            training.step(1)
            training.optimizer.wait_for_parameters()
        records = [
            (r.name, r.kind, r.elements, r.dtype, r.sent)
            for r in recorder.records
            if "FSDP" not in r.name  # FSDP2's own, of which test_fsdp is about
        ]
        optimizer = training.optimizer
        lines = [line for plan in optimizer.shared_parameters for line in plan.plan.lines()]
        lines += [line for plan in optimizer.sharded_parameters for line in plan.lines()[1:]]
        found[layout.name] = lines, optimizer.schedule_lines(), records
    return found


def expected(plan, rank):
    grid = plan.grid
    records = []
    for each in Launches(plan).of_step(rank):
        transfer = each.of(0 if each.among is None else grid.place(rank, each.among))
        dtype = str(transfer.dtype).removeprefix("torch.")
        sent = transfer.sent(grid.place(rank, each.peers), each.peers.size)
        records.append((each.name, each.traffic.kind, transfer.elements, dtype, sent))
    return records


CASES = [(2, AllPresent, "fast"), (4, Clipped, "fast"), (3, AllPresent, "ordered")]
if SOAK:
    CASES += [(8, AllPresent, "fast"), (8, Clipped, "ordered"), (4, AllPresent, "fast")]


@pytest.mark.parametrize(("world", "kind", "reduction"), some(CASES, every=3))
def test_every_collective_of_every_layout_is_foreseen(world, kind, reduction):
    ranks = run_forked(world, counted, world, kind, reduction)
    for layout in chosen(world):
        plan = grid_plan_of(layout, kind(3, world), world, reduction)
        for rank, found in enumerate(ranks):
            _, schedule, records = found[layout.name]
            assert records == expected(plan, rank), (layout.name, rank)
            assert len(records) > 2, layout.name
            assert schedule == tuple(map(describe_operation, plan.schedule(rank))), layout.name


def groups_of_their_own(rank, world, kind):
    """Experts on every other rank together, or copies of what pairs of ranks share."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Matrices(SHAPES)
    pairs = [registry.of_ranks(ranks) for ranks in ([0, 1], [2, 3])]
    strides = [registry.of_ranks(ranks) for ranks in ([0, 2], [1, 3])]
    pair = next(group for group in pairs if group is not None)
    stride = next(group for group in strides if group is not None)
    if kind == "experts":
        groups = [
            {"params": [n for n in SHAPES if n != "experts" and n not in MUON], "rule": "adamw"},
            {"params": [n for n in MUON if n != "experts"], "rule": "muon"},
            {"params": ["experts"], "rule": "muon", "process_group": stride.handle, "divisor": 4},
        ]
        more = {"groups": groups}
    else:
        more = {**AllPresent(3, world).options(), "process_group": pair.handle}
        more["outer_group"] = stride.handle
        more["reduction"] = "ordered" if kind == "ordered copies" else "fast"
    more |= {"crossover": 64, "bucket_size": 1500, "max_grad_norm": 1.0, "update_rms": True}
    optimizer = samestep.MuonAdamW(model, **more)
    for step in range(2):
        for place, param in enumerate(model.parameters()):
            param.grad = AllPresent(3, world).random(param.shape, place, step, rank)
        recorder = samestep.FlightRecorder(last=4096)
        with recorder:
            optimizer.step()
    return [(r.name, r.kind, r.elements, r.dtype, r.sent) for r in recorder.records]


def test_every_layout_is_chosen_on_two_ranks_and_on_more():
    assert len(chosen(2)) >= 11
    assert len({layout.name for layout in (*chosen(3), *chosen(4))}) >= 12


@twin_cases("ordered copies")
@pytest.mark.parametrize("kind", some(["experts", "copies", "ordered copies"]))
def test_groups_with_ranks_of_their_own(kind):
    ranks = run_forked(4, groups_of_their_own, 4, kind)
    with torch.device("meta"):
        model = Matrices(SHAPES)
    more = {"crossover": 64, "bucket_size": 1500, "max_grad_norm": 1.0, "update_rms": True}
    if kind == "experts":
        groups = [
            {"params": [n for n in SHAPES if n not in MUON], "rule": "adamw"},
            {"params": [n for n in MUON if n != "experts"], "rule": "muon"},
            {"params": ["experts"], "rule": "muon"},
        ]
        grid = Grid({"data": 2, "expert": 2})
        optimizer = samestep.MuonAdamW(model, groups=groups, **more)
        plan = plan_on_grid(optimizer, grid, own_peers={2: grid.peers("data")})
    else:
        grid = Grid({"replicate": 2, "data": 2})
        more["reduction"] = "ordered" if kind == "ordered copies" else "fast"
        optimizer = samestep.MuonAdamW(model, **{**AllPresent(3, 4).options(), **more})
        inner, outer = grid.peers("data"), grid.peers("replicate")
        plan = plan_on_grid(optimizer, grid, everyone=inner, outer=outer)
    for rank, records in enumerate(ranks):
        assert records == expected(plan, rank), rank


def copies_on_some_ranks(rank):
    """HSDP over tensor parallel, where norms lie on a mesh that leaves out the model axis."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "data", "model"))
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.RMSNorm(8))
    parallelize_module(model, mesh["model"], {"0": RowwiseParallel()})
    fully_shard(model, mesh=mesh["replicate", "data"])
    optimizer = samestep.MuonAdamW(model, max_grad_norm=1.0)
    for step in range(2):
        for param in model.parameters():
            generator = torch.Generator().manual_seed(step)
            grad = torch.randn(param.shape, generator=generator)
            param.grad = distribute_tensor(
                grad, param.device_mesh, param.placements, src_data_rank=None
            )
        with samestep.FlightRecorder(last=4096) as recorder:
            optimizer.step()
    return [(r.name, r.kind, r.elements, r.dtype, r.sent) for r in recorder.records]


@twin
def test_copies_on_some_ranks():
    """The others hear whether they have the same gradients."""
    ranks = run_forked(4, copies_on_some_ranks)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.RMSNorm(8))
    inner = (("replicate",), ("data",))
    lie = {
        "0.weight": SpreadOver((*inner, ("model",)), (Cut(), Cut(0), Cut(1)), by_fsdp=True),
        "1.weight": SpreadOver(inner, (Cut(), Cut(0)), by_fsdp=True),
    }
    plan = plan_on_grid(
        samestep.MuonAdamW(model, max_grad_norm=1.0),
        Grid({"replicate": 2, "data": 1, "model": 2}),
        spread=lambda name, param: lie[name],
    )
    for rank, records in enumerate(ranks):
        assert records == expected(plan, rank), rank
        assert [name for name, *_ in records].count("problems") == 1


def test_gradients_that_come_averaged_are_not_added_up():
    """Small ones are, rank by rank and gathered, where they come from this rank alone."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    for grads, expected_names in (
        ("local", {"reduction", "sums", "presence"}),
        ("reduced", {"presence"}),
    ):
        optimizer = samestep.AdamW(model, grads=grads, reduction="ordered", sharding="none")
        launches = Launches(plan_on_grid(optimizer, Grid({"data": 2}))).of_step()
        assert {each.name.split()[0] for each in launches} == expected_names
