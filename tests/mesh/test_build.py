"""From degrees to a DeviceMesh: its groups, what is checked before there are any, and hosts."""

import copy
import math
import socket

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import samestep
from samestep.comm.groups import registry
from samestep.comm.integrity.agreement import RanksDisagreeError
from samestep.mesh import AXES, Degrees, DegreesError, build
from samestep.mesh.build import (
    DuplicateGroupError,
    axes_with_groups,
    make_groups,
    require_local_groups,
    require_single_groups,
)
from tests.limits import limit
from tests.mesh.fake import fake_world
from tests.mesh.strategies import degrees
from tests.ranks import run_forked, run_threaded
from tests.soak import SOAK


def asked(degrees):
    """The arguments of `build` for these degrees."""
    names = ("pp", "replicate", "ep", "tp", "sequence_parallel", "expert_tensor_parallel")
    return {name: getattr(degrees, name) for name in (*names, "ep_carries_data")}


def ranks_of(mesh):
    return sorted(mesh.mesh.flatten().tolist())


@given(degrees().filter(lambda d: d.world <= 32), st.data())
@settings(max_examples=300 if SOAK else 10)
def test_any_rank_of_any_mesh_has_its_axes_and_peers(degrees, data):
    rank = data.draw(st.integers(0, degrees.world - 1))
    with fake_world(rank, degrees.world):
        mesh = build(**asked(degrees))
        assert mesh.degrees == degrees
        assert mesh.device_mesh.mesh_dim_names == tuple(degrees.axes)
        assert mesh.device_mesh.mesh.flatten().tolist() == list(range(degrees.world))
        assert mesh.coordinates == degrees.coordinates(rank)
        for axis in AXES:
            one = mesh.axis(axis)
            assert (one is None) == (degrees.sizes[axis] == 1 and axis != "data")
            if one is not None:
                assert tuple(one.mesh.tolist()) == degrees.peers(rank, axis)
                assert one.get_local_rank() == degrees.coordinates(rank)[axis]
        copies = ["replicate"] if degrees.replicate > 1 else []
        carries = degrees.ep_carries_data
        assert ranks_of(mesh.expert) == list(degrees.peers(rank, "replicate", "data"))
        over = ["replicate", "data", *(["expert"] if carries else [])]
        assert ranks_of(mesh.dense) == list(degrees.peers(rank, *over))
        dense = "dense" if carries and degrees.ep > 1 else "data"
        assert mesh.dense.mesh_dim_names == (*copies, dense)
        assert mesh.expert.mesh_dim_names == (*copies, "data")
        # Every set of ranks has one group, and what parameters may be spread over is among them.
        made = [creation.members for creation in registry.creations]
        assert len(made) == len(set(made))
        count = len(made)
        for axes in axes_with_groups(degrees):
            for members in degrees.groups(*axes):
                registry.of_ranks(members)
        assert len(registry.creations) == count


def test_a_large_world():
    with fake_world(177, 256):
        mesh = build(tp=4, ep=4, pp=2, replicate=2, sequence_parallel=True)
        assert mesh.coordinates == Degrees(256, 2, 2, 4, 4).coordinates(177)
        assert tuple(mesh.dense.shape) == (2, 16)


