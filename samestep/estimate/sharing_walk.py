"""The memory of parameters that peers hold whole, operation by operation.

Follows `replicated`, `reduction` and `gradients` of `placements.whole`.
"""

import torch

from samestep.estimate.blueprint import Blueprint, Sharing
from samestep.estimate.ledger import GRADIENTS, Ledger
from samestep.placements.whole.buffers import gradient_dtype
from samestep.plan.flat import places
from samestep.plan.sharding import Segment
from samestep.plan.transfers import Traffic, Transfer, divides_first


class SharingWalk:
    """One plan on one rank."""

    def __init__(
        self, number: int, sharing: Sharing, place: int, blueprint: Blueprint, ledger: Ledger
    ) -> None:
        self._number, self._sharing, self._place = number, sharing, place
        self._ledger = ledger
        self._ranks = sharing.peers.size
        distribution = sharing.distribution
        self._flat = distribution.buffers == "flat"
        self._frees = distribution.frees_gradients
        self._transfers = sharing.shape.transfers
        self._reuses = distribution.sums_in_place(sharing.policy)
        self._flying: list[int] = []
        self._launched = 0
        self._members = [bucket.params for bucket in sharing.plan.buckets]
        self._buckets_of: dict[int, list[int]] = {}  # in launch order
        for bucket, members in enumerate(self._members):
            for index in members:
                self._buckets_of.setdefault(index, []).append(bucket)
        self._places = places(sharing.plan) if self._flat else []
        self._spare: list[object] = []
        rooms: dict[str, int] = {}
        for bucket_ in sharing.plan.buckets:
            rooms[bucket_.dtype] = max(bucket_.size, rooms.get(bucket_.dtype, 0))
        self._rooms = rooms

    # --- backward ----------------------------------------------------------------------------

    def backward(self) -> None:
        """Gradients arrive from the last parameter to the first."""
        overlaps = self._sharing.distribution.overlap_grad_reduce
        missing = [set(members) for members in self._members]
        for index in range(len(self._sharing.params) - 1, -1, -1):
            self._arrive(index)
            for bucket in self._buckets_of.get(index, ()):
                missing[bucket].discard(index)
            while overlaps and self._launched < len(missing) and not missing[self._launched]:
                if self._sharing.distribution.one_in_flight:
                    self._land_all()
                self._launch()

    def _arrive(self, index: int) -> None:
        param = self._sharing.params[index]
        size = param.numel() * gradient_dtype(param).itemsize
        self._ledger.add(("gradient", self._number, index), size, GRADIENTS)
        place = self._places[index] if self._flat else None
        if place is not None:  # moved into its buffer
            self._buffer(place.bucket)
            self._ledger.drop(("gradient", self._number, index))

    def _buffer(self, number: int) -> None:
        key = ("gradients", self._number, number)
        if self._ledger.size(key) is not None:
            return
        if self._spare:
            self._ledger.drop(self._spare.pop())
        bucket = self._sharing.plan.buckets[number]
        width = gradient_dtype(self._sharing.params[bucket.params[0]]).itemsize
        size = self._rooms[bucket.dtype] if self._frees else bucket.size
        self._ledger.add(key, size * width, GRADIENTS)

    def begin(self) -> None:
        """Nothing is allocated before the first operation."""

    # --- reductions --------------------------------------------------------------------------

    def on_reduce(self, number: int) -> None:
        """Everything up to this bucket."""
        while self._launched <= number:
            self._launch()

    def _launch(self) -> None:
        number = self._launched
        self._launched += 1
        self._flying.append(number)
        bucket, transfer = self._sharing.plan.buckets[number], self._transfers[number].reduce
        width = transfer.dtype.itemsize
        if self._flat:
            self._buffer(number)
        if not self._flat or self._travels_apart(transfer):
            self._ledger.add(("packed", self._number, number), bucket.size * width)
        if self._frees:
            for index in self._members[number]:
                if self._buckets_of[index][-1] == number:
                    self._ledger.drop(("gradient", self._number, index))
        if self._ranks == 1:
            return
        if transfer.sizes is None:  # all of it, in place
            return
        own = transfer.sizes[self._place] * width
        if transfer.traffic is Traffic.EXCHANGE:
            in_middle = 0 < self._place < self._ranks - 1
            own *= self._ranks if in_middle else self._ranks - 1
        self._ledger.add(("received", self._number, number), own)

    def _travels_apart(self, transfer: Transfer) -> bool:
        """Whether not the flat buffer itself is sent."""
        exchange = transfer.traffic is Traffic.EXCHANGE
        divided = divides_first(transfer.dtype, self._ranks, exchange=exchange)
        return divided or self._sharing.distribution.reduce_dtype is not None

    def _land_all(self) -> None:
        for number in list(self._flying):
            self._land(number)

    def _land(self, number: int) -> None:
        """The sum lies in the packed buffer, in the received one, or in one of its own."""
        if number not in self._flying:
            return
        self._flying.remove(number)
        bucket, transfer = self._sharing.plan.buckets[number], self._transfers[number].reduce
        dtype = transfer.dtype
        wide = torch.promote_types(dtype, torch.float32)
        packed, received = ("packed", self._number, number), ("received", self._number, number)
        total = ("sum", self._number, number)
        if self._ranks == 1:
            return
        own = transfer.elements if transfer.sizes is None else transfer.sizes[self._place]
        if transfer.traffic is Traffic.EXCHANGE:
            if not self._reuses or dtype != wide:
                self._ledger.add(total, own * wide.itemsize)
                self._ledger.drop(packed)
                self._ledger.drop(received)
            elif self._place < 2:
                self._ledger.drop(received)
            else:
                self._ledger.drop(packed)
        elif dtype != wide:
            self._ledger.add(total, own * wide.itemsize)
            self._ledger.drop(packed)
            self._ledger.drop(received)
        elif not bucket.replicated:
            self._ledger.drop(packed)
        if not self._flat:
            return
        if self._frees:
            key = ("gradients", self._number, number)
            spare = ("spare", self._number, number)
            size = self._ledger.size(key)
            if size is not None:
                self._ledger.drop(key)
                self._ledger.add(spare, size, GRADIENTS)
                self._spare.append(spare)
        elif not bucket.replicated:  # the sum takes the place of its segment
            self._ledger.drop(total)
            self._ledger.drop(received)

    def on_average(self, number: int) -> None:
        """Wait, and where every rank needs all sums gather them."""
        if not self._sharing.shape.reduces:
            return
        self._land(number)
        sums = self._transfers[number].sums
        if sums is not None and self._ranks > 1:
            self._gather(("gathered sums", self._number, number), sums, cat=False, into=False)
            self._ledger.add(("sum", self._number, number), sums.elements * sums.dtype.itemsize)
            for name in ("gathered sums", "packed", "received"):
                self._ledger.drop((name, self._number, number))

    # --- updates -----------------------------------------------------------------------------

    def _owned(self, number: int) -> Segment:
        bucket = self._sharing.plan.buckets[number]
        return bucket.segments[0 if bucket.replicated else self._place]

    def operands(self, number: int) -> list[tuple[int, torch.Tensor, tuple[int, ...]]]:
        """Group, parameter and shape of what this rank updates in a bucket."""
        return [
            (
                self._sharing.specs[piece.param].group,
                self._sharing.params[piece.param],
                (piece.size,) if piece.block is None else piece.block.shape,
            )
            for piece in self._owned(number).pieces
        ]

    def updated(self, number: int) -> None:
        """Gradients of a bucket are not needed any longer."""
        for name in ("packed", "received", "sum"):
            self._ledger.drop((name, self._number, number))

    def on_gather(self, number: int) -> None:
        """What is sent, and where it arrives."""
        transfer = self._transfers[number].gather
        if transfer is None or self._ranks == 1:
            return
        several = len(self._owned(number).pieces) > 1
        if self._flat and self._sharing.distribution.poison_early_reads:
            size = transfer.elements * transfer.dtype.itemsize
            self._ledger.add(("room", self._number, number), size)
        key = ("gather", self._number, number)
        self._gather(key, transfer, cat=several and not self._flat, into=self._flat)

    def _gather(self, key: object, transfer: Transfer, *, cat: bool, into: bool) -> None:
        assert transfer.sizes is not None
        own, whole, width = transfer.sizes[self._place], transfer.elements, transfer.dtype.itemsize
        in_middle = 0 < self._place < self._ranks - 1
        if transfer.traffic is Traffic.ALL_GATHER:
            self._ledger.add(key, (own * cat + whole * (not into)) * width)
            return
        copies = 0 if self._ranks == 2 else own * (self._ranks if in_middle else self._ranks - 1)
        arrives = 0 if into else whole if in_middle else whole - own
        self._ledger.add(key, (own * cat + copies + arrives) * width)

    def on_place(self, number: int) -> None:
        """It has arrived."""
        self._ledger.drop(("gather", self._number, number))
        self._ledger.drop(("room", self._number, number))
