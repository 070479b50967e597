"""An optimizer on any number of ranks as data: the plans and the schedule it would run there.

    optimizer = samestep.MuonAdamW(model_on_meta, sharding="zero2")   # one process, no memory
    blueprint(optimizer, one_axis(1024)).schedule()

Plans are made by the functions that the optimizer calls, once for all ranks: which part is whose
is part of a plan.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.groups.distribution import Distribution
from samestep.groups.param_groups import Group
from samestep.lab.estimate.grid import Grid, Peers
from samestep.lab.estimate.hardware import Hardware
from samestep.lab.estimate.placed import (
    GradientSum,
    OnRank,
    Placed,
    Sharing,
    Spreading,
    Summands,
    Updated,
    on_rank,
    primary_spreadings,
    restricted_sharings,
    with_windows,
)
from samestep.layout.boxes import Cut, all_boxes, replicas
from samestep.optimizer.rule_optimizer import RuleOptimizer
from samestep.plan.layouts import RankBoxes
from samestep.plan.links import Fabric, usual_links
from samestep.plan.mesh_shares import even_share
from samestep.plan.replicated_gradients import ReplicatedAlong, replicated_along, replicated_by_all
from samestep.plan.schedule import BucketId, PlacementShape, Schedule, step_schedule
from samestep.plan.sharding import ParamSpec
from samestep.rules.state import StoredTensors
from samestep.shards.local import KnownGroup, LocalParameters
from samestep.shards.placement import PlanMembers
from samestep.shards.registry import KINDS, kind_of, require_kind
from samestep.shards.replicated.buckets import gradient_dtype
from samestep.shards.replicated.local_tensors import REPLICATED, SUMMAND
from samestep.shards.replicated.planned import plan_copies
from samestep.shards.windows import OffloadUnit, Windows

MOST_GATHERING_RANKS = 64  # its plan grows with their square


Mesh = tuple[tuple[str, ...], ...]  # per axis of a mesh the axes of the grid it is made of


class SpreadOver(NamedTuple):
    """How a DTensor lies on a mesh: per mesh axis the axes of the grid it is made of, and its cut.

    (("data", "expert"),) with (Cut(0),) is what `fully_shard` does over both as one.
    summed: numbers of the mesh axes on which backward leaves every rank a summand of the gradient.
    padded: FSDP2 shards it, with room for as many rows on every rank.
    by_fsdp: FSDP2 manages it, and averages its gradients. Other DTensors are averaged by the
        optimizer, over the ranks of which it knows that they hold the same parts elsewhere.
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


@dataclass(frozen=True)
class Blueprint:
    """Everything that is decided before the first step, for all ranks of a grid."""

    optimizer: RuleOptimizer
    grid: Grid
    everyone: Peers  # that the optimizer knows
    placements: tuple[Placed, ...]  # in the order of the schedule's numbers; (): one process
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
        """The ranks of a pipeline, one of each stage, that speak of norms and problems."""
        peers = self.grid.peers(*self.grid.beside)
        return peers if peers.size > 1 else None

    def reduced(self) -> list[tuple[int, Sharing]]:
        """Placements that are averaged by the optimizer, with their numbers.

        Of DTensors as the first rank of a mesh has them, which has the largest parts.
        """
        found = enumerate(self.placements)
        return [(number, each.sharings[0]) for number, each in found if each.sharings]

    def shared_by(self, bucket: BucketId) -> Sharing | None:
        """What a bucket is of, likewise; None: of what nobody averages here."""
        return dict(self.reduced()).get(bucket.placement)

    def schedule(self, rank: int | None = None) -> Schedule:
        """Of one rank; None: of the first, with as many chunks of blocks as any has."""
        shapes = [
            own.shape if self.distribution.offload is None else with_windows(own, self.groups)
            for own in self.on_rank(rank)
        ]
        has_plain = any(not each.spreadings for each in self.placements)
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
        """Of one process: what it updates, with its state."""
        found = []
        for index, group in enumerate(self.groups):
            known = KnownGroup(group, index, self.optimizer.state, self.optimizer.plan.blocks)
            for unit in known.units():
                param, block = unit.about.param, unit.about.block
                about = Updated(index, param, unit.elements, block, StoredTensors())
                found.append(unit._replace(about=about))
        return found

    @cached_property
    def local_windows(self) -> Windows:
        """Those of its state, where that stays on the host."""
        return Windows({("update", 0): self.local_units})

    def on_rank(self, rank: int | None) -> list[OnRank]:
        """What a rank has of each placement; None: as `schedule` has it."""
        return [on_rank(placement, self.grid, rank) for placement in self.placements]

    def stored(self, rank: int) -> list[tuple[Tensor, int]]:
        """All parameters of a rank, and elements of each in its memory."""
        if not self.placements:
            return [(param, param.numel()) for group in self.groups for param in group["params"]]
        return [each for own in self.on_rank(rank) for each in own.stored()]


