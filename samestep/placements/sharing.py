"""How ranks share the parameters of groups: which plans there are, and what each is made of."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from samestep.comm.groups import GroupReduction, RankGroup
from samestep.groups.distribution import Distribution
from samestep.groups.param_groups import Group, options_of, parameter_names, rule_of
from samestep.layout.blocks import Block, Shape
from samestep.placements.copies import refuse_copies_nobody_averages
from samestep.placements.placement import PlanMembers, mesh_of
from samestep.placements.whole.in_flight import ParametersInFlight
from samestep.placements.whole.launch_order import LaunchOrder
from samestep.placements.whole.replicated import ReplicatedParameters
from samestep.plan.sharding import ParamSpec
from samestep.rules.state import is_elementwise, needs_master

if TYPE_CHECKING:
    from samestep.placements.parts.sharded_blocks import ShardedParameters

Blocks = Mapping[Tensor, list[Block] | None]


class Plans(NamedTuple):
    """Plain parameters that ranks hold whole, and DTensors, mesh by mesh."""

    replicated: "list[ReplicatedParameters]"
    sharded: "list[ShardedParameters]"


class Planner:
    """Makes the plans of an optimizer, in one launch order; all ranks must have `lines` alike."""

    def __init__(
        self,
        ranks: RankGroup | None,
        outer: RankGroup | None,
        distribution: Distribution,
        in_flight: ParametersInFlight,
        order_of_use: Iterable[Tensor],
        *,
        owner: str,
        master_weights: bool,
        lines: Sequence[str],
    ) -> None:
        self._ranks = ranks
        self._outer = outer
        self._distribution = distribution
        self._in_flight = in_flight
        self._master_weights = master_weights
        self._lines = list(lines)
        self._place_of_use = {param: place for place, param in enumerate(order_of_use)}
        self._launch_order = LaunchOrder(owner)

    def plans(
        self,
        groups: Sequence[Group],
        indices: Sequence[int],
        blocks: Blocks,
        reductions: Mapping[int, GroupReduction],
    ) -> Plans:
        """The plans of the groups at `indices`, agreed on by the ranks they live on."""
        meshes = dict.fromkeys(mesh_of(p) for index in indices for p in groups[index]["params"])
        replicated = self._of_plain(groups, indices, blocks, reductions) if None in meshes else []
        sharded = [self._of_mesh(m, groups, indices, blocks) for m in meshes if m is not None]
        if self._distribution.grads == "local":  # last, since other comparisons tell more
            refuse_copies_nobody_averages(_named(groups), self._everyone())
        return Plans(replicated, sharded)

    def _everyone(self) -> list[RankGroup]:
        """The groups of ranks that may hold copies."""
        return [group for group in (self._ranks, self._outer) if group is not None]

    def launch_in_order(self, replicated: Iterable[ReplicatedParameters]) -> None:
        """Put the buckets of plans into the one order of launches."""
        for plan in replicated:
            self._launch_order.add(plan.reducer, plan.shape.places)
            if self._distribution.overlap_grad_reduce:
                names = [spec.name for spec in plan.plan.params]
                self._launch_order.launch_inside_backward(names, plan.group.members)

    def _of_plain(
        self,
        groups: Sequence[Group],
        indices: Sequence[int],
        blocks: Blocks,
        reductions: Mapping[int, GroupReduction],
    ) -> list[ReplicatedParameters]:
        """One plan for groups that are reduced alike."""
        if self._ranks is None:
            return []
        distribution = self._distribution
        if any(mesh_of(param) is not None for group in groups for param in group["params"]):
            # The few plain ones beside DTensors: whole, so that checkpoints have all their state.
            distribution = distribution.beside_dtensors()
        usual = GroupReduction(self._ranks, outer=self._outer)
        together: dict[GroupReduction, list[int]] = {usual: []}
        for index in indices:
            if any(mesh_of(param) is None for param in groups[index]["params"]):
                together.setdefault(reductions.get(index, usual), []).append(index)
        return [
            ReplicatedParameters(
                self.members(groups, alike, blocks),
                reduction,
                distribution,
                self._launch_order,
                self._in_flight,
            )
            for reduction, alike in together.items()
            if alike
        ]

    def _of_mesh(
        self, mesh: Any, groups: Sequence[Group], indices: Sequence[int], blocks: Blocks
    ) -> "ShardedParameters":
        from samestep.placements.parts.sharded_blocks import (
            ShardedParameters,  # DTensors take long to import
        )

        members = self.members(groups, indices, blocks, mesh)
        ranks = 1 if self._ranks is None else self._ranks.size
        return ShardedParameters(members, mesh, self._distribution, ranks)

    def members(
        self, groups: Sequence[Group], indices: Sequence[int], blocks: Blocks, mesh: Any = None
    ) -> PlanMembers:
        """What a plan of some groups is made of: of their parameters those on `mesh`."""
        members: list[tuple[int, Tensor, ParamSpec]] = []
        lines = list(self._lines)
        for index in indices:
            group = groups[index]
            lines += [f"param_groups[{index}]: {k} = {v}" for k, v in options_of(group).items()]
            kept = rule_of(group).state_shapes((64, 64), group).values()
            of_whole = cache(partial(_state_of_whole, group))
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
                    sum(map(prod, kept)) / 64**2 + needs_master(param, self._master_weights),
                    tuple(of_whole(block.shape) for block in cut or ()),
                )
                members.append((self._place_of_use.get(param, -1), param, spec))
        members.sort(key=lambda member: member[0])
        places, params, specs = zip(*members, strict=True)
        return PlanMembers(params, specs, lines, places)


def _state_of_whole(group: Group, shape: Shape) -> int:
    """Elements of state that belong to a whole block, such as its variance."""
    rule = rule_of(group)
    shapes = rule.state_shapes(shape, group)
    return sum(prod(shapes[key]) for key in shapes if not is_elementwise(rule, key, group))


def _named(groups: Sequence[Group]) -> Iterator[tuple[str, Tensor]]:
    for index, group in enumerate(groups):
        yield from zip(parameter_names(group, index), group["params"], strict=True)
