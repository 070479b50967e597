"""Plots the differences of a scenario over its steps, one panel per family, on a log scale.

From top to bottom a panel has a band for the infinite (if there is any), the axis, and a band for
zero, where no logarithm reaches.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple

from samestep.lab.common.numbers import short
from samestep.lab.stress.report.numbers import (
    FAMILIES,
    Case,
    Pick,
    between_replicas,
    to_first_layout,
    to_reference,
)

WIDTH, HEIGHT = 290, 216
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 8, 24
ZERO_BAND, INFINITE_BAND = 30, 24
COLOURS = 8
MOST_TICKS = 7
TITLES = {
    "adam": "adam: AdamW's parameters",
    "mu_a": "mu_a: Muon's first group",
    "mu_b": "mu_b: Muon's other groups",
    "state": "state: the optimizer's",
}


class Scale(NamedTuple):
    """Maps steps and distances to places in a panel; `low` and `high` are powers of ten."""

    low: int
    high: int
    last_step: int
    infinite: bool

    @property
    def top(self) -> float:
        return TOP + (INFINITE_BAND if self.infinite else 0)

    @property
    def bottom(self) -> float:
        """The lower end of the scale, below which zeros are drawn."""
        return HEIGHT - BOTTOM - ZERO_BAND

    def x(self, step: int) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / self.last_step, 1)

    def y(self, distance: float, row: int = 0) -> float:
        """The height of a distance; zeros may be drawn in rows -1, 0 or 1."""
        if distance == 0:
            return self.bottom + ZERO_BAND / 2 + row * ZERO_BAND / 4
        if math.isinf(distance):
            return TOP + INFINITE_BAND / 2
        share = (math.log10(distance) - self.low) / (self.high - self.low)
        return round(self.bottom + (self.top - self.bottom) * share, 1)

    def ticks(self) -> list[tuple[float, str]]:
        every = math.ceil((self.high - self.low + 1) / MOST_TICKS)
        powers = range(self.low + (-self.low) % every, self.high + 1, every)
        return [(self.y(10.0**power), f"1e{power}") for power in powers]


class Dot(NamedTuple):
    """A sample on a curve."""

    x: float
    y: float
    tip: str


def plot(cases: Sequence[Case], limits: Mapping[str, float]) -> SimpleNamespace | None:
    """All panels of a scenario; None if there is no sample.

    legend: (colour, layouts) of the lines.
    styles: of the zeros there are, and of the lines, those with " line" after them.
    """
    cases = [case for case in cases if case["samples"]]
    if not cases:
        return None
    scale = scale_for(cases, limits)
    groups = alike(cases)
    families = [f for f in FAMILIES if any(f in d for d in _all_distances(cases))]
    panels = [_panel(family, cases, groups, limits[family], scale) for family in families]
    names = [", ".join(case["layout"] for case in group) for group in groups]
    if len(groups) == 1 and len(cases) > 1:
        names = [f"all {len(cases)} layouts, on one line"]
    styles = {f"{line.style} line" for panel in panels for line in panel.lines}
    styles |= {zeros.style for panel in panels for zeros in panel.zeros}
    middle = scale.last_step // 2
    steps = [0, middle, scale.last_step] if middle else [0, scale.last_step]
    return SimpleNamespace(
        scale=scale,
        x_ticks=[(scale.x(step), f"{step:,}") for step in steps],
        panels=panels,
        legend=[(n % COLOURS, name) for n, name in enumerate(names)],
        styles=sorted(styles),
    )


def scale_for(cases: Iterable[Case], limits: Mapping[str, float]) -> Scale:
    """A scale with whole powers of ten that holds all distances and limits."""
    distances = [d for of_families in _all_distances(cases) for d in of_families.values()]
    drawn = [d for d in distances if 0 < d < math.inf] + list(limits.values())
    return Scale(
        low=math.floor(math.log10(min(drawn) / 1.5)),
        high=math.ceil(math.log10(max(drawn) * 1.5)),
        last_step=max(1, *(s["step"] for case in cases for s in case["samples"])),
        infinite=math.inf in distances,
    )


def alike(cases: Iterable[Case]) -> list[list[Case]]:
    """Group cases with equal distances to the reference, which are drawn as one line."""
    groups: dict[object, list[Case]] = {}
    for case in cases:
        key = tuple((s["step"], *to_reference(s).items()) for s in case["samples"])
        groups.setdefault(key, []).append(case)
    return list(groups.values())


def _all_distances(cases: Iterable[Case]) -> list[Mapping[str, float]]:
    picks: tuple[Pick, ...] = (to_reference, to_first_layout, between_replicas)
    return [pick(sample) for case in cases for sample in case["samples"] for pick in picks]


def _panel(
    family: str, cases: Sequence[Case], groups: list[list[Case]], limit: float, scale: Scale
) -> SimpleNamespace:
    """The panel of one family: its lines, and markers where a difference was zero."""
    colours = {id(case): n % COLOURS for n, group in enumerate(groups) for case in group}
    lines, zeros = [], []
    for group in groups:
        layouts = ", ".join(case["layout"] for case in group)
        dots = _dots(group[0], family, to_reference, f"from the reference, {layouts}", scale)
        lines += [_line("reference", colours[id(group[0])], dots)] if dots else []
    for style, row, pick, words in (
        ("layouts", 1, to_first_layout, "from the first layout"),
        ("replicas", -1, between_replicas, "between replicas"),
    ):
        values = [(s["step"], pick(s).get(family)) for case in cases for s in case["samples"]]
        steps = sorted({step for step, value in values if value == 0})
        if steps:
            tip = f"{words}: exactly 0 in {sum(value == 0 for _, value in values)} samples"
            places = [(scale.x(step), scale.y(0, row)) for step in steps]
            zeros.append(SimpleNamespace(style=style, places=places, tip=tip))
        for case in cases:
            if any(pick(sample).get(family) for sample in case["samples"]):
                dots = _dots(case, family, pick, f"{words}, {case['layout']}", scale, row)
                dots = _from_last_zero(dots, scale.y(0, row))
                lines.append(_line(style, colours[id(case)], dots))
    compared = [s["step"] for case in cases for s in case["samples"] if to_reference(s)]
    ends_early = compared and max(compared) < scale.last_step
    return SimpleNamespace(
        title=TITLES[family],
        description=_description(family, cases, limit),
        limit=(scale.y(limit), short(limit)),
        lines=lines,
        zeros=zeros,
        not_compared_from=scale.x(max(compared)) if ends_early else None,
    )


def _line(style: str, colour: int, dots: list[Dot]) -> SimpleNamespace:
    """The line of one distance; style: reference, layouts or replicas."""
    points = " ".join(f"{dot.x:g},{dot.y:g}" for dot in dots)
    return SimpleNamespace(style=style, colour=colour, dots=dots, points=points)


def _dots(case: Case, family: str, pick: Pick, words: str, scale: Scale, row: int = 0) -> list[Dot]:
    found = [(sample["step"], pick(sample).get(family)) for sample in case["samples"]]
    return [
        Dot(scale.x(step), scale.y(away, row), f"step {step:,}: {family} {short(away)} {words}")
        for step, away in found
        if away is not None
    ]


def _from_last_zero(dots: list[Dot], zero: float) -> list[Dot]:
    """Drop leading zeros except the last, where the line begins."""
    first = next(place for place, dot in enumerate(dots) if dot.y != zero)
    return dots[max(0, first - 1) :]


def _description(family: str, cases: Iterable[Case], limit: float) -> str:
    """A text description of the panel for screen readers."""
    told = []
    for words, pick in (
        ("from the reference", to_reference),
        ("between replicas", between_replicas),
        ("from the first layout", to_first_layout),
    ):
        found = [pick(s)[family] for c in cases for s in c["samples"] if family in pick(s)]
        if found:
            told.append(f"{words} at most {short(max(found))}")
    return f"{TITLES[family]} over steps: {', '.join(told)}; limit {short(limit)}"
