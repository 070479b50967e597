"""Collectives that each operation of a schedule launches on all ranks, and their time.

The collectives carry the transfers of the plan, and scalars.

Tests compare them one by one with the records of `comm.recorder`, for every layout.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, maximum

from samestep.comm.presence import PROBLEM_CODES, presence_elements
from samestep.lab.estimate.grid import Grid, Peers, per_peer
from samestep.lab.estimate.grid_plan import GridPlacement, GridPlan, Summands
from samestep.lab.estimate.hardware import RINGS, Hardware
from samestep.plan.bucket_exchanges import BucketExchanges
from samestep.plan.chunks import Chunk
from samestep.plan.exchanges import Exchange, transfer_of
from samestep.plan.links import Fabric
from samestep.plan.schedule import (
    Agree,
    Average,
    BucketId,
    Clip,
    Collect,
    Gather,
    GiveBack,
    Measure,
    OfBucket,
    Operation,
    Reduce,
    Sum,
)
from samestep.plan.transfers import Traffic, Transfer, gather_of

SUM = "sum of gradients"


@dataclass(frozen=True)
class Collective:
    """One collective of all ranks; `transfers` has one transfer, or one per place in `among`.

    Ranks at different places in `among` run the collective in different groups of peers, each with
    its own transfer; a transfer of None: the ranks at that place launch nothing.
    """

    transfers: tuple[Transfer | None, ...]
    peers: Peers
    among: Peers | None = None

    @cached_property
    def _first(self) -> Transfer:
        return next(each for each in self.transfers if each is not None)

    @property
    def name(self) -> str:
        return self._first.name

    @property
    def traffic(self) -> Traffic:
        return self._first.traffic

    @property
    def levels(self) -> int:
        return self._first.levels

    def of(self, place_among: int) -> Transfer | None:
        """Return the transfer of the ranks at a place in `among`; None: they launch nothing."""
        return self.transfers[place_among if self.among is not None else 0]

    def of_rank(self, rank: int, grid: Grid) -> Transfer | None:
        """Return the transfer of a rank of the grid; None: the rank launches nothing."""
        return self.of(0 if self.among is None else grid.place(rank, self.among))

    def sent_by_all(self) -> Tensor:
        """Return the least bytes each peer sends: (size,), or (places in `among`, size)."""
        return self._by_place(_sent)

    def received_by_all(self) -> Tensor:
        """Return the least bytes each peer receives, in the shape of `sent_by_all`."""
        return self._by_place(_received)

    def spread(self, values: Tensor, grid: Grid) -> Tensor:
        """Spread one number per peer over all ranks: the shape of the grid."""
        if self.among is None:
            return grid.spread(values, self.peers)
        return grid.spread_both(values, self.among, self.peers)

    def _by_place(self, count: Callable[[Transfer, int], Tensor]) -> Tensor:
        ranks = self.peers.size
        if self.among is None:
            return count(self._first, ranks)
        nothing = torch.zeros(ranks, dtype=torch.float64)
        known = {id(each): each for each in self.transfers}  # many are one
        rows = {key: nothing if e is None else count(e, ranks) for key, e in known.items()}
        return torch.stack([rows[id(each)] for each in self.transfers])


def _segments(transfer: Transfer) -> Tensor:
    """Return the bytes of each peer's segment: (size,)."""
    assert transfer.sizes is not None
    return per_peer(transfer.sizes) * transfer.dtype.itemsize


def _sent(transfer: Transfer, ranks: int) -> Tensor:
    """Return the least bytes that each of so many ranks sends: (ranks,)."""
    if transfer.sizes is None:
        return torch.full((ranks,), float(transfer.sent(0, ranks)), dtype=torch.float64)
    whole = transfer.elements * transfer.dtype.itemsize
    base, one_more = (round(transfer.traffic.sent(whole, mine, ranks)) for mine in (0, 1))
    return base + (one_more - base) * _segments(transfer)  # it is linear in a rank's own


def _received(transfer: Transfer, ranks: int) -> Tensor:
    """Return the least bytes that each of so many ranks receives: (ranks,)."""
    if transfer.sizes is None:
        return _sent(transfer, ranks)
    if transfer.incoming is not None:
        return per_peer(transfer.incoming) * transfer.dtype.itemsize
    mine = _segments(transfer)
    if transfer.traffic is Traffic.EXCHANGE:
        return mine * (ranks - 1)
    if transfer.traffic is Traffic.REDUCE_SCATTER:  # backends add up on the way
        return mine.sum().expand(ranks) * (ranks - 1) / ranks
    return mine.sum() - mine


