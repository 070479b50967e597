"""What the parts of a page show: the matrix, failures, presence of gradients, collectives.

What only templates read are namespaces, whose fields are named where they are made.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from samestep.stress.report.numbers import (
    STATUSES,
    Case,
    Receipt,
    between_replicas,
    count,
    duration,
    ranks,
    short,
    size,
    to_first_layout,
    worst,
    worst_to_reference,
)

# --- scenarios times layouts: how each case ended, with its worst numbers ------------------------


def matrix(receipt: Receipt) -> dict[str, Any]:
    """One row per scenario, in it a list per layout; `counts`: cases by status, if there are any.

    `is_dense`: there are so many layouts that a page has room for little about each.
    """
    layouts = {name: layout["story"] for name, layout in receipt["layouts"].items()}
    rows = []
    for scenario in receipt["scenarios"]:
        of_scenario = [case for case in receipt["cases"] if case["scenario"] == scenario]
        cells = [
            [cell(case, receipt["thresholds"]) for case in of_scenario if case["layout"] == layout]
            for layout in layouts
        ]
        statuses = sorted({case["status"] for case in of_scenario})
        row = {"scenario": scenario, "anchor": anchor(scenario), "cells": cells}
        rows.append({**row, "statuses": statuses})
    of_all = Counter(case["status"] for case in receipt["cases"])
    counts = {status: of_all[status] for status in STATUSES if of_all[status]}
    return {"layouts": layouts, "rows": rows, "counts": counts, "is_dense": len(layouts) > 8}


def anchor(scenario: str) -> str:
    return "scenario-" + re.sub(r"[^A-Za-z0-9_-]", "-", scenario)


def cell(case: Case, limits: Mapping[str, float]) -> SimpleNamespace:
    """One case: its status as a symbol and in words, numbers for a reader, and all in a tip."""
    symbol, label = STATUSES[case["status"]]
    numbers, tip = [], [f"{case['scenario']} in {case['layout']}: {label}"]
    for name, pick in (("ranks", between_replicas), ("layouts", to_first_layout)):
        if (apart := worst([case], pick)) is not None:
            tip.append(f"{name} {short(apart.distance)} apart")
            if apart.distance > 0:
                numbers.append(tip[-1])
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
    shown = {"status": case["status"], "symbol": symbol, "label": label, "numbers": numbers}
    return SimpleNamespace(**shown, tip="; ".join(tip))


# --- failures: findings, where each rank was, and where ranks went different ways ----------------

Dump = Mapping[str, Any]
Operation = tuple[str, str, int, str]  # kind, name, elements, dtype


def failure(case: Case) -> dict[str, Any]:
    """A case that failed, or was interrupted, and the last operations of its ranks, newest first.

    parts_at, parting: the first operation that ranks do not share, and what is told of it.
    """
    symbol, label = STATUSES[case["status"]]
    taken = f"{case['steps_taken']:,} of {count(case['steps'], 'step')}"
    dumps = {rank: dump for rank, dump in _by_rank(case["flights"]).items() if dump.get("records")}
    parts_at, told = parting(dumps) or (None, None)
    return {
        "layout": case["layout"],
        "status": case["status"],
        "symbol": symbol,
        "headline": f"{label} after {taken}",
        "findings": case["findings"],
        "positions": positions(case["positions"]),
        "parts_at": parts_at,
        "parting": told,
        "ranks": [
            {
                "rank": rank,
                "launched": count(dump.get("count", len(dump["records"])), "operation"),
                "flights": sorted(dump["records"], key=lambda record: -record["number"]),
            }
            for rank, dump in dumps.items()
        ],
    }


def positions(of_ranks: Mapping[str, str]) -> list[SimpleNamespace]:
    """Where each rank was, in their order; those in another operation than most are odd."""
    [(usual, times)] = Counter(of_ranks.values()).most_common(1) or [("", 0)]
    told = times > 1  # of two ranks in two operations none is the odd one
    return [
        SimpleNamespace(rank=rank, operation=operation, odd=told and operation != usual)
        for rank, operation in _by_rank(of_ranks).items()
    ]


def parting(dumps: Mapping[str, Dump]) -> tuple[int, str] | None:
    """The first operation that ranks do not share, and which rank launched what there.

    None if all have launched the same, as far as their last operations reach.
    """
    by_rank = {int(rank): _operations(dump) for rank, dump in dumps.items()}
    if len(by_rank) < 2:
        return None
    begin = max(min(operations) for operations in by_rank.values())
    end = max(max(operations) for operations in by_rank.values())
    for number in range(begin, end + 1):
        launched: dict[Operation | None, list[int]] = {}
        for rank, operations in by_rank.items():
            launched.setdefault(operations.get(number), []).append(rank)
        if len(launched) > 1:
            ways = [_launched(who, operation) for operation, who in launched.items()]
            return number, f"Ranks part at operation {number:,}: {'; '.join(ways)}."
    return None


def _operations(dump: Dump) -> dict[int, Operation]:
    return {
        record["number"]: (record["kind"], record["name"], record["elements"], record["dtype"])
        for record in dump["records"]
    }


def _launched(who: Sequence[int], operation: Operation | None) -> str:
    if operation is None:
        return f"{ranks(who)} launched nothing"
    kind, name, elements, dtype = operation
    return f"{ranks(who)} launched {name} ({kind} of {elements:,} {dtype})"


def _by_rank(of_ranks: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(of_ranks.items(), key=lambda item: int(item[0])))


# --- presence: on how many ranks parameters have a gradient, step by step, a row of cells each ---

CELL, ROW = 12, 16
MOST_ROWS = 12  # with more parameters than that, equal rows are shown once


def heat_map(presence: Mapping[str, Any], world: int) -> SimpleNamespace | None:
    """Rows, what their shades mean, and numbers of steps with their places; None: nothing known."""
    named = list(zip(presence["params"], presence["ranks_with_gradient"], strict=True))
    steps = max((len(row) for _, row in named), default=0)
    if not steps:
        return None
    alike: dict[object, tuple[list[str], list[int]]] = {}
    for place, (name, row) in enumerate(named):
        key = place if len(named) <= MOST_ROWS else tuple(row)
        alike.setdefault(key, ([], list(row)))[0].append(name)
    return SimpleNamespace(
        rows=[_heat_row(names, row, world) for names, row in alike.values()],
        legend=[level(ranks, world) for ranks in range(world + 1)],
        width=steps * CELL,
        ticks=[((step + 0.5) * CELL, step) for step in range(0, steps, 8)],
    )


def level(ranks: int, world: int, path: str = "") -> SimpleNamespace:
    """Cells with the same number of ranks, as a path; style: none, some or all."""
    label = "no rank" if ranks == 0 else f"all {world}" if ranks == world else f"{ranks} of {world}"
    style = "none" if ranks == 0 else "all" if ranks == world else "some"
    # What some ranks have stays clearly apart from what none and what all have.
    shade = round(0.12 + 0.58 * ranks / world, 2) if style == "some" else 1.0
    return SimpleNamespace(ranks=ranks, label=label, style=style, shade=shade, path=path)


def cells(values: Sequence[int], ranks: int) -> str:
    """A path around the cells that have this number of ranks."""
    box = f"h{CELL - 1}v{ROW - 2}h-{CELL - 1}z"
    return "".join(f"M{step * CELL} 1{box}" for step, value in enumerate(values) if value == ranks)


def _heat_row(names: Sequence[str], values: list[int], world: int) -> SimpleNamespace:
    """Parameters with the same presence; `values` are ranks per step."""
    levels = [level(ranks, world, cells(values, ranks)) for ranks in sorted(set(values))]
    everyone, nobody = values.count(world), values.count(0)
    some = len(values) - everyone - nobody
    others = f"+{len(names) - 1}" if len(names) > 1 else ""
    description = (
        f"{names[0]}{' and alike' * bool(others)}: a gradient on all ranks in "
        f"{count(everyone, 'step')}, on some in {some}, on none in {nobody}"
    )
    named = {"name": names[0], "others": others, "tip": "\n".join(names)}
    return SimpleNamespace(**named, values=values, levels=levels, description=description)


# --- collectives: bytes sent and time waited per step, per kind, in each layout ------------------

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
COLOURS = 6


def traffic(cases: Sequence[Case]) -> SimpleNamespace | None:
    """One row per case, and (colour, kind) as legend; None if no case has any collective."""
    found = {kind for case in cases for kind in case["collectives"]}
    kinds = [kind for kind in KINDS if kind in found] + sorted(found.difference(KINDS))
    if not kinds:
        return None
    units = {"sent": size, "waited": duration, "in_flight": duration}
    bars = [_bars(cases, kinds, key, text) for key, text in units.items()]
    rows = [
        SimpleNamespace(
            layout=case["layout"],
            per_step=f"{case['collectives_per_step']:.4g}",
            seconds=duration(case["seconds"]),
            kinds=[
                SimpleNamespace(name=kind, totals=case["collectives"][kind])
                for kind in kinds
                if kind in case["collectives"]
            ],
            **dict(zip(units, of_case, strict=True)),
        )
        for case, *of_case in zip(cases, *bars, strict=True)
    ]
    return SimpleNamespace(rows=rows, legend=[(colour_of(kind), kind) for kind in kinds])


def colour_of(kind: str) -> int:
    """The same on the whole page."""
    return KINDS.index(kind) if kind in KINDS else COLOURS - 1


def _bars(
    cases: Sequence[Case], kinds: Sequence[str], key: str, text: Callable[[float], str]
) -> list[SimpleNamespace]:
    """Of each case one quantity per step, in segments: percent of the longest bar, by kind."""
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
            place = {"start": round(start, 2), "width": round(width, 2)}
            segments.append(SimpleNamespace(**place, colour=colour_of(kind), tip=tip))
            start += width
        total, description = text(sum(of_case.values())), "; ".join(each.tip for each in segments)
        bars.append(SimpleNamespace(total=total, segments=segments, description=description))
    return bars
