"""Sending updated parameters to everyone, bucket by bucket: the way back of a reduction."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from samestep.comm.collectives import Gathered, Pending, gather_stretch
from samestep.comm.groups import RankGroup
from samestep.placements.whole.buffers import FlatParameters
from samestep.placements.whole.held_tensors import HeldTensors
from samestep.placements.whole.in_flight import ParametersInFlight
from samestep.plan.sharding import Bucket, Piece, Segment, ShardingPlan
from samestep.plan.transfers import BucketTransfers


@dataclass(eq=False)
class ParameterGatherer:
    """Gathers the pieces that ranks have updated, and puts those of others into place.

    places: the ranks in the order of the plan's segments.
    flat: the buffers in which parameters lie, where they do.
    in_flight: who waits for parameters after the step; None: the step places them itself.
    """

    held: HeldTensors
    plan: ShardingPlan
    places: RankGroup
    transfers: Sequence[BucketTransfers]
    flat: FlatParameters | None
    in_flight: ParametersInFlight | None

    def __post_init__(self) -> None:
        self._flying: dict[int, Pending[Gathered]] = {}
        self._runs_of_others: dict[int, list[tuple[Piece, int]]] = {}

    def launch(self, number: int) -> None:
        """Start sending the updated pieces of a bucket."""
        bucket, transfer = self.plan.buckets[number], self.transfers[number].gather
        if transfer is None:
            return
        assert transfer.sizes is not None
        sizes, whole = list(transfer.sizes), None
        if self.flat is not None:
            whole = self.flat.room(number)
            segment = torch.split(whole, sizes)[self.places.rank]
        else:
            mine = [self.held.piece(piece) for piece in bucket.owned(self.places.rank).pieces]
            if not mine:
                mine = [self.held.value(bucket.params[0]).new_empty(0)]
            segment = mine[0] if len(mine) == 1 else torch.cat(mine)
        self.advance()
        self._flying[number] = gather_stretch(
            transfer.name, segment, sizes, self.places, into=whole
        )
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
        for piece, start in self._of_others(number):
            part = stretch[start - first : start - first + piece.size]
            self.held.piece(piece).copy_(part)

    def _of_others(self, number: int) -> list[tuple[Piece, int]]:
        """What others own in a bucket, in runs, and where it starts."""
        known = self._runs_of_others.get(number)
        if known is None:
            bucket, rank = self.plan.buckets[number], self.places.rank
            segments = list(bucket.segments)
            segments[rank] = Segment((), (), segments[rank].size)
            known = list(Bucket(bucket.dtype, tuple(segments)).runs)
            self._runs_of_others[number] = known
        return known
