"""The schedule of a step: its operations in order, with what they send, as data.

    Agree ... Reduce ... Average ... Clip   Update Gather Place   Update Gather Place ...

Reductions are all started first (by backward, where they overlap with it), in the one order in
which all ranks launch them: from what backward reaches first to what it reaches last. Updates
go in waves: while a wave is computed, the parameters of the wave before are on their way.
Where gathers overlap with the next forward, nothing is placed here.

Blocks of DTensors come together in chunks, after the waves:

    Collect   Transform GiveBack Apply   Transform GiveBack Apply ...

Before a chunk is applied, `Sum` adds up over ranks what its rules need of whole blocks, if any do.

Where ranks average copies of DTensors themselves, a block comes together from averaged parts, and
is gathered when it was applied.

State that stays on the host comes in windows, each into a staging buffer of the device: the next
one comes while one is updated and the one before returns:

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
    """State on the host that travels together: some of a bucket's, or what a chunk needs.

    stage: what it is needed for: to update a bucket, or for a chunk from when it is collected
        until it is applied.
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
    """Start adding up the gradients of a bucket over ranks."""

    sends = "reduce"


@dataclass(frozen=True)
class Agree:
    """Find out which parameters have a gradient on any rank."""

    placement: int


@dataclass(frozen=True)
class Average(_About):
    """Wait for a reduction, and divide.

    Before that it may have to be gathered, and added up over groups that do the same: `outer` has
    what a rank at each place of its group does.
    """

    sums: Transfer | None = field(default=None, compare=False, repr=False)
    outer: tuple[tuple[Transfer, ...], ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Clip:
    """Combine the joint norm of all gradients, and decide by it."""


@dataclass(frozen=True)
class Update:
    """Run the rules on what this rank owns in some buckets: one wave, or one window of a bucket."""

    buckets: tuple[BucketId, ...]
    window: WindowId | None = None
    is_last: bool = True  # window of its bucket


class Gather(_Sends):
    """Start sending the updated parts of a bucket to everyone."""

    sends = "gather"


class Place(_About):
    """Wait for a gather, and copy what arrived into the parameters."""


class Collect(_Sends):
    """Start sending a chunk of spread blocks to their owners."""

    sends = "collection"


class Transform(_About):
    """Wait for a chunk, and run the rule on the blocks that this rank owns."""


class GiveBack(_Sends):
    """Start sending the directions of a chunk to those who hold parts of its blocks."""

    sends = "giving_back"


class Sum(_Sends):
    """Wait for the directions of a chunk, and start adding up what rules need of whole blocks."""

    sends = "sums"


class Apply(_About):
    """Wait for the directions of a chunk, or for such sums, and step."""


@dataclass(frozen=True)
class Measure:
    """Combine what `metrics()` tells of the updates."""


OfChunk = Collect | Transform | GiveBack | Sum | Apply
OfBucket = Reduce | Average | Gather | Place | OfChunk
OfWindow = Fetch | Return
Operation = OfBucket | OfWindow | Agree | Clip | Update | Measure
Schedule = tuple[Operation, ...]


def describe_operation(operation: Operation) -> str:
    """An operation as text: "Reduce 0.3" is about bucket 3 of placement 0."""
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
    """All that a schedule needs of a placement: elements per bucket, and its collectives."""

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
        """This shape, with blocks that come together in the chunks of another."""
        return self._replace(
            chunks=blocks.chunks,
            gives_back=blocks.gives_back,
            planned_chunks=blocks.planned_chunks,
        )

    def sending(self, kind: type[S], about: BucketId) -> S:
        """An operation about a bucket or a chunk, with what it sends."""
        every = self.exchanges if kind in (Reduce, Gather) else self.planned_chunks
        exchange = getattr(every[about.bucket], kind.sends) if every else None
        return kind(about, transfer_of(exchange))

    def applied(self, chunk: BucketId) -> list[Operation]:
        """The end of a chunk: sums over its blocks, if rules need any, and the step."""
        sums = self.planned_chunks and self.planned_chunks[chunk.bucket].sums is not None
        return [self.sending(Sum, chunk), Apply(chunk)] if sums else [Apply(chunk)]

    def average(self, bucket: BucketId) -> Average:
        """The average of a bucket, with what it sends; nothing if gradients come reduced."""
        if not self.exchanges or not self.reduces:
            return Average(bucket)
        own = self.exchanges[bucket.bucket]
        return Average(bucket, transfer_of(own.sums), own.outer_transfers)


def launch_order(placements: Sequence[Sequence[int]]) -> list[BucketId]:
    """Buckets by how late forward uses them, the latest first; `placements[i][j]` is of bucket j.

    Of several that are used at once, in the order of placements.
    """
    each = [BucketId(n, b) for n, places in enumerate(placements) for b in range(len(places))]
    return sorted(each, key=lambda bucket: -placements[bucket.placement][bucket.bucket])


def reductions_in_order(placements: Sequence[PlacementShape]) -> list[BucketId]:
    """The buckets that are reduced, in the order in which all ranks launch them."""
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
    """The operations of one step over all placements."""
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
    """Chunks that follow each other.

    How many there are of blocks whose copies are averaged depends on what a rank is the primary
    holder of. So these have pipelines of their own, or all others would be collected sooner on some
    ranks than on others, and groups of ranks are shared.
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
    """Chunks in a pipeline; the first `ahead` are on their way already.

    While a chunk is computed, the next are collected and the one before is given back; with none
    ahead nothing is: each chunk is waited for, there and back.
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
    """Neighbouring buckets in at most `waves` runs of about equal size."""
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
    """The size of every staging buffer that a schedule needs."""
    sizes: dict[int, int] = defaultdict(int)
    for operation in schedule:
        if isinstance(operation, Fetch):
            sizes[operation.slot] = max(sizes[operation.slot], operation.nbytes)
    return tuple(sizes[slot] for slot in range(len(sizes)))


def _updates(placements: Sequence[PlacementShape], wave: Sequence[BucketId]) -> list[Operation]:
    """A wave at once; what has windows, window by window."""
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
    """Operations with the windows that they need: each is fetched while the one before is used.

    A staging buffer is filled again when another one has been returned since it was: then its own
    return is over, or all links are busy anyway. So three are enough where windows follow each
    other.
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
    """The windows that have to be there for an operation, and were not needed before; bytes."""
    match operation:
        case Update(_, window) if window is not None:
            of_bucket = placements[window.bucket.placement].windows[window.bucket.bucket]
            return {window: of_bucket[window.number]}
        case Collect(chunk):
            return _of_chunk(placements, chunk)
    return {}


def _releases(placements: Sequence[PlacementShape], operation: Operation) -> dict[WindowId, int]:
    """The windows that nobody needs after an operation."""
    if isinstance(operation, Apply):
        return _of_chunk(placements, operation.bucket)
    return {} if isinstance(operation, Collect) else _needs(placements, operation)


def _of_chunk(placements: Sequence[PlacementShape], chunk: BucketId) -> dict[WindowId, int]:
    sizes = placements[chunk.placement].chunk_windows
    size = sizes[chunk.bucket] if sizes else 0
    return {WindowId(chunk, "chunk"): size} if size else {}
