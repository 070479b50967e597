"""An optimizer on the ranks of a grid, as data: the plans and the schedule of every rank.

    optimizer = samestep.MuonAdamW(model_on_meta, sharding="zero2")   # one process, no memory
    plan_on_grid(optimizer, one_axis(1024)).schedule()

`plan.placement_plan` makes the plans, for all ranks at once. This module adds the facts that no
process group tells: the axes of the grid that a placement lies on, and the kinds of gradients.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.groups.distribution import Distribution
from samestep.groups.param_groups import Group, rule_of
from samestep.lab.estimate.grid import Grid, Peers
from samestep.lab.estimate.hardware import Hardware
from samestep.layout.blocks import Shape
from samestep.layout.boxes import Cut, all_boxes, replicas
from samestep.optimizer.rule_optimizer import RuleOptimizer
from samestep.plan.layouts import RankBoxes
from samestep.plan.links import Fabric, usual_links
from samestep.plan.placement_plan import (
    BlockPlan,
    BucketPlan,
    GradientSum,
    PlacementPlan,
    RankPlan,
    Topology,
    Updated,
    plan_placement,
)
from samestep.plan.replicated_gradients import ReplicatedAlong, replicated_along, replicated_by_all
from samestep.plan.schedule import BucketId, PlacementShape, Schedule, Stage, step_schedule
from samestep.plan.sharding import ParamSpec
from samestep.rules.state import State, StoredTensors, block_state_shapes, state_shapes
from samestep.shards.local import KnownGroup, LocalParameters
from samestep.shards.placement import PlanMembers
from samestep.shards.registry import KINDS, kind_of, require_kind
from samestep.shards.replicated.local_tensors import REPLICATED, SUMMAND
from samestep.shards.windows import OffloadUnit, Windows

MOST_GATHERING_RANKS = 64  # its plan grows with their square


Mesh = tuple[tuple[str, ...], ...]  # per axis of a mesh the axes of the grid it is made of


class SpreadOver(NamedTuple):
    """The layout of a DTensor on a mesh: for each mesh axis the axes of the grid, and the cut.

    (("data", "expert"),) with (Cut(0),) is `fully_shard` over both axes flattened into one.
    summed: numbers of the mesh axes on which backward leaves every rank a summand of the gradient.
    padded: whether FSDP2 pads shards to as many rows on every rank.
    by_fsdp: whether FSDP2 manages the DTensor and averages its gradients. The optimizer averages
        gradients of other DTensors, over the ranks of its process group with the same shards.
    """

    mesh: Mesh
    cuts: tuple[Cut, ...]
    summed: tuple[int, ...] = ()
    padded: bool = False
    by_fsdp: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for joined in self.mesh for axis in joined)


Spread = Callable[[str, Tensor], SpreadOver | None]  # by name; None: a plain parameter


class Summands(NamedTuple):
    """The ranks that have summands of a gradient.

    kinds: the kind of gradient along each axis of the mesh, or the axes with summands. Gradients
        with equal kinds are added up in one collective.
    """

    peers: Peers
    kinds: tuple[int, ...]


@dataclass(eq=False)
class GridPlacement:
    """The plan of one placement, and the place of its ranks on the grid.

    peers: the ranks with copies, which share the work on them; `outer`: replicas of that group.
    mesh: the ranks with the other shards of one copy; for plain parameters a rank alone.
    everyone: all ranks that hold a part of the placement.
    replicated: the copies that ranks compare.
    summands: the ranks with summands, for each gradient; None: gradients are whole; (): all are.
    room: elements of each parameter's shard with padding; None, or (): shards are not padded.
    bucket_plans: the buckets by place in the mesh; []: the optimizer averages no gradients here.
    """

    plan: PlacementPlan
    peers: Peers
    mesh: Peers
    everyone: Peers
    replicated: tuple[ReplicatedAlong, ...]
    outer: Peers | None = None
    summands: tuple[Summands | None, ...] = ()
    room: tuple[int | None, ...] = ()

    @property
    def specs(self) -> tuple[ParamSpec, ...]:
        """Return the specs of whole parameters, in the order in which forward uses them."""
        return self.plan.specs

    def __post_init__(self) -> None:
        found = map(self.plan.buckets_on, range(self.mesh.size))
        self.bucket_plans = [buckets for buckets in found if buckets is not None]

    @cached_property
    def block_plans(self) -> list[BlockPlan]:
        """Return a mesh's block plans by place among copies; []: parameters are plain."""
        found = map(self.plan.blocks_on, range(self.peers.size))
        return [blocks for blocks in found if blocks is not None]

    @property
    def buckets(self) -> BucketPlan:
        """Return the buckets of the first rank of a mesh, which has the largest shards."""
        return self.bucket_plans[0]

    def gradient_sums(self) -> list[tuple[Peers, GradientSum]]:
        """Return the gradients summed over the mesh when a step begins; [] with buckets."""
        if self.bucket_plans:
            return []
        sums = self.block_plans[0].gradient_sums(self.summands)
        found = ((each.summands, each) for each in sums)
        return [(own.peers, each) for own, each in found if isinstance(own, Summands)]

    def on_rank(self, grid: Grid, rank: int | None) -> RankPlan:
        """Return a rank's plan; None: the first rank's, with the most chunks that any rank has."""
        place, mesh_place = (grid.place(rank or 0, each) for each in (self.peers, self.mesh))
        if rank is None and self.block_plans:
            chunks = [len(each.chunks) for each in self.block_plans]
            place = chunks.index(max(chunks))
        buckets = self.bucket_plans[mesh_place] if self.bucket_plans else None
        blocks = self.block_plans[place] if self.block_plans else None
        return RankPlan(buckets, buckets.place(place) if buckets else 0, blocks, mesh_place)

    def stored(self, own: RankPlan) -> list[tuple[ParamSpec, int]]:
        """Return the parameters of a rank, each with its elements (and its gradient's) there."""
        if own.buckets is not None:
            return [(spec, spec.numel) for spec in own.specs]
        held = (of_ranks.boxes[own.mesh_place].numel for of_ranks in self.plan.topology.held or ())
        room = self.room or (None,) * len(self.specs)
        found = zip(self.specs, held, room, strict=True)
        return [(spec, numel if fixed is None else fixed) for spec, numel, fixed in found]


