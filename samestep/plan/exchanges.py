"""Exchanges: what has to travel so that tensors in one layout are in another one.

    source layout             hops                                    target layout
    box A: ranks 0 and 1  ->  the overlap of A and B, from a rank  -> box B: rank 2
                              that has A to a rank that needs B

An exchange is pure data: it needs no process group and no tensor. Saving, loading, resharding and
reading whole values differ in their two layouts alone. What a rank has already does not travel,
and an exchange in which that is so on every rank is silent.

Where every rank needs everything, one all-gather moves it, of a segment per rank; `comm.exchange`
runs it.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from samestep.layout.boxes import Box
from samestep.plan.layouts import Holding, Key, Layout


class Hop(NamedTuple):
    """A box that one rank sends to another, or has itself if `source` is `target`."""

    key: Key
    box: Box
    source: int
    target: int
    held: Box  # of the source, which the box is a part of
    needed: Box  # of the target, which the box is a part of
    number: int = 0  # of the addend: they are summed in this order
    addends: int = 1  # 1: it is the value itself


class Exchange:
    """Tensors on their way from one layout to another, in one collective.

    Args:
        name: The same on every rank; messages about the collective have it.
        source: Where the values are.
        target: Where they shall be: the same keys, and for each of them boxes of the same tensor.
        ranks: How many ranks the group has.
        ranks_per_host: Of several ranks that have what is needed, one of the same host sends it.
    """

    def __init__(
        self, name: str, source: Layout, target: Layout, ranks: int, *, ranks_per_host: int = 1
    ) -> None:
        if source.keys() != target.keys():
            raise ValueError(
                f"{name}: the layouts have different tensors: {source.keys() ^ target.keys()}"
            )
        self.name, self.source, self.target = name, source, target
        self.ranks, self._per_host = ranks, ranks_per_host
        self._incoming: dict[int, Sequence[Hop]] = {}
        self._outgoing: dict[int, Sequence[Hop]] = {}

    # --- between any two layouts ------------------------------------------------------------

    def hops_to(self, rank: int) -> Sequence[Hop]:
        """What a rank gets, source by source, which is the order in which addends are summed."""
        if rank not in self._incoming:
            hops = [
                Hop(key, box, sender, rank, held.box, needed.box, number, len(senders))
                for key in self.target
                for needed, held, box in self._overlaps(key)
                if rank in needed.ranks
                for senders in [self._senders(needed, held, rank)]
                for number, sender in enumerate(senders)
            ]
            self._incoming[rank] = sorted(hops, key=attrgetter("source"))
        return self._incoming[rank]

    def hops_from(self, rank: int) -> Sequence[Hop]:
        """What a rank gives, target by target, to each of them in the order of its `hops_to`."""
        if rank not in self._outgoing:
            hops = [
                Hop(key, box, rank, target, held.box, needed.box, senders.index(rank), len(senders))
                for key in self.target
                for needed, held, box in self._overlaps(key)
                if rank in held.ranks
                for target in needed.ranks
                for senders in [self._senders(needed, held, target)]
                if rank in senders
            ]
            self._outgoing[rank] = sorted(hops, key=attrgetter("target"))
        return self._outgoing[rank]

    @cached_property
    def is_silent(self) -> bool:
        """Whether every rank has what it needs."""
        return all(
            self._senders(needed, held, target) == (target,)
            for key in self.target
            for needed, held, _ in self._overlaps(key)
            for target in needed.ranks
        )

    def elements_sent(self, rank: int) -> int:
        """How many elements a rank sends to others."""
        if self.is_gather:
            return self.segments[rank] * (self.ranks - 1)
        return sum(hop.box.numel for hop in self.hops_from(rank) if hop.target != rank)

    # --- to all ranks -----------------------------------------------------------------------

    @cached_property
    def is_gather(self) -> bool:
        """Whether all ranks need all of it, and nothing has to be summed."""
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
        """By rank what it gives to all others, of a gather; its target is itself.

        Of several ranks with copies the one that gives least so far gives a box. A box that all
        ranks have is given by nobody.
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
        """How many elements each rank gives to all others, of a gather."""
        return [sum(hop.box.numel for hop in hops) for hops in self.gathered]

    def held_by_all(self) -> Iterator[Hop]:
        """What every rank has already, of a gather; source and target are 0, and stand for all."""
        for key in self.target:
            for needed, held, box in self._overlaps(key):
                if len(held.sources) == self.ranks:
                    yield Hop(key, box, 0, 0, held.box, needed.box)

    # --- who gives what to whom -------------------------------------------------------------

    def _overlaps(self, key: Key) -> Iterator[tuple[Holding, Holding, Box]]:
        """What is needed, what is held, and the elements that are both."""
        if self.source[key] == self.target[key]:
            yield from ((holding, holding, holding.box) for holding in self.source[key])
            return
        for needed in self.target[key]:
            for held in self.source[key]:
                box = needed.box.overlap(held.box)
                if box.numel:
                    yield needed, held, box

    def _senders(self, needed: Holding, held: Holding, target: int) -> tuple[int, ...]:
        """One of the sources: the target's own, else one of its host, else they take turns.

        Where the target shall have an addend, it sums its share of the addends.
        """
        own = [source for source in held.sources if target in source]
        host = target // self._per_host
        near = own or [source for source in held.sources if source[0] // self._per_host == host]
        choice = near or held.sources
        source = choice[needed.ranks.index(target) % len(choice)]
        together = next(each for each in needed.sources if target in each)
        share = len(source) // len(together)
        first = together.index(target) * share
        return source[first : first + share]
