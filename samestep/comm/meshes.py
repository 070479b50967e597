"""Boxes of DTensors, and process groups of their meshes."""

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from samestep.comm.exchange import launch_gather
from samestep.comm.groups import RankGroup, registry
from samestep.comm.replicated_votes import ReplicatedHere
from samestep.layout.boxes import Box, Cut, Shape, all_boxes, local_box, replicas
from samestep.plan.exchanges import Exchange
from samestep.plan.layouts import RankBoxes, by_box, whole, whole_on
from samestep.plan.replicated_gradients import line_through, replicated_along

_WAY_OUT = (
    "Give all copies of a part the same gradient, of zeros if these ranks have not used it; or "
    "leave each of them a summand, a DTensor that is Partial() along this axis of the mesh: the "
    "optimizer adds them up, and takes zeros where there is none"
)


def mesh_group(mesh: DeviceMesh) -> RankGroup:
    """Return all ranks of a mesh as one group; made at the first call, by these ranks alone."""
    if mesh.ndim == 1:
        return registry.of(mesh.get_group())
    return registry.of_members(mesh.mesh.flatten().tolist())


def axes_group(mesh: DeviceMesh, axes: Sequence[int]) -> RankGroup:
    """Return the group of ranks that differ from this one on `axes` alone; see `mesh_group`."""
    if len(axes) == 1:
        return registry.of(mesh.get_group(axes[0]))
    here = mesh.get_coordinate()
    assert here is not None
    place = tuple(slice(None) if axis in axes else here[axis] for axis in range(mesh.ndim))
    return registry.of_members(mesh.mesh[place].flatten().tolist())


def shard_places(mesh: DeviceMesh) -> dict[int, tuple[int, ...]]:
    """Return the index of the shard that each rank of a mesh has along each axis.

    The index may differ from the coordinate: torch scatters, gathers and shards by the rank
    in an axis' process group, in the order of global ranks, even if permuted in the mesh.

    Raises:
        ValueError: The order of ranks differs between lines along an axis, so that collectives
            would combine different shards. Raised on every rank of the mesh.
    """
    places = []
    for axis in range(mesh.ndim):
        order = mesh.mesh.argsort(dim=axis).argsort(dim=axis)
        lines = order.movedim(axis, 0).reshape(mesh.size(axis), -1)
        if not bool((lines == lines[:, :1]).all()):
            name = repr(mesh.mesh_dim_names[axis]) if mesh.mesh_dim_names else str(axis)
            raise ValueError(
                f"the ranks of the mesh {mesh.mesh.tolist()} are in different orders along its "
                f"axis {name}: torch shards by the order of ranks, not by their places in the "
                "mesh, and would combine different parts of one parameter. Build the mesh with "
                "ranks that ascend along each axis, as init_device_mesh does"
            )
        places.append(order)
    orders = zip(*(order.flatten().tolist() for order in places), strict=True)
    return dict(zip(mesh.mesh.flatten().tolist(), orders, strict=True))