@dataclass(frozen=True)
class GridPlan:
    """The decisions before the first step, for all ranks of a grid: placements and schedules."""

    optimizer: RuleOptimizer
    grid: Grid
    everyone: Peers  # that the optimizer knows
    placements: tuple[GridPlacement, ...]  # in the order of the schedule's numbers; (): one process
    device: torch.device

    @property
    def clips(self) -> bool:
        return self.optimizer._steps.max_grad_norm is not None

    @property
    def measures(self) -> bool:
        return self.optimizer._steps.update_rms

    @property
    def groups(self) -> list[Group]:
        return self.optimizer.param_groups

    @property
    def distribution(self) -> Distribution:
        return self.optimizer.plan.distribution

    @property
    def stages(self) -> Peers | None:
        """Return the ranks, one per pipeline stage, that exchange gradient norms and problems."""
        peers = self.grid.peers(*self.grid.beside)
        return peers if peers.size > 1 else None

    def reduced(self) -> list[tuple[int, GridPlacement]]:
        """Return the placements whose gradients the optimizer averages, with their numbers."""
        return [(number, each) for number, each in enumerate(self.placements) if each.bucket_plans]

    def reduced_by(self, bucket: BucketId) -> GridPlacement | None:
        """Return a bucket's placement; None: the optimizer does not average its gradients."""
        return dict(self.reduced()).get(bucket.placement)

    def schedule(self, rank: int | None = None) -> Schedule:
        """Return a rank's operations; None: the first rank's, with the most chunks of any rank."""
        shapes = [
            own.shape if self.distribution.offload is None else _with_windows(own, self.groups)
            for own in self.on_rank(rank)
        ]
        has_plain = any(not each.block_plans for each in self.placements)
        if not has_plain and (self.everyone.size == 1 or not shapes):
            shapes.append(self._shape_of_local())  # as the optimizer does, also if it is empty
        return _schedule(
            tuple(shapes),
            waves=self.distribution.waves,
            clip=self.clips,
            measure=self.measures,
            chunks_ahead=self.distribution.chunks_ahead,
        )

    def _shape_of_local(self) -> PlacementShape:
        if self.distribution.offload is None or self.placements:
            return LocalParameters.shape
        return LocalParameters.shape._replace(windows=self.local_windows.sizes(1))

    @cached_property
    def local_units(self) -> list[OffloadUnit]:
        """Return the pieces that one process updates, with their state."""
        found, blocks = [], self.optimizer.plan.blocks
        for index, group in enumerate(self.groups):
            known = KnownGroup(group, index, self.optimizer.state, blocks)
            for unit in known.units():
                about = Updated(self.local_specs[unit.about.param], unit.elements, unit.about.block)
                found.append(unit._replace(about=about))
        return found

    @cached_property
    def local_specs(self) -> dict[Tensor, ParamSpec]:
        """Return the specs of all parameters, as one process has them."""
        planner, blocks = self.optimizer.plan.planner, self.optimizer.plan.blocks
        params, specs, *_ = planner.members(self.groups, range(len(self.groups)), blocks)
        return dict(zip(params, specs, strict=True))

    @cached_property
    def local_windows(self) -> Windows:
        """Return the windows of one process's state that is offloaded to the host."""
        return Windows({("update", 0): self.local_units})

    def on_rank(self, rank: int | None) -> list[RankPlan]:
        """Return the plans of a rank, one per placement; None: as in `schedule`."""
        return [placement.on_rank(self.grid, rank) for placement in self.placements]

    def stored(self, rank: int) -> list[tuple[ParamSpec, int]]:
        """Return all parameters of a rank, each with its number of elements there."""
        if not self.placements:
            return [(spec, spec.numel) for spec in self.local_specs.values()]
        both = zip(self.placements, self.on_rank(rank), strict=True)
        return [each for placement, own in both for each in placement.stored(own)]

    def windows(self, own: RankPlan) -> Windows:
        """Return the windows of a placement's state that is offloaded to the host."""
        return _windows_of(own, self.groups)


