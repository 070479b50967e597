"""Boxes against torch's own shards, and what holds for any mesh."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from samestep.layout.boxes import Box, Cut, all_boxes, local_box, replicas
from tests.ranks import run_forked
from tests.soak import some, twin_cases


@st.composite
def meshes(draw):
    """A shape, a mesh and cuts as torch makes them: plain shards, and FSDP over tensor parallel."""
    ndim = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=ndim, max_size=ndim)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    cuts = [Cut(draw(st.one_of(st.none(), st.integers(0, ndim - 1)))) for _ in mesh]
    for axis in range(len(mesh) - 2, -1, -1):
        after = 1
        for other in range(axis + 1, len(mesh)):
            if cuts[other].dim == cuts[axis].dim:
                after *= mesh[other]
        if cuts[axis].dim is not None and after > 1 and draw(st.booleans()):
            cuts[axis] = Cut(cuts[axis].dim, after, strided=True)
    return shape, mesh, cuts


@given(meshes())
def test_every_element_is_held_once_per_replica(case):
    shape, mesh, cuts = case
    boxes, copies = all_boxes(shape, mesh, cuts), replicas(mesh, cuts)
    for copy in range(max(copies) + 1):
        held = torch.zeros(shape, dtype=torch.int64)
        for box, number in zip(boxes, copies, strict=True):
            if number == copy:
                held[box.slices] += 1
        assert held.eq(1).all()


@given(meshes())
def test_boxes_of_ranks_are_those_of_their_coordinates(case):
    shape, mesh, cuts = case
    coordinates = product(*map(range, mesh))
    boxes = [local_box(shape, mesh, cuts, coordinate) for coordinate in coordinates]
    assert boxes == all_boxes(shape, mesh, cuts)


def test_boxes():
    one, other = Box((0, 2), (4, 6)), Box((3, 0), (5, 3))
    assert one.overlap(other) == other.overlap(one) == Box((3, 2), (1, 1))
    assert one.overlap(Box((4, 0), (1, 9))).numel == 0
    assert Box((3, 2), (1, 1)).within(one) == Box((3, 0), (1, 1))
    assert Box((0, 0), (2, 3)).numel == 6


def test_an_order_of_cuts_that_is_not_known_is_refused():
    with pytest.raises(
        ValueError, match=r"axis 0 shards dim 0 as _StridedShard with split_factor 3, .* into 2"
    ):
        all_boxes((8,), (2, 2), [Cut(0, 3, strided=True), Cut(0)])


def found_on_this_rank(tensor, shape):
    """The box in which the local tensor lies, read off a tensor that numbers its elements."""
    local = tensor.to_local()
    if not local.numel():
        return None
    flat = local.reshape(-1)[0].item()
    offsets = [int(i) for i in torch.unravel_index(torch.tensor(int(flat)), shape)]
    return Box(tuple(offsets), tuple(local.shape))


PLACEMENTS = {
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "hsdp": ((2, 2), [Replicate(), Shard(0)]),
    "both dims": ((2, 2), [Shard(0), Shard(1)]),
    "rows twice": ((2, 2), [Shard(0), Shard(0)]),
}


@twin_cases("rows", "columns", "rows twice")
@pytest.mark.parametrize("name", PLACEMENTS)
def test_torchs_shards(name):
    mesh_shape, placements = PLACEMENTS[name]
    cuts = [Cut(p.dim if isinstance(p, Shard) else None) for p in placements]

    def job(rank):
        mesh = init_device_mesh("cpu", mesh_shape)
        for shape in [(8, 6), (33, 5), (5, 7), (1, 3), (3, 3, 2)]:
            numbered = torch.arange(torch.Size(shape).numel()).view(shape).float()
            tensor = distribute_tensor(numbered, mesh, placements)
            box = local_box(shape, mesh_shape, cuts, mesh.get_coordinate())
            assert torch.equal(tensor.to_local(), numbered[box.slices]), shape
            assert found_on_this_rank(tensor, shape) in (None, box)

    run_forked(4, job)


@twin_cases("2-3")
@pytest.mark.parametrize(("data", "model"), some([(2, 2), (3, 2), (2, 3)]))
def test_fsdp_over_tensor_parallel(data, model):
    """7 rows on 3 x 2 is where torch's own helper is wrong."""

    def job(rank):
        mesh = init_device_mesh("cpu", (data, model), mesh_dim_names=("data", "model"))
        net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 4, bias=False))
        for index, param in enumerate(net.parameters()):
            values = torch.arange(param.numel()).view(param.shape).float()
            param.data.copy_(values + 1000 * index)
        whole = [param.detach().clone() for param in net.parameters()]
        parallelize_module(net, mesh["model"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(net, mesh=mesh["data"])
        for param, values in zip(net.parameters(), whole, strict=True):
            cuts = []
            for placement in param.placements:
                strided = type(placement).__name__ == "_StridedShard"
                factor = getattr(placement, "split_factor", 1)
                dim = None if placement.is_replicate() else placement.dim
                cuts.append(Cut(dim, factor, strided))
            box = local_box(tuple(param.shape), (data, model), cuts, mesh.get_coordinate())
            assert torch.equal(param.to_local(), values[box.slices])

    run_forked(data * model, job)