def place_here(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the index of the shard that this rank has along each axis."""
    return shard_places(mesh)[dist.get_rank()]


def held(tensor: DTensor, group: RankGroup) -> RankBoxes:
    """Return the boxes of a DTensor on all ranks of a mesh; raise for unsupported placements."""
    mesh = tensor.device_mesh
    cuts = [_cut(placement) for placement in tensor.placements]
    shape, mesh_shape = tuple(tensor.shape), tuple(mesh.shape)
    by_place = list(
        zip(all_boxes(shape, mesh_shape, cuts), replicas(mesh_shape, cuts), strict=True)
    )
    strides = [prod(mesh_shape[axis + 1 :]) for axis in range(mesh.ndim)]
    places = {
        rank: sum(at * stride for at, stride in zip(place, strides, strict=True))
        for rank, place in shard_places(mesh).items()
    }
    boxes, copies = zip(*(by_place[places[rank]] for rank in group.members), strict=True)
    mine, here = boxes[group.rank], tuple(tensor.to_local().shape)
    if not prod(shape) and not prod(here) and here != mine.sizes:
        # FSDP2 leaves no rows on any rank of a matrix that has no columns.
        mine = Box((0,) * len(shape), here)
        boxes = (*boxes[: group.rank], mine, *boxes[group.rank + 1 :])
    if here != mine.sizes:
        raise ValueError(
            f"rank {dist.get_rank()} holds a shard of shape {here}, and by its "
            f"placements {tensor.placements} it should have {mine.sizes}: build the "
            "DTensor with distribute_tensor or fully_shard"
        )
    return RankBoxes(boxes, copies)


def replicated_here(
    tensors: Sequence[DTensor], mesh: DeviceMesh, ranks: RankGroup, copy: int = 0
) -> ReplicatedHere | None:
    """Return the parameters that are replicated along axes of a mesh; None if none is.

    ranks: the ranks of all meshes that hold copies of the parameters. copy: index of this mesh.
    """
    sizes, here = tuple(mesh.shape), mesh.get_coordinate()
    assert here is not None
    replicated = [
        [axis for axis, place in enumerate(tensor.placements) if place.is_replicate()]
        for tensor in tensors
    ]
    along = replicated_along(sizes, replicated, ranks.size // mesh.size())
    lines = tuple(line_through(sizes, here, each.axis, copy) for each in along)
    return ReplicatedHere(along, lines, ranks, _WAY_OUT) if along else None


def own_box(tensor: DTensor) -> Box:
    group = mesh_group(tensor.device_mesh)
    return held(tensor, group).boxes[group.rank]


def box_in_forward(tensor: DTensor) -> Box:
    """Return the box that this rank computes with: its shard under tensor parallel.

    FSDP2 cuts a sharded dim again, into strided shards, which are gathered in forward.
    """
    cuts = [_cut(placement) for placement in tensor.placements]
    strided = [axis for axis, cut in enumerate(cuts) if cut.strided]
    return box_without(tensor, strided)


def box_without(tensor: DTensor, axes: Sequence[int]) -> Box:
    """Return the box of this rank if the mesh axes `axes` did not shard."""
    mesh = tensor.device_mesh
    cuts = [
        Cut() if axis in axes else _cut(placement)
        for axis, placement in enumerate(tensor.placements)
    ]
    return local_box(tuple(tensor.shape), tuple(mesh.shape), cuts, place_here(mesh))


def whole_tensor(tensor: DTensor) -> Tensor:
    """Return the full tensor of a DTensor, on every rank of its mesh. Collective.

    The result is right also where torch's own `full_tensor` is wrong or hangs: uneven strided
    shards, and uneven shards of a mesh whose ranks are permuted.
    """
    group = mesh_group(tensor.device_mesh)
    local = tensor.to_local().detach()
    return gather_shards(local, held(tensor, group), tuple(tensor.shape), group, tensor.device)


def gather_shards(
    local: Tensor, boxes: RankBoxes, shape: Shape, group: RankGroup, device: torch.device
) -> Tensor:
    """Return the full tensor of `shape`, on every rank of a group. Collective.

    local: this rank's box, which may be on another device than `device`, from which ranks send.
    """
    result = torch.empty(shape, dtype=local.dtype, device=device)
    if not result.numel():
        return result
    source, target = by_box(enumerate(boxes.boxes)), whole_on(shape, range(group.size))
    key = 0, ""
    exchange = Exchange("gather of a DTensor", {key: source}, {key: target}, group.size)
    own = {key: {boxes.boxes[group.rank]: local}}
    launch_gather(exchange, own, {key: {whole(shape): result}}, group, result)()
    return result


def _cut(placement: object) -> Cut:
    """Return a placement as a Cut."""
    name = type(placement).__name__
    if name == "Replicate":
        return Cut()
    if name in ("Shard", "_StridedShard"):
        factor = getattr(placement, "split_factor", 1)
        return Cut(placement.dim, factor, strided=name == "_StridedShard")  # type: ignore[attr-defined]
    raise ValueError(
        f"placement {placement} of a parameter is not supported: give parameters that "
        "are Replicate() or Shard() on each mesh axis, and reduce a Partial() one first"
    )
