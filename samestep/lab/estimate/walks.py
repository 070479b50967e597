"""What is alive at every moment of a step, and the moment when that is most.

`SharingWalk` has the memory of parameters that peers hold copies of, operation by operation: it
follows `replicated`, `reduction` and `buffers` of `shards.replicated`, and `parts.gradients`.
`SpreadingWalk` has that of DTensors and of blocks on their way: it follows
`shards.dtensor.block_exchange`.
DTensors that other meshes have copies of need both: one for buckets, one for chunks.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from samestep.lab.estimate.blueprint import Blueprint
from samestep.lab.estimate.placed import OnRank, Sharing
from samestep.lab.estimate.temporaries import RulePeaks
from samestep.plan.chunks import OF_WHOLE, Chunk, PlannedBlock
from samestep.plan.exchanges import transfer_of
from samestep.plan.flat import places
from samestep.plan.packing import PackedPart
from samestep.plan.sharding import Segment
from samestep.plan.transfers import Traffic, Transfer, divides_first
from samestep.shards.replicated.buckets import gradient_dtype, joint_gradient_dtype
from samestep.update.lanes import Batch

GRADIENTS, BUFFERS, TEMPORARIES = "gradients", "buffers", "temporaries"


IN_ONE_CALL = (Traffic.ALL_GATHER, Traffic.UNEVEN_GATHER)


class Then(NamedTuple):
    """Bytes at one moment."""

    gradients: int
    buffers: int
    temporaries: int

    @property
    def total(self) -> int:
        return sum(self)


class Ledger:
    """What is alive, by key, and the moment when that is most."""

    def __init__(self) -> None:
        self._alive: dict[object, tuple[str, int]] = {}
        self.now = dict.fromkeys(Then._fields, 0)
        self.most = Then(0, 0, 0)
        self._total = 0  # of the most

    def add(self, key: object, size: int, kind: str = BUFFERS) -> None:
        self.drop(key)
        self._alive[key] = kind, size
        self.now[kind] += size
        total = sum(self.now.values())
        if total > self._total:
            self._total, self.most = total, Then(**self.now)

    def drop(self, key: object) -> None:
        """It is let go of; nothing, if it was not there."""
        if key in self._alive:
            kind, size = self._alive.pop(key)
            self.now[kind] -= size

    def passing(self, size: int) -> None:
        self.add("passing", size, TEMPORARIES)
        self.drop("passing")

    def size(self, key: object) -> int | None:
        return self._alive[key][1] if key in self._alive else None


Stored = Sequence[tuple[torch.Tensor, int]]  # parameters, and elements of each in memory


class Walk:
    """One placement on one rank: a function for each operation, in a ledger that all share."""

    def __init__(self, number: int, place: int, ledger: Ledger, stored: Stored = ()) -> None:
        self._number, self._place, self._ledger, self._stored = number, place, ledger, stored

    def backward(self, *, again: bool) -> None:
        """Gradients arrive, as they stay; `again`: those of earlier micro-batches are there."""
        for index, (param, elements) in enumerate(self._stored):
            self._add("gradient", index, elements * gradient_dtype(param).itemsize, GRADIENTS)

    def begin(self) -> None:
        """What comes before the first operation."""

    def idle(self, number: int) -> None:
        """Of a bucket or a chunk: nothing is allocated, or let go of."""

    on_reduce = on_average = on_gather = on_place = updated = idle

    def _key(self, what: str, number: int) -> tuple[str, int, int]:
        return what, self._number, number

    def _add(self, what: str, number: int, size: int, kind: str = BUFFERS) -> None:
        self._ledger.add(self._key(what, number), size, kind)

    def _drop(self, number: int, *whats: str) -> None:
        for what in whats:
            self._ledger.drop(self._key(what, number))


class SharingWalk(Walk):
    """Parameters that peers hold copies of, whole or of parts."""

    def __init__(self, number: int, sharing: Sharing, place: int, ledger: Ledger) -> None:
        super().__init__(number, place, ledger)
        self._sharing, self._ranks = sharing, sharing.peers.size
        distribution = sharing.distribution
        self._flat = distribution.buffers == "flat"
        self._frees = distribution.frees_gradients
        self._exchanges = sharing.shape.exchanges
        self._reuses = distribution.sums_in_place(sharing.policy)
        self._flying: list[int] = []
        self._launched = 0
        self._members = [bucket.params for bucket in sharing.plan.buckets]
        self._buckets_of: dict[int, list[int]] = defaultdict(list)  # in launch order
        for bucket, members in enumerate(self._members):
            for index in members:
                self._buckets_of[index].append(bucket)
        self._places = places(sharing.plan) if self._flat else []
        # Of each bucket the dtype of its gradients; by that: buckets whose buffer can be used
        # again, and the elements that a buffer has room for.
        self._dtypes = [
            joint_gradient_dtype([sharing.params[index] for index in members])
            for members in self._members
        ]
        self._spare: dict[torch.dtype, list[int]] = {dtype: [] for dtype in self._dtypes}
        self._rooms = dict.fromkeys(self._dtypes, 0)
        for each, dtype in zip(sharing.plan.buckets, self._dtypes, strict=True):
            self._rooms[dtype] = max(each.size, self._rooms[dtype])

    # --- backward ----------------------------------------------------------------------------

    def backward(self, *, again: bool) -> None:
        """Gradients arrive from the last parameter to the first."""
        distribution = self._sharing.distribution
        missing = [set(members) for members in self._members]
        order = range(len(self._sharing.params) - 1, -1, -1)
        for index in order if again else ():
            self._arrive(index)
        for index in order:
            if again:  # added to what is there
                self._ledger.passing(self._gradient_bytes(index))
            else:
                self._arrive(index)
            for bucket in self._buckets_of[index]:
                missing[bucket].discard(index)
            while (
                distribution.overlap_grad_reduce
                and self._launched < len(missing)
                and not missing[self._launched]
            ):
                for number in [*self._flying] if distribution.one_in_flight else ():
                    self._land(number)
                self._launch()

    def _gradient_bytes(self, index: int) -> int:
        param = self._sharing.params[index]
        return param.numel() * gradient_dtype(param).itemsize

    def _arrive(self, index: int) -> None:
        self._add("gradient", index, self._gradient_bytes(index), GRADIENTS)
        place = self._places[index] if self._flat else None
        if place is not None:  # moved into its buffer
            self._buffer(place.bucket)
            self._drop(index, "gradient")

    def _buffer(self, number: int) -> None:
        if self._ledger.size(self._key("gradients", number)) is not None:
            return
        dtype = self._dtypes[number]
        if self._spare[dtype]:
            self._drop(self._spare[dtype].pop(), "spare")
        size = self._rooms[dtype] if self._frees else self._sharing.plan.buckets[number].size
        self._add("gradients", number, size * dtype.itemsize, GRADIENTS)

    # --- reductions --------------------------------------------------------------------------

    def on_reduce(self, number: int) -> None:
        while self._launched <= number:
            self._launch()

    def _launch(self) -> None:
        number = self._launched
        self._launched += 1
        self._flying.append(number)
        bucket, transfer = (
            self._sharing.plan.buckets[number],
            self._exchanges[number].reduce.transfer,
        )
        width = transfer.dtype.itemsize
        if self._flat:
            self._buffer(number)
        if not self._flat or self._travels_apart(transfer):
            self._add("packed", number, bucket.size * width)
        if self._frees:
            for index in self._members[number]:
                if self._buckets_of[index][-1] == number:
                    self._drop(index, "gradient")
        if self._ranks == 1 or transfer.sizes is None:  # all of it, in place
            return
        own, exchanged = transfer.sizes[self._place], transfer.traffic is Traffic.EXCHANGE
        if transfer.levels == 2:  # the column's sum, and what is added up across hosts
            column, inside, across = self._in_two(transfer)
            own = (inside + 1) * column + across * own if exchanged else column + own
        elif exchanged:
            own *= self._copies
        self._add("received", number, own * width)

    def _in_two(self, transfer: Transfer) -> tuple[int, int, int]:
        """Elements of this rank's column, and of how many others it hears inside and across."""
        assert transfer.sizes is not None
        here = self._sharing.per_host
        hosts = self._ranks // here
        first = self._place - self._place % hosts
        return sum(transfer.sizes[first : first + hosts]), here - 1, hosts - 1

    @property
    def _in_middle(self) -> bool:
        return 0 < self._place < self._ranks - 1

    @property
    def _copies(self) -> int:
        """Segments of its size that an exchange has room for on this rank."""
        return self._ranks if self._in_middle else self._ranks - 1

    def _travels_apart(self, transfer: Transfer) -> bool:
        """Whether not the flat buffer itself is sent."""
        exchange = transfer.traffic is Traffic.EXCHANGE
        divided = divides_first(transfer.dtype, self._ranks, exchange=exchange)
        return divided or self._sharing.distribution.reduce_dtype is not None

    def _land(self, number: int) -> None:
        """The sum lies in the packed buffer, in the received one, or in one of its own."""
        if number not in self._flying:
            return
        self._flying.remove(number)
        bucket, transfer = (
            self._sharing.plan.buckets[number],
            self._exchanges[number].reduce.transfer,
        )
        dtype, wide = transfer.dtype, torch.promote_types(transfer.dtype, torch.float32)
        if self._ranks == 1:
            return
        own = transfer.elements if transfer.sizes is None else transfer.sizes[self._place]
        exchanged = transfer.traffic is Traffic.EXCHANGE
        if exchanged and self._reuses and dtype == wide:
            self._drop(number, "received" if self._place < 2 else "packed")
        elif exchanged or dtype != wide:
            self._add("sum", number, own * wide.itemsize)
            self._drop(number, "packed", "received")
        elif not bucket.replicated:
            self._drop(number, "packed")
        size = self._ledger.size(self._key("gradients", number))
        if self._flat and self._frees and size is not None:
            self._drop(number, "gradients")
            self._add("spare", number, size, GRADIENTS)
            self._spare[self._dtypes[number]].append(number)
        elif self._flat and not self._frees and not bucket.replicated:
            self._drop(number, "sum", "received")  # the sum takes the place of its segment

    def on_average(self, number: int) -> None:
        """Wait, and where every rank needs all sums gather them.

        What are summands still is added up over the mesh, side by side.
        """
        exchanges = self._exchanges[number]
        if self._sharing.shape.reduces:
            self._land(number)
            sums = transfer_of(exchanges.sums)
            if sums is not None and self._ranks > 1:
                self._gather("gathered sums", number, sums, cat=False, into=False)
                self._add("gathered sums", number, self._arriving(sums) * sums.dtype.itemsize)
                self._add("sum", number, sums.elements * sums.dtype.itemsize)
                self._drop(number, "gathered sums", "packed", "received")
        wide = torch.promote_types(exchanges.reduce.transfer.dtype, torch.float32)
        for place, elements in enumerate(self._sharing.sums(number, self._place).values()):
            self._add(f"sum in mesh {place}", number, elements * wide.itemsize)
        summands, pieces = self._sharing.summands, self._owned(number).pieces
        # What was added up over the mesh lies elsewhere, and a block of which this rank has nothing
        # keeps nothing alive.
        if summands and all(summands[piece.param] for piece in pieces if piece.size):
            self._drop(number, "packed", "received", "sum")

    # --- updates -----------------------------------------------------------------------------

    def _owned(self, number: int) -> Segment:
        return self._sharing.owned(number, self._place)

    def updated(self, number: int) -> None:
        """Averaged gradients of parts of blocks stay until the step is over, with all beside."""
        pieces = self._owned(number).pieces
        blocks = [piece.param for piece in pieces if piece.block is not None and piece.size]
        stay = [self._sharing.summands[param] for param in blocks if self._sharing.even]
        if None not in stay:
            self._drop(number, "packed", "received", "sum")
        for place, summands in enumerate(self._sharing.sums(number, self._place)):
            if summands not in stay:
                self._drop(number, f"sum in mesh {place}")

    def on_gather(self, number: int) -> None:
        transfer = transfer_of(self._exchanges[number].gather)
        if transfer is None or self._ranks == 1:
            return
        several = len(self._owned(number).pieces) > 1
        if self._flat and self._sharing.distribution.poison_early_reads:
            self._add("room", number, transfer.elements * transfer.dtype.itemsize)
        cat = several and not self._flat
        self._gather("gather", number, transfer, cat=cat, into=self._flat)

    def _gather(self, what: str, number: int, transfer: Transfer, *, cat: bool, into: bool) -> None:
        assert transfer.sizes is not None
        own, whole, width = transfer.sizes[self._place], transfer.elements, transfer.dtype.itemsize
        if transfer.traffic in IN_ONE_CALL:
            self._add(what, number, (own * cat + whole * (not into)) * width)
            return
        copies = 0 if self._ranks == 2 else own * self._copies
        arrives = 0 if into else self._arriving(transfer)
        if transfer.levels == 2:
            column, inside, across = self._in_two(transfer)
            copies = max(column * inside * (inside > 1), own * across * (across > 1))
            arrives = 0 if into else whole
        self._add(what, number, (own * cat + copies + arrives) * width)

    def _arriving(self, transfer: Transfer) -> int:
        """Elements of room for what others send."""
        assert transfer.sizes is not None
        if self._in_middle or transfer.traffic in IN_ONE_CALL:
            return transfer.elements
        return transfer.elements - transfer.sizes[self._place]

    def on_place(self, number: int) -> None:
        self._drop(number, "gather", "room")


