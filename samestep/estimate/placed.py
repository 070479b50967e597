"""Parameters on all ranks of a grid: in copies, in parts, and in copies of parts.

A rank asks by its places: which one it is among the ranks with copies, and which one in its mesh.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.estimate.grid import Grid, Peers
from samestep.groups.distribution import Distribution
from samestep.placements.parts.block_exchange import planned as planned_blocks
from samestep.placements.parts.block_exchange import shape_of as shape_of_blocks
from samestep.placements.parts.block_exchange import transfers_of
from samestep.placements.placement import PlanMembers
from samestep.placements.whole.buffers import gradient_dtype
from samestep.placements.whole.planned import shape_of as shape_of_shares
from samestep.plan.block_exchange import ChunkTransfers, ExchangePlan, ShardedSpec
from samestep.plan.copied import CopiedAlong, copied_by_all
from samestep.plan.narrowed import answered_blocks, held_spec, narrowed
from samestep.plan.schedule import PlacementShape
from samestep.plan.sharding import ParamSpec, Piece, Segment, ShardingPlan
from samestep.plan.transfers import BucketPolicy


@dataclass(frozen=True)
class Sharing:
    """Parameters that peers hold copies of, and how they share the work on them.

    has_parts: the copies are of parts; their blocks come together in `CopiedParts.blocks`.
    per_host: peers on each host, where buckets go in two levels.
    summands: of each gradient, if the ranks of a mesh have summands of it.
    """

    params: tuple[Tensor, ...]
    plan: ShardingPlan
    peers: Peers
    outer: Peers | None
    distribution: Distribution
    policy: BucketPolicy
    shape: PlacementShape
    has_parts: bool = False
    per_host: int = 1
    summands: tuple["Summands | None", ...] = ()

    def place(self, peer: int) -> int:
        """Which segment of a bucket is a peer's: in two levels those of a column lie together."""
        if self.policy.levels == 1:
            return peer
        host, here = divmod(peer, self.per_host)
        return here * (self.peers.size // self.per_host) + host

    @property
    def specs(self) -> tuple[ParamSpec, ...]:
        """In order of use."""
        return self.plan.params

    @property
    def copied(self) -> tuple[CopiedAlong, ...]:
        """What ranks compare."""
        if self.distribution.grads == "local":
            return ()
        return copied_by_all(len(self.params), self.peers.size)

    def owned(self, number: int, place: int) -> Segment:
        """What a peer updates of a bucket."""
        return self.plan.buckets[number].owned(place)

    def sums(self, number: int, place: int) -> dict["Summands", int]:
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
    held: tuple[ShardedSpec, ...]
    plan: ExchangePlan
    transfers: tuple[ChunkTransfers, ...]
    peers: Peers
    distribution: Distribution
    sums: tuple[GradientSum, ...] = ()
    copied: tuple[CopiedAlong, ...] = ()
    # Elements of each that every rank has room for; None: its own.
    room: tuple[int | None, ...] = ()

    def stored(self, index: int, place: int) -> int:
        """Elements of a parameter, and of its gradient, in the memory of a rank."""
        room = self.room[index]
        return self.held[index].boxes[place].numel if room is None else room

    @property
    def shape(self) -> PlacementShape:
        """What the schedule of a rank depends on."""
        return shape_of_blocks(self.transfers, self.distribution, self.specs, self.peers.size)


class Summands(NamedTuple):
    """What ranks of a mesh have of a gradient: along some axes summands.

    kinds: of all axes. Gradients that have the same are added up at once.
    """

    peers: Peers
    kinds: tuple[int, ...]


@dataclass(frozen=True)
class CopiedParts:
    """DTensors of a mesh of which other meshes hold copies.

    Ranks with copies of the same parts share the work on them, and for the blocks for which one of
    them answers, its mesh brings these together.

    peers: ranks with the same parts; mesh: with the others of one copy.
    summands: of each gradient; None: ranks of a mesh have what they need.
    """

    members: PlanMembers
    held: tuple[ShardedSpec, ...]
    plan: ShardingPlan  # for an even share of everything
    peers: Peers
    mesh: Peers
    everyone: Peers
    summands: tuple[Summands | None, ...]
    copied: tuple[CopiedAlong, ...]
    distribution: Distribution
    policy: BucketPolicy
    device: torch.device
    watched: bool

    @property
    def params(self) -> tuple[Tensor, ...]:
        """As they are, whole."""
        return tuple(self.members.params)

    @property
    def specs(self) -> tuple[ParamSpec, ...]:
        """The same."""
        return tuple(self.members.specs)

    @cached_property
    def has_blocks(self) -> bool:
        return any(spec.blocks is not None for spec in self.specs)

    # --- between copies ----------------------------------------------------------------------

    @cached_property
    def by_mesh_place(self) -> tuple[Sharing, ...]:
        """How each rank of a mesh shares its parts with their copies; where parts are equal, one.

        Raises:
            ValueError: Of flat buffers, where they are not.
        """
        known: dict[tuple[ParamSpec, ...], Sharing] = {}
        found = []
        for place in range(self.mesh.size):
            specs = tuple(
                held_spec(share, held.boxes[place])
                for share, held in zip(self.plan.params, self.held, strict=True)
            )
            if specs not in known:
                known[specs] = self._sharing(specs)
            found.append(known[specs])
        return tuple(found)

    def _sharing(self, specs: tuple[ParamSpec, ...]) -> Sharing:
        plan = narrowed(self.plan, specs, flat=self.distribution.buffers == "flat")
        shape = shape_of_shares(
            plan, self.members, self.distribution, self.policy, watched=self.watched
        )
        even = tuple(bucket.size for bucket in self.plan.buckets)
        params = tuple(
            _part(param, spec.shape) for param, spec in zip(self.params, specs, strict=True)
        )
        return Sharing(
            params, plan, self.peers, None, self.distribution, self.policy,
            shape._replace(has_parts=self.has_blocks, bucket_sizes=even), has_parts=True,
            summands=self.summands,
        )  # fmt: skip

    @property
    def widest(self) -> Sharing:
        """Of the first rank of a mesh, which has the largest parts: what time is counted for."""
        return self.by_mesh_place[0]

    # --- blocks ------------------------------------------------------------------------------

    @cached_property
    def by_place(self) -> tuple[Spreading, ...]:
        """The blocks for which each rank with copies answers, as DTensors of its mesh."""
        known: dict[tuple[Piece, ...], Spreading] = {}
        found = []
        for place in range(self.peers.size):
            pieces = tuple(piece for piece in self.plan.owned(place) if piece.block is not None)
            if pieces not in known:
                known[pieces] = self._spreading(place)
            found.append(known[pieces])
        return tuple(found)

    def _spreading(self, place: int) -> Spreading:
        items = answered_blocks(self.plan, self.held, place)
        held = tuple(item.held for item in items)
        specs = tuple(item.spec for item in items)
        params = tuple(self.params[item.piece.param] for item in items)  # of which a dtype counts
        ranks = self.mesh.size
        exchange = planned_blocks(held, ranks, self.distribution, self.device)
        transfers = transfers_of(exchange, params, specs, ranks, self.distribution, self.device)
        return Spreading(
            params, specs, held, exchange, transfers, self.mesh, self.distribution,
            room=(None,) * len(held),
        )  # fmt: skip


def _part(param: Tensor, shape: tuple[int, ...]) -> Tensor:
    """As large as what a rank holds of a parameter."""
    part = torch.empty(shape, dtype=param.dtype, device="meta", requires_grad=True)
    if gradient_dtype(param) != param.dtype:
        part.grad_dtype = param.grad_dtype
    return part


Placed = Sharing | CopiedParts | Spreading


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

    @property
    def shape(self) -> PlacementShape:
        """What the schedule of the rank depends on."""
        if self.spreading is None:
            assert self.sharing is not None
            return self.sharing.shape
        blocks = self.spreading.shape
        if self.sharing is None:
            return blocks
        return self.sharing.shape._replace(
            chunks=blocks.chunks,
            gives_back=blocks.gives_back,
            chunk_transfers=blocks.chunk_transfers,
        )


def on_rank(placement: Placed, grid: Grid, rank: int | None) -> OnRank:
    """Of a rank; None: of the first, with as many chunks of blocks as any has."""
    place = grid.place(rank or 0, placement.peers)
    if isinstance(placement, Sharing):
        return OnRank(placement, placement.place(place), None, 0)
    if isinstance(placement, Spreading):
        return OnRank(None, 0, placement, place)
    if rank is None:
        chunks = [len(each.transfers) for each in placement.by_place]
        place = chunks.index(max(chunks))
    mesh_place = grid.place(rank or 0, placement.mesh)
    sharing, spreading = placement.by_mesh_place[mesh_place], placement.by_place[place]
    return OnRank(sharing, place, spreading, mesh_place)
