"""Shards of DTensors and of their blocks on one rank, in one step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from samestep.comm.groups import RankGroup
from samestep.groups.group_checks import same_objects
from samestep.groups.param_groups import Group, rule_of
from samestep.layout.boxes import Box, local_of
from samestep.plan.chunks import PlannedBlock
from samestep.plan.layouts import RankBoxes
from samestep.plan.sharding import ParamSpec
from samestep.rules.rule import StagedRule, is_staged
from samestep.rules.state import GlobalElementIndex, State
from samestep.update.plain import GroupMath, GroupMaths, Operand, put

Slices = tuple[slice, ...]


@dataclass(eq=False)
class LocalShards:
    """Shards of the tensors of one mesh on this rank.

    The tensors are parameters, or blocks of which this rank is the primary holder among copies.

    held: who of the mesh, `group`, holds what of each tensor.
    wholes: where the elements of each tensor are in a whole parameter; None: nothing is rounded
        at random.
    counted: the tensors of which this rank counts among ranks of other meshes; None: all.
    share: of sums over all ranks that the optimizer has, since other meshes hold copies.
    values, states: to write into, of this rank alone; as the last step has found them.
    version: larger than before when some of these were replaced; views of them are made once.
    gradients: of this step; None: only others may have one.
    groups: there from when state is made.
    present: whether each tensor has a gradient on any rank, in this step.
    owned: the blocks of each tensor that this rank owns, by number.
    """

    specs: Sequence[ParamSpec]
    held: Sequence[RankBoxes]
    group: RankGroup
    device: torch.device
    wholes: Sequence[GlobalElementIndex | None]
    counted: Sequence[bool] | None = None
    share: float = 1.0
    values: Sequence[Tensor] = field(init=False, default=())
    states: Sequence[State] = field(init=False, default=())
    version: int = field(init=False, default=0)
    gradients: list[Tensor | None] = field(init=False, default_factory=list)
    groups: Sequence[Group] = field(init=False)
    present: list[bool | Tensor] = field(init=False, default_factory=list)
    owned: Sequence[Sequence[int]] = field(init=False, default=())
    _addresses: list[int] = field(init=False, default_factory=list)  # of values
    _tensors: list[Tensor] = field(init=False, default_factory=list)  # of states, as they are kept

    def __post_init__(self) -> None:
        self.elements = [  # of a whole parameter, that each shard has
            None if where is None else where.at(where.elements[self.box(index).slices])
            for index, where in enumerate(self.wholes)
        ]

    def box(self, index: int) -> Box:
        """The box of a tensor that this rank holds."""
        return self.held[index].boxes[self.group.rank]

    def look_at(self, values: Sequence[Tensor], states: Sequence[State]) -> None:
        """Use the parameters and state of this step."""
        tensors = [tensor for state in states for tensor in state.values()]
        addresses = [value.data_ptr() for value in values]
        if addresses == self._addresses and same_objects(tensors, self._tensors):
            return
        self._addresses, self._tensors = addresses, tensors
        self.values = values
        self.states = [{key: local_of(own) for key, own in state.items()} for state in states]
        self.version += 1

    def gradient_of(self, index: int) -> Tensor:
        """Gradient of a shard; zeros if only other ranks have one."""
        value, grad = self.values[index], self.gradients[index]
        return torch.zeros_like(value) if grad is None else grad.view(value.shape)

    def is_of_whole(self, index: int, key: str) -> bool:
        """Whether a state belongs to whole blocks, such as a variance."""
        return self.specs[index].stored[key].per is None

    def is_owned(self, index: int, key: str) -> bool:
        """Whether only owners of blocks have a state."""
        return self.specs[index].stored[key].owned

    def is_primary(self, index: int) -> bool:
        """Whether this rank's copy of a shard counts in sums over ranks."""
        counts = self.counted is None or self.counted[index]
        return counts and self.held[index].replicas[self.group.rank] == 0

    def staged(self, planned: PlannedBlock, math: GroupMaths) -> tuple[StagedRule, GroupMath]:
        """The staged rule of a block."""
        of_group = math(self.specs[planned.param].group, self.device)
        assert is_staged(of_group.rule)
        return of_group.rule, of_group

    def put(
        self, planned: PlannedBlock, of_group: GroupMath, pairs: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        """Write new values, unless the parameter is absent or the step is skipped."""
        present, only_if = self.present[planned.param], of_group.only_if
        if present is False:
            return
        if isinstance(present, Tensor):
            only_if = present if only_if is None else only_if & present
        for old, value in pairs:
            put(old, value, only_if)

    def count(self, planned: PlannedBlock, of_group: GroupMath, direction: Tensor) -> None:
        """Add squares of a direction, if update sizes are measured."""
        present = self.present[planned.param]
        if of_group.sizes is None or present is False:
            return
        flag = present if isinstance(present, Tensor) else None
        counted = self.is_primary(planned.param)
        operand = Operand(direction, direction, {}, flag, counted, self.share)
        wide = direction.to(torch.promote_types(direction.dtype, torch.float32))
        square = wide.square().sum(dtype=torch.float64).reshape(1)
        of_group.sizes.add(self.specs[planned.param].group, [operand], square)


def divided(slices: Slices, per: int) -> Slices:
    """Boxes of a tensor with one element per `per` neighbours in the last dim."""
    if per == 1:
        return slices
    return (*slices[:-1], slice(slices[-1].start // per, slices[-1].stop // per))


def refuse_unstaged(spec: ParamSpec, group: Group) -> None:
    """Raise if a rule without stages is used for DTensors."""
    rule = rule_of(group)
    if spec.blocks is not None and not is_staged(rule):
        raise ValueError(
            f"rule {rule.name!r} has only update(), and {spec.name!r} is a DTensor: "
            "give the rule prepare(), transform() and finish(), or use plain parameters"
        )


def placed_beside(param: DTensor, local: Tensor, per: int = 1) -> DTensor:
    """A DTensor with other values and the placements of a parameter.

    `per`: of so many elements of the parameter, along its last dim, it has one.

    torch's `from_local` would move it to the device of the mesh, so FSDP2 makes parameters that it
    offloads as it is done here.
    """
    shape, stride = param.shape, param.stride()
    if per > 1:
        like = torch.empty((*shape[:-1], shape[-1] // per), device="meta")
        shape, stride = like.shape, like.stride()
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    spec = DTensorSpec(param.device_mesh, tuple(param.placements), tensor_meta=meta)
    make: Any = DTensor
    found: DTensor = make(local, spec, requires_grad=False)
    return found