_schedule = lru_cache(maxsize=64)(step_schedule)


def blueprint(
    optimizer: RuleOptimizer,
    grid: Grid,
    *,
    everyone: Peers | None = None,
    outer: Peers | None = None,
    own_peers: Mapping[int, Peers] | None = None,
    spread: Spread | None = None,
    device: torch.device | None = None,
    hardware: Hardware | None = None,
) -> Blueprint:
    """Plan what an optimizer that was built in one process would do on the ranks of a grid.

    everyone: the ranks that share plain parameters (all), and `outer` those that do the same.
    own_peers: of groups that have a process group of their own, by index.
    spread: which parameters are DTensors there, and how they lie.
    hardware: whose links the plan is made for; without it, ranks are on one host, of the device.
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
                raise ValueError(f"{name!r} is a DTensor: spread= has to say how it will lie")
    present = set(asked.kinds.values())
    kinds = [kind.name for kind in KINDS if kind.name in present]  # as the optimizer has them
    placements = tuple(placed for kind in kinds for placed in PLACED[kind](asked))
    return Blueprint(optimizer, grid, asked.everyone, placements, asked.device)


@dataclass(eq=False)
class _Request:
    """What a kind is asked to place on all ranks: see `blueprint`.

    kinds: of all parameters, by name; lie: how those that are DTensors lie.
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

    @property
    def on_gpu(self) -> bool:  # and NCCL carries
        return self.device.type != "cpu"

    @cached_property
    def meshes(self) -> dict[Mesh, None]:
        return dict.fromkeys(over.mesh for over in self.lie.values())

    @cached_property
    def copies(self) -> dict[Mesh, Peers]:
        """Of meshes of whose DTensors there are copies that are averaged here: who has them."""
        found = {}
        for mesh in self.meshes:
            lie = [over for over in self.lie.values() if over.mesh == mesh]
            peers = _copies(self.grid, self.everyone, lie)
            if peers.size > 1:
                found[mesh] = peers
        return found

    @cached_property
    def beside(self) -> Distribution:
        """Of what is averaged here."""
        others = self.meshes.keys() - self.copies.keys()
        distribution = self.optimizer.plan.distribution
        return distribution.beside_dtensors() if others else distribution

    def members(self, indices: Sequence[int], only: Callable[[Tensor], bool]) -> PlanMembers:
        holds = self.optimizer.plan
        return holds.planner.members(self.optimizer.param_groups, indices, holds.blocks, only)

    def links(self, peers: Peers) -> Fabric:
        if self.hardware is not None:
            return self.hardware.fabric(peers, self.grid)
        return Fabric(*usual_links(self.device.type), peers.size, peers.size)

    def sharing(
        self,
        members: PlanMembers,
        specs: tuple[ParamSpec, ...],
        peers: Peers,
        outer: Peers | None = None,
        alone: bool = False,
        summands: tuple[Summands | None, ...] = (),
    ) -> Sharing:
        links = self.links(peers)
        planned = plan_copies(
            members,
            specs,
            links,
            self.beside,
            self.device,
            outer=1 if outer is None else outer.size,
            uneven=self.on_gpu,
            alone=alone,
            watched=self.optimizer._in_flight.all_watched(members.params),
        )
        return Sharing(planned, members.params, peers, outer, links.per_host, summands)


def _whole(asked: _Request) -> Iterator[Placed]:
    """Plain parameters: one placement for groups that are reduced over the same ranks."""
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
        params, specs, *_ = members
        own_outer = outer if peers == everyone else None
        shared = asked.sharing(members, specs, peers, own_outer, alone=own_outer is None)
        compared = replicated_by_all(len(params), peers.size) if beside.grads != "local" else ()
        yield Placed(params, specs, peers, asked.grid.peers(), peers, compared, (shared,))


