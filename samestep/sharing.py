"""Parameter groups as ranks share them: what a plan needs to know."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from samestep.layout.blocks import Block
from samestep.param_groups import Group, options_of, parameter_names, rule_of
from samestep.plan.sharding import ParamSpec
from samestep.state import needs_master


def mesh_of(param: Tensor) -> Any:
    """The mesh of a DTensor; None for a plain tensor."""
    return getattr(param, "device_mesh", None)


class PlanMembers(NamedTuple):
    """The parameters of a plan in order of use, with their specs and their groups' options."""

    params: tuple[Tensor, ...]
    specs: tuple[ParamSpec, ...]
    option_lines: list[str]


def plan_members(
    groups: Sequence[Group],
    indices: Iterable[int],
    blocks: Mapping[Tensor, list[Block] | None],
    place_of_use: Mapping[Tensor, int],
    master_weights: bool,
    mesh: object = None,
) -> PlanMembers:
    """What a plan of the groups at `indices` is made of: of their parameters those on `mesh`."""
    members: list[tuple[Tensor, ParamSpec]] = []
    lines = []
    for index in indices:
        group = groups[index]
        lines += [f"param_groups[{index}]: {k} = {v}" for k, v in options_of(group).items()]
        kept = rule_of(group).state_shapes((64, 64), group).values()
        for name, param in zip(parameter_names(group, index), group["params"], strict=True):
            if mesh_of(param) != mesh:
                continue
            cut = blocks[param]
            spec = ParamSpec(
                name,
                tuple(param.shape),
                str(param.dtype),
                index,
                group["rule"],
                None if cut is None else tuple(cut),
                sum(map(prod, kept)) / 64**2 + needs_master(param, master_weights),
            )
            members.append((param, spec))
    members.sort(key=lambda member: place_of_use.get(member[0], -1))
    params, specs = zip(*members, strict=True)
    return PlanMembers(params, specs, lines)
