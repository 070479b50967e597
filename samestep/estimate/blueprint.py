"""An optimizer on any number of ranks as data: the plans and the schedule it would run there.

    optimizer = samestep.MuonAdamW(model_on_meta, sharding="zero2")   # one process, no memory
    blueprint(optimizer, one_axis(1024)).schedule()

Plans are made by the functions that the optimizer calls, once for all ranks: which part is whose
is part of a plan.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.groups.distribution import Distribution
from samestep.groups.param_groups import Group
from samestep.layout.boxes import Box, Cut, all_boxes, replicas
from samestep.optimizer.rule_optimizer import RuleOptimizer
from samestep.placements.local import LocalParameters
from samestep.placements.parts.block_exchange import planned as planned_blocks
from samestep.placements.parts.block_exchange import shape_of as shape_of_blocks
from samestep.placements.parts.block_exchange import transfers_of
from samestep.placements.whole.buffers import gradient_dtype
from samestep.placements.whole.replicated import planned as planned_shares
from samestep.placements.whole.replicated import shape_of as shape_of_shares
from samestep.plan.block_exchange import ChunkTransfers, ExchangePlan, ShardedSpec
from samestep.plan.schedule import BucketId, PlacementShape, Schedule, step_schedule
from samestep.plan.sharding import ParamSpec, ShardingPlan
from samestep.plan.transfers import BucketPolicy


class Peers(NamedTuple):
    """Ranks that differ at most in these axes of a grid, in the order of the grid."""

    axes: tuple[str, ...]
    size: int

    @property
    def name(self) -> str:
        """For tables: "data x expert"."""
        return " x ".join(self.axes) or "one rank"


class Beside(NamedTuple):
    """An axis along which a grid has one place of several: others have grids of their own."""

    place: int
    size: int


class Grid:
    """All ranks that train one model (or one stage of it); the last axis varies fastest.

    beside: axes outside of it, such as the stages of a pipeline.
    """

    def __init__(
        self, sizes: Mapping[str, int], beside: Mapping[str, Beside] | None = None
    ) -> None:
        self.sizes = dict(sizes)
        self.beside = dict(beside or {})
        self.ranks = prod(self.sizes.values())

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes.values())

    def peers(self, *axes: str) -> Peers:
        """The group of a rank along some axes: the same ranks are the same peers."""
        sizes = {**{axis: size for axis, (_, size) in self.beside.items()}, **self.sizes}
        ordered = tuple(axis for axis, size in sizes.items() if axis in axes and size > 1)
        return Peers(ordered, prod(sizes[axis] for axis in ordered))

    def place(self, rank: int, peers: Peers) -> int:
        """Which one of its peers a rank is."""
        places = dict(self.beside)
        for axis, size in reversed(self.sizes.items()):
            rank, at = divmod(rank, size)
            places[axis] = Beside(at, size)
        number = 0
        for axis in peers.axes:
            number = number * places[axis].size + places[axis].place
        return number

    def spread(self, values: Tensor, peers: Peers) -> Tensor:
        """What each peer has, (peers.size,), for all ranks: the shape of the grid."""
        for axis in peers.axes:
            if axis in self.beside:
                place, size = self.beside[axis]
                values = values.reshape(size, -1)[place]
        inner = [self.sizes[axis] if axis in peers.axes else 1 for axis in self.sizes]
        return values.reshape(inner).expand(self.shape)

    def maximum(self, values: Tensor, peers: Peers) -> Tensor:
        """The largest among the peers of each rank; `values` has the shape of the grid."""
        dims = [dim for dim, axis in enumerate(self.sizes) if axis in peers.axes]
        return values.amax(dim=dims, keepdim=True).expand(self.shape) if dims else values

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=torch.float64)


def one_axis(ranks: int) -> Grid:
    return Grid({"data": ranks})


def per_peer(numbers: Sequence[float]) -> Tensor:
    """One number of each; in a tenth of the time that `torch.tensor` takes for a thousand."""
    return torch.frombuffer(array("d", numbers), dtype=torch.float64)


MOST_GATHERING_RANKS = 64  # its plan grows with their square


class SpreadOver(NamedTuple):
    """How a DTensor lies on a mesh: per mesh axis the axes of the grid it is made of, and its cut.

    (("data", "expert"),) with (Cut(0),) is what `fully_shard` does over both as one.
    summed: numbers of the mesh axes on which backward leaves every rank a summand of the gradient.
    padded: FSDP2 shards it, with room for as many rows on every rank.
    """

    mesh: tuple[tuple[str, ...], ...]
    cuts: tuple[Cut, ...]
    summed: tuple[int, ...] = ()
    padded: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for joined in self.mesh for axis in joined)


Spread = Callable[[str, Tensor], SpreadOver | None]  # by name; None: a plain parameter


@dataclass(frozen=True)
class Sharing:
    """Parameters that peers hold whole, and how they share the work on them."""

    params: tuple[Tensor, ...]
    plan: ShardingPlan
    peers: Peers
    outer: Peers | None
    distribution: Distribution
    policy: BucketPolicy
    shape: PlacementShape

    @property
    def specs(self) -> tuple[ParamSpec, ...]:
        """In order of use."""
        return self.plan.params


class GradientSum(NamedTuple):
    """Gradients that are added up at once when a step begins: numbers of their parameters."""

    peers: Peers
    dtype: torch.dtype
    params: tuple[int, ...]


@dataclass(frozen=True)
class Spreading:
    """DTensors of one mesh, and how their blocks come together."""

    params: tuple[Tensor, ...]
    specs: tuple[ParamSpec, ...]
    held: tuple[ShardedSpec, ...]
    plan: ExchangePlan
    transfers: tuple[ChunkTransfers, ...]
    peers: Peers
    distribution: Distribution
    sums: tuple[GradientSum, ...] = ()
    # Elements of each that every rank has room for; None: its own.
    room: tuple[int | None, ...] = ()

    def stored(self, index: int, place: int) -> int:
        """Elements of a parameter, and of its gradient, in the memory of a rank."""
        room = self.room[index]
        return self.held[index].boxes[place].numel if room is None else room

    def shape(self, place: int) -> PlacementShape:
        """What the schedule of a rank depends on."""
        elements = sum(spec.boxes[place].numel for spec in self.held)
        return shape_of_blocks(self.transfers, self.distribution, elements)


@dataclass(frozen=True)
class Blueprint:
    """Everything that is decided before the first step, for all ranks of a grid."""

    optimizer: RuleOptimizer
    grid: Grid
    everyone: Peers  # that the optimizer knows
    shared: tuple[Sharing, ...]
    spread: tuple[Spreading, ...]
    device: torch.device
    clips: bool = False
    measures: bool = False

    @property
    def groups(self) -> list[Group]:
        return self.optimizer.param_groups

    @property
    def distribution(self) -> Distribution:
        return self.optimizer._distribution

    @property
    def placements(self) -> tuple[Sharing | Spreading, ...]:
        """In the order of the schedule's numbers; none: one process."""
        return (*self.shared, *self.spread)

    @property
    def stages(self) -> Peers | None:
        """The ranks of a pipeline, one of each stage, that speak of norms and problems."""
        peers = self.grid.peers(*self.grid.beside)
        return peers if peers.size > 1 else None

    def shared_by(self, bucket: BucketId) -> Sharing | None:
        """What a bucket is of; None: of DTensors, or of the parameters of this process alone."""
        return self.shared[bucket.placement] if bucket.placement < len(self.shared) else None

    def schedule(self, rank: int = 0) -> Schedule:
        shapes: list[PlacementShape] = [placement.shape for placement in self.shared]
        shapes += [s.shape(self.grid.place(rank, s.peers)) for s in self.spread]
        if not self.shared and (self.everyone.size == 1 or not shapes):
            shapes.append(LocalParameters.shape)  # as the optimizer does, also if it is empty
        return _schedule(
            tuple(shapes),
            waves=self.distribution.waves,
            clip=self.clips,
            measure=self.measures,
            chunks_ahead=self.distribution.chunks_ahead,
        )


