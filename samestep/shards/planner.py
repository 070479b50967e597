"""Plans the parameters of some groups, by kind, mesh and group of ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from samestep.comm.groups import GroupReduction, RankGroup, registry
from samestep.groups.distribution import Distribution
from samestep.groups.param_groups import (
    Group,
    naming_group,
    options_of,
    parameter_names,
    rule_of,
)
from samestep.groups.tied import TiedMembers, ranks_of, refuse_other_places, tied_members
from samestep.kernels.choice import missing_products
from samestep.layout.blocks import Block, Shape
from samestep.layout.boxes import mesh_of
from samestep.plan.sharding import ParamSpec
from samestep.rules import checks
from samestep.rules.rule import is_summing, math_dtype
from samestep.rules.state import StoredTensors, state_shapes, stored_tensors
from samestep.shards.copies import Copies, find_copies, refuse_copies_nobody_averages
from samestep.shards.placement import Placement, PlanMembers
from samestep.shards.registry import KINDS, Kind, kind_of
from samestep.shards.replicated.awaited import ParametersInFlight
from samestep.shards.replicated.buckets import gradient_dtype
from samestep.shards.replicated.inside_backward import LaunchOrder

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Blocks = Mapping[Tensor, list[Block] | None]


class Request(NamedTuple):
    """Parameters of one kind in some groups, with everything a plan depends on.

    indices: of the groups that have any.
    members: what a plan is made of, from indices of groups; of a kind's parameters those that a
        function takes.
    reductions: of groups that have ranks of their own, by index.
    """

    ranks: RankGroup | None  # None: this process is alone
    outer: RankGroup | None
    distribution: Distribution
    groups: Sequence[Group]
    indices: Sequence[int]
    members: Callable[..., PlanMembers]
    reductions: Mapping[int, GroupReduction]
    order: LaunchOrder
    in_flight: ParametersInFlight
    copies: "Mapping[DeviceMesh, Copies]"  # of DTensors, that are averaged here
    brings_together: bool  # DTensors are there whose gradients somebody else averages


@dataclass(eq=False)
class Planner:
    """Plans an optimizer, with one launch order; `lines` must agree on all ranks."""

    ranks: RankGroup | None
    outer: RankGroup | None
    distribution: Distribution
    in_flight: ParametersInFlight
    order_of_use: Iterable[Tensor]
    owner: str
    master_weights: bool
    lines: Sequence[str]
    stages: RankGroup | None = None  # one rank of each pipeline stage

    def __post_init__(self) -> None:
        self._place_of_use = {param: place for place, param in enumerate(self.order_of_use)}
        self._launch_order = LaunchOrder(self.owner)
        self._copied: set[DeviceMesh] = set()  # of whose DTensors copies are averaged here
        self.problem: str | None = None  # of parameters, told where all ranks have it

    def plans(
        self,
        groups: Sequence[Group],
        indices: Sequence[int],
        blocks: Blocks,
        reductions: Mapping[int, GroupReduction],
    ) -> list[Placement]:
        """The plans of the groups at `indices`, agreed on by the ranks they live on."""
        self._settle_products([groups[index] for index in indices], blocks)
        found: list[Placement] = []
        copies: dict[DeviceMesh, Copies] = {}
        named = [
            list(zip(parameter_names(group, index), group["params"], strict=True))
            for index, group in enumerate(groups)
        ]
        if self.ranks is not None and self.distribution.grads == "local":
            copies = find_copies(chain.from_iterable(named[index] for index in indices), self.ranks)
        self._copied |= copies.keys()
        meshes = {mesh_of(param) for group in groups for param in group["params"]}
        kinds = {index: {kind_of(param) for param in groups[index]["params"]} for index in indices}
        for kind in KINDS:
            mine = [index for index in indices if kind in kinds[index]]
            if mine:
                request = Request(
                    self.ranks,
                    self.outer,
                    self.distribution,
                    groups,
                    mine,
                    partial(self._of_kind, kind, groups, blocks),
                    reductions,
                    self._launch_order,
                    self.in_flight,
                    copies,
                    bool(meshes - {None} - self._copied),
                )
                found += kind.load().plans(request)
        if self.distribution.grads == "local":  # last, since other comparisons tell more
            refuse_copies_nobody_averages(chain.from_iterable(named), self.ranks, self.outer)
        return found

    def _settle_products(self, groups: Sequence[Group], blocks: Blocks) -> None:
        """Choose kernels for Muon's products, equally on all ranks. Collective."""
        halves = (None, torch.bfloat16, torch.float16)
        params = [p for g in groups if g.get("compute_dtype") in halves for p in g["params"]]
        if params and missing_products(params[0].device) is None:
            from samestep.update.measure import settle

            shapes = {
                shape
                for param in params
                for block in blocks[param] or ()
                for shape in block.matrices
            }
            with torch.cuda.device_of(params[0]):  # type: ignore[no-untyped-call]
                settle(shapes, params[0].device, self.ranks)

    def own_reduction(self, index: int, group: Group) -> GroupReduction | None:
        """Remove process_group and divisor from a group, because they are not saved."""
        process_group, divisor = group.pop("process_group", None), group.pop("divisor", None)
        tied = tied_members(group)
        if tied is not None:
            with naming_group(index):
                self._refuse_tied(tied, group, process_group, divisor)
            assert self.ranks is not None
            # Of which ranks is found out when all of this stage are ready: see `with_stages`.
            return GroupReduction(self.ranks, float(self.ranks.size), stages=len(tied.places))
        if process_group is None and divisor is None:
            return None
        with naming_group(index):
            if self.ranks is None:
                raise ValueError(
                    "a param_group has process_group or divisor, and this is the only "
                    "rank: leave them out"
                )
            if self.outer is not None:
                raise ValueError(
                    "a param_group has process_group or divisor, which cannot be combined "
                    "with outer_group=: leave one of them out"
                )
            if divisor is not None:
                checks.positive("divisor", divisor)
            if self.distribution.grads == "reduced":
                raise ValueError(
                    "a param_group has process_group or divisor, which have no effect with "
                    'grads="reduced": leave them out'
                )
            own = self.ranks if process_group is None else registry.of(process_group)
        return GroupReduction(own, divisor)

    def _refuse_tied(
        self, tied: TiedMembers, group: Group, process_group: object, divisor: object
    ) -> None:
        """Raise if copies on other pipeline stages could not be kept equal."""
        refuse_other_places(tied, self.stages)
        name, distribution = tied.names[0], self.distribution
        own = process_group is not None or divisor is not None
        reasons = (
            (distribution.deferred, "deferred=True finds ranks later: leave it out"),
            (self.outer is not None, "outer_group has other ranks: leave it out"),
            (
                distribution.grads == "reduced",
                'with grads="reduced" nothing is added up here: leave it out',
            ),
            (own, "its ranks and divisor are known: leave them out of its group"),
            (self.ranks is None, "comes late: give it to the optimizer when that is made"),
        )
        why = next((text for given, text in reasons if given), None)
        if why is not None:
            raise ValueError(f"parameter {name!r} is tied over pipeline stages, and {why}")

    def with_stages(self, reduction: GroupReduction, group: Group) -> GroupReduction:
        """Ranks of all stages with the tied parameters of a group. Collective."""
        tied = tied_members(group)
        if tied is None or self.ranks is None or self.stages is None:
            return reduction
        return reduction._replace(ranks=ranks_of(tied, self.ranks, self.stages))

    def _of_kind(
        self,
        kind: Kind,
        groups: Sequence[Group],
        blocks: Blocks,
        indices: Sequence[int],
        only: Callable[[Tensor], bool] = lambda _: True,
    ) -> PlanMembers:
        def mine(param: Tensor) -> bool:
            return kind_of(param) is kind and only(param)

        return self.members(groups, indices, blocks, mine)

    def members(
        self,
        groups: Sequence[Group],
        indices: Sequence[int],
        blocks: Blocks,
        only: Callable[[Tensor], bool] = lambda _: True,
    ) -> PlanMembers:
        """Members of a plan: parameters of some groups that `only` selects."""
        members: list[tuple[int, Tensor, ParamSpec]] = []
        lines = [*self.lines, f"problem: {self.problem}"]
        for index in indices:
            group = groups[index]
            lines += [f"param_groups[{index}]: {k} = {v}" for k, v in options_of(group).items()]
            rule = rule_of(group)
            for name, param in zip(parameter_names(group, index), group["params"], strict=True):
                if not only(param):
                    continue
                cut = blocks[param]
                stored = stored_tensors(rule, param, cut, group, self.master_weights)
                of_whole = cache(partial(_state_of_whole, group, stored))
                spec = ParamSpec(
                    name,
                    tuple(param.shape),
                    str(param.dtype),
                    index,
                    group["rule"],
                    None if cut is None else tuple(cut),
                    _state_per_element(group, stored, math_dtype(param)),
                    tuple(sum(map(of_whole, block.matrices)) for block in cut or ()),
                    stored=stored,
                    sums=len(rule.sums(group)) if is_summing(rule) else 0,
                    grad_dtype=gradient_dtype(param),
                )
                members.append((self._place_of_use.get(param, -1), param, spec))
        members.sort(key=lambda member: member[0])
        places, params, specs = zip(*members, strict=True)
        return PlanMembers(params, specs, lines, places, self.problem)


def _state_of_whole(group: Group, stored: StoredTensors, shape: Shape) -> int:
    """Elements of state per whole block, such as a variance."""
    shapes = state_shapes(rule_of(group), shape, group, stored)
    of_whole = (key for key, how in stored.items() if how.per is None and not how.owned)
    return sum(prod(shapes[key]) for key in of_whole)


def _state_per_element(group: Group, stored: StoredTensors, wide: torch.dtype) -> float:
    """Elements of state per element of a typical parameter."""
    shapes = state_shapes(rule_of(group), (64, 64), group, stored)
    sizes = (prod(shapes[key]) * how.dtype.itemsize for key, how in stored.items())
    return sum(sizes) / wide.itemsize / 64**2