_schedule = lru_cache(maxsize=64)(step_schedule)


def plan_on_grid(
    optimizer: RuleOptimizer,
    grid: Grid,
    *,
    everyone: Peers | None = None,
    outer: Peers | None = None,
    own_peers: Mapping[int, Peers] | None = None,
    spread: Spread | None = None,
    device: torch.device | None = None,
    hardware: Hardware | None = None,
) -> GridPlan:
    """Plan an optimizer that was built in one process for the ranks of a grid.

    everyone: the ranks that share plain parameters (default: all); `outer`: replicas of them.
    own_peers: by index, the ranks of param groups that have their own process group.
    spread: gives the layout of parameters that are DTensors on the grid, by name.
    hardware: the links to plan for; None: all ranks are on one host with the device's usual links.
    """
    asked = _Request(
        optimizer,
        grid,
        everyone or grid.peers(*grid.sizes),
        outer,
        own_peers or {},
        device or torch.device("cpu"),
        hardware,
    )
    groups = optimizer.param_groups
    for group in groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            found = spread(name, param) if spread else None
            kind = kind_of(param).name if found is None else "dtensor"  # it will be a DTensor
            require_kind(kind, PLACED, f"estimate, which {name!r} needs", f"PLACED of {__name__}")
            asked.kinds[param] = kind
            if found is not None:
                asked.lie[param] = found
            elif kind == "dtensor":
                raise ValueError(f"{name!r} is a DTensor: pass spread=, its placements")
    present = set(asked.kinds.values())
    kinds = [kind.name for kind in KINDS if kind.name in present]  # as the optimizer has them
    placements = tuple(placed for kind in kinds for placed in PLACED[kind](asked))
    return GridPlan(optimizer, grid, asked.everyone, placements, asked.device)


@dataclass(eq=False)
class _Request:
    """The request to place the parameters of a kind on all ranks: see `plan_on_grid`.

    kinds: the kind name of every parameter; lie: the layout of every DTensor.
    """

    optimizer: RuleOptimizer
    grid: Grid
    everyone: Peers
    outer: Peers | None
    own_peers: Mapping[int, Peers]
    device: torch.device
    hardware: Hardware | None
    kinds: dict[Tensor, str] = field(default_factory=dict)
    lie: dict[Tensor, SpreadOver] = field(default_factory=dict)

    @cached_property
    def meshes(self) -> dict[Mesh, None]:
        return dict.fromkeys(over.mesh for over in self.lie.values())

    @cached_property
    def copies(self) -> dict[Mesh, Peers]:
        """Return by mesh the ranks with copies whose gradients the optimizer averages."""
        found = {}
        for mesh in self.meshes:
            lie = [over for over in self.lie.values() if over.mesh == mesh]
            peers = _copies(self.grid, self.everyone, lie)
            if peers.size > 1:
                found[mesh] = peers
        return found

    @cached_property
    def beside(self) -> Distribution:
        """Return the distribution options of parameters that the optimizer averages."""
        others = self.meshes.keys() - self.copies.keys()
        distribution = self.optimizer.plan.distribution
        return distribution.beside_dtensors() if others else distribution

    def members(self, indices: Sequence[int], only: Callable[[Tensor], bool]) -> PlanMembers:
        holds = self.optimizer.plan
        return holds.planner.members(self.optimizer.param_groups, indices, holds.blocks, only)

    def topology(
        self,
        peers: Peers | None = None,
        held: tuple[RankBoxes, ...] | None = None,
        outer: Peers | None = None,
    ) -> Topology:
        """Return a placement's topology; `peers`: ranks with copies, if the optimizer averages."""
        fabric = None
        if peers is not None and self.hardware is not None:
            fabric = self.hardware.fabric(peers, self.grid)
        elif peers is not None:
            fabric = Fabric(*usual_links(self.device.type), peers.size, peers.size)
        groups = None if outer is None else outer.size
        on_gpu = self.device.type != "cpu"  # and NCCL carries
        return Topology(self.device, fabric, held, groups, uneven=on_gpu)

    def plan(self, members: PlanMembers, topology: Topology) -> PlacementPlan:
        """Plan a placement as the optimizers of its ranks do."""
        averaged = topology.fabric is not None
        return plan_placement(
            members.specs,
            self.beside if averaged else self.optimizer.plan.distribution,
            topology,
            places=members.places,
            watched=self.optimizer._in_flight.all_watched(members.params),
        )