class Launches:
    """Collectives by operation, in the order in which all ranks launch them."""

    def __init__(self, grid_plan: GridPlan) -> None:
        self._grid_plan = grid_plan

    def of_step(self, rank: int | None = None) -> list[Collective]:
        """Return the collectives of a step on one rank; None: of all ranks."""
        operations = self._grid_plan.schedule(rank)
        inside = 0  # backward, which is over when a step begins
        if self._grid_plan.distribution.overlap_grad_reduce:
            inside = sum(isinstance(operation, Reduce) for operation in operations)
        found = [each for op in operations[:inside] for each in self.of(op)]
        found += self.of_beginning()
        found += [each for op in operations[inside:] for each in self.of(op)]
        if rank is None:
            return found
        grid = self._grid_plan.grid
        return [each for each in found if each.of_rank(rank, grid) is not None]

    def of_beginning(self) -> list[Collective]:
        """Return the collectives before the first operation: problems of other stages."""
        return [] if self._grid_plan.placements else list(self._hear_others())

    def of(self, operation: Operation) -> Iterator[Collective]:
        """Yield the collectives that an operation launches."""
        there = len(self._grid_plan.placements)
        if isinstance(operation, OfBucket) and operation.bucket.placement == there:
            return  # of one process
        match operation:
            case Agree(number):
                yield from self._agree(number)
            case Average(bucket, sums, outer):
                if sums is not None:
                    yield from self._of_bucket(bucket, lambda own: own.sums)
                yield from self._over_outer(bucket, outer)
                yield from self._in_mesh(bucket)
            case Clip():
                yield from self._clip()
            case Reduce(bucket):
                yield from self._of_bucket(bucket, lambda own: own.reduce)
            case Gather(bucket):
                yield from self._of_bucket(bucket, lambda own: own.gather)
            case Collect(chunk):
                yield from self._of_chunk(chunk, lambda own: own.collection)
            case GiveBack(chunk):
                yield from self._of_chunk(chunk, lambda own: own.giving_back)
            case Sum(chunk):
                yield from self._of_chunk(chunk, lambda own: own.sums)
            case Measure():
                elements = 2 * len(self._grid_plan.groups)
                everyone = self._grid_plan.everyone
                yield from _summed("update sizes", everyone, torch.float64, elements)

    # --- scalars -----------------------------------------------------------------------------

    def _codes(
        self, name: str, peers: Peers | None, elements: int = PROBLEM_CODES
    ) -> Iterator[Collective]:
        """Yield the all-reduce of problem codes between ranks; on GPUs there is none."""
        if peers is not None and self._grid_plan.device.type == "cpu":
            yield from _summed(name, peers, torch.int64, elements)

    def _all_holders(self) -> Peers | None:
        """Return the ranks that hold any parameter; None: the same ranks hold every placement."""
        grid_plan = self._grid_plan
        held_by = dict.fromkeys(each.everyone for each in grid_plan.placements)
        if len(held_by) < 2:
            return None
        axes = {axis for peers in held_by for axis in peers.axes}
        union = grid_plan.grid.peers(*axes)
        return next((each for each in held_by if each.size == union.size), grid_plan.everyone)

    def _agree(self, number: int) -> Iterator[Collective]:
        placement = self._grid_plan.placements[number]
        elements = presence_elements(len(placement.specs), placement.replicated)
        for peers in filter(None, (placement.peers, placement.outer, placement.mesh)):
            yield from _summed("presence", peers, torch.int64, elements)
        for over, each in placement.gradient_sums():
            size_on = partial(self._held_by, placement, each.params)
            yield from self._sums(over, placement.mesh, each.dtype, size_on)
        if number == len(self._grid_plan.placements) - 1:
            yield from self._hear_others()

    def _hear_others(self) -> Iterator[Collective]:
        """Yield the collectives that report problems between ranks that share no parameter."""
        yield from self._codes("problems", self._all_holders())
        yield from self._codes("problems", self._grid_plan.stages)

    def _clip(self) -> Iterator[Collective]:
        grid_plan = self._grid_plan
        count = 1 + len(grid_plan.optimizer._steps.clipped_rules)
        over = dict.fromkeys(
            each.everyone if each.block_plans else grid_plan.everyone
            for each in grid_plan.placements
        )
        for peers in over:
            yield from _summed("gradient norm", peers, torch.float64, count)
        if grid_plan.stages is not None:
            peers = grid_plan.stages
            on_cpu = grid_plan.device.type == "cpu"
            name, sizes = "norm of stages", (count,) * peers.size
            gather = gather_of(name, torch.float64, sizes, on_cpu=on_cpu, uneven=not on_cpu)
            yield Collective((gather,), peers)
        yield from self._codes("not finite", self._all_holders(), 1)
        yield from self._codes("not finite", grid_plan.stages, 1)

    def _sums(
        self, over: Peers, among: Peers, dtype: torch.dtype, size_on: Callable[[int], int | None]
    ) -> Iterator[Collective]:
        """Yield the all-reduce of gradients of which the ranks along `over` have summands.

        size_on: gives the elements of a rank; None: the rank has nothing to add up.
        """
        grid = self._grid_plan.grid
        others = grid.peers(*(axis for axis in among.axes if axis not in over.axes))
        sizes = [size_on(grid.rank_at(others, place)) for place in range(others.size)]
        if over.size > 1 and any(size is not None for size in sizes):
            sums = (
                None if size is None else Transfer(Traffic.ALL_REDUCE, SUM, dtype, size)
                for size in sizes
            )
            yield Collective(tuple(sums), over, among=others)

    def _held_by(self, placement: GridPlacement, params: Sequence[int], rank: int) -> int:
        """Return the number of elements of some parameters that a rank holds."""
        place, (blocks,) = self._grid_plan.grid.place(rank, placement.mesh), placement.block_plans
        return sum(blocks.held[param].boxes[place].numel for param in params)

    # --- buckets and chunks: as the plan has them ----------------------------------------------

    def _of_bucket(
        self, bucket: BucketId, which: Callable[[BucketExchanges], Exchange | None]
    ) -> Iterator[Collective]:
        """Yield a bucket's exchange between the ranks that have copies of a placement."""
        placement = self._grid_plan.placements[bucket.placement]
        if placement.peers.size == 1:
            return
        exchanges = [which(each.shape.exchanges[bucket.bucket]) for each in placement.bucket_plans]
        found = list(map(transfer_of, exchanges))
        if len(set(map(id, found))) > 1:
            yield Collective(tuple(found), placement.peers, among=placement.mesh)
        elif found[0] is not None:
            yield Collective((found[0],), placement.peers)

    def _in_mesh(self, bucket: BucketId) -> Iterator[Collective]:
        """Yield the sums of averaged gradients of which ranks of a mesh have summands."""
        placement, grid = self._grid_plan.placements[bucket.placement], self._grid_plan.grid
        if not placement.bucket_plans or not placement.summands:
            return
        first = placement.buckets
        members = first.plan.buckets[bucket.bucket].params
        reduce = first.shape.exchanges[bucket.bucket].reduce.transfer
        wide = torch.promote_types(reduce.dtype, torch.float32)
        for summands in dict.fromkeys(filter(None, (placement.summands[i] for i in members))):

            def size_on(rank: int, summands: Summands = summands) -> int | None:
                mesh, place = (grid.place(rank, each) for each in (placement.mesh, placement.peers))
                plan = placement.bucket_plans[mesh]
                return plan.sums_in_mesh(bucket.bucket, place, placement.summands).get(summands)

            yield from self._sums(summands.peers, placement.everyone, wide, size_on)

    def _of_chunk(
        self, chunk: BucketId, which: Callable[[Chunk], Exchange | Transfer | None]
    ) -> Iterator[Collective]:
        """Yield a chunk's exchange between the ranks of a mesh, if any bytes travel."""
        placement = self._grid_plan.placements[chunk.placement]
        found: list[Transfer | None] = []
        for each in placement.block_plans:
            own = each.chunks[chunk.bucket] if chunk.bucket < len(each.chunks) else None
            exchange = None if own is None else which(own)
            sent = transfer_of(exchange)
            found.append(sent if sent is not None and sent.elements else None)
        if any(found):
            yield Collective(tuple(found), placement.mesh, among=placement.peers)

    def _over_outer(
        self, bucket: BucketId, by_place: Sequence[tuple[Transfer, ...]]
    ) -> Iterator[Collective]:
        """Yield the transfers between replicas of a group, by place in the group."""
        for together in zip(*by_place, strict=True):
            placement = self._grid_plan.placements[bucket.placement]
            assert placement.outer is not None
            yield Collective(together, placement.outer, among=placement.peers)


