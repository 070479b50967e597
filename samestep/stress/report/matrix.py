"""Scenarios times layouts: how each case ended, with its worst numbers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.stress.report.distances import (
    Case,
    Receipt,
    worst_between_replicas,
    worst_to_first_layout,
    worst_to_reference,
)
from samestep.stress.report.words import STATUSES, short


@dataclass(frozen=True)
class Cell:
    """One case: its status as a symbol and in words, numbers for a reader, and all in a tip."""

    status: str
    symbol: str
    label: str
    numbers: list[str]
    tip: str


@dataclass(frozen=True)
class Row:
    """One scenario. `cells`: per layout those of its cases."""

    scenario: str
    anchor: str
    cells: list[list[Cell]]

    @property
    def statuses(self) -> list[str]:
        """Those of its cases."""
        return sorted({cell.status for cells in self.cells for cell in cells})


@dataclass(frozen=True)
class Matrix:
    """`counts`: cases by status, of those statuses that there are."""

    layouts: Mapping[str, str]
    rows: list[Row]
    counts: dict[str, int]

    @property
    def is_dense(self) -> bool:
        """Whether there are so many layouts that a page has room for little about each."""
        return len(self.layouts) > 8


def matrix(receipt: Receipt) -> Matrix:
    """The cases of a receipt in order."""
    layouts = {name: layout["story"] for name, layout in receipt["layouts"].items()}
    rows = []
    for scenario in receipt["scenarios"]:
        of_scenario = [case for case in receipt["cases"] if case["scenario"] == scenario]
        cells = [
            [cell(case, receipt["thresholds"]) for case in of_scenario if case["layout"] == layout]
            for layout in layouts
        ]
        rows.append(Row(scenario, anchor(scenario), cells))
    statuses = [case["status"] for case in receipt["cases"]]
    return Matrix(layouts, rows, {s: statuses.count(s) for s in STATUSES if s in statuses})


def anchor(scenario: str) -> str:
    """The id of a scenario's section."""
    return "scenario-" + re.sub(r"[^A-Za-z0-9_-]", "-", scenario)


def cell(case: Case, limits: Mapping[str, float]) -> Cell:
    """What the matrix shows of a case."""
    symbol, label = STATUSES[case["status"]]
    numbers, tip = [], [f"{case['scenario']} in {case['layout']}: {label}"]
    for name, worst in (
        ("ranks", worst_between_replicas([case])),
        ("layouts", worst_to_first_layout([case])),
    ):
        if worst is not None:
            tip.append(f"{name} {short(worst.distance)} apart")
            if worst.distance > 0:
                numbers.append(f"{name} {short(worst.distance)} apart")
    reference = worst_to_reference([case], limits)
    if reference is not None:
        limit = short(limits[reference.family])
        numbers.append(f"{short(reference.distance)} of {limit}")
        tip.append(
            f"{reference.family} {short(reference.distance)} from the reference at step "
            f"{reference.step:,}, limit {limit}"
        )
    if case["findings"]:
        numbers.insert(0, ", ".join(finding["check"] for finding in case["findings"]))
    if case["status"] == "does_not_apply":
        tip.append(case["reason"])
    elif case["steps_taken"] < case["steps"]:
        numbers.append(f"after {case['steps_taken']:,} steps")
    return Cell(case["status"], symbol, label, numbers, "; ".join(tip))
