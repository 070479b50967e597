"""Which rank of a mesh holds which box of its DTensors.

Used by every placement of DTensors: by those whose gradients FSDP2 or tensor parallel reduces, and
by those whose copies on other meshes the optimizer averages.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from samestep.comm.groups import RankGroup
from samestep.comm.meshes import gather_shards, held, mesh_group, replicated_here, whole_tensor
from samestep.layout.boxes import Box, Shape
from samestep.plan.layouts import Key, RankBoxes, whole
from samestep.plan.sharding import ParamSpec
from samestep.shards.dtensor.local_shards import placed_beside
from samestep.shards.state_store import Part, StateStore, boxes_of_ranks


class MeshLayout:
    """The DTensors of one mesh, by their index in a plan.

    group: the ranks of the mesh, in the order of their global ranks.
    held: which box of each tensor each of them holds.
    boxes: this rank's.
    replicated: the axes along which ranks hold copies and must have the same gradients.

    Args:
        everyone: The ranks of all meshes that hold copies of all of it; None: this mesh alone.
        number: Which of these meshes this is.

    Raises:
        ValueError: A placement that is not supported.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        specs: Sequence[ParamSpec],
        mesh: DeviceMesh,
        everyone: RankGroup | None = None,
        number: int = 0,
    ) -> None:
        self.mesh, self.group = mesh, mesh_group(mesh)
        self.params = [param for param in params if isinstance(param, DTensor)]
        self.device = self.params[0].to_local().device
        self.held: list[RankBoxes] = []
        for param, spec in zip(self.params, specs, strict=True):
            try:
                self.held.append(held(param, self.group))
            except ValueError as error:
                raise ValueError(f"parameter {spec.name!r}: {error}") from None
        self.boxes = [of_param.boxes[self.group.rank] for of_param in self.held]
        self.replicated = replicated_here(self.params, mesh, everyone or self.group, number)

    def lines(self, shares: Sequence[ParamSpec]) -> list[str]:
        """The placements of parameters as text; the same on all ranks and copies of a mesh."""
        placed = zip(shares, self.params, strict=True)
        return [f"mesh {tuple(self.mesh.shape)}"] + [
            f"{spec.name}: {tuple(param.shape)} as {param.placements}" for spec, param in placed
        ]

    def is_primary(self, index: int) -> bool:
        """Whether this rank's copy counts in sums over ranks."""
        return self.held[index].replicas[self.group.rank] == 0

    def store(
        self,
        tensors: Mapping[Key, tuple[Shape, int | None]],
        owned: Mapping[Key, Sequence[Sequence[Part]]] | None = None,
    ) -> StateStore:
        """A store of state that is sharded like the parameters.

        tensors: by (index of the parameter, key of the state) the shape of all of it, and of how
            many elements of the parameter, along its last dim, it has one; None: every rank has
            all of it.
        owned: of those that owners of blocks alone have, the parts by rank.
        """
        shapes = {key: shape for key, (shape, _) in tensors.items()}
        boxes: dict[Key, Sequence[Box]] = {}
        for (index, key), (shape, per) in tensors.items():
            everywhere = [whole(shape)] * self.group.size
            boxes[index, key] = everywhere if per is None else self.held[index].divided(per).boxes
        every, of_owners = boxes_of_ranks(boxes), owned or {}

        def parts_of(rank: int) -> Mapping[Key, Sequence[Part]]:
            return {**every(rank), **{key: by_rank[rank] for key, by_rank in of_owners.items()}}

        return StateStore("gather of the state", shapes, parts_of, self.group)

    def part(self, index: int, values: Tensor, per: int = 1) -> Tensor:
        """This rank's shard of a whole tensor or of another DTensor.

        per: of so many elements of the parameter, along its last dim, the tensor has one.
        """
        if isinstance(values, DTensor):
            param = self.params[index]
            if (values.device_mesh, values.placements) == (param.device_mesh, param.placements):
                return values.to_local()
            values = whole_tensor(values)
        return values[self.boxes[index].divided(per).slices]

    def whole(self, index: int, local: Tensor, per: int = 1) -> Tensor:
        """The whole tensor of local shards. Collective."""
        shape = whole(self.params[index].shape).divided(per).sizes
        boxes = self.held[index].divided(per)
        return gather_shards(local.detach(), boxes, shape, self.group, self.device)

    def beside(self, index: int, local: Tensor, per: int = 1) -> DTensor:
        """A DTensor with other values and the placements of a parameter."""
        return placed_beside(self.params[index], local, per)