class SpreadingWalk(Walk):
    """The DTensors of one mesh."""

    def __init__(self, number: int, own: OnRank, ledger: Ledger, blueprint: Blueprint) -> None:
        assert own.spreading is not None
        super().__init__(number, own.mesh_place, ledger, own.stored())  # gradients come reduced
        self._spreading, self._blueprint = own.spreading, blueprint

    def begin(self) -> None:
        """Gradients of which ranks have summands are added up side by side, and stay there."""
        for number, (_, dtype, params) in enumerate(self._spreading.sums):
            elements = sum(map(self._local, params))
            self._add("gradient sum", number, elements * dtype.itemsize, GRADIENTS)
        for _, _, params in self._spreading.sums:
            for index in params:
                self._drop(index, "gradient")

    def _local(self, index: int) -> int:
        return self._spreading.held[index].boxes[self._place].numel

    def _parts(self, chunk: Chunk) -> list[int]:
        """Elements of each block of which this rank holds a part."""
        held = (planned.held.box_of(self._place) for planned in chunk.blocks)
        return [box.numel for box in held if box is not None]

    def on_collect(self, number: int) -> None:
        """Directions of the parts, what is sent and what comes."""
        chunk = self._spreading.chunks[number]
        dtype, wide, parts = chunk.dtype, chunk.wide, self._parts(chunk)
        self._add("prepared", number, sum(parts) * wide.itemsize)
        self._ledger.passing(max(parts, default=0) * wide.itemsize)
        out, coming = chunk.collection.packed_from(self._place), chunk.collection.moved.got
        copied = sum(out.sizes) if len(out.parts) > 1 or dtype != wide else 0
        self._add("collected", number, copied * dtype.itemsize)
        self._add("coming", number, coming[self._place] * dtype.itemsize)

    def on_transform(self, number: int) -> None:
        chunk = self._spreading.chunks[number]
        owned, wide = [r for r in chunk.blocks if self._place in r.owners], chunk.wide
        self._drop(number, "collected")
        elements = sum(planned.box.numel for planned in owned)
        self._add("blocks", number, elements * wide.itemsize)
        self._drop(number, "coming", "prepared")
        stacks: dict[tuple[tuple[int, int], int, str], list[PlannedBlock]] = defaultdict(list)
        for planned in owned:
            spec = self._spreading.specs[planned.param]
            for shape in planned.block.matrices:
                stacks[shape, spec.group, spec.dtype].append(planned)
        done = 0
        for ((rows, cols), index, _), blocks in stacks.items():
            group = self._blueprint.groups[index]
            if self._blueprint.device.type == "cpu":
                peaks = RulePeaks(group, on_cpu=True)
                size = peaks.transform(len(blocks), (rows, cols), wide)
            else:
                batch = Batch(len(blocks), rows, cols)
                size = batch.temporary_bytes + batch.count * rows * cols * 4
            self._ledger.passing(size)
            done += len(blocks) * rows * cols * wide.itemsize
            self._add("directions", number, done)
        self._drop(number, "blocks")

    def on_giveback(self, number: int) -> None:
        chunk = self._spreading.chunks[number]
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
        self._add("returned", number, sent if len(out) > 1 else copied)
        self._add("returning", number, sum(part.numel for part in into) * dtype.itemsize)
        self._ledger.passing(copied if len(out) > 1 else 0)

    def on_sum(self, number: int) -> None:
        """Terms of one part after the other."""
        chunk = self._spreading.chunks[number]
        self._drop(number, "returned")
        self._ledger.passing(max(self._parts(chunk), default=0) * chunk.wide.itemsize)

    def on_apply(self, number: int) -> None:
        """One part after the other."""
        chunk = self._spreading.chunks[number]
        self._drop(number, "returned")
        self._ledger.passing(max(self._parts(chunk), default=0) * chunk.wide.itemsize)
        self._drop(number, "returning", "directions")


def _lies_together(part: PackedPart, planned: PlannedBlock) -> bool:
    """Whether a part of a direction is one stretch: dims after the first long one are whole.

    A tall block is computed as a wide one, and its direction is the transpose of that.
    """
    if planned.block.rows > planned.block.cols:
        return False
    sizes = part.sizes
    first = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))
    return sizes[first + 1 :] == planned.box.sizes[first + 1 :]
