"""The schedule of a step as data: its operations in order, with their collectives.

    Agree ... Reduce ... Average ... Clip   Update Gather Place   Update Gather Place ...

Reductions are all started first (by backward, where they overlap with it), in the one order in
which all ranks launch them: from the first bucket that backward completes to the last. Updates
go in waves: while one wave is computed, the parameters of the previous wave are gathered.
If gathers overlap with the next forward, a step has no `Place`.

Blocks of DTensors come together in chunks, after the waves:

    Collect   Transform GiveBack Apply   Transform GiveBack Apply ...

If rules need sums over whole blocks, `Sum` adds them up over ranks before a chunk is applied.

If the optimizer averages copies of DTensors, a block is collected from averaged parts, and the
parts are gathered after the block was applied.

State that stays on the host is copied in windows, each into a staging buffer of the device: while
one window is updated, the next is fetched and the previous returned:

    Fetch 0   Fetch 1 Update 0 Return 0   Fetch 2 Update 1 Return 1 ...
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, TypeVar

from samestep.plan.bucket_exchanges import BucketExchanges
from samestep.plan.chunks import Chunk
from samestep.plan.exchanges import transfer_of
from samestep.plan.transfers import Transfer


class BucketId(NamedTuple):
    """One bucket of one set of parameters that share a plan."""

    placement: int
    bucket: int


Stage = Literal["update", "chunk"]


class WindowId(NamedTuple):
    """State on the host that is copied together: a part of a bucket's, or all of a chunk's.

    stage: the use of the window: "update" of a bucket, or "chunk", from the time the chunk is
        collected until it is applied.
    """

    bucket: BucketId
    stage: Stage
    number: int = 0


@dataclass(frozen=True)
class _Travel:
    window: WindowId
    slot: int  # the staging buffer
    nbytes: int


class Fetch(_Travel):
    """Start copying a window of state from the host into a staging buffer."""


class Return(_Travel):
    """Start copying a window back to the host."""


@dataclass(frozen=True)
class _About:
    bucket: BucketId


@dataclass(frozen=True)
class _Sends(_About):
    transfer: Transfer | None = field(default=None, compare=False, repr=False)
    sends: ClassVar[str]  # where a bucket or a chunk has it


S = TypeVar("S", bound=_Sends)


class Reduce(_Sends):
    """Start summing the gradients of a bucket over ranks."""

    sends = "reduce"


@dataclass(frozen=True)
class Agree:
    """Find out which parameters have a gradient on any rank."""

    placement: int


@dataclass(frozen=True)
class Average(_About):
    """Wait for the reduction of a bucket, and divide the sums.

    Before the division, sums may be gathered, and added up over groups of ranks: `outer` has
    the collectives of a rank by its place in its group.
    """

    sums: Transfer | None = field(default=None, compare=False, repr=False)
    outer: tuple[tuple[Transfer, ...], ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Clip:
    """Combine the joint norm of all gradients over ranks, and decide how to clip by it."""


@dataclass(frozen=True)
class Update:
    """Run the rules on pieces that this rank owns: of a wave of buckets, or one window."""

    buckets: tuple[BucketId, ...]
    window: WindowId | None = None
    is_last: bool = True  # window of its bucket


class Gather(_Sends):
    """Start sending the updated parts of a bucket to all ranks."""

    sends = "gather"


class Place(_About):
    """Wait for a gather, and copy the received values into the parameters."""


class Collect(_Sends):
    """Start sending a chunk of spread blocks to their owners."""

    sends = "collection"


class Transform(_About):
    """Wait for a chunk, and run the rule on the blocks that this rank owns."""


class GiveBack(_Sends):
    """Start sending the directions of a chunk to the ranks that hold parts of its blocks."""

    sends = "giving_back"


class Sum(_Sends):
    """Wait for the directions of a chunk, and start the sums over whole blocks that rules need."""

    sends = "sums"


class Apply(_About):
    """Wait for the directions or the sums of a chunk, and update its parameters."""


@dataclass(frozen=True)
class Measure:
    """Combine the values of updates that `metrics()` returns over ranks."""


OfChunk = Collect | Transform | GiveBack | Sum | Apply
OfBucket = Reduce | Average | Gather | Place | OfChunk
OfWindow = Fetch | Return
Operation = OfBucket | OfWindow | Agree | Clip | Update | Measure
Schedule = tuple[Operation, ...]


def describe_operation(operation: Operation) -> str:
    """Return an operation as text: "Reduce 0.3" is about bucket 3 of placement 0."""
    of_window = ""
    match operation:
        case Update(buckets, window):
            about = [*buckets]
            of_window = "" if window is None else f" window {window.number}"
        case Fetch(window) | Return(window):
            about = [window.bucket]
            of_window = f" window {window.number}" if window.stage == "update" else " chunk"
        case Agree(placement):
            return f"Agree {placement}"
        case Clip() | Measure():
            about = []
        case _:
            about = [operation.bucket]
    places = [f"{bucket.placement}.{bucket.bucket}" for bucket in about]
    return " ".join([type(operation).__name__, *places]) + of_window


class PlacementShape(NamedTuple):
    """All data of a placement that a schedule needs: elements per bucket, and its collectives."""

    bucket_sizes: tuple[int, ...]
    agrees: bool  # on presence, with other ranks; only then its buckets are gathered
    reduces: bool
    overlaps: bool = False  # reductions may have begun inside backward
    defers: bool = False  # gathers are waited for by the next forward
    chunks: int = 0  # of blocks that come together on their owners
    gives_back: bool = True  # what the owners found; else every rank is one
    # Buckets have parts of blocks: averaged before chunks, gathered after them. Not by the chunks
    # of this rank, which may be primary holder of none: gathers have one order on all ranks.
    has_parts: bool = False
    places: tuple[int, ...] = ()  # how late forward uses each bucket
    exchanges: tuple[BucketExchanges, ...] = ()
    planned_chunks: tuple[Chunk, ...] = ()
    # Of state that stays on the host, in bytes; (): it lies on the device. A rank may have other
    # windows than its peers: nobody else takes part in what they do.
    windows: tuple[tuple[int, ...], ...] = ()  # of each bucket
    chunk_windows: tuple[int, ...] = ()  # of each chunk

    def with_chunks_of(self, blocks: "PlacementShape") -> "PlacementShape":
        """Return this shape with the chunks of another."""
        return self._replace(
            chunks=blocks.chunks,
            gives_back=blocks.gives_back,
            planned_chunks=blocks.planned_chunks,
        )

    def sending(self, kind: type[S], about: BucketId) -> S:
        """Return an operation about a bucket or a chunk, with its collective."""
        every = self.exchanges if kind in (Reduce, Gather) else self.planned_chunks
        exchange = getattr(every[about.bucket], kind.sends) if every else None
        return kind(about, transfer_of(exchange))

    def applied(self, chunk: BucketId) -> list[Operation]:
        """Return the last operations of a chunk: `Sum`, if rules need any, and `Apply`."""
        sums = self.planned_chunks and self.planned_chunks[chunk.bucket].sums is not None
        return [self.sending(Sum, chunk), Apply(chunk)] if sums else [Apply(chunk)]

    def average(self, bucket: BucketId) -> Average:
        """Return the `Average` of a bucket, with no collective if gradients come reduced."""
        if not self.exchanges or not self.reduces:
            return Average(bucket)
        own = self.exchanges[bucket.bucket]
        return Average(bucket, transfer_of(own.sums), own.outer_transfers)


def launch_order(placements: Sequence[Sequence[int]]) -> list[BucketId]:
    """Sort buckets by how late forward uses them, the latest first.

    `placements[i][j]` is the place of bucket j of placement i in forward. Buckets with equal
    places stay in the order of placements.
    """
    each = [BucketId(n, b) for n, places in enumerate(placements) for b in range(len(places))]
    return sorted(each, key=lambda bucket: -placements[bucket.placement][bucket.bucket])


def reductions_in_order(placements: Sequence[PlacementShape]) -> list[BucketId]:
    """Return the buckets that are reduced, in the order in which all ranks launch them."""
    order = launch_order([p.places or [-1] * len(p.bucket_sizes) for p in placements])
    return [bucket for bucket in order if placements[bucket.placement].reduces]


def step_schedule(
    placements: Sequence[PlacementShape],
    *,
    waves: int,
    clip: bool,
    measure: bool,
    chunks_ahead: int = 1,
) -> Schedule:
    """Return the operations of one step over all placements."""
    buckets = [
        BucketId(number, bucket)
        for number, placement in enumerate(placements)
        for bucket in range(len(placement.bucket_sizes))
    ]
    reduce: list[Operation] = [
        placements[bucket.placement].sending(Reduce, bucket)
        for bucket in reductions_in_order(placements)
    ]
    agree: list[Operation] = [Agree(n) for n, p in enumerate(placements) if p.agrees]
    # Presence comes first, so that updates need not wait for the last reduction, but not before
    # reductions that other ranks have launched already.
    late = any(placement.overlaps for placement in placements)
    operations = reduce + agree if late else agree + reduce
    begun = len(operations)
    if clip:  # the norm needs every gradient
        operations += [placements[bucket.placement].average(bucket) for bucket in buckets]
        operations.append(Clip())
    if any(placement.defers for placement in placements):
        buckets.reverse()  # what forward uses first is on its way first
    pipelines = _pipelines(placements)
    with_blocks = [bucket for bucket in buckets if placements[bucket.placement].has_parts]
    if not clip:
        operations += [placements[bucket.placement].average(bucket) for bucket in with_blocks]
    ahead = [chunk for chunks in pipelines for chunk in chunks[:chunks_ahead]]
    operations += [placements[chunk.placement].sending(Collect, chunk) for chunk in ahead]
    before: tuple[BucketId, ...] = ()
    for wave in _waves(placements, buckets, waves):
        alone = [bucket for bucket in wave if bucket not in with_blocks]
        operations += [placements[b.placement].average(b) for b in alone if not clip]
        operations += _updates(placements, wave)
        shared = tuple(bucket for bucket in alone if placements[bucket.placement].agrees)
        operations += [placements[bucket.placement].sending(Gather, bucket) for bucket in shared]
        operations += [Place(bucket) for bucket in before]
        before = tuple(bucket for bucket in shared if not placements[bucket.placement].defers)
    for chunks in pipelines:
        operations += _chunks(placements, chunks, chunks_ahead)
    for bucket in with_blocks:  # two on their way at a time: each has a buffer of its own
        operations.append(placements[bucket.placement].sending(Gather, bucket))
        operations += [Place(done) for done in before]
        before = () if placements[bucket.placement].defers else (bucket,)
    if measure:
        operations.append(Measure())
    operations += [Place(bucket) for bucket in before]
    return (*operations[:begun], *_with_travel(placements, operations[begun:]))


def _pipelines(placements: Sequence[PlacementShape]) -> list[list[BucketId]]:
    """Group chunks in pipelines, in each of which chunks follow each other.

    If copies are averaged here, the number of chunks depends on the blocks of which a rank is the
    primary holder. So these chunks have pipelines of their own: otherwise ranks that share a
    process group would collect the other chunks in different orders.
    """
    each = [[BucketId(n, c) for c in range(p.chunks)] for n, p in enumerate(placements)]
    alike = [
        c for chunks, p in zip(each, placements, strict=True) if not p.has_parts for c in chunks
    ]
    own = [chunks for chunks, p in zip(each, placements, strict=True) if p.has_parts]
    return [alike, *own]


def _chunks(
    placements: Sequence[PlacementShape], chunks: Sequence[BucketId], ahead: int
) -> list[Operation]:
    """Return the operations of a pipeline of chunks, of which `ahead` are collected early.

    While a chunk is computed, the next are collected and the one before is given back; with
    `ahead` of 0 nothing overlaps: each chunk is waited for in both directions.
    """
    late = min(1, ahead)  # a chunk is applied after the next one was computed
    operations: list[Operation] = []
    for number, chunk in enumerate(chunks):
        later = chunks[number + ahead : number + ahead + 1]
        operations += [placements[chunk.placement].sending(Collect, chunk) for chunk in later]
        operations.append(Transform(chunk))
        if placements[chunk.placement].gives_back:
            operations.append(placements[chunk.placement].sending(GiveBack, chunk))
        for done in chunks[max(0, number - late) : number - late + 1]:
            operations += placements[done.placement].applied(done)
    for done in chunks[len(chunks) - late :]:
        operations += placements[done.placement].applied(done)
    return operations


def _waves(
    placements: Sequence[PlacementShape], buckets: Sequence[BucketId], waves: int
) -> list[tuple[BucketId, ...]]:
    """Group neighbouring buckets in at most `waves` waves of about equal size."""
    total = sum(sum(placement.bucket_sizes) for placement in placements)
    runs: list[list[BucketId]] = [[] for _ in range(waves)]
    done = 0
    for bucket in buckets:
        size = placements[bucket.placement].bucket_sizes[bucket.bucket]
        middle = done + size / 2
        runs[min(waves - 1, int(waves * middle / max(total, 1)))].append(bucket)
        done += size
    return [tuple(run) for run in runs if run]


# --- state that stays on the host ---------------------------------------------------------------


def staging_bytes(schedule: Schedule) -> tuple[int, ...]:
    """Return the bytes of every staging buffer that a schedule needs."""
    sizes: dict[int, int] = defaultdict(int)
    for operation in schedule:
        if isinstance(operation, Fetch):
            sizes[operation.slot] = max(sizes[operation.slot], operation.nbytes)
    return tuple(sizes[slot] for slot in range(len(sizes)))


def _updates(placements: Sequence[PlacementShape], wave: Sequence[BucketId]) -> list[Operation]:
    """Return the updates of a wave: one for buckets without windows, and one per window."""
    found: list[Operation] = []
    resident: list[BucketId] = []
    for bucket in wave:
        windows = placements[bucket.placement].windows
        sizes = windows[bucket.bucket] if windows else ()
        if not sizes:
            resident.append(bucket)
        for number in range(len(sizes)):
            is_last = number == len(sizes) - 1
            found.append(Update((bucket,), WindowId(bucket, "update", number), is_last))
    return [Update(tuple(resident)), *found] if resident else found


def _with_travel(
    placements: Sequence[PlacementShape], operations: Sequence[Operation]
) -> Iterator[Operation]:
    """Insert fetches and returns of windows: each is fetched while the previous is used.

    A staging buffer is reused only after another buffer was returned later: by then its own
    return is over, or all links are busy anyway. So three buffers are enough for consecutive
    windows.
    """
    sizes: dict[WindowId, int] = {}
    for operation in operations:
        sizes |= _needs(placements, operation)
    slots: dict[WindowId, int] = {}
    resting: list[int] = []  # buffers in the order in which they were returned
    wanted, used = list(sizes), 0

    def fetches(until: int) -> Iterator[Operation]:
        for window in wanted[len(slots) : until]:
            slot = resting.pop(0) if len(resting) > 1 else len(set(slots.values()))
            slots[window] = slot
            yield Fetch(window, slot, sizes[window])

    yield from fetches(1)
    for operation in operations:
        needed = len(_needs(placements, operation))
        if needed:
            used += needed
            yield from fetches(used + 1)
        yield operation
        for window in _releases(placements, operation):
            resting.append(slots[window])
            yield Return(window, slots[window], sizes[window])


def _needs(placements: Sequence[PlacementShape], operation: Operation) -> dict[WindowId, int]:
    """Return the windows, with bytes, that an operation is the first to need."""
    match operation:
        case Update(_, window) if window is not None:
            of_bucket = placements[window.bucket.placement].windows[window.bucket.bucket]
            return {window: of_bucket[window.number]}
        case Collect(chunk):
            return _of_chunk(placements, chunk)
    return {}


def _releases(placements: Sequence[PlacementShape], operation: Operation) -> dict[WindowId, int]:
    """Return the windows, with bytes, that no later operation needs."""
    if isinstance(operation, Apply):
        return _of_chunk(placements, operation.bucket)
    return {} if isinstance(operation, Collect) else _needs(placements, operation)


def _of_chunk(placements: Sequence[PlacementShape], chunk: BucketId) -> dict[WindowId, int]:
    sizes = placements[chunk.placement].chunk_windows
    size = sizes[chunk.bucket] if sizes else 0
    return {WindowId(chunk, "chunk"): size} if size else {}
