"""Exchanges: the communication that turns one layout of tensors into another.

    source layout             hops                                    target layout
    box A: ranks 0 and 1  ->  the overlap of A and B, from a rank  -> box B: rank 2
                              that has A to a rank that needs B

An exchange is pure data: it needs no process group and no tensor. Saving, loading, resharding and
reading whole values differ only in these two layouts. A rank never receives values that it has
already, and an exchange in which every rank has all that it needs is silent.

Where every rank needs everything, one all-gather moves it, of a segment per rank; `comm.exchange`
runs it. Blocks whose parts are spread over ranks are sent all-to-all; everything that a rank
sends lies in one buffer, and so does everything that it gets: a `Packing` says where.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import torch

from samestep.layout.boxes import Box
from samestep.plan.layouts import Holding, Holdings, Key, Layout
from samestep.plan.packing import PackedPart, Packing
from samestep.plan.transfers import CollectivePolicy, Traffic, Transfer, of_segments


class Hop(NamedTuple):
    """A box sent from one rank to another."""

    key: Key
    box: Box
    source: int
    target: int
    held: Box  # of the source, which the box is a part of
    needed: Box  # of the target, which the box is a part of
    number: int = 0  # of the addend: they are summed in this order
    addends: int = 1  # 1: it is the value itself


class Moved(NamedTuple):
    """Elements that ranks send and receive."""

    sent: list[int]
    got: list[int]


class _Alike(NamedTuple):
    """Tensors that are cut alike over ranks, and how many of them each rank has or needs whole."""

    parts: Holdings
    by_whole: Counter[int]

    def add_to(self, of_parts: list[int], of_wholes: list[int]) -> None:
        """Add the elements exchanged between ranks with parts and other ranks with all."""
        sizes, count = self.parts.sizes, self.by_whole.total()
        everything = sum(sizes.values())
        for rank, size in sizes.items():
            of_parts[rank] += size * count
        for rank, times in self.by_whole.items():
            own = sizes.get(rank, 0)
            of_parts[rank] -= own * times
            of_wholes[rank] += (everything - own) * times


class Exchange:
    """A change of tensors from one layout to another in one collective.

    If several ranks have needed values, the target uses its own, or else a near rank sends them.

    Args:
        name: Name in messages about the collective, the same on every rank.
        source: Layout in which the values are.
        target: Layout to reach: the same keys, and for each of them boxes of the same tensor.
        ranks: Number of ranks of the group.
        dtype: Dtype in which tensors are sent, if all have the same.
        policy: Choice of the collective for a single tensor that every rank has an addend of, or
            needs whole; None: parts are sent all-to-all.
    """

    def __init__(
        self,
        name: str,
        source: Layout,
        target: Layout,
        ranks: int,
        dtype: torch.dtype | None = None,
        policy: CollectivePolicy | None = None,
    ) -> None:
        if source.keys() != target.keys():
            raise ValueError(
                f"exchange {name}: its two layouts have different tensors: "
                f"{source.keys() ^ target.keys()}"
            )
        self.name, self.source, self.target, self.ranks = name, source, target, ranks
        self._dtype, self._policy = dtype, policy
        self._incoming: dict[int, Sequence[Hop]] = {}
        self._outgoing: dict[int, Sequence[Hop]] = {}

    # --- between any two layouts ------------------------------------------------------------

    def hops_to(self, rank: int) -> Sequence[Hop]:
        """Return the hops to a rank by source: the order in which addends are summed."""
        if rank not in self._incoming:
            hops = [
                Hop(key, box, sender, rank, held.box, needed.box, number, len(senders))
                for key in self.target
                for needed in self.target[key].of_rank(rank)
                for held, box in self._parts(key, needed, self.source[key])
                for senders in [self._senders(key, needed, held, rank)]
                for number, sender in enumerate(senders)
            ]
            self._incoming[rank] = sorted(hops, key=attrgetter("source"))
        return self._incoming[rank]

    def hops_from(self, rank: int) -> Sequence[Hop]:
        """Return the hops from a rank by target, for each in the order of its `hops_to`."""
        if rank not in self._outgoing:
            hops = [
                Hop(key, box, rank, target, held.box, needed.box, senders.index(rank), len(senders))
                for key in self.target
                for mine in [self.source[key].of_rank(rank)]
                if mine
                for needed in self.target[key]
                for held, box in self._parts(key, needed, mine)
                for target in needed.ranks
                for senders in [self._senders(key, needed, held, target)]
                if rank in senders
            ]
            self._outgoing[rank] = sorted(hops, key=attrgetter("target"))
        return self._outgoing[rank]

    def givers(self, key: Key, rank: int) -> Sequence[int]:
        """Return all ranks whose values of a tensor a rank uses, in order, itself included."""
        held, needed = self.source[key], self.target[key].of_rank(rank)
        if needed and len(self.target[key]) == 1 and held.has_one_rank_each:
            return sorted(held.sizes)
        return sorted(
            sender
            for holding in needed
            for part, _ in self._parts(key, holding, held)
            for sender in self._senders(key, holding, part, rank)
        )

    def packed_to(self, rank: int) -> Packing:
        """Return the packing of the buffer that a rank receives."""
        hops = (hop for hop in self.hops_to(rank) if hop.source != rank)
        return self._packed((hop.source, hop, hop.needed) for hop in hops)

    def packed_from(self, rank: int) -> Packing:
        """Return the packing of the buffer that a rank sends."""
        hops = (hop for hop in self.hops_from(rank) if hop.target != rank)
        return self._packed((hop.target, hop, hop.held) for hop in hops)

    def _packed(self, hops: Iterable[tuple[int, Hop, Box]]) -> Packing:
        """Pack hops, each with the other rank and the box that this rank has or needs."""
        parts, sizes, start = list[PackedPart](), [0] * self.ranks, 0
        for rank, hop, own in hops:
            slices, numel = hop.box.within(own).slices, hop.box.numel
            parts.append(PackedPart(rank, hop.key, hop.box.sizes, slices, start, numel))
            sizes[rank] += numel
            start += numel
        return Packing(parts, sizes)

    @cached_property
    def moved(self) -> Moved:
        """Count the elements that each rank sends to other ranks and gets from them."""
        moved = Moved([0] * self.ranks, [0] * self.ranks)
        # Tensors that lie alike are counted once, by who has all of them: of one side or the other.
        gathered, scattered = dict[int, _Alike](), dict[int, _Alike]()
        for key, needed in self.target.items():
            held = self.source[key]
            if len(held) == 1 and held.has_one_rank_each:
                alike = scattered.setdefault(id(needed), _Alike(needed, Counter()))
                alike.by_whole.update(held[0].ranks)
            elif len(needed) == 1 and held.has_one_rank_each:
                alike = gathered.setdefault(id(held), _Alike(held, Counter()))
                alike.by_whole.update(needed[0].ranks)
            else:
                self._count(key, moved)
        for alike in gathered.values():
            alike.add_to(moved.sent, moved.got)
        for alike in scattered.values():
            alike.add_to(moved.got, moved.sent)
        return moved

    def _count(self, key: Key, moved: Moved) -> None:
        """Add the elements that each rank sends and gets of a tensor."""
        for needed, held, box in self._overlaps(key):
            for target in needed.ranks:
                for sender in self._senders(key, needed, held, target):
                    if sender != target:
                        moved.sent[sender] += box.numel
                        moved.got[target] += box.numel

    @cached_property
    def transfer(self) -> Transfer:
        """Return the collective of the exchange."""
        assert self._dtype is not None, self.name
        if self._policy is None:
            sent = sum(self.moved.sent)
            return Transfer(Traffic.PARTS, self.name, self._dtype, sent, *self.moved)
        ((source, target),) = zip(self.source.values(), self.target.values(), strict=True)
        # On one rank copies and addends are the same, and nothing travels.
        if self.ranks == 1 or not (source.has_one_rank_each or target.has_one_rank_each):
            return Transfer(Traffic.ALL_REDUCE, self.name, self._dtype, target[0].box.numel)
        if source.has_one_rank_each:
            gather = self._policy.gather(self.name, self._dtype, self._sizes(source))
            return gather._replace(levels=self._policy.levels)
        traffic = Traffic.EXCHANGE if self._policy.exchanges else Traffic.REDUCE_SCATTER
        sums = of_segments(traffic, self.name, self._dtype, self._sizes(target))
        return sums._replace(levels=self._policy.levels)

    def _sizes(self, holdings: Holdings) -> list[int]:
        """Return the number of elements of every rank."""
        return [holdings.sizes.get(rank, 0) for rank in range(self.ranks)]

    @cached_property
    def is_silent(self) -> bool:
        """Whether no communication is needed."""
        return all(
            self._senders(key, needed, held, target) == (target,)
            for key in self.target
            for needed, held, _ in self._overlaps(key)
            for target in needed.ranks
        )

    def elements_sent(self, rank: int) -> int:
        """Return the number of elements that a rank sends to others."""
        if self.is_gather:
            return self.segments[rank] * (self.ranks - 1)
        return sum(hop.box.numel for hop in self.hops_from(rank) if hop.target != rank)

    # --- to all ranks -----------------------------------------------------------------------

    @cached_property
    def is_gather(self) -> bool:
        """Whether all ranks need every tensor whole, and nothing has to be summed."""
        everyone = tuple(range(self.ranks))
        return all(
            holding.ranks == everyone and len(holding.sources) == self.ranks
            for holdings in self.target.values()
            for holding in holdings
        ) and all(
            len(source) == 1
            for holdings in self.source.values()
            for holding in holdings
            for source in holding.sources
        )

    @cached_property
    def gathered(self) -> Sequence[Sequence[Hop]]:
        """Return by rank the hops of a gather that it sends to all; their target is the rank.

        If several ranks have copies of a box, the one with the least to send so far sends it. A
        box that all ranks have is not sent.
        """
        found: list[list[Hop]] = [[] for _ in range(self.ranks)]
        given = [0] * self.ranks
        for key in self.target:
            for needed, held, box in self._overlaps(key):
                if len(held.sources) < self.ranks:
                    sender = min((rank for (rank,) in held.sources), key=given.__getitem__)
                    given[sender] += box.numel
                    found[sender].append(Hop(key, box, sender, sender, held.box, needed.box))
        return found

    @cached_property
    def segments(self) -> Sequence[int]:
        """Return the number of elements that each rank sends to all others in a gather."""
        return [sum(hop.box.numel for hop in hops) for hops in self.gathered]

    def held_by_all(self) -> Iterator[Hop]:
        """Yield boxes of a gather that every rank has already, as hops from rank 0 to itself."""
        for key in self.target:
            for needed, held, box in self._overlaps(key):
                if len(held.sources) == self.ranks:
                    yield Hop(key, box, 0, 0, held.box, needed.box)

    # --- who gives what to whom -------------------------------------------------------------

    def _overlaps(self, key: Key) -> Iterator[tuple[Holding, Holding, Box]]:
        """Yield overlaps of needed and held boxes of a tensor, with both holdings."""
        if self.source[key] == self.target[key]:
            yield from ((holding, holding, holding.box) for holding in self.source[key])
            return
        for needed in self.target[key]:
            for held, box in self._parts(key, needed, self.source[key]):
                yield needed, held, box

    def _parts(
        self, key: Key, needed: Holding, held: Iterable[Holding]
    ) -> Iterator[tuple[Holding, Box]]:
        """Yield the parts of a needed box that holdings have."""
        if len(self.target[key]) == 1:  # all of the tensor
            yield from ((holding, holding.box) for holding in held)
            return
        for holding in held:
            box = needed.box
            if len(self.source[key]) > 1:
                box = box.overlap(holding.box)
            if box.numel:
                yield holding, box

    def _senders(self, key: Key, needed: Holding, held: Holding, target: int) -> tuple[int, ...]:
        """Choose a sender: the target itself, a near rank, else in turns.

        If the target needs an addend, it sums its share of the addends.
        """
        source = held.sources[0]
        if len(held.sources) > 1:
            own = [source for source in held.sources if target in source]
            choice = own or self._near(key, held, target) or held.sources
            source = choice[needed.ranks.index(target) % len(choice)]
        if len(source) == 1:
            return source
        together = next(each for each in needed.sources if target in each)
        share = len(source) // len(together)
        first = together.index(target) * share
        return source[first : first + share]

    def _near(self, key: Key, held: Holding, target: int) -> Sequence[tuple[int, ...]]:
        """Return the sources that are near a target."""
        near = self.source[key].near
        return [each for each in held.sources if near[each[0]] == near[target]] if near else ()


def transfer_of(exchange: Exchange | Transfer | None) -> Transfer | None:
    """Return the collective of an exchange; None if there is no exchange."""
    return exchange.transfer if isinstance(exchange, Exchange) else exchange