def test_fsdp_over_the_mesh_with_matrices_and_experts_that_are_cut():
    """Parameters know all axes, gradients are right, and all groups are those of the registry."""

    def job(rank):
        mesh = samestep.mesh.build(tp=2, ep=2)
        torch.manual_seed(0)
        whole, stack = nn.Linear(8, 16, bias=False), torch.randn(4, 6, 6)
        inputs = torch.randn(4, 8)
        expected = 4 * inputs.mean(0)  # of the sum over outputs of the mean over the dense ranks
        layer = copy.deepcopy(whole)
        parallelize_module(layer, mesh.axis("model"), ColwiseParallel())
        expert = nn.Module()
        expert.up = nn.Parameter(distribute_tensor(stack, mesh.axis("expert"), [Shard(0)]))
        fully_shard(expert, mesh=mesh.expert)
        model = nn.Sequential(layer, nn.Threshold(-math.inf, 0.0))  # no view of its output
        fully_shard(model, mesh=mesh.dense)
        place = mesh.dense.get_local_rank()
        model(inputs[place : place + 1]).sum().backward()
        grad = layer.weight.grad.full_tensor()
        assert torch.allclose(grad, expected.expand(16, 8) / 4, atol=1e-6)
        assert torch.equal(layer.weight.full_tensor(), whole.weight)
        assert torch.equal(expert.up.full_tensor(), stack)
        assert layer.weight.device_mesh.mesh_dim_names == ("dense", "model")
        assert isinstance(expert.up, DTensor)
        assert expert.up.device_mesh.mesh_dim_names == ("data", "expert")
        count = len(registry.creations)
        samestep.Muon([layer.weight, expert.up])  # needs groups of whole meshes
        assert len(registry.creations) == count
        again = samestep.mesh.build(tp=2, ep=2)
        assert len(registry.creations) == count
        assert again.axis("model").get_group() is mesh.axis("model").get_group()
        return [str(creation) for creation in registry.creations]

    first, *others = run_forked(8, job)
    assert all(other == first for other in others)
    assert first[0] == f"group of ranks 0, 4, timeout {limit(120.0):g} s"


def test_sizes_are_checked_before_any_group_exists():
    def job(rank):
        with pytest.raises(DegreesError, match="tp 3 does not divide a world of 4 ranks"):
            build(tp=3)
        return registry.creations

    assert run_threaded(4, job) == [()] * 4


def test_ranks_that_ask_for_different_meshes_are_told_so():
    def job(rank):
        with pytest.raises(RanksDisagreeError) as caught:
            build(tp=2 if rank < 3 else 1)
        return str(caught.value), registry.creations

    for message, made in run_forked(4, job):
        assert message.startswith(
            "the mesh differs between ranks: rank 0 has 'tp = 2', rank 3 has 'tp = 1'"
        )
        assert made == ()


def test_ranks_that_would_make_groups_in_different_orders_are_told_so():
    def job(rank):
        groups = [[0, 1], [2, 3]]
        with pytest.raises(RanksDisagreeError, match="the list of groups to make differs"):
            make_groups(groups if rank else groups[::-1], None, torch.device("cpu"))
        return registry.creations

    assert run_forked(4, job) == [()] * 4


def test_groups_that_members_have_made_before_are_taken():
    """Without asking, ranks 2 and 3 would make the group of 0 and 1 once more, for themselves."""

    def job(rank):
        early = registry.of_members([0, 1]) if rank < 2 else None
        made = len(registry.creations)
        mesh = build(tp=2)
        group = registry.of(mesh.axis("model").get_group())
        total = torch.ones(1)
        dist.all_reduce(total, group=group.handle)
        assert total.item() == 2
        return (group is early) == (rank < 2), len(registry.creations) - made

    assert run_forked(4, job) == [(True, 3)] * 4


@pytest.mark.parametrize("as_mesh", [True, False])
def test_groups_that_the_user_has_made_are_taken(as_mesh):
    def job(rank):
        own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        handles = own.get_all_groups()
        if not as_mesh:  # torch gives other ranks a member of no group
            handles = [*handles, dist.GroupMember.NON_GROUP_MEMBER]
        mesh = build(tp=2, groups=own if as_mesh else handles)
        taken = [
            mesh.axis(name).get_group() is handle
            for name, handle in zip(("data", "model"), own.get_all_groups(), strict=True)
        ]
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=mesh.axis("model").get_group())
        assert build(tp=2).axis("model").get_group() is mesh.axis("model").get_group()
        return taken, registry.creations, total.item()

    for rank, found in enumerate(run_forked(4, job)):
        assert found == ([True, True], (), 1.0 if rank < 2 else 5.0)


