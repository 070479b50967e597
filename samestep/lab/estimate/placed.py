"""Parameters on all ranks of a grid: in copies, in parts, and in copies of parts.

A rank asks by its places: which one it is among the ranks with copies, and which one in its mesh.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.groups.distribution import Distribution
from samestep.groups.param_groups import rule_of
from samestep.lab.estimate.grid import Grid, Peers
from samestep.layout.blocks import Block, Shape
from samestep.plan.chunks import Chunk
from samestep.plan.layouts import RankBoxes
from samestep.plan.mesh_shares import primary_blocks, shard_spec
from samestep.plan.placement_plan import BlockPlan, BucketPlan
from samestep.plan.replicated_gradients import ReplicatedAlong
from samestep.plan.schedule import PlacementShape, Stage
from samestep.plan.sharding import ParamSpec, Piece, Segment, ShardingPlan
from samestep.plan.transfers import CollectivePolicy
from samestep.rules.state import State, StoredTensors, block_state_shapes, state_shapes
from samestep.shards.replicated.buckets import gradient_dtype
from samestep.shards.windows import OffloadUnit, Windows

Groups = Sequence[Mapping[str, Any]]


class Summands(NamedTuple):
    """What ranks of a mesh have of a gradient: along some axes summands.

    kinds: of all axes. Gradients that have the same are added up at once.
    """

    peers: Peers
    kinds: tuple[int, ...]


@dataclass(frozen=True)
class Sharing:
    """Parameters that peers hold copies of, and how they share the work on them.

    planned: as optimizers have it; `params`: the parameters as a rank has them.
    per_host: peers on each host, where buckets go in two levels.
    summands: of each gradient, if the ranks of a mesh have summands of it.
    """

    planned: BucketPlan
    params: tuple[Tensor, ...]
    peers: Peers
    outer: Peers | None
    per_host: int = 1
    summands: tuple[Summands | None, ...] = ()

    @property
    def plan(self) -> ShardingPlan:
        return self.planned.plan

    @property
    def even(self) -> ShardingPlan | None:
        """The plan for even shares of DTensors, whose blocks come together in their mesh."""
        return self.planned.even

    @property
    def policy(self) -> CollectivePolicy:
        return self.planned.policy

    @property
    def distribution(self) -> Distribution:
        return self.planned.options

    def place(self, peer: int) -> int:
        """Which segment of a bucket is a peer's: in two levels those of a column lie together."""
        if self.policy.levels == 1:
            return peer
        host, here = divmod(peer, self.per_host)
        return here * (self.peers.size // self.per_host) + host

    @property
    def specs(self) -> tuple[ParamSpec, ...]:
        """The parameters, in the order in which forward uses them."""
        return self.plan.params

    @property
    def shape(self) -> PlacementShape:
        """What the schedule of a rank depends on."""
        return self.planned.shape

    def owned(self, number: int, place: int) -> Segment:
        """What a peer updates of a bucket."""
        return self.plan.buckets[number].owned(place)

    def sums(self, number: int, place: int) -> dict[Summands, int]:
        """Elements that a peer adds up over its mesh, of what it has averaged of a bucket."""
        found: dict[Summands, int] = {}
        for piece in self.owned(number, place).pieces if self.summands else ():
            own = self.summands[piece.param]
            if own is not None:
                found[own] = found.get(own, 0) + piece.size
        return found


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
    held: tuple[RankBoxes, ...]
    peers: Peers
    distribution: Distribution
    device: torch.device
    # Elements of each that every rank has room for; None, or nothing: its own.
    room: tuple[int | None, ...] = ()
    sums: tuple[GradientSum, ...] = ()  # of gradients of which ranks have summands

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        return self._plan.chunks

    @cached_property
    def _plan(self) -> BlockPlan:
        return BlockPlan(self.specs, self.held, self.peers.size, self.distribution, self.device)

    def stored(self, index: int, place: int) -> int:
        """Elements of a parameter, and of its gradient, in the memory of a rank."""
        room = self.room[index] if self.room else None
        return self.held[index].boxes[place].numel if room is None else room

    @property
    def shape(self) -> PlacementShape:
        """What the schedule of a rank depends on."""
        return self._plan.shape


@dataclass(frozen=True)
class Placed:
    """One placement on all ranks.

    Ranks with the same parts of everything, `peers`, share the work on them; ranks of a mesh have
    the others of one copy. Plain parameters are a mesh of one rank, and DTensors that somebody else
    averages have no peers.

    everyone: all ranks that hold some of it.
    replicated: what ranks compare.
    sharings: by place in the mesh, what peers share; where parts are equal, it is one. (): nothing.
    spreadings: by place among peers, its primary blocks, as DTensors of its mesh;
        (): parameters are plain.
    """

    params: tuple[Tensor, ...]
    specs: tuple[ParamSpec, ...]
    peers: Peers
    mesh: Peers
    everyone: Peers
    replicated: tuple[ReplicatedAlong, ...]
    sharings: tuple[Sharing, ...] = ()
    spreadings: tuple[Spreading, ...] = ()


def restricted_sharings(
    even: Sharing, held: Sequence[RankBoxes], ranks: int
) -> tuple[Sharing, ...]:
    """How each rank of a mesh shares its parts with their copies, from how it is for even shares.

    Raises:
        ValueError: Of flat buffers, where parts are not equal.
    """

    @cache
    def sharing(specs: tuple[ParamSpec, ...]) -> Sharing:
        pairs = zip(even.params, specs, strict=True)
        params = tuple(_part(param, spec.shape) for param, spec in pairs)
        return replace(even, params=params, planned=even.planned.restricted_to(specs))

    return tuple(
        sharing(
            tuple(
                shard_spec(share, own.boxes[place])
                for share, own in zip(even.specs, held, strict=True)
            )
        )
        for place in range(ranks)
    )


def primary_spreadings(
    even: Sharing, held: Sequence[RankBoxes], mesh: Peers, device: torch.device
) -> tuple[Spreading, ...]:
    """The blocks of which each rank with copies is the primary holder."""
    known: dict[tuple[Piece, ...], Spreading] = {}
    found = []
    for place in range(even.peers.size):
        pieces = tuple(piece for piece in even.plan.owned(place) if piece.block is not None)
        if pieces not in known:
            items = primary_blocks(even.plan, held, place)
            known[pieces] = Spreading(
                tuple(even.params[item.piece.param] for item in items),  # of which a dtype counts
                tuple(item.spec for item in items),
                tuple(item.held for item in items),
                mesh,
                even.distribution,
                device,
            )
        found.append(known[pieces])
    return tuple(found)


def _part(param: Tensor, shape: tuple[int, ...]) -> Tensor:
    """As large as what a rank holds of a parameter."""
    part = torch.empty(shape, dtype=param.dtype, device="meta", requires_grad=True)
    if gradient_dtype(param) != param.dtype:
        part.grad_dtype = param.grad_dtype
    return part


class Updated(NamedTuple):
    """What a rank updates at once, with what is kept for it.

    block: None: any range of the elements may be updated.
    """

    group: int
    param: Tensor
    elements: int
    block: Block | None
    stored: StoredTensors

    def shapes(self, elements: int) -> Sequence[tuple[int, ...]]:
        """What rules are run on, of so many of its elements."""
        return [(elements,)] if self.block is None else self.block.matrices


class OnRank(NamedTuple):
    """What one rank has of a placement: copies, DTensors of a mesh, or both of copied parts.

    place: which segment of buckets is its own; mesh_place: which rank of the mesh it is.
    """

    sharing: Sharing | None
    place: int
    spreading: Spreading | None
    mesh_place: int

    def stored(self) -> list[tuple[Tensor, int]]:
        """Parameters, and elements of each, and of its gradient, in the memory of the rank."""
        if self.sharing is not None:
            return [(param, param.numel()) for param in self.sharing.params]
        assert self.spreading is not None
        members = enumerate(self.spreading.params)
        return [(param, self.spreading.stored(i, self.mesh_place)) for i, param in members]

    def updates(self, number: int) -> list[Updated]:
        """What is updated in a bucket: no blocks of which there are parts here."""
        found = []
        if self.sharing is not None:
            for piece in self.sharing.owned(number, self.place).pieces:
                param, spec = self.sharing.params[piece.param], self.sharing.specs[piece.param]
                if piece.block is None or self.sharing.even is None:
                    found.append(Updated(spec.group, param, piece.size, piece.block, spec.stored))
        elif self.spreading is not None:
            own = self.spreading
            for param, spec, held in zip(own.params, own.specs, own.held, strict=True):
                if spec.blocks is None:
                    elements = held.boxes[self.mesh_place].numel
                    found.append(Updated(spec.group, param, elements, None, spec.stored))
        return found

    @property
    def shape(self) -> PlacementShape:
        """What the schedule of the rank depends on."""
        if self.spreading is None:
            assert self.sharing is not None
            return self.sharing.shape
        blocks = self.spreading.shape
        if self.sharing is None:
            return blocks
        return self.sharing.shape.with_chunks_of(blocks)


def on_rank(placement: Placed, grid: Grid, rank: int | None) -> OnRank:
    """Of a rank; None: of the first, with as many chunks of blocks as any has."""
    place, mesh_place = (grid.place(rank or 0, each) for each in (placement.peers, placement.mesh))
    if rank is None and placement.spreadings:
        chunks = [len(each.chunks) for each in placement.spreadings]
        place = chunks.index(max(chunks))
    sharing = placement.sharings[mesh_place] if placement.sharings else None
    spreading = placement.spreadings[place] if placement.spreadings else None
    return OnRank(sharing, sharing.place(place) if sharing else 0, spreading, mesh_place)


# --- state that stays on the host: cut as the placements of optimizers do, on the meta device ----


def with_windows(own: OnRank, groups: Groups) -> PlacementShape:
    """What the schedule of a rank depends on, with the windows of its state."""
    windows, shape = windows_of(own, groups), own.shape
    return shape._replace(
        windows=windows.sizes(len(shape.bucket_sizes)),
        chunk_windows=windows.chunk_sizes(shape.chunks),
    )


def windows_of(own: OnRank, groups: Groups) -> Windows:
    """The windows of every bucket and chunk, as the placements of optimizers cut them."""
    units: dict[tuple[Stage, int], list[OffloadUnit]] = {}
    for number in range(len(own.shape.bucket_sizes)):
        units["update", number] = [_unit(each, groups) for each in own.updates(number)]
    for number in range(own.shape.chunks):
        units["chunk", number] = list(_of_chunk(own, number, groups))
    return Windows(units)


def _unit(updated: Updated, groups: Groups) -> OffloadUnit:
    group, stored, block = groups[updated.group], updated.stored, updated.block
    if block is None:
        shapes = state_shapes(rule_of(group), (updated.elements,), group, stored)
    else:
        shapes = block_state_shapes(rule_of(group), block, group, stored)
    return OffloadUnit(updated, _state(shapes, stored), updated.elements, may_be_cut=block is None)


def _of_chunk(own: OnRank, number: int, groups: Groups) -> Iterator[OffloadUnit]:
    """Of the parts that a rank holds, and of what belongs to whole blocks, which all have."""
    assert own.spreading is not None
    for planned in own.spreading.chunks[number].blocks:
        spec = own.spreading.specs[planned.param]
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
