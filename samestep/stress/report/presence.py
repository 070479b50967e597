"""Which parameters have a gradient on how many ranks, step by step: a row of cells each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.stress.report.words import count

CELL, ROW = 12, 16
MOST_ROWS = 12  # with more parameters than that, equal rows are shown once


@dataclass(frozen=True)
class Level:
    """Cells with the same number of ranks, as a path, and how dark they are."""

    ranks: int
    label: str
    style: str  # none, some or all
    shade: float
    path: str = ""


@dataclass(frozen=True)
class Row:
    """Parameters with the same presence. `values`: ranks per step."""

    name: str
    others: str
    tip: str
    values: list[int]
    levels: list[Level]
    description: str


@dataclass(frozen=True)
class HeatMap:
    """Rows, what the shades mean, and numbers of steps with their places."""

    rows: list[Row]
    legend: list[Level]
    width: int
    ticks: list[tuple[float, int]]


def heat_map(presence: Mapping[str, Any], world: int) -> HeatMap | None:
    """The heat map of a scenario; None if nothing is known of it."""
    params, values = presence["params"], presence["ranks_with_gradient"]
    steps = max(map(len, values), default=0)
    if not steps:
        return None
    rows = [_row(names, row, world) for names, row in _rows(params, values)]
    ticks = [((step + 0.5) * CELL, step) for step in range(0, steps, 8)]
    return HeatMap(rows, [level(ranks, world) for ranks in range(world + 1)], steps * CELL, ticks)


def level(ranks: int, world: int, path: str = "") -> Level:
    """None, some or all of the ranks."""
    label = "no rank" if ranks == 0 else f"all {world}" if ranks == world else f"{ranks} of {world}"
    style = "none" if ranks == 0 else "all" if ranks == world else "some"
    # What some ranks have stays clearly apart from what none and what all have.
    shade = round(0.12 + 0.58 * ranks / world, 2) if style == "some" else 1.0
    return Level(ranks, label, style, shade, path)


def cells(values: Sequence[int], ranks: int) -> str:
    """A path around the cells that have this number of ranks."""
    box = f"h{CELL - 1}v{ROW - 2}h-{CELL - 1}z"
    return "".join(f"M{step * CELL} 1{box}" for step, value in enumerate(values) if value == ranks)


def _rows(
    params: Sequence[str], values: Sequence[Sequence[int]]
) -> list[tuple[list[str], list[int]]]:
    if len(params) <= MOST_ROWS:
        return [([name], list(row)) for name, row in zip(params, values, strict=True)]
    alike: dict[tuple[int, ...], list[str]] = {}
    for name, row in zip(params, values, strict=True):
        alike.setdefault(tuple(row), []).append(name)
    return [(names, list(row)) for row, names in alike.items()]


def _row(names: Sequence[str], values: list[int], world: int) -> Row:
    levels = [level(ranks, world, cells(values, ranks)) for ranks in sorted(set(values))]
    everyone, nobody = values.count(world), values.count(0)
    some = len(values) - everyone - nobody
    others = f"+{len(names) - 1}" if len(names) > 1 else ""
    description = (
        f"{names[0]}{' and alike' * bool(others)}: a gradient on all ranks in "
        f"{count(everyone, 'step')}, on some in {some}, on none in {nobody}"
    )
    return Row(names[0], others, "\n".join(names), values, levels, description)