def _summed(name: str, peers: Peers, dtype: torch.dtype, elements: int) -> Iterator[Collective]:
    if peers.size > 1:
        yield Collective((Transfer(Traffic.ALL_REDUCE, name, dtype, elements),), peers)


# --- how long they take ---------------------------------------------------------------------------


def seconds_of(each: Collective, grid: Grid, hardware: Hardware) -> Tensor:
    """Return the seconds of each group's busiest direction: the shape of the grid."""
    carried = maximum(each.sent_by_all(), each.received_by_all())
    spread = grid.maximum(each.spread(carried, grid), each.peers)
    fabric = hardware.fabric(each.peers, grid)
    if each.levels == 2:
        return sum((leg.seconds for leg in legs_of(each, grid, hardware)), grid.zeros())
    fixed = hardware.seconds(each.traffic.kind, 0.0, fabric)
    per_byte = hardware.seconds(each.traffic.kind, 1e9, fabric) - fixed
    return fixed + spread * (per_byte / 1e9)


INSIDE, ACROSS = "inside", "across"
BOTH = INSIDE, ACROSS


class Leg(NamedTuple):
    """One level of a collective; its legs run one after the other."""

    name: str
    seconds: Tensor  # the shape of the grid
    latest: Callable[[Tensor], Tensor]  # of times of all ranks: the last among those who meet
    links: tuple[str, ...] = BOTH  # that a rank cannot use for anything else meanwhile