_schedule = lru_cache(maxsize=64)(step_schedule)


def _shared_plan(
    specs: tuple[ParamSpec, ...], ranks: int, distribution: Distribution
) -> ShardingPlan:
    """zero1 and zero2 share one: they differ in when gradients are let go of."""
    if distribution.sharding == "zero2":
        distribution = replace(distribution, sharding="zero1")
    return _known_plan(specs, ranks, distribution)


_known_plan = lru_cache(maxsize=2)(planned_shares)


def blueprint(
    optimizer: RuleOptimizer,
    grid: Grid,
    *,
    everyone: Peers | None = None,
    outer: Peers | None = None,
    own_peers: Mapping[int, Peers] | None = None,
    spread: Spread | None = None,
    device: torch.device | None = None,
) -> Blueprint:
    """Plan what an optimizer that was built in one process would do on the ranks of a grid.

    everyone: the ranks that share plain parameters (all), and `outer` those that do the same.
    own_peers: of groups that have a process group of their own, by index.
    spread: which parameters are DTensors there, and how they lie.
    """
    everyone = everyone or grid.peers(*grid.sizes)
    device = device or torch.device("cpu")
    held_as = cache(partial(_held, grid))  # layers are alike
    lie: dict[Tensor, SpreadOver] = {}
    groups = optimizer.param_groups
    for group in groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            found = spread(name, param) if spread else None
            if found is not None:
                lie[param] = found
    distribution = optimizer._distribution
    clips, measures = optimizer._steps.max_grad_norm is not None, optimizer._steps.update_rms
    beside = distribution.beside_dtensors() if lie else distribution
    plain: dict[Peers, list[int]] = {everyone: []}  # groups reduced over the same ranks
    for index, group in enumerate(groups):
        if any(param not in lie for param in group["params"]):
            plain.setdefault((own_peers or {}).get(index, everyone), []).append(index)
    shared = []
    for peers, indices in plain.items():
        if not indices or everyone.size * (1 if outer is None else outer.size) == 1:
            continue  # one process: nothing is shared
        members = optimizer._planner.members(_only(groups, lie, None), indices, optimizer._blocks)
        plan = _shared_plan(members.specs, peers.size, beside)
        own_outer = outer if peers == everyone else None
        policy = beside.bucket_policy(peers.size, own_outer.size if own_outer else 1, device)
        watched = optimizer._in_flight.all_watched(members.params)
        shape = shape_of_shares(plan, members, beside, policy, watched=watched)
        shared.append(Sharing(members.params, plan, peers, own_outer, beside, policy, shape))
    spreads = []
    for mesh in dict.fromkeys(found.mesh for found in lie.values()):
        own = _only(groups, lie, mesh)
        indices = [index for index, group in enumerate(own) if group["params"]]
        params, specs, *_ = optimizer._planner.members(own, indices, optimizer._blocks)
        peers = grid.peers(*(axis for joined in mesh for axis in joined))
        if distribution.muon_schedule == "gather" and peers.size > MOST_GATHERING_RANKS:
            raise ValueError(
                f"muon_schedule='gather' has every rank compute every block: it is planned for up "
                f"to {MOST_GATHERING_RANKS} ranks, not {peers.size}; take 'parallel'"
            )
        lying = [held_as(spec.shape, lie[p]) for p, spec in zip(params, specs, strict=True)]
        held = tuple(
            ShardedSpec(spec.name, spec.shape, spec.blocks or (), found.boxes, found.replicas)
            for spec, found in zip(specs, lying, strict=True)
        )
        exchange = planned_blocks(held, peers.size, distribution, device)
        sums = _sums(params, [lie[param] for param in params], grid)
        room = tuple(found.room for found in lying)
        transfers = transfers_of(exchange, params, specs, peers.size, distribution, device)
        spreads.append(
            Spreading(params, specs, held, exchange, transfers, peers, distribution, sums, room)
        )
    return Blueprint(
        optimizer, grid, everyone, tuple(shared), tuple(spreads), device, clips, measures
    )


