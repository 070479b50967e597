"""Bytes sent and time waited per step, per kind of collective, in each layout."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.stress.report.distances import Case
from samestep.stress.report.words import duration, size

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
COLOURS = 6


@dataclass(frozen=True)
class Segment:
    """One kind's part of a bar, in percent of the longest bar."""

    start: float
    width: float
    colour: int
    tip: str


@dataclass(frozen=True)
class Bar:
    """One quantity per step: its segments, and the sum as text."""

    total: str
    segments: list[Segment]

    @property
    def description(self) -> str:
        """The bar for who cannot see it."""
        return "; ".join(segment.tip for segment in self.segments)


@dataclass(frozen=True)
class Kind:
    """All operations of a kind in a case, as text."""

    name: str
    calls: str
    elements: str
    sent: str
    waited: str
    in_flight: str


@dataclass(frozen=True)
class Row:
    """One case."""

    layout: str
    per_step: str
    sent: Bar
    waited: Bar
    in_flight: Bar
    seconds: str
    kinds: list[Kind]


@dataclass(frozen=True)
class Traffic:
    """One row per case; the legend: (colour, kind)."""

    rows: list[Row]
    legend: list[tuple[int, str]]


def traffic(cases: Sequence[Case]) -> Traffic | None:
    """None if no case has any collective."""
    kinds = kinds_of(cases)
    if not kinds:
        return None
    bars = {
        key: dict(zip(map(id, cases), _bars(cases, kinds, key, text), strict=True))
        for key, text in (("sent", size), ("waited", duration), ("in_flight", duration))
    }
    rows = [
        Row(
            case["layout"],
            f"{case['collectives_per_step']:.4g}",
            bars["sent"][id(case)],
            bars["waited"][id(case)],
            bars["in_flight"][id(case)],
            duration(case["seconds"]),
            [
                _kind(kind, case["collectives"][kind])
                for kind in kinds
                if kind in case["collectives"]
            ],
        )
        for case in cases
    ]
    return Traffic(rows, [(colour_of(kind), kind) for kind in kinds])


def kinds_of(cases: Iterable[Case]) -> list[str]:
    """All kinds there are, the known ones in their order."""
    found = {kind for case in cases for kind in case["collectives"]}
    return [kind for kind in KINDS if kind in found] + sorted(found.difference(KINDS))


def colour_of(kind: str) -> int:
    """The same on the whole page."""
    return KINDS.index(kind) if kind in KINDS else COLOURS - 1


def _bars(
    cases: Sequence[Case], kinds: Sequence[str], key: str, text: Callable[[float], str]
) -> list[Bar]:
    amounts = [
        {
            kind: case["collectives"][kind][key] / max(1, case["steps_taken"])
            for kind in kinds
            if kind in case["collectives"]
        }
        for case in cases
    ]
    longest = max(sum(of_case.values()) for of_case in amounts) or 1.0
    bars = []
    for of_case in amounts:
        segments, start = [], 0.0
        for kind, amount in of_case.items():
            width = 100 * amount / longest
            tip = f"{kind} {text(amount)} per step"
            segments.append(Segment(round(start, 2), round(width, 2), colour_of(kind), tip))
            start += width
        bars.append(Bar(text(sum(of_case.values())), segments))
    return bars


def _kind(name: str, totals: Mapping[str, Any]) -> Kind:
    return Kind(
        name,
        f"{totals['calls']:,}",
        f"{totals['elements']:,}",
        size(totals["sent"]),
        duration(totals["waited"]),
        duration(totals["in_flight"]),
    )