def test_groups_that_do_not_fit_are_refused_on_every_rank():
    def job(rank):
        handles = {ranks: dist.new_group(list(ranks)) for ranks in [(0, 1), (2, 3), (1, 2, 3)]}
        mine = [handle for ranks, handle in handles.items() if rank in ranks]
        with pytest.raises(ValueError, match="groups= has an unusable group") as other:
            build(tp=2, groups=mine)
        pair = handles[0, 1] if rank < 2 else handles[2, 3]
        with pytest.raises(ValueError, match="groups= has an unusable group") as lacking:
            build(tp=2, groups=[] if rank == 3 else [pair])
        build(tp=2)
        with pytest.raises(ValueError, match="groups= has an unusable group") as twice:
            build(tp=2, groups=[pair])
        return str(other.value), str(lacking.value), str(twice.value)

    for other, lacking, twice in run_forked(4, job):
        assert other == (
            "groups= has an unusable group "
            "of ranks 1, 2, 3, and the mesh needs none of these ranks: leave "
            "it out. The mesh needs groups of the ranks "
            "[0, 1], [0, 1, 2, 3], [0, 2], [1, 3], [2, 3]"
        )
        assert lacking == (
            "groups= has an unusable group "
            "of ranks 2, 3 on rank 2, and not on rank 3: every rank gives "
            "the groups that it is in"
        )
        assert twice == (
            "groups= has an unusable group "
            "of ranks 0, 1, which have another group already on rank 0: "
            "give groups to the first mesh that needs them"
        )


def test_the_timeout_of_new_groups():
    def job(rank):
        mesh = build(tp=2, timeout=3)
        backend = mesh.axis("model").get_group()._get_backend(torch.device("cpu"))
        return backend.options._timeout.total_seconds()

    assert run_forked(4, job) == [3.0] * 4


def test_a_timeout_of_nothing_is_refused():
    def job(rank):
        with pytest.raises(ValueError, match="mesh: timeout must be above 0 seconds, got 0"):
            build(timeout=0)

    run_threaded(1, job)


def test_groups_of_layers_stay_inside_a_host():
    def job(rank):
        socket.gethostname = lambda: "north" if rank < 2 else "south"
        with pytest.raises(DegreesError) as caught:
            build(ep=2, tp=2)
        assert registry.creations == ()
        assert build(ep=2, tp=2, across_hosts=True).hosts == ("north", "north", "south", "south")
        assert build(tp=2).axis("model").size() == 2
        return str(caught.value)

    for message in run_forked(4, job):
        assert message == (
            "groups of the model and expert axes must stay inside a host. ep 2: ranks 0, 2 span "
            "north (rank 0) and south (rank 2), and 1 more groups do. Choose ep x tp from 1, 2, or "
            "allow it with across_hosts=True"
        )


@given(degrees(), st.integers(1, 9))
def test_what_is_offered_for_hosts_stays_inside_them(degrees, per_host):
    hosts = [f"host{rank // per_host}" for rank in range(degrees.world)]
    inside = degrees.ep * degrees.tp
    try:
        require_local_groups(degrees, hosts)
    except DegreesError as error:
        offers = str(error).partition("ep x tp from ")[2].partition(", or allow")[0]
        for offer in map(int, offers.split(", ")):
            require_local_groups(Degrees(degrees.world // offer * offer, tp=offer), hosts)
    else:
        groups = [g for axis in ("model", "expert") for g in degrees.groups(axis)]
        assert all(len({hosts[rank] for rank in group}) == 1 for group in groups)
        assert inside == 1 or per_host > 1


def test_without_a_default_group_there_is_no_mesh():
    with pytest.raises(RuntimeError, match="init_process_group first"):
        build(tp=2)


def test_an_axis_that_does_not_exist():
    def job(rank):
        with pytest.raises(ValueError, match="the mesh has no axis 'tensor'; its axes are pipe"):
            build().axis("tensor")

    run_threaded(1, job)


def test_a_group_that_was_made_twice_is_found():
    def job(rank):
        registry.of_ranks([0, 1])
        require_single_groups()
        registry._by_members.clear()  # as if it had been forgotten
        registry.of_ranks([0, 1])
        with pytest.raises(DuplicateGroupError, match="there are 2 groups of ranks 0, 1: take"):
            require_single_groups()

    run_threaded(3, job)
