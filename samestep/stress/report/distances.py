"""The differences that a receipt tells of, as numbers, and the largest of them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Receipt = Mapping[str, Any]
Case = Mapping[str, Any]
Sample = Mapping[str, Any]
Pick = Callable[[Sample], Mapping[str, float]]

FAMILIES = ("adam", "mu_a", "mu_b", "state")
BETWEEN_REPLICAS = {
    "adam": "max_adam_abs_diff",
    "mu_a": "max_mu_a_abs_diff",
    "mu_b": "max_mu_b_abs_diff",
    "state": "max_abs_state_diff",
}


class Worst(NamedTuple):
    """The largest of some distances."""

    distance: float
    family: str
    step: int


def number(distance: float | str) -> float:
    """A distance of the receipt, where JSON has no word for infinity."""
    return math.inf if distance == "infinite" else float(distance)


def between_replicas(sample: Sample) -> dict[str, float]:
    """How far ranks are apart, per family that there is."""
    return {
        family: number(sample[key])
        for family, key in BETWEEN_REPLICAS.items()
        if sample[key] is not None
    }


def to_first_layout(sample: Sample) -> dict[str, float]:
    """How far it is from the first layout; empty where that was not compared."""
    return _distances(sample["layouts"])


def to_reference(sample: Sample) -> dict[str, float]:
    """How far it is from the reference; empty where that was not compared."""
    return _distances(sample["reference"])


def _distances(of_families: Mapping[str, Any] | None) -> dict[str, float]:
    return {f: number(d) for f, d in (of_families or {}).items() if d is not None}


def distances(cases: Iterable[Case], pick: Pick) -> Iterator[Worst]:
    """All of one sort, with family and step."""
    for case in cases:
        for sample in case["samples"]:
            for family, distance in pick(sample).items():
                yield Worst(distance, family, sample["step"])


def worst_between_replicas(cases: Iterable[Case]) -> Worst | None:
    """None: no sample was taken."""
    return max(distances(cases, between_replicas), key=_distance, default=None)


def worst_to_first_layout(cases: Iterable[Case]) -> Worst | None:
    """None: nothing was compared."""
    return max(distances(cases, to_first_layout), key=_distance, default=None)


def worst_to_reference(cases: Iterable[Case], limits: Mapping[str, float]) -> Worst | None:
    """The one that is the largest share of its limit; None: nothing was compared."""
    found = distances(cases, to_reference)
    return max(found, key=lambda worst: worst.distance / limits[worst.family], default=None)


def worst_of_families(case: Case, pick: Pick) -> dict[str, Worst]:
    """The largest per family that there is."""
    found = list(distances([case], pick))
    by_family = {f: [each for each in found if each.family == f] for f in FAMILIES}
    return {family: max(each, key=_distance) for family, each in by_family.items() if each}


def _distance(worst: Worst) -> float:
    return worst.distance
