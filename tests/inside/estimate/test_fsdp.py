"""FSDP2's own collectives, counted by a process group that sees all of them."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from samestep.lab.estimate.fsdp import Unit, fsdp_collectives
from samestep.lab.estimate.grid import Grid
from samestep.lab.stress.models import GPT
from tests.counting_group import counted
from tests.ranks import run_forked
from tests.soak import SOAK, twin_cases


def sent_by_fsdp(rank, copies):
    with counted() as log:
        torch.manual_seed(0)
        model = GPT(vocabulary=41, width=18, layers=2)
        shape = (copies, dist.get_world_size() // copies)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        mesh = mesh if copies > 1 else mesh["shard"]
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(2):
            before = len(log)
            model(torch.randint(41, (2, 7)), recycled=True, second=True).backward()
            model.zero_grad()
    return [(call.op, call.sent) for call in log[before:]]


@twin_cases("4-2")
@pytest.mark.parametrize(
    ("world", "copies"), [(2, 1), (4, 2), *([(3, 1), (8, 1), (8, 4)] if SOAK else [])]
)
def test_gathers_and_reductions_are_foreseen(world, copies):
    with torch.device("meta"):
        model = GPT(vocabulary=41, width=18, layers=2)
    inner = {p for layer in model.layers for p in layer.parameters()}
    rest = tuple(p for p in model.parameters() if p not in inner)
    grid = Grid({"replicate": copies, "shard": world // copies})
    over = {"shard": grid.peers("shard"), "replicate": grid.peers("replicate")}
    units = [Unit("outermost", rest, reshards=False, **over)]
    units += [
        Unit(f"layer {i}", tuple(each.parameters()), **over) for i, each in enumerate(model.layers)
    ]
    foreseen = fsdp_collectives(units)
    ranks = run_forked(world, sent_by_fsdp, copies)
    for rank, calls in enumerate(ranks):
        sizes = [
            (each.traffic.kind, each.of(0).sent(grid.place(rank, each.peers), each.peers.size))
            for each in foreseen
        ]
        assert sorted(calls) == sorted(sizes), rank
