"""What each operation of a schedule launches: name, kind, ranks, elements and bytes.

The twin of what `comm.recorder` sees: tests hold every layout's records against it, one by one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from samestep.comm.collectives import prefers_exchange
from samestep.comm.traffic import Traffic
from samestep.estimate.blueprint import Blueprint, Sharing, Spreading
from samestep.estimate.grid import Peers
from samestep.groups.param_groups import rule_of
from samestep.placements.parts.sharded_blocks import travel_dtypes
from samestep.placements.whole.gradients import gradient_dtype
from samestep.placements.whole.launch_order import LaunchOrder
from samestep.placements.whole.reduction import even_sizes, is_frugal
from samestep.plan.block_exchange import Route, elements_from_owners, elements_to_owners
from samestep.plan.schedule import (
    Agree,
    Average,
    BucketId,
    Clip,
    Collect,
    Gather,
    GiveBack,
    Measure,
    Operation,
    Reduce,
)
from samestep.plan.sharding import Bucket
from samestep.rules.state import math_dtype


@dataclass(frozen=True)
class Collective:
    """One collective of all ranks.

    sizes: elements per peer, None if every peer has all.
    whole: elements of the operation; where ranks of `among` have different ones, by place there.
    incoming: what each peer gets, where that does not follow from the sizes.
    """

    traffic: Traffic
    name: str
    peers: Peers
    dtype: torch.dtype
    whole: int | tuple[int, ...]
    sizes: tuple[int, ...] | None = None
    among: Peers | None = None
    incoming: tuple[int, ...] | None = None

    def elements(self, place_among: int = 0) -> int:
        """Of the whole operation."""
        return self.whole if isinstance(self.whole, int) else self.whole[place_among]

    def sent(self, place: int, place_among: int = 0) -> int:
        """Bytes that a peer must send at least."""
        whole = self.elements(place_among)
        mine = whole if self.sizes is None else self.sizes[place]
        width = self.dtype.itemsize
        return round(self.traffic.sent(whole * width, mine * width, self.peers.size))

    def sent_by_all(self) -> Tensor:
        """The same for all peers, or for all ranks of `among`: (size,)."""
        if self.among is not None:
            size = self.among.size
            return torch.tensor([self.sent(0, place) for place in range(size)], dtype=torch.float64)
        if self.sizes is None:
            return torch.full((self.peers.size,), float(self.sent(0)), dtype=torch.float64)
        first = {size: place for place, size in enumerate(self.sizes)}  # many are alike
        known = {size: self.sent(place) for size, place in first.items()}
        return torch.tensor([known[size] for size in self.sizes], dtype=torch.float64)

    def received_by_all(self) -> Tensor:
        """Bytes that peers get at least: (size,)."""
        ranks, width = self.peers.size, self.dtype.itemsize
        if self.sizes is None or self.among is not None:
            return self.sent_by_all()
        if self.incoming is not None:
            return torch.tensor(self.incoming, dtype=torch.float64) * width
        mine = torch.tensor(self.sizes, dtype=torch.float64) * width
        if self.traffic is Traffic.EXCHANGE:
            return mine * (ranks - 1)
        if self.traffic is Traffic.REDUCE_SCATTER:  # backends add up on the way
            return mine.sum().expand(ranks) * (ranks - 1) / ranks
        return mine.sum() - mine


class Launches:
    """Collectives by operation, in the order in which all ranks launch them."""

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint = blueprint
        self._of_reduce = self._reductions()
        self._chunks: dict[tuple[BucketId, str], list[Collective]] = {}

    def of(self, operation: Operation) -> list[Collective]:
        """What an operation launches, in order."""
        return list(self._of(operation))

    def of_step(self, rank: int = 0) -> list[Collective]:
        """What a step launches, in order."""
        operations = self._blueprint.schedule(rank)
        return [*self.of_beginning(), *(each for op in operations for each in self._of(op))]

    def of_beginning(self) -> list[Collective]:
        """What comes before the first operation: sums of gradients, problems of other stages."""
        return [*self._gradient_sums(), *self._over_stages("problems")]

    def _of(self, operation: Operation) -> Iterator[Collective]:
        match operation:
            case Agree(number):
                yield from self._agree(number)
            case Reduce(bucket):
                yield from self._of_reduce.get(bucket, ())
            case Average(bucket):
                if bucket.placement < len(self._blueprint.shared):
                    sharing = self._blueprint.shared[bucket.placement]
                    yield from _average(sharing, bucket.bucket, self._blueprint.device)
            case Clip():
                yield from self._clip()
            case Gather(bucket):
                if bucket.placement < len(self._blueprint.shared):
                    sharing = self._blueprint.shared[bucket.placement]
                    yield from _gather(sharing, bucket.bucket, self._blueprint.device)
            case Collect(chunk) | GiveBack(chunk):
                yield from self._moved(chunk, back=isinstance(operation, GiveBack))
            case Measure():
                elements = 2 * len(self._blueprint.groups)
                yield from _summed("update sizes", self._all(), torch.float64, elements)

    # --- scalars -----------------------------------------------------------------------------

    def _all(self) -> Peers:
        return self._blueprint.everyone

    def _meeting(self) -> Peers | None:
        """All ranks, where placements live on different ones: as the optimizer decides it."""
        blueprint = self._blueprint
        held_by = dict.fromkeys(placement.peers for placement in blueprint.placements)
        if len(held_by) < 2:
            return None
        axes = {axis for peers in held_by for axis in peers.axes}
        union = blueprint.grid.peers(*axes)
        return next((peers for peers in held_by if peers.size == union.size), blueprint.everyone)

    def _agree(self, number: int) -> Iterator[Collective]:
        blueprint = self._blueprint
        meeting = self._meeting()
        if number == 0 and meeting is not None and blueprint.device.type == "cpu":
            yield from _summed("problems", meeting, torch.int64, 1)
        placement = blueprint.placements[number]
        for peers in (placement.peers, placement.outer if isinstance(placement, Sharing) else None):
            if peers is not None:
                yield from _summed("presence", peers, torch.int64, len(placement.params) + 1)

    def _clip(self) -> Iterator[Collective]:
        blueprint = self._blueprint
        over = dict.fromkeys(
            [blueprint.everyone for _ in blueprint.shared] + [s.peers for s in blueprint.spread]
        )
        for peers in over:
            yield from _summed("gradient norm", peers, torch.float64, 1)
        if blueprint.stages is not None:
            peers = blueprint.stages
            sizes = (1,) * peers.size
            yield from _gathered("norm of stages", peers, torch.float64, sizes, blueprint.device)
        meeting = self._meeting()
        if meeting is not None and blueprint.device.type == "cpu":
            yield from _summed("not finite", meeting, torch.int64, 1)
        yield from self._over_stages("not finite")

    def _over_stages(self, name: str) -> Iterator[Collective]:
        """A code of every stage; a GPU does not wait for it."""
        stages = self._blueprint.stages
        if stages is not None and self._blueprint.device.type == "cpu":
            yield from _summed(name, stages, torch.int64, 1)

    def _gradient_sums(self) -> Iterator[Collective]:
        """Of DTensors of which ranks have summands: each of them as long as what it holds."""
        for spreading in self._blueprint.spread:
            for peers, dtype, params in spreading.sums:
                places = range(spreading.peers.size)
                sizes = (sum(spreading.held[p].boxes[at].numel for p in params) for at in places)
                if peers.size > 1:
                    yield Collective(
                        Traffic.ALL_REDUCE, "sum of gradients", peers, dtype, tuple(sizes),
                        among=spreading.peers,
                    )  # fmt: skip

    # --- whole parameters --------------------------------------------------------------------

    def _reductions(self) -> dict[BucketId, list[Collective]]:
        """What each Reduce launches: all that come before its bucket in the one order, and it."""
        shared = self._blueprint.shared
        order, log = LaunchOrder(), list[BucketId]()
        launchers = [_Launcher(number, log) for number in range(len(shared))]
        for launcher, sharing in zip(launchers, shared, strict=True):
            order.add(launcher, sharing.places)
        found: dict[BucketId, list[Collective]] = {}
        for number, sharing in enumerate(shared):
            for bucket in range(len(sharing.plan.buckets) if sharing.shape.reduces else 0):
                order.launch_through(launchers[number], bucket)
                found[BucketId(number, bucket)] = [
                    each
                    for launched in log
                    for each in _reduction(
                        shared[launched.placement], launched.bucket, self._blueprint.device
                    )
                ]
                log.clear()
        return found

    # --- blocks of DTensors ------------------------------------------------------------------

    def _moved(self, chunk: BucketId, *, back: bool) -> Iterator[Collective]:
        spreading = self._blueprint.spread[chunk.placement - len(self._blueprint.shared)]
        key = chunk, "back" if back else "to"
        if key not in self._chunks:
            self._chunks[key] = list(
                _chunk_moves(
                    spreading, chunk.bucket, self._blueprint.groups, self._blueprint.device, back
                )
            )
        yield from self._chunks[key]


class _Launcher:
    """The buckets of one plan, noted when their turn comes."""

    def __init__(self, number: int, log: list[BucketId]) -> None:
        self._number, self._log = number, log
        self.launched = 0

    def is_complete(self, bucket: int) -> bool:
        """Nobody asks here."""
        return True

    def make_room(self) -> None:
        """There is no memory here."""

    def launch_next(self) -> None:
        """Note it."""
        self._log.append(BucketId(self._number, self.launched))
        self.launched += 1


def _summed(name: str, peers: Peers, dtype: torch.dtype, elements: int) -> Iterator[Collective]:
    if peers.size > 1:
        yield Collective(Traffic.ALL_REDUCE, name, peers, dtype, elements)


def reduction_sizes(sharing: Sharing, bucket: Bucket) -> tuple[int, ...]:
    """Elements that each peer adds up."""
    if bucket.replicated:
        return _even_sizes(bucket.size, sharing.peers.size)
    return tuple(bucket.segment_sizes)


@lru_cache(maxsize=1024)  # a plan of many ranks asks for few of them, again and again
def _even_sizes(elements: int, parts: int) -> tuple[int, ...]:
    return tuple(even_sizes(elements, parts))


def exchanges(sharing: Sharing, bucket: Bucket, device: torch.device) -> bool:
    """Whether a bucket is reduced by an all-to-all and a sum."""
    ordered = sharing.distribution.reduction == "ordered"
    frugal = is_frugal(sharing.distribution, sharing.peers.size) or bucket.replicated
    return prefers_exchange(device, ordered=ordered, frugal=frugal)


def reduce_dtype(sharing: Sharing, bucket: Bucket) -> torch.dtype:
    """In which gradients travel."""
    return sharing.distribution.reduce_dtype or gradient_dtype(some_param(sharing, bucket))


def some_param(sharing: Sharing, bucket: Bucket) -> Tensor:
    """One of a bucket's parameters, which have one dtype."""
    _, segment = bucket.filled[0]
    return sharing.params[segment.pieces[0].param]


