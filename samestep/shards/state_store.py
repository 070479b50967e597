"""State divided among ranks: which rank keeps which boxes of which tensor.

    a rank's own tensor    part 0 | part 1 | ...        each part is a box of the whole tensor
    the whole tensor       what one process would have, of all parts of all ranks

Whole tensors come together by an exchange from the boxes that ranks keep to copies of everything;
taking one apart sends nothing. Every placement says which parts its ranks keep, and the rest is
the same for pieces of replicated parameters, flat buffers, DTensors and copies of DTensors.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.comm.exchange import launch_gather
from samestep.comm.groups import RankGroup
from samestep.layout.boxes import Box, Shape, local_of
from samestep.plan.exchanges import Exchange
from samestep.plan.layouts import Holdings, Key, by_box, whole, whole_on

BUNDLE = 1 << 24  # elements that travel at once where memory counts more than latency


class PartsDisagreeError(RuntimeError):
    """Raised if shards of one parameter have different step counts."""


class Part(NamedTuple):
    """A box of a whole tensor, and its offset in a rank's tensor."""

    box: Box
    start: int

    def of(self, tensor: Tensor) -> Tensor:
        """View of the part in a rank's tensor."""
        own = local_of(tensor)
        if own.shape == self.box.sizes:
            return own
        return own.view(-1)[self.start : self.start + self.box.numel].view(self.box.sizes)


PartsOfRank = Callable[[int], Mapping[Key, Sequence[Part]]]


