"""Gathering updated parameters, bucket by bucket: the way back of a reduction."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from samestep.comm.collectives import Gathered, Pending, gather_stretch
from samestep.comm.groups import RankGroup
from samestep.plan.bucket_exchanges import BucketExchanges
from samestep.plan.packing import PackedPart
from samestep.plan.sharding import ShardingPlan
from samestep.shards.replicated.awaited import ParametersInFlight
from samestep.shards.replicated.flat import FlatParameters
from samestep.shards.replicated.local_tensors import LocalTensors


@dataclass(eq=False)
class ParameterGatherer:
    """Gathers the pieces that ranks have updated, and puts those of others into place.

    places: the ranks in the order of the plan's segments.
    flat: the buffers in which parameters lie, where they do.
    in_flight: who waits for parameters after the step; None: the step places them itself.
    """

    held: LocalTensors
    plan: ShardingPlan
    places: RankGroup
    exchanges: Sequence[BucketExchanges]
    flat: FlatParameters | None
    in_flight: ParametersInFlight | None

    def __post_init__(self) -> None:
        self._flying: dict[int, Pending[Gathered]] = {}
        self._owned = [bucket.owned(self.places.rank).pieces for bucket in self.plan.buckets]
        self._packed_by_others: dict[int, Sequence[PackedPart]] = {}

    def launch(self, number: int) -> None:
        """Start sending the updated pieces of a bucket."""
        bucket, gather = self.plan.buckets[number], self.exchanges[number].gather
        if gather is None:
            return
        transfer = gather.transfer
        assert transfer.sizes is not None
        whole = None
        if self.flat is not None:
            whole = self.flat.room(number)
            segment = torch.split(whole, list(transfer.sizes))[self.places.rank]
        else:
            mine = [self.held.read(piece.param, piece.elements) for piece in self._owned[number]]
            if not mine:
                mine = [self.held.value(bucket.params[0]).new_empty(0)]
            segment = mine[0] if len(mine) == 1 else torch.cat(mine)
        planned = transfer.sizes[self.places.rank], transfer.dtype
        assert planned == (segment.numel(), segment.dtype), transfer.name
        self.advance()
        self._flying[number] = gather_stretch(transfer, segment, self.places, into=whole)
        if self.in_flight is not None:
            members = [self.held.params[index] for index in bucket.params]
            self.in_flight.add(members, partial(self.place, number))

    def advance(self) -> None:
        """Launch what follows on the first halves of gathers in two levels."""
        for gather in self._flying.values():
            gather.advance()

    def place(self, number: int) -> None:
        """Wait for a bucket, and copy what the others updated into place."""
        if number not in self._flying:
            return
        arrived = self._flying.pop(number).wait()
        if self.flat is not None:
            self.flat.arrived(number)
            return
        stretch, first = arrived
        if number not in self._packed_by_others:
            bucket = self.plan.buckets[number]
            self._packed_by_others[number] = bucket.packing_without(self.places.rank).parts
        for part in self._packed_by_others[number]:
            start = part.start - first
            self.held.write(part.key[0], part.elements, stretch[start : start + part.numel])