def legs_of(each: Collective, grid: Grid, hardware: Hardware) -> list[Leg]:
    """Return one leg, or two: sums begin inside hosts, gathers begin across hosts.

    GPUs have separate links inside and across hosts. CPUs have one link for both.
    """
    if each.levels == 1:
        seconds = seconds_of(each, grid, hardware)
        return [Leg(each.name, seconds, lambda times: grid.maximum(times, each.peers))]
    fabric = hardware.fabric(each.peers, grid)
    inside, across = seconds_in_two(each.of(0), fabric)
    columns = across.expand(fabric.hosts, fabric.per_host).reshape(-1)
    legs = [
        Leg(
            f"{each.name}, in hosts",
            grid.zeros() + inside,
            lambda times: grid.maximum_of(times, each.peers, fabric.per_host, -1),
            BOTH if hardware.on_cpu else (INSIDE,),
        ),
        Leg(
            f"{each.name}, across hosts",
            grid.spread(columns, each.peers),
            lambda times: grid.maximum_of(times, each.peers, fabric.per_host, -2),
            BOTH if hardware.on_cpu else (ACROSS,),
        ),
    ]
    return legs if each.traffic in (Traffic.REDUCE_SCATTER, Traffic.EXCHANGE) else legs[::-1]


def seconds_in_two(transfer: Transfer | None, fabric: Fabric) -> tuple[float, Tensor]:
    """Return the seconds of the leg inside hosts, and of each column's leg across hosts.

    A column, the ranks at one place of every host, has neighbouring segments.
    """
    assert transfer is not None
    assert transfer.sizes is not None
    hosts, here, width = fabric.hosts, fabric.per_host, transfer.dtype.itemsize
    segments = (per_peer(transfer.sizes) * width).reshape(here, hosts)
    columns = segments.sum(1)
    whole, column = columns.sum(), columns[:, None]
    if transfer.traffic.kind in RINGS:  # everything passes by everyone
        inside, across = whole * (here - 1) / here, columns * (hosts - 1) / hosts
    else:  # a rank's own, to each; and of what the others have, theirs
        inside = maximum(columns * (here - 1), whole - columns)
        across = maximum(segments * (hosts - 1), column - segments).amax(1)
    begin = fabric.between.seconds(hosts, 0.0)
    return (
        fabric.inside.seconds(here, float(inside.max())),
        begin + across / fabric.between.bandwidth,
    )


Counted = tuple[tuple[Collective, int], ...]  # and how many of them there are


def counted(collectives: Sequence[Collective]) -> Counted:
    """Return the distinct collectives, each with its number of launches."""
    known = {(each.transfers, each.peers): each for each in collectives}
    counts = Counter((each.transfers, each.peers) for each in collectives)
    return tuple((each, counts[key]) for key, each in known.items())