def _plain_placements(asked: _Request) -> Iterator[GridPlacement]:
    """Place plain parameters: param groups reduced over the same ranks share a placement."""
    everyone, outer, beside = asked.everyone, asked.outer, asked.beside
    if everyone.size * (1 if outer is None else outer.size) == 1:
        return  # one process: nothing is shared
    plain: dict[Peers, list[int]] = {everyone: []}
    for index, group in enumerate(asked.optimizer.param_groups):
        if any(asked.kinds[param] == "replicated" for param in group["params"]):
            plain.setdefault(asked.own_peers.get(index, everyone), []).append(index)
    for peers, indices in plain.items():
        if not indices:
            continue
        members = asked.members(indices, lambda param: asked.kinds[param] == "replicated")
        own_outer = outer if peers == everyone else None
        plan = asked.plan(members, asked.topology(peers, outer=own_outer))
        count = len(members.specs)
        compared = replicated_by_all(count, peers.size) if beside.grads != "local" else ()
        yield GridPlacement(plan, peers, asked.grid.peers(), peers, compared, own_outer)


def _dtensor_placements(asked: _Request) -> Iterator[GridPlacement]:
    """Place DTensors: all DTensors of a mesh share a placement."""
    grid, lie, groups = asked.grid, asked.lie, asked.optimizer.param_groups
    distribution = asked.optimizer.plan.distribution
    held_as = cache(partial(_held, grid))  # layers are alike
    for mesh in asked.meshes:
        there = {param for param, over in lie.items() if over.mesh == mesh}
        members = asked.members(range(len(groups)), there.__contains__)
        peers = grid.peers(*(axis for joined in mesh for axis in joined))
        if distribution.muon_schedule == "gather" and peers.size > MOST_GATHERING_RANKS:
            raise ValueError(
                "muon_schedule='gather' has every rank compute every block, and can be "
                f"planned for at most {MOST_GATHERING_RANKS} ranks, not {peers.size}: "
                "use 'parallel'"
            )
        overs = [lie[param] for param in members.params]
        both = zip(members.specs, overs, strict=True)
        lying = [held_as(spec.shape, over) for spec, over in both]
        held = tuple(boxes for boxes, _ in lying)
        copies = asked.copies.get(mesh)
        plan = asked.plan(members, asked.topology(copies, held))
        summands = _reduced_summands if copies is None else _summands
        copies = copies or grid.peers()
        yield GridPlacement(
            plan,
            copies,
            peers,
            grid.peers(*copies.axes, *peers.axes),
            _replicated(grid, overs, copies.size),
            summands=tuple(summands(grid, over) for over in overs),
            room=tuple(room for _, room in lying),
        )


# What ranks will have of parameters, by the name of their kind in `shards.registry`.
PLACED: dict[str, Callable[[_Request], Iterator[GridPlacement]]] = {
    "replicated": _plain_placements,
    "dtensor": _dtensor_placements,
}


def _copies(grid: Grid, everyone: Peers, lie: Sequence[SpreadOver]) -> Peers:
    """Return the ranks with the same shards of a mesh's DTensors, over which gradients average."""
    if any(over.by_fsdp for over in lie):
        return grid.peers()
    return grid.peers(*(axis for axis in everyone.axes if axis not in lie[0].axes))