class StateStore:
    """Some state tensors by key.

    Args:
        title: Of the collectives.
        shapes: Of the whole tensors. A stretch of a contiguous tensor is a box of one dim, and the
            tensor counts as one of one dim then.
        parts_of: What a rank keeps of every tensor; the same answers on every rank.
        ranks: The ranks that keep the parts, by place.
        counts: Tensors that are one number, which every part keeps for itself.
        describe: What a count is, for messages.
    """

    def __init__(
        self,
        title: str,
        shapes: Mapping[Key, Shape],
        parts_of: PartsOfRank,
        ranks: RankGroup,
        counts: Collection[Key] = (),
        describe: Callable[[Key], str] = str,
    ) -> None:
        self._title, self.shapes, self._parts_of = title, shapes, parts_of
        self._ranks, self._counts, self._describe = ranks, counts, describe
        self._of_rank: dict[int, Mapping[Key, Sequence[Part]]] = {}

    def parts(self, key: Key) -> Sequence[Part]:
        """Parts of a tensor on this rank."""
        return self._kept_by(self._ranks.rank)[key]

    def _kept_by(self, rank: int) -> Mapping[Key, Sequence[Part]]:
        if rank not in self._of_rank:
            self._of_rank[rank] = self._parts_of(rank)
        return self._of_rank[rank]

    def take(self, key: Key, tensor: Tensor, values: Tensor) -> None:
        """Copy this rank's parts out of whole values."""
        shaped = values if values.shape == self.shapes[key] else values.reshape(self.shapes[key])
        for part in self.parts(key):
            part.of(tensor).copy_(shaped[part.box.slices])

    # --- put together -----------------------------------------------------------------------

    def gather(
        self, tensors: Mapping[Key, Tensor], device: torch.device, at_once: int = BUNDLE
    ) -> dict[Key, Tensor]:
        """Gather whole tensors on `device`. Collective.

        No more than about `at_once` elements are on their way at any time.
        """
        found: dict[Key, Tensor] = {}
        for keys in self._bundles(tensors, at_once):
            found |= self.launch({key: tensors[key] for key in keys}, device)()
        return {key: found[key] for key in tensors}

    def launch(
        self, tensors: Mapping[Key, Tensor], device: torch.device
    ) -> Callable[[], dict[Key, Tensor]]:
        """Start gathering whole tensors. Collective.

        Returns:
            A function that waits, and gives new tensors on `device`, by key. It raises on every
            rank if a number that each part keeps for itself is not the same everywhere.
        """
        landings = list[Callable[[], None]]()
        made: dict[Key, Tensor] = {}
        counted: dict[Key, Sequence[int]] = {}  # the ranks of the parts, in order
        for dtype, keys in _by_dtype(tensors).items():
            held, into = dict[Key, dict[Box, Tensor]](), dict[Key, dict[Box, Tensor]]()
            source, target = dict[Key, Holdings](), dict[Key, Holdings]()
            for key in keys:
                if key in self._counts:
                    counted[key], source[key], held[key] = self._counts_of(key, tensors[key])
                    shape: Shape = (len(counted[key]),) if counted[key] else ()
                else:
                    shape, source[key] = self.shapes[key], self._holdings(key)
                    held[key] = {part.box: part.of(tensors[key]) for part in self.parts(key)}
                made[key] = torch.empty(shape, dtype=dtype, device=device)
                target[key] = whole_on(shape, range(self._ranks.size))
                into[key] = {whole(shape): made[key]}
            exchange = Exchange(self._title, source, target, self._ranks.size)
            like = torch.empty(0, dtype=dtype, device=device)
            landings.append(launch_gather(exchange, held, into, self._ranks, like))

        def finish() -> dict[Key, Tensor]:
            for land in landings:
                land()
            self._require_same_counts({key: (ranks, made[key]) for key, ranks in counted.items()})
            firsts = {key: made[key][0] for key, ranks in counted.items() if ranks}
            return {key: firsts.get(key, made[key]) for key in tensors}

        return finish

    def _holdings(self, key: Key) -> Holdings:
        """Which ranks keep which boxes of a tensor."""
        return by_box(
            (rank, part.box)
            for rank in range(self._ranks.size)
            for part in self._kept_by(rank)[key]
        )

    def _counts_of(
        self, key: Key, tensor: Tensor
    ) -> tuple[Sequence[int], Holdings, dict[Box, Tensor]]:
        """Step counts of parts on all ranks, one element each.

        The ranks of the parts, who holds which element, and the elements that are here.
        """
        ranks, held = list[int](), dict[Box, Tensor]()
        for rank in range(self._ranks.size):
            for part in self._kept_by(rank)[key]:
                if rank == self._ranks.rank:
                    held[Box((len(ranks),), (1,))] = part.of(tensor).view(1)
                ranks.append(rank)
        elements = ((rank, Box((place,), (1,))) for place, rank in enumerate(ranks))
        return ranks, by_box(elements), held

    def _require_same_counts(self, counts: Mapping[Key, tuple[Sequence[int], Tensor]]) -> None:
        """Raise with the values per rank unless all step counts agree."""
        if not counts:
            return
        wide = torch.cat([numbers.double() for _, numbers in counts.values()])
        read = iter(wide.tolist())  # the device is waited for once
        for key, (ranks, _) in counts.items():
            found = {(self._ranks.members[rank], repr(next(read))) for rank in ranks}
            if len({text for _, text in found}) > 1:
                values = ", ".join(f"{text} on rank {rank}" for rank, text in sorted(found))
                raise PartsDisagreeError(
                    f"{self._describe(key)} is stored with every shard and differs "
                    f"between shards: {values}. Some shards have missed a step: load "
                    "the last checkpoint on every rank"
                )

    def _bundles(self, tensors: Mapping[Key, Tensor], at_once: int) -> Iterator[list[Key]]:
        """Group keys to send about this number of elements together."""
        some, elements = list[Key](), 0
        for key in tensors:
            size = prod(self.shapes[key])
            if some and elements + size > at_once:
                yield some
                some, elements = [], 0
            some.append(key)
            elements += size
        if some:
            yield some


def _by_dtype(tensors: Mapping[Key, Tensor]) -> dict[torch.dtype, list[Key]]:
    found: dict[torch.dtype, list[Key]] = {}
    for key, tensor in tensors.items():
        found.setdefault(tensor.dtype, []).append(key)
    return found


def boxes_of_ranks(boxes: Mapping[Key, Iterable[Box]]) -> PartsOfRank:
    """Boxes of a tensor, one per rank."""
    by_place = {key: list(of_ranks) for key, of_ranks in boxes.items()}
    return lambda rank: {key: [Part(of_ranks[rank], 0)] for key, of_ranks in by_place.items()}
