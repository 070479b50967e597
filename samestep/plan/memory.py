"""Predict a step's memory on a rank: the buffers that each operation allocates and frees.

    backward    gradients arrive, as they stay; in flat buffers they move into that of their bucket
    Reduce      + packed, received                       - gradients, in zero2
    Average     + sum, or gathered sums                  - packed, received
    Update      + what rules make on their way           - sum
    Gather      + what is sent, and what comes
    Place                                                - both
    Collect     + directions of parts, what is sent, what comes
    Transform   + blocks, directions                     - what was sent and came
    GiveBack    + what is sent and what comes
    Apply                                                - all of it

A change is an allocation or a release of a buffer, in the order in which the step makes them, so
that their running sum gives the peak. Rules are asked how much they allocate while they run.

The model describes `shards.replicated` (buckets) and `shards.dtensor.block_exchange` (chunks); a
test of peaks on real ranks shows if they allocate anything else.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch

from samestep.plan.chunks import OF_WHOLE, Chunk, PlannedBlock
from samestep.plan.exchanges import transfer_of
from samestep.plan.flat import places
from samestep.plan.packing import PackedPart
from samestep.plan.placement_plan import BlockPlan, BucketPlan
from samestep.plan.schedule import (
    Apply,
    Average,
    Collect,
    Gather,
    GiveBack,
    OfBucket,
    Operation,
    Place,
    Reduce,
    Sum,
    Transform,
    Update,
)
from samestep.plan.sharding import ParamSpec, Segment
from samestep.plan.transfers import Traffic, Transfer, divides_first

GRADIENTS, BUFFERS, TEMPORARIES = "gradients", "buffers", "temporaries"  # kinds of memory
IN_ONE_CALL = (Traffic.ALL_GATHER, Traffic.UNEVEN_GATHER)

BufferKey = tuple[str, int, int]  # what it is; of which placement; its parameter, bucket or chunk


class Allocation(NamedTuple):
    """A buffer of `nbytes` from now on; it replaces a buffer with the same key.

    pool: a spare buffer of this pool is reused, if there is one.
    """

    key: BufferKey
    nbytes: int
    kind: str = BUFFERS
    pool: Hashable = None


class Release(NamedTuple):
    """The release of a buffer, if allocated; `pool`: it stays in this pool as a spare."""

    key: BufferKey
    pool: Hashable = None


class Passing(NamedTuple):
    """Bytes that are allocated and freed again at once."""

    nbytes: int


Change = Allocation | Release | Passing
Changes = Iterator[Change]


# Bytes that a rule allocates to transform so many whole matrices of one shape of a parameter.
TransformBytes = Callable[[ParamSpec, int, tuple[int, int]], int]


class PlacementMemory:
    """The memory of one placement on one rank; this base class knows only gradients.

    number: of the placement in the schedule.
    gradients: bytes of each, as backward leaves them and they stay.
    summands: by parameter a key of what is added up over the mesh at once, where backward leaves
        ranks summands of the gradient; None: a gradient is whole.
    """

    def __init__(
        self, number: int, gradients: Sequence[int] = (), summands: Sequence[Hashable] = ()
    ) -> None:
        self._number, self._gradients, self._summands = number, gradients, summands
        self._changes: dict[type[OfBucket], Callable[[int], Changes]] = {}

    def backward(self, *, again: bool) -> Changes:
        """Yield changes as gradients arrive; `again`: earlier micro-batches left some."""
        for index, nbytes in enumerate(self._gradients):
            yield self._add("gradient", index, nbytes, GRADIENTS)

    def begin(self) -> Changes:
        """Return the changes before the first operation."""
        return iter(())

    def of(self, operation: Operation) -> Changes:
        """Yield the changes that an operation makes in this placement, in order."""
        if isinstance(operation, Update) and operation.is_last:
            for placement, number in operation.buckets:
                if placement == self._number:
                    yield from self._updated(number)
        if isinstance(operation, OfBucket) and operation.bucket.placement == self._number:
            changes = self._changes.get(type(operation))
            yield from () if changes is None else changes(operation.bucket.bucket)

    def _updated(self, number: int) -> Changes:
        """Return the changes when all of a bucket is updated."""
        return iter(())

    def _add(self, what: str, number: int, nbytes: int, kind: str = BUFFERS) -> Allocation:
        return Allocation((what, self._number, number), nbytes, kind)

    def _drop(self, number: int, *whats: str) -> Changes:
        for what in whats:
            yield Release((what, self._number, number))


class BucketMemory(PlacementMemory):
    """The memory of parameters with copies on several ranks, whole or of shards."""

    def __init__(
        self, number: int, plan: BucketPlan, place: int, summands: Sequence[Hashable] = ()
    ) -> None:
        super().__init__(number, summands=summands)
        self._plan, self._place, self._ranks = plan, place, plan.fabric.ranks
        options = plan.options
        self._flat = options.buffers == "flat"
        self._frees = options.frees_gradients
        self._exchanges = plan.shape.exchanges
        self._sums_in_place = options.sums_in_place(plan.policy)
        self._members = [bucket.params for bucket in plan.plan.buckets]
        self._last_bucket = {
            index: bucket for bucket, members in enumerate(self._members) for index in members
        }
        self._places = places(plan.plan) if self._flat else []
        self._launches_inside = options.overlap_grad_reduce  # backward
        self._lands_inside = self._launches_inside and options.one_in_flight  # all but the last
        self._changes = {Average: self._average, Gather: self._start_gather, Place: self._placed}
        if not self._launches_inside:
            self._changes[Reduce] = self._launch
        # By dtype of gradients the elements of a buffer that has room for any bucket of it.
        self._rooms = dict.fromkeys(plan.gradient_dtypes, 0)
        for bucket, dtype in zip(plan.plan.buckets, plan.gradient_dtypes, strict=True):
            self._rooms[dtype] = max(bucket.size, self._rooms[dtype])

    # --- backward ----------------------------------------------------------------------------

    def backward(self, *, again: bool) -> Changes:
        """Yield changes as gradients arrive, the last parameter first, and buckets launch."""
        order = range(len(self._plan.plan.params) - 1, -1, -1)
        begun: set[int] = set()  # flat buffers
        for index in order if again else ():
            yield from self._arrive(index, begun)
        launched = 0
        for index in order:
            if again:  # added to what is there
                yield Passing(self._gradient_bytes(index))
            else:
                yield from self._arrive(index, begun)
            while (
                self._launches_inside
                and launched < len(self._members)
                and self._members[launched][0] >= index
            ):
                if self._lands_inside and launched:
                    yield from self._land(launched - 1)
                yield from self._launch(launched)
                launched += 1

    def _gradient_bytes(self, index: int) -> int:
        spec = self._plan.plan.params[index]
        return spec.numel * spec.gradient_dtype.itemsize

    def _arrive(self, index: int, begun: set[int]) -> Changes:
        yield self._add("gradient", index, self._gradient_bytes(index), GRADIENTS)
        place = self._places[index] if self._flat else None
        if place is None:
            return
        if place.bucket not in begun:  # moved into its buffer
            begun.add(place.bucket)
            dtype = self._plan.gradient_dtypes[place.bucket]
            size = self._plan.plan.buckets[place.bucket].size
            if self._frees:
                size = self._rooms[dtype]
            key = "gradients", self._number, place.bucket
            yield Allocation(key, size * dtype.itemsize, GRADIENTS, (self._number, dtype))
        yield from self._drop(index, "gradient")

    # --- reductions --------------------------------------------------------------------------

    def _launch(self, number: int) -> Changes:
        bucket = self._plan.plan.buckets[number]
        transfer = self._exchanges[number].reduce.transfer
        width = transfer.dtype.itemsize
        if not self._flat or self._travels_apart(transfer):
            yield self._add("packed", number, bucket.size * width)
        for index in self._members[number] if self._frees else ():
            if self._last_bucket[index] == number:
                yield from self._drop(index, "gradient")
        if self._ranks == 1 or transfer.sizes is None:  # all of it, in place
            return
        own, exchanged = transfer.sizes[self._place], transfer.traffic is Traffic.EXCHANGE
        if transfer.levels == 2:  # the column's sum, and what is added up across hosts
            column, inside, across = self._in_two(transfer)
            own = (inside + 1) * column + across * own if exchanged else column + own
        elif exchanged:
            own *= self._copies
        yield self._add("received", number, own * width)

    def _in_two(self, transfer: Transfer) -> tuple[int, int, int]:
        """Return the elements of this rank's column, and its peers inside a host and across."""
        assert transfer.sizes is not None
        here = self._plan.fabric.per_host
        hosts = self._ranks // here
        first = self._place - self._place % hosts
        return sum(transfer.sizes[first : first + hosts]), here - 1, hosts - 1

    @property
    def _in_middle(self) -> bool:
        return 0 < self._place < self._ranks - 1

    @property
    def _copies(self) -> int:
        """Return the number of segments for which an exchange allocates on this rank."""
        return self._ranks if self._in_middle else self._ranks - 1

    def _travels_apart(self, transfer: Transfer) -> bool:
        """Whether a buffer other than the flat one is sent."""
        exchange = transfer.traffic is Traffic.EXCHANGE
        divided = divides_first(transfer.dtype, self._ranks, exchange=exchange)
        return divided or self._plan.options.reduce_dtype is not None

    def _land(self, number: int) -> Changes:
        """Yield changes of a sum that is in the packed, the received or an own buffer."""
        bucket = self._plan.plan.buckets[number]
        transfer = self._exchanges[number].reduce.transfer
        dtype, wide = transfer.dtype, torch.promote_types(transfer.dtype, torch.float32)
        if self._ranks == 1:
            return
        own = transfer.elements if transfer.sizes is None else transfer.sizes[self._place]
        exchanged = transfer.traffic is Traffic.EXCHANGE
        if exchanged and self._sums_in_place and dtype == wide:
            yield from self._drop(number, "received" if self._place < 2 else "packed")
        elif exchanged or dtype != wide:
            yield self._add("sum", number, own * wide.itemsize)
            yield from self._drop(number, "packed", "received")
        elif not bucket.replicated:
            yield from self._drop(number, "packed")
        if self._flat and self._frees:
            pool = self._number, self._plan.gradient_dtypes[number]
            yield Release(("gradients", self._number, number), pool)
        elif self._flat and not bucket.replicated:
            yield from self._drop(number, "sum", "received")  # it takes the place of its segment

    def _average(self, number: int) -> Changes:
        """Yield changes of a wait for sums, and of their all-gather if every rank needs all.

        Gradients that are still summands in the mesh are then summed over it, in a buffer per key.
        """
        exchanges = self._exchanges[number]
        if self._plan.shape.reduces:
            if not self._lands_inside or number == len(self._members) - 1:
                yield from self._land(number)
            sums = transfer_of(exchanges.sums)
            if sums is not None and self._ranks > 1:
                yield self._gather("gathered sums", number, sums, cat=False, into=False)
                arriving = self._arriving(sums) * sums.dtype.itemsize
                yield self._add("gathered sums", number, arriving)
                yield self._add("sum", number, sums.elements * sums.dtype.itemsize)
                yield from self._drop(number, "gathered sums", "packed", "received")
        wide = torch.promote_types(exchanges.reduce.transfer.dtype, torch.float32)
        for place, elements in enumerate(self._sums_in_mesh(number).values()):
            yield self._add(f"sum in mesh {place}", number, elements * wide.itemsize)
        summands, pieces = self._summands, self._owned(number).pieces
        # What was added up over the mesh lies elsewhere, and a block of which this rank has nothing
        # keeps nothing alive.
        if summands and all(summands[piece.param] for piece in pieces if piece.size):
            yield from self._drop(number, "packed", "received", "sum")

    # --- updates -----------------------------------------------------------------------------

    def _owned(self, number: int) -> Segment:
        return self._plan.owned(number, self._place)

    def _sums_in_mesh(self, number: int) -> dict[Hashable, int]:
        return self._plan.sums_in_mesh(number, self._place, self._summands)

    def _updated(self, number: int) -> Changes:
        """Yield changes of an update; averaged gradients of parts of blocks stay allocated."""
        pieces = self._owned(number).pieces
        blocks = [piece.param for piece in pieces if piece.block is not None and piece.size]
        stay = [self._summands[param] for param in blocks if self._plan.even is not None]
        if None not in stay:
            yield from self._drop(number, "packed", "received", "sum")
        for place, summands in enumerate(self._sums_in_mesh(number)):
            if summands not in stay:
                yield from self._drop(number, f"sum in mesh {place}")

    def _start_gather(self, number: int) -> Changes:
        transfer = transfer_of(self._exchanges[number].gather)
        if transfer is None or self._ranks == 1:
            return
        several = len(self._owned(number).pieces) > 1
        if self._flat and self._plan.options.poison_early_reads:
            yield self._add("room", number, transfer.elements * transfer.dtype.itemsize)
        cat = several and not self._flat
        yield self._gather("gather", number, transfer, cat=cat, into=self._flat)

    def _gather(
        self, what: str, number: int, transfer: Transfer, *, cat: bool, into: bool
    ) -> Allocation:
        """Return the allocation to send this rank's segment and to receive the other ones.

        cat: the segment is concatenated first. into: segments are received in place.
        """
        assert transfer.sizes is not None
        own, whole, width = transfer.sizes[self._place], transfer.elements, transfer.dtype.itemsize
        if transfer.traffic in IN_ONE_CALL:
            return self._add(what, number, (own * cat + whole * (not into)) * width)
        copies = 0 if self._ranks == 2 else own * self._copies
        arrives = 0 if into else self._arriving(transfer)
        if transfer.levels == 2:
            column, inside, across = self._in_two(transfer)
            copies = max(column * inside * (inside > 1), own * across * (across > 1))
            arrives = 0 if into else whole
        return self._add(what, number, (own * cat + copies + arrives) * width)

    def _placed(self, number: int) -> Changes:
        return self._drop(number, "gather", "room")

    def _arriving(self, transfer: Transfer) -> int:
        """Return the elements allocated for data from other ranks."""
        assert transfer.sizes is not None
        if self._in_middle or transfer.traffic in IN_ONE_CALL:
            return transfer.elements
        return transfer.elements - transfer.sizes[self._place]