def _summands(grid: Grid, over: SpreadOver) -> Summands | None:
    if not over.summed:
        return None
    kinds = [REPLICATED if cut.dim is None else 0 for cut in over.cuts]
    for place in over.summed:
        kinds[place] = SUMMAND
    return Summands(_summing(grid, over), tuple(kinds))


def _reduced_summands(grid: Grid, over: SpreadOver) -> Summands | None:
    """Return the summands of DTensors: gradients with equal axes are summed at once."""
    return Summands(_summing(grid, over), over.summed) if over.summed else None


def _summing(grid: Grid, over: SpreadOver) -> Peers:
    return grid.peers(*(axis for place in over.summed for axis in over.mesh[place]))


def _replicated(
    grid: Grid, lie: Sequence[SpreadOver], copies: int = 1
) -> tuple[ReplicatedAlong, ...]:
    """Return the copies along the axes of one mesh that ranks compare."""
    replicated = [[axis for axis, cut in enumerate(o.cuts) if cut.dim is None] for o in lie]
    return replicated_along(_sizes(grid, lie[0]), replicated, copies)


def _sizes(grid: Grid, over: SpreadOver) -> list[int]:
    """Return the sizes of a mesh's axes."""
    return [prod(grid.sizes[axis] for axis in joined) for joined in over.mesh]


def _held(grid: Grid, shape: tuple[int, ...], over: SpreadOver) -> tuple[RankBoxes, int | None]:
    """Return the boxes of a mesh's ranks in order, and the room as in `GridPlacement.room`."""
    sizes = _sizes(grid, over)
    boxes = all_boxes(shape, sizes, over.cuts)
    copies = replicas(sizes, over.cuts)
    if list(over.axes) != [axis for axis in grid.sizes if axis in over.axes]:
        raise ValueError(f"mesh axes {over.axes} are in another order than the grid's")
    room = max(box.numel for box in boxes) if over.padded else None
    return RankBoxes(tuple(boxes), tuple(copies)), room


# --- state that stays on the host: cut as the placements of optimizers do, on the meta device ----


def _with_windows(own: RankPlan, groups: Sequence[Group]) -> PlacementShape:
    """Return the shape that a rank's schedule depends on, with the windows of its state."""
    windows, shape = _windows_of(own, groups), own.shape
    return shape._replace(
        windows=windows.sizes(len(shape.bucket_sizes)),
        chunk_windows=windows.chunk_sizes(shape.chunks),
    )


def _windows_of(own: RankPlan, groups: Sequence[Group]) -> Windows:
    """Return the windows of every bucket and chunk, cut as the optimizer's placements do."""
    units: dict[tuple[Stage, int], list[OffloadUnit]] = {}
    for number in range(len(own.shape.bucket_sizes)):
        units["update", number] = [_unit(each, groups) for each in own.updates(number)]
    for number in range(own.shape.chunks):
        units["chunk", number] = list(_of_chunk(own, number, groups))
    return Windows(units)


def _unit(updated: Updated, groups: Sequence[Group]) -> OffloadUnit:
    spec, block = updated.spec, updated.block
    group, stored = groups[spec.group], spec.stored
    if block is None:
        shapes = state_shapes(rule_of(group), (updated.elements,), group, stored)
    else:
        shapes = block_state_shapes(rule_of(group), block, group, stored)
    return OffloadUnit(updated, _state(shapes, stored), updated.elements, may_be_cut=block is None)


def _of_chunk(own: RankPlan, number: int, groups: Sequence[Group]) -> Iterator[OffloadUnit]:
    """Yield a chunk's state: of the parts that a rank holds, or of whole blocks on every rank."""
    assert own.blocks is not None
    for planned in own.blocks.chunks[number].blocks:
        spec = own.blocks.specs[planned.param]
        group, held = groups[spec.group], planned.held.sizes.get(own.mesh_place, 0)
        shapes = block_state_shapes(rule_of(group), planned.block, group, spec.stored)
        sizes = {
            key: (prod(shapes[key]) if how.per is None else held // how.per,)
            for key, how in spec.stored.items()
        }
        yield OffloadUnit(planned.key, _state(sizes, spec.stored), elements=1)


def _state(shapes: Mapping[str, Shape], stored: StoredTensors) -> State:
    return {
        key: torch.empty(shape, dtype=stored[key].dtype, device="meta")
        for key, shape in shapes.items()
    }
