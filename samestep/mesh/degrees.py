"""Degrees: the number of ranks on each mesh axis."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

AXES = ("pipe", "replicate", "data", "expert", "model")  # the last one varies fastest


class DegreesError(ValueError):
    """Raised for degrees that do not fit together; the text has all problems and remedies."""


@dataclass(frozen=True)
class Degrees:
    """The number of ranks on each axis; a rank has one coordinate on each axis of `AXES`.

    A batch is divided over `batch_ranks`. Dense parameters are reduced over all of them; experts
    over those with the same experts. Both are divided by `batch_ranks`.
    """

    world: int
    pp: int = 1  # pipeline stages
    replicate: int = 1  # copies of the sharded model
    ep: int = 1  # ranks that share the experts
    tp: int = 1  # ranks that share a matrix
    sequence_parallel: bool = False  # between matrices, ranks that share them share the sequence
    expert_tensor_parallel: int = 0  # ranks that share an expert's matrix; 0: follow tp
    ep_carries_data: bool = True  # ranks along the expert axis see different tokens

    def __post_init__(self) -> None:
        violations = list(self._violations())
        if violations:
            raise DegreesError("; ".join(violations))

    @property
    def data(self) -> int:
        """Ranks that shard one copy of the model, not counting the expert axis."""
        return self.world // (self.pp * self.replicate * self.ep * self.tp)

    @property
    def data_parallel(self) -> int:
        """Ranks that see different tokens, not counting the expert axis."""
        return self.world // (self.pp * self.tp * self.ep)

    @property
    def batch_ranks(self) -> int:
        """Ranks whose losses are averaged, the divisor of gradient sums."""
        return self.data_parallel * (self.ep if self.ep_carries_data else 1)

    @property
    def expert_tp(self) -> int:
        """Ranks that share an expert's matrix, with 0 resolved."""
        return self.expert_tensor_parallel or self.tp

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every axis, in the order of `AXES`."""
        by_axis = (self.pp, self.replicate, self.data, self.ep, self.tp)
        return dict(zip(AXES, by_axis, strict=True))

    @property
    def axes(self) -> dict[str, int]:
        """Axes with more than one rank, and always data."""
        return {axis: size for axis, size in self.sizes.items() if size > 1 or axis == "data"}

    @property
    def name(self) -> str:
        """A short name for traces. Copies show only if there are several."""
        shown = {axis: n for axis, n in self.sizes.items() if axis != "replicate" or n > 1}
        return ".".join(f"{axis}{size}" for axis, size in shown.items())

    def coordinates(self, rank: int) -> dict[str, int]:
        if not 0 <= rank < self.world:
            raise ValueError(f"rank must be from 0 to {self.world - 1}, got {rank}")
        places = {}
        for axis, size in reversed(self.sizes.items()):
            rank, places[axis] = divmod(rank, size)
        return {axis: places[axis] for axis in AXES}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at a coordinate; missing axes count as 0."""
        rank = 0
        for axis, size in self.sizes.items():
            rank = rank * size + coordinates.get(axis, 0)
        return rank

    def peers(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Ranks that differ from this one only on these axes, including itself."""
        here = self.coordinates(rank)
        found = [here]
        for axis in axes:
            found = [place | {axis: i} for place in found for i in range(self.sizes[axis])]
        return tuple(sorted({self.rank(place) for place in found}))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups of ranks along these axes, by their first rank."""
        found: list[tuple[int, ...]] = []
        seen: set[int] = set()
        for rank in range(self.world):
            if rank not in seen:
                found.append(self.peers(rank, *axes))
                seen.update(found[-1])
        return found

    def _violations(self) -> Iterator[str]:
        sizes = {name: getattr(self, name) for name in ("world", "pp", "replicate", "ep", "tp")}
        bad = {name: size for name, size in sizes.items() if not _is_size(size)}
        for name, size in bad.items():
            yield f"{name} must be a whole number of ranks, at least 1, got {size!r}"
        if not bad:
            yield from self._misfits()
        if self.sequence_parallel and self.tp == 1:
            yield "sequence_parallel shares the sequence among the ranks of tp, but tp is 1"
        if not (_is_size(self.expert_tensor_parallel) or self.expert_tensor_parallel == 0):
            yield (
                "expert_tensor_parallel must be 0 (follow tp), 1 or tp, "
                f"got {self.expert_tensor_parallel!r}"
            )
        elif self.expert_tensor_parallel not in (0, 1, self.tp):
            yield (
                f"expert_tensor_parallel must be 0 (follow tp), 1 or tp = {self.tp}, got "
                f"{self.expert_tensor_parallel}: other sizes would need an axis of their own"
            )

    def _misfits(self) -> Iterator[str]:
        """Products that do not divide the world, with the nearest that do."""
        degrees = {name: getattr(self, name) for name in ("pp", "replicate", "ep", "tp")}
        product = prod(degrees.values())
        if self.world % product == 0:
            return
        factors = [f"{name} {size}" for name, size in degrees.items() if size > 1]
        asked = factors[0] if len(factors) == 1 else f"{' x '.join(factors)} = {product}"
        fixes = []
        for name, size in degrees.items():
            room, rest = divmod(self.world, product // size)
            if size > 1 and rest == 0:
                fixes.append(f"{name} {_listed(nearest_divisors(room, size))}")
        worlds = nearest_multiples(product, self.world)
        fixes.append(f"a world of {_listed(worlds)} ranks")
        yield (
            f"{asked} does not divide a world of {self.world} ranks. "
            f"What works, changing one: {', or '.join(fixes)}"
        )


def nearest_divisors(whole: int, wanted: int) -> list[int]:
    """The divisors of `whole` next to `wanted`, below and above (or itself)."""
    divisors = [size for size in range(1, whole + 1) if whole % size == 0]
    below = [size for size in divisors if size <= wanted]
    above = [size for size in divisors if size >= wanted]
    return sorted({*below[-1:], *above[:1]})


def nearest_multiples(unit: int, wanted: int) -> list[int]:
    """The multiples of `unit` next to `wanted`, below and above (or itself); none is 0."""
    below = wanted // unit * unit
    above = -(-wanted // unit) * unit
    return sorted({size for size in (below, above) if size > 0})


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _listed(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes))
