"""The numbers of a receipt: its differences, the largest of them, and how people read them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
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


def short(distance: float) -> str:
    """Two digits: 3.1e-7, 2e-5, 0.25, 0, infinite."""
    if distance == 0 or math.isinf(distance):
        return "infinite" if distance else "0"
    if 0.01 <= distance < 1000:
        return f"{distance:.2g}" if distance < 100 else f"{distance:.0f}"
    digits, power = f"{distance:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def count(number: int, noun: str) -> str:
    """1 run, 1,260 runs."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(amount: float) -> str:
    """Bytes: 0 B, 812 B, 9.2 kB, 1.5 MB."""
    for unit in ("B", "kB", "MB"):
        if amount < 999.5:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.3g} GB"


def duration(seconds: float) -> str:
    """0 s, 12 µs, 3.4 ms, 7.5 s, 12 min 5 s, 1 h 4 min."""
    if seconds >= 3600:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes} min"
    if seconds >= 59.95:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    if seconds >= 0.9995 or seconds == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"


def moment(time: str) -> str:
    """A time in ISO format as `14 March 2026, 09:26 UTC`."""
    when = datetime.fromisoformat(time)
    return f"{when.day} {when:%B %Y, %H:%M} UTC"


def enumeration(names: Sequence[str], most: int = 3) -> str:
    """`a, b and c`; of many the first ones."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def ranks(numbers: Sequence[int]) -> str:
    """`rank 2`, `ranks 0, 1 and 3`."""
    names = [str(number) for number in numbers]
    return f"rank{'s' * (len(names) != 1)} {enumeration(names, most=8)}"


# --- differences, and the largest of them --------------------------------------------------------


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
    found = {family: sample[f"max_{family}_abs_diff"] for family in FAMILIES[:-1]}
    return _distances({**found, "state": sample["max_abs_state_diff"]})


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


def worst(cases: Iterable[Case], pick: Pick, family: str | None = None) -> Worst | None:
    """The largest of one sort, or of one family of it; None: nothing was compared."""
    found = (each for each in distances(cases, pick) if family in (None, each.family))
    return max(found, key=lambda each: each.distance, default=None)


def worst_to_reference(cases: Iterable[Case], limits: Mapping[str, float]) -> Worst | None:
    """The one that is the largest share of its limit; None: nothing was compared."""
    found = distances(cases, to_reference)
    return max(found, key=lambda each: each.distance / limits[each.family], default=None)


def worst_of_families(case: Case, pick: Pick) -> dict[str, Worst]:
    return {f: found for f in FAMILIES if (found := worst([case], pick, f)) is not None}
