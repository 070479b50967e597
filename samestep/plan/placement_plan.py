"""The plan of a placement on all of its ranks: all decisions before the first step.

A placement is a set of parameters that are reduced, updated and sent alike. Its ranks form a grid:

              a mesh: each rank holds other shards of its DTensors
    copies    rank 0   rank 1   rank 2
              rank 3   rank 4   rank 5

Ranks of a column hold copies. They average gradients bucket by bucket, each updates its pieces, and
all gather what the others have updated: `BucketPlan`. Ranks of a row bring blocks together on their
owners, chunk by chunk: `BlockPlan`. Plain parameters are one column. DTensors whose gradients
are averaged outside samestep, as by FSDP2, are one row, without buckets.

`plan_placement` makes the plan from specs, options and a topology, with no process group and no
tensor: an optimizer runs the part of its rank, and `estimate` reads the part of any rank.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, reduce
from math import ceil, prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from samestep.layout.blocks import Block
from samestep.plan.bucket_exchanges import bucket_exchanges
from samestep.plan.chunks import Chunk, blocks_to_all, blocks_to_owners, chunk_of
from samestep.plan.flat import plan_flat
from samestep.plan.layouts import RankBoxes
from samestep.plan.links import Fabric, bucket_elements
from samestep.plan.mesh_shares import (
    PrimaryBlock,
    even_share,
    primary_blocks,
    restrict_to_shards,
    shard_spec,
)
from samestep.plan.schedule import PlacementShape
from samestep.plan.sharding import ParamSpec, Piece, Segment, ShardingPlan, plan_sharding
from samestep.plan.transfers import CollectivePolicy, gather_of
from samestep.rules.exact_sums import WIDTH

if TYPE_CHECKING:
    from samestep.groups.distribution import Distribution  # as users gave it: data alone is read


@dataclass(frozen=True)
class Topology:
    """The ranks of a placement, as numbers.

    device: device of the parameters.
    fabric: the links between ranks with copies; None: gradients are averaged elsewhere.
    held: by parameter which box of it each rank of the mesh holds; None: parameters are plain.
    outer: number of groups of ranks that reduce the same buckets; None: there is one.
    uneven: the backend gathers unequal lengths in one call.
    """

    device: torch.device
    fabric: Fabric | None = None
    held: tuple[RankBoxes, ...] | None = None
    outer: int | None = None
    uneven: bool = False

    @property
    def mesh_ranks(self) -> int:
        """Return the number of ranks of a mesh; 1: parameters are plain."""
        return 1 if self.held is None else len(self.held[0].boxes)


def plan_placement(
    specs: Sequence[ParamSpec],
    options: "Distribution",
    topology: Topology,
    *,
    places: Sequence[int] = (),
    watched: bool = False,
) -> "PlacementPlan":
    """Plan a placement for parameters given in the order in which forward uses them.

    places: by parameter how late forward uses it; -1: unknown.
    watched: modules wait for all parameters, so that gathers may overlap with the next forward.

    Raises:
        ValueError: Two levels are asked for where there are none, or elements that share an
            8-bit scale are cut.
    """
    held, fabric = topology.held, topology.fabric
    for spec, of_ranks in () if held is None else zip(specs, held, strict=True):
        spec.refuse_cut_scales(of_ranks.boxes)
    if fabric is None:
        return PlacementPlan(tuple(specs), options, topology, None)
    shares = tuple(specs)
    if held is not None:  # all ranks of a mesh decide alike, for even shares of what it holds
        shares = tuple(map(even_share, specs, (of_ranks.boxes for of_ranks in held)))
    on_cpu = topology.device.type == "cpu"
    levels = 1
    if held is None and topology.outer is None:
        levels = levels_of(shares, fabric, options, on_cpu=on_cpu)
    refuse_missing_levels(options, fabric if held is None and topology.outer is None else None)
    policy = options.bucket_policy(
        fabric.ranks, topology.outer or 1, topology.device, uneven=topology.uneven, levels=levels
    )
    # zero1 and zero2 have one plan: they differ in when gradients are let go of.
    alike = replace(options, sharding="zero1") if options.sharding == "zero2" else options
    plan = _known_sharding(shares, fabric, alike, levels)
    buckets = BucketPlan(plan, policy, fabric, options, tuple(places), watched)
    return PlacementPlan(tuple(specs), options, topology, buckets)


# --- buckets of copies --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """The plan, on one rank, of parameters that several ranks hold copies of.

    plan: buckets, pieces and their owners; of DTensors for the shards of the rank.
    policy: the choice of collectives for buckets.
    fabric: the links between the ranks with copies.
    places: how late forward uses each parameter.
    watched: modules wait for all of the parameters.
    even: of DTensors the plan for even shares, as all ranks of a mesh have it; None: parameters
        are plain.
    """

    plan: ShardingPlan
    policy: CollectivePolicy
    fabric: Fabric
    options: "Distribution"
    places: tuple[int, ...]
    watched: bool
    even: ShardingPlan | None = None

    def restricted_to(self, shards: Sequence[ParamSpec]) -> "BucketPlan":
        """Restrict this plan, which is for even shares, to a rank that holds `shards`.

        Raises:
            ValueError: With flat buffers, where shards are not equal.
        """
        plan = restrict_to_shards(self.plan, shards, flat=self.options.buffers == "flat")
        return replace(self, plan=plan, even=self.plan)

    def place(self, rank: int) -> int:
        """Return the segment number of a rank; in two levels a column has adjacent segments."""
        if self.policy.levels == 1:
            return rank
        host, here = divmod(rank, self.fabric.per_host)
        return here * self.fabric.hosts + host

    def owned(self, number: int, place: int) -> Segment:
        """Return the pieces that a rank updates of a bucket."""
        return self.plan.buckets[number].owned(place)

    def sums_in_mesh(
        self, number: int, place: int, summands: Sequence[Hashable]
    ) -> dict[Hashable, int]:
        """Count by key the averaged elements of a bucket that a rank sums over its mesh.

        summands: by parameter the key of gradients that are summed together, if backward
            leaves the ranks of a mesh summands of it; None: a gradient is whole.
        """
        found: dict[Hashable, int] = {}
        for piece in self.owned(number, place).pieces if summands else ():
            key = summands[piece.param]
            if key is not None:
                found[key] = found.get(key, 0) + piece.size
        return found

    @cached_property
    def gradient_dtypes(self) -> list[torch.dtype]:
        """Return by bucket a dtype that holds the gradients of all its parameters."""
        params = self.plan.params
        return [
            reduce(torch.promote_types, (params[i].gradient_dtype for i in bucket.params))
            for bucket in self.plan.buckets
        ]

    @cached_property
    def shape(self) -> PlacementShape:
        """Return the part of the plan that the schedule of a step depends on."""
        params, buckets, options = self.plan.params, self.plan.buckets, self.options
        dtypes = [params[bucket.params[0]].torch_dtype for bucket in buckets]  # a bucket has one
        gradients = [options.reduce_dtype or dtype for dtype in self.gradient_dtypes]
        return PlacementShape(
            # A bucket is complete with the parameter that forward uses first.
            places=tuple(self.places[bucket.params[0]] for bucket in buckets),
            exchanges=bucket_exchanges(self.plan, self.policy, gradients, dtypes),
            # Waves are the same on all ranks of a mesh, also where their shards are not equal.
            bucket_sizes=tuple(bucket.size for bucket in (self.even or self.plan).buckets),
            agrees=True,
            reduces=options.grads == "local",
            overlaps=options.overlap_grad_reduce or options.check_gradients,
            defers=options.overlap_param_gather and self.watched,
            has_parts=self.even is not None and any(spec.blocks is not None for spec in params),
        )


def shard_plan(
    specs: Sequence[ParamSpec], fabric: Fabric, options: "Distribution", levels: int = 1
) -> ShardingPlan:
    """Cut parameters into pieces and buckets for the ranks of a fabric, as options ask."""
    size = _bucket_size(specs, fabric, options)
    columns = fabric.per_host if levels == 2 else 1
    if options.buffers == "flat":
        return plan_flat(specs, fabric.ranks, bucket_elements=size, columns=columns)
    return plan_sharding(
        specs,
        fabric.ranks,
        shard=options.sharding != "none",
        crossover=options.crossover,
        bucket_elements=size,
        owners=options.owners,
        max_size_ratio=options.max_state_ratio,
        columns=columns,
    )


_known_sharding = lru_cache(maxsize=2)(shard_plan)


def refuse_missing_levels(options: "Distribution", fabric: Fabric | None) -> None:
    """Raise if two levels are asked for where there are none.

    fabric: None if parameters are DTensors, or if other groups of ranks have copies of them.
    """
    if not options.two_levels or (fabric is not None and fabric.has_levels):
        return
    reason = "DTensors and outer_group have groups of their own"
    if fabric is not None:
        reason = f"{fabric.ranks} ranks are on {fabric.hosts} hosts, {fabric.per_host} on each"
    raise ValueError(
        f"two_levels=True needs several hosts with several ranks each: {reason}. Pass "
        "ranks_per_host= if torchrun's LOCAL_WORLD_SIZE is not that number, or leave "
        "two_levels out"
    )


def levels_of(
    specs: Sequence[ParamSpec], fabric: Fabric, options: "Distribution", *, on_cpu: bool
) -> int:
    """Return 2 if buckets are sent inside hosts and across them in two levels, else 1."""
    asked = options.two_levels
    if asked is None:
        elements = sum(spec.numel for spec in specs)
        share = min(1.0, _bucket_size(specs, fabric, options) / max(elements, 1))
        asked = fabric.pays_in_two(
            share * bytes_of(specs),
            exchanged=on_cpu or options.reduction == "ordered",
            block=largest_block(specs),
            in_a_row=legs_in_a_row(ceil(1 / share), on_cpu=on_cpu),
        )
    return 1 + (asked and fabric.has_levels)


def legs_in_a_row(buckets: int, *, on_cpu: bool) -> int:
    """Return the number of buckets whose legs inside and across overlap; 1 on a CPU."""
    return 1 if on_cpu else buckets


def _bucket_size(specs: Sequence[ParamSpec], fabric: Fabric, options: "Distribution") -> int:
    """Return the elements of a bucket, as asked for or chosen."""
    if options.bucket_size is not None:
        return options.bucket_size
    waves = None if options.overlap_grad_reduce else options.waves
    elements = sum(spec.numel for spec in specs)
    return bucket_elements(elements, bytes_of(specs), fabric, most_buckets=waves)


def largest_block(specs: Sequence[ParamSpec]) -> int:
    """Return the bytes of the largest block, 0 if there is none."""
    sizes = (
        block.rows * block.cols * spec.torch_dtype.itemsize
        for spec in specs
        for block in spec.blocks or ()
    )
    return max(sizes, default=0)


def bytes_of(specs: Sequence[ParamSpec]) -> int:
    """Return the bytes of parameters, as a rank holds them."""
    return sum(spec.nbytes for spec in specs)


# --- blocks of DTensors -------------------------------------------------------------------------


class GradientSum(NamedTuple):
    """Gradients that are summed in one collective, by the numbers of their parameters."""

    summands: Hashable
    dtype: torch.dtype
    params: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """The plan of the blocks of DTensors in one mesh: their owners, chunks and exchanges.

    specs: the DTensors; if other meshes hold copies of them, the blocks of which ranks of this
        mesh are the primary holders, each as a parameter of its own.
    held: by parameter which box of it each rank of the mesh holds.
    primary: these blocks, with their pieces of the plan for even shares; (): gradients are not
        averaged here.
    """

    specs: tuple[ParamSpec, ...]
    held: tuple[RankBoxes, ...]
    ranks: int
    options: "Distribution"
    device: torch.device
    primary: tuple[PrimaryBlock, ...] = ()

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Return the chunks of blocks in the order in which they are sent, with exchanges."""
        gives_back = self.options.muon_schedule == "parallel"
        size = self.options.chunk_elements(self.device)
        if gives_back:
            owners = self.options.owners
            chunks = blocks_to_owners(
                self.specs, self.held, self.ranks, chunk_elements=size, owners=owners
            )
        else:
            chunks = blocks_to_all(self.specs, self.held, self.ranks, chunk_elements=size)
        found = []
        for number, chunk in enumerate(chunks):
            of_blocks = [self.specs[planned.param] for planned in chunk]
            wide = reduce(
                torch.promote_types, (spec.math_dtype for spec in of_blocks), torch.float32
            )
            extra = [
                spec.state_of_blocks[planned.number] if gives_back else 0
                for spec, planned in zip(of_blocks, chunk, strict=True)
            ]
            dtype, ranks = self._travels_as(wide), self.ranks
            planned_chunk = chunk_of(
                number, chunk, extra, ranks, dtype=dtype, wide=wide, gives_back=gives_back
            )
            found.append(self._with_sums(planned_chunk, number))
        return tuple(found)

    def _with_sums(self, chunk: Chunk, number: int) -> Chunk:
        """Return a chunk with the sums over each matrix of its blocks that their rules need."""
        summed = tuple(self.specs[planned.param].sums for planned in chunk.blocks)
        pairs = zip(chunk.blocks, summed, strict=True)
        rows = sum(count * len(planned.block.matrices) for planned, count in pairs)
        if not rows:
            return chunk
        on_cpu = self.device.type == "cpu"
        sizes = (rows * WIDTH,) * self.ranks
        name = f"sums of chunk {number}"
        sums = gather_of(name, torch.int64, sizes, on_cpu=on_cpu, uneven=not on_cpu)
        return replace(chunk, sums=sums, summed=summed)

    def gradient_sums(self, summands: Sequence[Hashable]) -> list[GradientSum]:
        """Return gradients to sum over the mesh when a step begins, grouped by key and dtype.

        summands: as `BucketPlan.sums_in_mesh` has them.
        """
        together: dict[tuple[Hashable, torch.dtype], list[int]] = {}
        for index, key in enumerate(summands):
            if key is not None:
                together.setdefault((key, self.specs[index].gradient_dtype), []).append(index)
        return [GradientSum(*key, tuple(params)) for key, params in together.items()]

    def _travels_as(self, wide: torch.dtype) -> torch.dtype:
        usual = wide if self.device.type == "cpu" else torch.bfloat16
        return self.options.block_dtype or usual

    @cached_property
    def shape(self) -> PlacementShape:
        """Return the part that a schedule depends on: the same on all ranks of the mesh."""
        return PlacementShape(
            bucket_sizes=(sum(prod(spec.shape) for spec in self.specs) // self.ranks,),
            agrees=True,
            reduces=False,
            chunks=len(self.chunks),
            gives_back=self.options.muon_schedule == "parallel",
            planned_chunks=self.chunks,
        )


# --- all ranks, and one of them -----------------------------------------------------------------


class Updated(NamedTuple):
    """A range of a parameter, or a block of it, that a rank updates at once."""

    spec: ParamSpec
    elements: int
    block: Block | None


class RankPlan(NamedTuple):
    """The plan of a placement on one rank: copies, DTensors of a mesh, or both of copied shards.

    place: number of the segment that the rank owns of each bucket.
    mesh_place: the rank in its mesh.
    """

    buckets: BucketPlan | None
    place: int
    blocks: BlockPlan | None
    mesh_place: int

    @property
    def specs(self) -> tuple[ParamSpec, ...]:
        """Return the parameters in order of use; the shards of DTensors that are averaged here."""
        if self.buckets is not None:
            return self.buckets.plan.params
        assert self.blocks is not None
        return self.blocks.specs

    @property
    def shape(self) -> PlacementShape:
        """Return the part of the plan that the schedule of the rank depends on."""
        if self.buckets is None:
            assert self.blocks is not None
            return self.blocks.shape
        shape = self.buckets.shape
        return shape if self.blocks is None else shape.with_chunks_of(self.blocks.shape)

    def updates(self, number: int) -> list[Updated]:
        """Return the updates of the rank in a bucket, without blocks that span several ranks."""
        if self.buckets is None:
            assert self.blocks is not None
            return [
                Updated(spec, held.boxes[self.mesh_place].numel, None)
                for spec, held in zip(self.blocks.specs, self.blocks.held, strict=True)
                if spec.blocks is None
            ]
        return [
            Updated(self.specs[piece.param], piece.size, piece.block)
            for piece in self.buckets.owned(number, self.place).pieces
            if piece.block is None or self.buckets.even is None
        ]

    def primary_blocks(self) -> list[PrimaryBlock]:
        """Return blocks of which the rank is primary holder, with the pieces of its own plan."""
        assert self.buckets is not None
        assert self.buckets.even is not None
        assert self.blocks is not None
        shares, own = (p.owned(self.place) for p in (self.buckets.even, self.buckets.plan))
        pieces = dict(zip(shares, own, strict=True))
        return [item._replace(piece=pieces[item.piece]) for item in self.blocks.primary]


@dataclass(frozen=True, eq=False)
class PlacementPlan:
    """The plan of a placement for all of its ranks.

    buckets: the same on every rank; of DTensors for even shares. None: no averaging here.
    """

    specs: tuple[ParamSpec, ...]
    options: "Distribution"
    topology: Topology
    buckets: BucketPlan | None
    # Those that were made before: many ranks are alike.
    _of_shards: dict[tuple[ParamSpec, ...], BucketPlan] = field(default_factory=dict, init=False)
    _of_pieces: dict[tuple[Piece, ...], BlockPlan] = field(default_factory=dict, init=False)

    def buckets_on(self, mesh_place: int) -> BucketPlan | None:
        """Return the buckets of a rank of the mesh, restricted to the shards that it holds.

        Raises:
            ValueError: With flat buffers, where shards are not equal.
        """
        held = self.topology.held
        if self.buckets is None or held is None:
            return self.buckets
        shares = zip(self.buckets.plan.params, held, strict=True)
        shards = tuple(shard_spec(share, own.boxes[mesh_place]) for share, own in shares)
        if shards not in self._of_shards:
            self._of_shards[shards] = self.buckets.restricted_to(shards)
        return self._of_shards[shards]

    def blocks_on(self, place: int) -> BlockPlan | None:
        """Return the block plan of the mesh at `place` among copies; None if there is no mesh."""
        held, ranks, device = self.topology.held, self.topology.mesh_ranks, self.topology.device
        if held is None:
            return None
        if self.buckets is None:
            return self._of_pieces.setdefault(
                (), BlockPlan(self.specs, held, ranks, self.options, device)
            )
        owned = self.buckets.plan.owned(place)
        pieces = tuple(piece for piece in owned if piece.block is not None)
        if pieces not in self._of_pieces:
            items = primary_blocks(self.buckets.plan, held, place)
            specs, of_items = tuple(item.spec for item in items), tuple(item.held for item in items)
            plan = BlockPlan(specs, of_items, ranks, self.options, device, tuple(items))
            self._of_pieces[pieces] = plan
        return self._of_pieces[pieces]

    def on_rank(self, rank: int, mesh_place: int = 0) -> RankPlan:
        """Return the plan of a rank, given its places among ranks with copies and in its mesh."""
        buckets = self.buckets_on(mesh_place)
        place = 0 if buckets is None else buckets.place(rank)
        return RankPlan(buckets, place, self.blocks_on(rank), mesh_place)
