"""The largest differences in a receipt of the harness."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Receipt = Mapping[str, Any]
Case = Mapping[str, Any]
Sample = Mapping[str, Any]
Pick = Callable[[Sample], Mapping[str, float]]

FAMILIES = ("adam", "mu_a", "mu_b", "state")
STATUSES = {
    "exact": ("✓", "exact"),
    "within_tolerance": ("≈", "within tolerance"),
    "failed": ("✗", "failed"),
    "interrupted": ("…", "interrupted"),
    "does_not_apply": ("∅", "does not apply"),
}


class Worst(NamedTuple):
    """The largest of several distances."""

    distance: float
    family: str
    step: int


def number(distance: float | str) -> float:
    """A distance from a receipt, in which infinity is text."""
    return math.inf if distance == "infinite" else float(distance)


def between_replicas(sample: Sample) -> dict[str, float]:
    """Distances between ranks, by family."""
    found = {family: sample[f"max_{family}_abs_diff"] for family in FAMILIES[:-1]}
    return _distances({**found, "state": sample["max_abs_state_diff"]})


def to_first_layout(sample: Sample) -> dict[str, float]:
    """The distance from the first layout; empty where that was not compared."""
    return _distances(sample["layouts"])


def to_reference(sample: Sample) -> dict[str, float]:
    """The distance from the reference; empty where that was not compared."""
    return _distances(sample["reference"])


def _distances(of_families: Mapping[str, Any] | None) -> dict[str, float]:
    return {f: number(d) for f, d in (of_families or {}).items() if d is not None}


def distances(cases: Iterable[Case], pick: Pick) -> Iterator[Worst]:
    """All distances of one kind, with family and step."""
    for case in cases:
        for sample in case["samples"]:
            for family, distance in pick(sample).items():
                yield Worst(distance, family, sample["step"])


def worst(cases: Iterable[Case], pick: Pick, family: str | None = None) -> Worst | None:
    """The largest distance of one kind, or of one family; None if nothing was compared."""
    found = (each for each in distances(cases, pick) if family in (None, each.family))
    return max(found, key=lambda each: each.distance, default=None)


def worst_to_reference(cases: Iterable[Case], limits: Mapping[str, float]) -> Worst | None:
    """The distance closest to its limit; None if nothing was compared."""
    found = distances(cases, to_reference)
    return max(found, key=lambda each: each.distance / limits[each.family], default=None)


def worst_of_families(case: Case, pick: Pick) -> dict[str, Worst]:
    return {f: found for f in FAMILIES if (found := worst([case], pick, f)) is not None}