def _reduction(sharing: Sharing, number: int, device: torch.device) -> Iterator[Collective]:
    bucket, peers = sharing.plan.buckets[number], sharing.peers
    if peers.size == 1:
        return
    name = f"reduction of bucket {number} ({sharing.specs[bucket.params[0]].name}, ...)"
    dtype, sizes = reduce_dtype(sharing, bucket), reduction_sizes(sharing, bucket)
    if exchanges(sharing, bucket, device):
        yield Collective(Traffic.EXCHANGE, name, peers, dtype, sum(sizes), sizes)
    elif bucket.replicated:
        yield Collective(Traffic.ALL_REDUCE, name, peers, dtype, bucket.size)
    else:
        yield Collective(Traffic.REDUCE_SCATTER, name, peers, dtype, sum(sizes), sizes)


def _average(sharing: Sharing, number: int, device: torch.device) -> Iterator[Collective]:
    if not sharing.shape.reduces:
        return
    bucket, peers = sharing.plan.buckets[number], sharing.peers
    ordered = sharing.distribution.reduction == "ordered"
    wide = torch.promote_types(reduce_dtype(sharing, bucket), torch.float32)
    if bucket.replicated and ordered:
        sizes = reduction_sizes(sharing, bucket)
        yield from _gathered(f"sums of bucket {number}", peers, wide, sizes, device)
    if sharing.outer is None:
        return
    name = f"outer sum of bucket {number}"
    whole = (bucket.size,) * peers.size if bucket.replicated else tuple(bucket.segment_sizes)
    if not ordered:
        yield Collective(Traffic.ALL_REDUCE, name, sharing.outer, wide, whole, among=peers)
        return
    raise ValueError("ordered reduction over an outer group is not estimated: take 'fast'")


