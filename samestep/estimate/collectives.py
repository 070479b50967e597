"""What each operation of a schedule launches on all ranks: transfers of the plan, and scalars.

`comm.recorder` sees the same: tests hold every layout's records against it, one by one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from samestep.estimate.blueprint import Blueprint, Peers, Sharing, per_peer
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
from samestep.plan.transfers import Traffic, Transfer, gather_of


@dataclass(frozen=True)
class Collective:
    """One collective of all ranks; `transfers` has one, or one per place in `among`.

    Those are ranks that meet different peers at the same time, each with a transfer of its own.
    """

    transfers: tuple[Transfer, ...]
    peers: Peers
    among: Peers | None = None

    @property
    def name(self) -> str:
        return self.transfers[0].name

    @property
    def traffic(self) -> Traffic:
        return self.transfers[0].traffic

    def of(self, place_among: int) -> Transfer:
        """That of the ranks at a place in `among`."""
        return self.transfers[place_among if self.among is not None else 0]

    @cached_property
    def _segments(self) -> Tensor:
        """Bytes per peer, where each has a part of its own: (size,)."""
        assert self.transfers[0].sizes is not None
        return per_peer(self.transfers[0].sizes) * self.transfers[0].dtype.itemsize

    def sent_by_all(self) -> Tensor:
        """Bytes that all peers, or all ranks of `among`, must send at least: (size,)."""
        ranks = self.peers.size
        if self.among is not None:
            known = {id(each): each for each in self.transfers}  # many are one
            most = {
                key: max(each.sent(rank, ranks) for rank in range(ranks if each.sizes else 1))
                for key, each in known.items()
            }
            return per_peer([most[id(each)] for each in self.transfers])
        (transfer,) = self.transfers
        if transfer.sizes is None:
            return torch.full((ranks,), float(transfer.sent(0, ranks)), dtype=torch.float64)
        whole = transfer.elements * transfer.dtype.itemsize
        base, one_more = (round(transfer.traffic.sent(whole, mine, ranks)) for mine in (0, 1))
        return base + (one_more - base) * self._segments  # it is linear in a rank's own

    def received_by_all(self) -> Tensor:
        """Bytes that peers get at least: (size,)."""
        transfer, ranks = self.transfers[0], self.peers.size
        if transfer.sizes is None or self.among is not None:
            return self.sent_by_all()
        if transfer.incoming is not None:
            return per_peer(transfer.incoming) * transfer.dtype.itemsize
        mine = self._segments
        if transfer.traffic is Traffic.EXCHANGE:
            return mine * (ranks - 1)
        if transfer.traffic is Traffic.REDUCE_SCATTER:  # backends add up on the way
            return mine.sum().expand(ranks) * (ranks - 1) / ranks
        return mine.sum() - mine


class Launches:
    """Collectives by operation, in the order in which all ranks launch them."""

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint = blueprint

    def of(self, operation: Operation) -> list[Collective]:
        return list(self._of(operation))

    def of_step(self, rank: int = 0) -> list[Collective]:
        operations = self._blueprint.schedule(rank)
        return [*self.of_beginning(), *(each for op in operations for each in self._of(op))]

    def of_beginning(self) -> list[Collective]:
        """What comes before the first operation: sums of gradients, problems of other stages."""
        return [*self._gradient_sums(), *self._over_stages("problems")]

    def _of(self, operation: Operation) -> Iterator[Collective]:
        match operation:
            case Agree(number):
                yield from self._agree(number)
            case Average(bucket, sums, outer):
                yield from self._between(bucket, sums)
                yield from self._over_outer(bucket, outer)
            case Clip():
                yield from self._clip()
            case (
                Reduce(bucket, transfer)
                | Gather(bucket, transfer)
                | Collect(bucket, transfer)
                | GiveBack(bucket, transfer)
            ):
                yield from self._between(bucket, transfer)
            case Measure():
                elements = 2 * len(self._blueprint.groups)
                everyone = self._blueprint.everyone
                yield from _summed("update sizes", everyone, torch.float64, elements)

    # --- scalars -----------------------------------------------------------------------------

    def _on_all(self, name: str) -> Iterator[Collective]:
        """A code of all ranks, where placements live on different ones; a GPU does not wait for it.

        Over which ranks is decided as the optimizer does.
        """
        blueprint = self._blueprint
        held_by = dict.fromkeys(placement.peers for placement in blueprint.placements)
        if len(held_by) < 2 or blueprint.device.type != "cpu":
            return
        axes = {axis for peers in held_by for axis in peers.axes}
        union = blueprint.grid.peers(*axes)
        widest = (peers for peers in held_by if peers.size == union.size)
        yield from _summed(name, next(widest, blueprint.everyone), torch.int64, 1)

    def _agree(self, number: int) -> Iterator[Collective]:
        if number == 0:
            yield from self._on_all("problems")
        placement = self._blueprint.placements[number]
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
            on_cpu = blueprint.device.type == "cpu"
            name, sizes = "norm of stages", (1,) * peers.size
            yield Collective((gather_of(name, torch.float64, sizes, on_cpu=on_cpu),), peers)
        yield from self._on_all("not finite")
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
                if peers.size == 1:
                    continue
                held = [spreading.held[param].boxes for param in params]
                sizes = (sum(box.numel for box in boxes) for boxes in zip(*held, strict=True))
                name = "sum of gradients"
                sums = (Transfer(Traffic.ALL_REDUCE, name, dtype, size) for size in sizes)
                yield Collective(tuple(sums), peers, among=spreading.peers)

    # --- buckets and chunks: as the plan has them ----------------------------------------------

    def _between(self, bucket: BucketId, transfer: Transfer | None) -> Iterator[Collective]:
        """A transfer between the ranks of a placement."""
        if transfer is None or (transfer.traffic is Traffic.PARTS and not transfer.elements):
            return
        peers = self._blueprint.placements[bucket.placement].peers
        if peers.size > 1:
            yield Collective((transfer,), peers)

    def _over_outer(
        self, bucket: BucketId, by_place: Sequence[tuple[Transfer, ...]]
    ) -> Iterator[Collective]:
        """The transfers over groups that do the same, by place in the group."""
        if not by_place:
            return
        sharing = self._blueprint.placements[bucket.placement]
        assert isinstance(sharing, Sharing)
        assert sharing.outer is not None
        for together in zip(*by_place, strict=True):
            yield Collective(together, sharing.outer, among=sharing.peers)


def _summed(name: str, peers: Peers, dtype: torch.dtype, elements: int) -> Iterator[Collective]:
    if peers.size > 1:
        yield Collective((Transfer(Traffic.ALL_REDUCE, name, dtype, elements),), peers)