class BlockMemory(PlacementMemory):
    """The memory of the blocks of DTensors of one mesh.

    gradients: bytes of gradients that come reduced; (): gradients come from buckets.
    """

    def __init__(
        self,
        number: int,
        plan: BlockPlan,
        place: int,
        transform: TransformBytes,
        gradients: Sequence[int] = (),
        summands: Sequence[Hashable] = (),
    ) -> None:
        super().__init__(number, gradients, summands)
        self._plan, self._place, self._bytes_of = plan, place, transform
        self._changes = {
            Collect: self._collect,
            Transform: self._transform,
            GiveBack: self._give_back,
            Sum: self._sum,
            Apply: self._apply,
        }

    def begin(self) -> Changes:
        """Yield changes of summing gradients over ranks, in buffers that stay."""
        sums = self._plan.gradient_sums(self._summands)
        for number, (_, dtype, params) in enumerate(sums):
            elements = sum(self._plan.held[index].boxes[self._place].numel for index in params)
            yield self._add("gradient sum", number, elements * dtype.itemsize, GRADIENTS)
        for _, _, params in sums:
            for index in params:
                yield from self._drop(index, "gradient")

    def _parts(self, chunk: Chunk) -> list[int]:
        """Return the elements of the part of each block that this rank holds, if any."""
        held = (planned.held.box_of(self._place) for planned in chunk.blocks)
        return [box.numel for box in held if box is not None]

    def _collect(self, number: int) -> Changes:
        """Yield buffers for directions of parts, for sending and for receiving."""
        chunk = self._plan.chunks[number]
        dtype, wide, parts = chunk.dtype, chunk.wide, self._parts(chunk)
        yield self._add("prepared", number, sum(parts) * wide.itemsize)
        yield Passing(max(parts, default=0) * wide.itemsize)
        out, coming = chunk.collection.packed_from(self._place), chunk.collection.moved.got
        copied = sum(out.sizes) if len(out.parts) > 1 or dtype != wide else 0
        yield self._add("collected", number, copied * dtype.itemsize)
        yield self._add("coming", number, coming[self._place] * dtype.itemsize)

    def _transform(self, number: int) -> Changes:
        """Yield changes of assembling blocks, and transforming those of one shape at once."""
        chunk = self._plan.chunks[number]
        owned, wide = [r for r in chunk.blocks if self._place in r.owners], chunk.wide
        yield from self._drop(number, "collected")
        elements = sum(planned.box.numel for planned in owned)
        yield self._add("blocks", number, elements * wide.itemsize)
        yield from self._drop(number, "coming", "prepared")
        stacks: dict[tuple[tuple[int, int], int, str], list[ParamSpec]] = defaultdict(list)
        for planned in owned:
            spec = self._plan.specs[planned.param]
            for shape in planned.block.matrices:
                stacks[shape, spec.group, spec.dtype].append(spec)
        done = 0
        for (shape, _, _), specs in stacks.items():
            yield Passing(self._bytes_of(specs[0], len(specs), shape))
            done += len(specs) * shape[0] * shape[1] * wide.itemsize
            yield self._add("directions", number, done)
        yield from self._drop(number, "blocks")

    def _give_back(self, number: int) -> Changes:
        """Yield changes of sending directions; state of whole blocks is too small to count."""
        chunk = self._plan.chunks[number]
        assert chunk.giving_back is not None
        dtype, place = chunk.dtype, self._place
        out, into = (
            [part for part in packing.parts if part.key[1] != OF_WHOLE]
            for packing in (
                chunk.giving_back.packed_from(place),
                chunk.giving_back.packed_to(place),
            )
        )
        sent = sum(part.numel for part in out) * dtype.itemsize
        # Rows of a block lie together; of columns a copy is made before all are put side by side.
        differs = dtype != chunk.wide
        apart = (p for p in out if differs or not _lies_together(p, chunk.blocks[p.key[0]]))
        copied = sum(part.numel for part in apart) * dtype.itemsize
        yield self._add("returned", number, sent if len(out) > 1 else copied)
        yield self._add("returning", number, sum(part.numel for part in into) * dtype.itemsize)
        yield Passing(copied if len(out) > 1 else 0)

    def _sum(self, number: int) -> Changes:
        """Yield changes of computing the terms of sums, one part at a time."""
        chunk = self._plan.chunks[number]
        yield from self._drop(number, "returned")
        yield Passing(max(self._parts(chunk), default=0) * chunk.wide.itemsize)

    def _apply(self, number: int) -> Changes:
        """Yield changes of the update, one part at a time."""
        chunk = self._plan.chunks[number]
        yield from self._drop(number, "returned")
        yield Passing(max(self._parts(chunk), default=0) * chunk.wide.itemsize)
        yield from self._drop(number, "returning", "directions")


def _lies_together(part: PackedPart, planned: PlannedBlock) -> bool:
    """Whether a part of a direction is contiguous: dims after the first long one are whole.

    A tall block is computed as a wide one, and its direction is the transpose of that.
    """
    if planned.block.rows > planned.block.cols:
        return False
    sizes = part.sizes
    first = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))
    return sizes[first + 1 :] == planned.box.sizes[first + 1 :]