def _gather(sharing: Sharing, number: int, device: torch.device) -> Iterator[Collective]:
    bucket = sharing.plan.buckets[number]
    if not bucket.replicated:
        dtype = some_param(sharing, bucket).dtype
        sizes = tuple(bucket.segment_sizes)
        yield from _gathered(f"gather of bucket {number}", sharing.peers, dtype, sizes, device)


def _gathered(
    name: str, peers: Peers, dtype: torch.dtype, sizes: tuple[int, ...], device: torch.device
) -> Iterator[Collective]:
    if peers.size > 1:
        equal = len(set(sizes)) == 1 and device.type != "cpu"
        traffic = Traffic.ALL_GATHER if equal else Traffic.COPIES
        yield Collective(traffic, name, peers, dtype, sum(sizes), sizes)


def _chunk_moves(
    spreading: Spreading,
    number: int,
    groups: Sequence[Mapping[str, object]],
    device: torch.device,
    back: bool,
) -> Iterator[Collective]:
    chunk, peers = spreading.plan.chunks[number], spreading.peers
    wides = (math_dtype(spreading.params[route.param]) for route in chunk)
    dtype, wide = travel_dtypes(wides, spreading.distribution, device)
    parallel = spreading.distribution.muon_schedule == "parallel"
    extra = [_whole_state(spreading, route, groups) if parallel else 0 for route in chunk]
    extra = [count * wide.itemsize // dtype.itemsize for count in extra]
    if back:
        name, sent = f"return of chunk {number}", elements_from_owners(chunk, extra, peers.size)
    else:
        name, sent = f"collection of chunk {number}", elements_to_owners(chunk, peers.size)
    if any(sent):
        got = _incoming(chunk, extra, peers.size, back=back)
        yield Collective(
            Traffic.PARTS, name, peers, dtype, sum(sent), tuple(sent), incoming=tuple(got)
        )


def _incoming(chunk: Sequence[Route], extra: Sequence[int], ranks: int, *, back: bool) -> list[int]:
    """Elements that each rank gets: the opposite of what is sent."""
    got, beside_all = [0] * ranks, back and any(extra)
    for route, beside in zip(chunk, extra, strict=True):
        for part in route.parts:
            if part.rank != route.owner and (back or part.sent):
                got[part.rank if back else route.owner] += part.in_block.numel
        if beside_all:
            for rank in range(ranks):
                got[rank] += beside if rank != route.owner else 0
    return got


def _whole_state(spreading: Spreading, route: Route, groups: Sequence[Mapping[str, object]]) -> int:
    """Elements of state that belong to a whole block, such as its variance."""
    group = groups[spreading.specs[route.param].group]
    shapes = rule_of(group).state_shapes(route.block.shape, group)
    kept = [shape for shape in shapes.values() if shape != route.block.shape]
    return sum(torch.Size(shape).numel() for shape in kept)