def _parts(asked: _Request) -> Iterator[Placed]:
    """DTensors: one placement for each mesh."""
    grid, lie, groups = asked.grid, asked.lie, asked.optimizer.param_groups
    distribution = asked.optimizer.plan.distribution
    held_as = cache(partial(_held, grid))  # layers are alike
    for mesh in asked.meshes:
        there = {param for param, over in lie.items() if over.mesh == mesh}
        members = asked.members(range(len(groups)), there.__contains__)
        params, specs, *_ = members
        peers = grid.peers(*(axis for joined in mesh for axis in joined))
        if distribution.muon_schedule == "gather" and peers.size > MOST_GATHERING_RANKS:
            raise ValueError(
                f"muon_schedule='gather' has every rank compute every block: it is planned for up "
                f"to {MOST_GATHERING_RANKS} ranks, not {peers.size}; take 'parallel'"
            )
        overs = [lie[param] for param in params]
        lying = [held_as(spec.shape, over) for spec, over in zip(specs, overs, strict=True)]
        held = tuple(boxes for boxes, _ in lying)
        for spec, part in zip(specs, held, strict=True):
            spec.refuse_cut_scales(part.boxes)  # as ranks would
        if mesh in asked.copies:
            shares = tuple(map(even_share, specs, (own.boxes for own in held)))
            summands = tuple(_summands(grid, over) for over in overs)
            even = asked.sharing(members, shares, asked.copies[mesh], summands=summands)
            everywhere = grid.peers(*even.peers.axes, *peers.axes)
            compared = _replicated(grid, overs, even.peers.size)
            sharings = restricted_sharings(even, held, peers.size)
            blocks = primary_spreadings(even, held, peers, asked.device)
            yield Placed(params, specs, even.peers, peers, everywhere, compared, sharings, blocks)
            continue
        room, sums = tuple(room for _, room in lying), _sums(params, overs, grid)
        blocks = (Spreading(params, specs, held, peers, distribution, asked.device, room, sums),)
        compared = _replicated(grid, overs)
        yield Placed(params, specs, grid.peers(), peers, peers, compared, (), blocks)


# What ranks will have of parameters, by the name of their kind in `shards.registry`.
PLACED: dict[str, Callable[[_Request], Iterator[Placed]]] = {
    "replicated": _whole,
    "dtensor": _parts,
}


def _copies(grid: Grid, everyone: Peers, lie: Sequence[SpreadOver]) -> Peers:
    """Who else has the parts that a rank has of the DTensors of a mesh, and averages them."""
    if any(over.by_fsdp for over in lie):
        return grid.peers()
    return grid.peers(*(axis for axis in everyone.axes if axis not in lie[0].axes))


def _summands(grid: Grid, over: SpreadOver) -> Summands | None:
    if not over.summed:
        return None
    kinds = [REPLICATED if cut.dim is None else 0 for cut in over.cuts]
    for place in over.summed:
        kinds[place] = SUMMAND
    peers = grid.peers(*(axis for place in over.summed for axis in over.mesh[place]))
    return Summands(peers, tuple(kinds))


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


def _replicated(
    grid: Grid, lie: Sequence[SpreadOver], copies: int = 1
) -> tuple[ReplicatedAlong, ...]:
    """What ranks compare of copies along the axes of one mesh."""
    replicated = [[axis for axis, cut in enumerate(o.cuts) if cut.dim is None] for o in lie]
    return replicated_along(_sizes(grid, lie[0]), replicated, copies)


def _sizes(grid: Grid, over: SpreadOver) -> list[int]:
    """Of the axes of a mesh."""
    return [prod(grid.sizes[axis] for axis in joined) for joined in over.mesh]


def _held(grid: Grid, shape: tuple[int, ...], over: SpreadOver) -> tuple[RankBoxes, int | None]:
    """What ranks of a mesh hold, in the order of its group, and room as `Spreading.room` has it."""
    sizes = _sizes(grid, over)
    boxes = all_boxes(shape, sizes, over.cuts)
    copies = replicas(sizes, over.cuts)
    if list(over.axes) != [axis for axis in grid.sizes if axis in over.axes]:
        raise ValueError(f"mesh axes {over.axes} are not in the order of the grid's")
    room = max(box.numel for box in boxes) if over.padded else None
    return RankBoxes(tuple(boxes), tuple(copies)), room