def _sums(
    params: Sequence[Tensor], lie: Sequence[SpreadOver], grid: Grid
) -> tuple[GradientSum, ...]:
    """What `combine_gradients` adds up, all that can travel together at once."""
    together: dict[tuple[Peers, tuple[int, ...], torch.dtype], list[int]] = {}
    for number, (param, over) in enumerate(zip(params, lie, strict=True)):
        if over.summed:
            peers = grid.peers(*(axis for place in over.summed for axis in over.mesh[place]))
            key = peers, over.summed, gradient_dtype(param)
            together.setdefault(key, []).append(number)
    return tuple(
        GradientSum(peers, dtype, tuple(numbers)) for (peers, _, dtype), numbers in together.items()
    )


def _only(
    groups: Sequence[Group], lie: Mapping[Tensor, SpreadOver], mesh: object | None
) -> list[Group]:
    """The groups with only those parameters that lie on a mesh; None: plain ones."""
    found = []
    for group in groups:
        kept = [
            (name, param)
            for name, param in zip(group["param_names"], group["params"], strict=True)
            if (lie[param].mesh if param in lie else None) == mesh
        ]
        names, params = [name for name, _ in kept], [param for _, param in kept]
        found.append({**group, "params": params, "param_names": names})
    return found


class _Held(NamedTuple):
    """The boxes of all ranks of a mesh, and which copy each holds, in the order of its group."""

    boxes: tuple[Box, ...]
    replicas: tuple[int, ...]
    room: int | None  # as `Spreading.room` has it


def _held(grid: Grid, shape: tuple[int, ...], over: SpreadOver) -> _Held:
    sizes = [prod(grid.sizes[axis] for axis in joined) for joined in over.mesh]
    boxes = all_boxes(shape, sizes, over.cuts)
    copies = replicas(sizes, over.cuts)
    if list(over.axes) != [axis for axis in grid.sizes if axis in over.axes]:
        raise ValueError(f"mesh axes {over.axes} are not in the order of the grid's")
    room = max(box.numel for box in boxes) if over.padded else None
    return _Held(tuple(boxes), tuple(copies), room)
