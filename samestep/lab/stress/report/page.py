"""Renders the report: a verdict, the numbers behind it, and a section for each scenario.

What only templates read are namespaces, whose fields are named where they are made.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from samestep.lab.common.numbers import count, duration, enumeration, moment, ranks, short, size
from samestep.lab.common.page import templates
from samestep.lab.stress.report import plot as plots
from samestep.lab.stress.report.numbers import (
    STATUSES,
    Case,
    Receipt,
    Worst,
    between_replicas,
    to_first_layout,
    worst,
    worst_to_reference,
)

SYMBOLS = {"clean": "✓", "failed": "✗", "interrupted": "…"}
LOOPS = {
    "open": "gradients do not depend on the parameters",
    "recorded": "every layout gets the gradients of the reference's run",
    "closed": "each layout has the gradients of its own parameters, which amplifies rounding: only "
    "the first steps are held against the reference",
}


def render(receipt: Receipt) -> str:
    """Render a receipt that passed `check_receipt` as one HTML page without external files."""
    environment = templates("samestep.lab.stress.report", trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"duration": duration, "size": size, "counted": count}
    return environment.get_template("report.html.jinja").render(
        receipt=receipt,
        asked=receipt["asked"],
        ran=receipt["ran"],
        command=shlex.join(receipt["ran"]["command"]),
        started=moment(receipt["ran"]["started"]),
        summary=summary(receipt),
        matrix=matrix(receipt),
        sections=[_section(receipt, name) for name in receipt["scenarios"]],
        statuses=STATUSES,
        loops=LOOPS,
        plots=plots,
        presence=SimpleNamespace(CELL=CELL, ROW=ROW, cells=cells),
    )


def _section(receipt: Receipt, name: str) -> dict[str, Any]:
    """The section of one scenario."""
    scenario = receipt["scenarios"][name]
    cases = [case for case in receipt["cases"] if case["scenario"] == name]
    by_status = Counter(case["status"] for case in cases)
    return {
        "name": name,
        "anchor": anchor(name),
        "scenario": scenario,
        "statuses": [
            (status, f"{count(by_status[status], 'layout')} {words}")
            for status, (_, words) in STATUSES.items()
            if by_status[status]
        ],
        "failures": [
            failure(case) for case in cases if case["status"] in ("failed", "interrupted")
        ],
        "plot": plots.plot(cases, receipt["thresholds"]),
        "heat_map": heat_map(scenario["presence"], receipt["ran"]["world_size"]),
        "traffic": traffic(cases),
    }


# --- the verdict -----------------------------------------------------------------------------


class Tile(NamedTuple):
    """A number with its name and an explanation.

    tone: good, flag, bad or plain.
    """

    name: str
    value: str
    note: str
    tone: str = "plain"


def summary(receipt: Receipt) -> SimpleNamespace:
    """The verdict as a sentence; its headline ends at the colon."""
    verdict = receipt["verdict"]
    headline, rest = _sentence(receipt)
    told = {"headline": headline, "rest": "; ".join(rest), "tiles": _tiles(receipt)}
    return SimpleNamespace(verdict=verdict, symbol=SYMBOLS[verdict], **told)


def _sentence(receipt: Receipt) -> tuple[str, list[str]]:
    cases: Sequence[Case] = receipt["cases"]
    failed = [case for case in cases if case["status"] == "failed"]
    escaped = [mutant["name"] for mutant in receipt["mutants"] if not mutant["caught"]]
    if failed:
        first = failed[0]
        checks = list(dict.fromkeys(f["check"] for case in failed for f in case["findings"]))
        steps = count(first["findings"][0]["step"] if first["findings"] else 0, "step")
        rest = [f"first {first['scenario']} in {first['layout']}, after {steps}"]
        rest += [f"the checks that found it: {enumeration(checks, most=9)}"] if checks else []
        of_all = count(len(_applying(cases)), "run")
        return f"{len(failed)} of {of_all} failed", [*rest, *_mutants(receipt)]
    passed = [_passed(cases)] if cases else []
    if escaped:
        them = [enumeration(escaped), *passed, *_numbers(receipt)]
        return f"{len(escaped)} of {count(len(receipt['mutants']), 'mutant')} escaped", them
    told = [*passed, *_numbers(receipt), *_mutants(receipt)]
    if receipt["verdict"] == "interrupted":
        return "Interrupted", told or ["nothing had come to its end"]
    headline, *rest = told or ["nothing was run"]
    return headline[0].upper() + headline[1:], rest


def _passed(cases: Sequence[Case]) -> str:
    """Describe a run in which no case failed."""
    cases = _applying(cases)
    if not cases:
        return "no scenario applies to the layout"
    by_status = Counter(case["status"] for case in cases)
    runs = count(len(cases), "run")
    if by_status["interrupted"]:
        ended = [f"{by_status[s]} {STATUSES[s][1]}" for s in STATUSES if by_status[s]]
        return f"of {runs} {enumeration(ended)}"
    near = by_status["within_tolerance"]
    note = f", {near} of them not to the bit" if near else ""
    return f"{'the' if len(cases) == 1 else 'all'} {runs} clean{note}"


def _applying(cases: Sequence[Case]) -> list[Case]:
    """Cases that apply to their layout and were run."""
    return [case for case in cases if case["status"] != "does_not_apply"]


def _numbers(receipt: Receipt) -> list[str]:
    cases, limits = receipt["cases"], receipt["thresholds"]
    replicas, layouts = worst(cases, between_replicas), worst(cases, to_first_layout)
    reference = worst_to_reference(cases, limits)
    told = []
    if replicas is not None:
        steps = f"after up to {max(case['steps_taken'] for case in cases):,} steps"
        apart = [(name, w) for name, w in (("replica", replicas), ("layout", layouts)) if w]
        same = [f"every {name}" for name, found in apart if found.distance == 0]
        told += [f"{' and '.join(same)} bit-identical {steps}"] if same else []
        far = [(name, short(found.distance)) for name, found in apart if found.distance > 0]
        told += [f"{name}s up to {distance} apart" for name, distance in far]
    if reference is not None:
        limit = short(limits[reference.family])
        told.append(f"furthest from the float64 reference {short(reference.distance)} of {limit}")
    return told


def _mutants(receipt: Receipt) -> list[str]:
    mutants = receipt["mutants"]
    if not mutants:
        return []
    caught = sum(mutant["caught"] for mutant in mutants)
    all_of_them = count(len(mutants), "mutant")
    return [f"{'all' if caught == len(mutants) else f'{caught} of'} {all_of_them} caught"]


def _tiles(receipt: Receipt) -> list[Tile]:
    cases, limits, mutants = receipt["cases"], receipt["thresholds"], receipt["mutants"]
    samples = [sample for case in cases for sample in case["samples"]]
    tiles = []
    if (replicas := worst(cases, between_replicas)) is not None:
        note = f"exactly, in {count(len(samples), 'sample')}"
        tiles.append(_zero_tile("replicas differ by", replicas, note, "bad"))
    if (layouts := worst(cases, to_first_layout)) is not None:
        tone = "bad" if receipt["asked"]["reduction"] == "ordered" else "flag"
        tiles.append(_zero_tile("layouts differ by", layouts, "exactly, from the first", tone))
    if (reference := worst_to_reference(cases, limits)) is not None:
        limit = limits[reference.family]
        note = f"{reference.family}, limit {short(limit)}"
        tone = "good" if reference.distance <= limit else "bad"
        tiles.append(Tile("from the reference", short(reference.distance), note, tone))
    if samples:
        operations = sum(case["samples"][-1]["collectives"] for case in cases if case["samples"])
        same = all(sample["same_collectives"] for sample in samples)
        note = f"{'in' if same else 'not in'} the same order on all ranks"
        tiles.append(Tile("collectives", f"{operations:,}", note, "plain" if same else "bad"))
    if mutants:
        caught = sum(mutant["caught"] for mutant in mutants)
        tone = "good" if caught == len(mutants) else "bad"
        tiles.append(Tile("mutants", f"{caught} / {len(mutants)}", "caught", tone))
    steps = count(sum(case["steps_taken"] for case in cases), "step")
    runs = count(len(_applying(cases)), "run")
    note = f"{steps} in {runs}" if cases else count(len(mutants), "mutant")
    if (stretches := len(receipt["ran"].get("stretches", ()))) > 1:
        note += f", in {stretches} stretches"
    return [*tiles, Tile("time", duration(receipt["ran"]["seconds"]), note)]


def _zero_tile(name: str, found: Worst, note: str, nonzero: str) -> Tile:
    """The tile of a distance that should be zero; its tone is `nonzero` if it is not."""
    if found.distance == 0:
        return Tile(name, "0", note, "good")
    return Tile(name, short(found.distance), f"{found.family}, step {found.step:,}", nonzero)


# --- scenarios times layouts: how each case ended, with its worst numbers ------------------------


def matrix(receipt: Receipt) -> dict[str, Any]:
    """A row for each scenario with a cell for each layout; `counts` has cases by status.

    `is_dense`: there are so many layouts that a page has room for little about each.
    """
    layouts = receipt["layouts"]
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
    """One case: its status, its main numbers, and all numbers in a tooltip."""
    numbers, tip = [], [f"{case['scenario']} in {case['layout']}: {STATUSES[case['status']][1]}"]
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
    return SimpleNamespace(status=case["status"], numbers=numbers, tip="; ".join(tip))


# --- failures: findings, where each rank was, and where ranks went different ways ----------------

Dump = Mapping[str, Any]
Operation = tuple[str, str, int, str]  # kind, name, elements, dtype


def failure(case: Case) -> dict[str, Any]:
    """A failed or interrupted case, with the last operations of its ranks.

    parts_at, parting: the first operation that ranks do not share, and what is told of it.
    """
    taken = f"{case['steps_taken']:,} of {count(case['steps'], 'step')}"
    dumps = {rank: dump for rank, dump in _by_rank(case["flights"]).items() if dump.get("records")}
    parts_at, told = parting(dumps) or (None, None)
    return {
        "case": case,
        "headline": f"{STATUSES[case['status']][1]} after {taken}",
        "positions": positions(case["positions"]),
        "parts_at": parts_at,
        "parting": told,
        "dumps": dumps,
    }


def positions(of_ranks: Mapping[str, str]) -> list[SimpleNamespace]:
    """The operation of each rank; those that differ from most are marked."""
    [(usual, times)] = Counter(of_ranks.values()).most_common(1) or [("", 0)]
    told = times > 1  # of two ranks in two operations none is the odd one
    return [
        SimpleNamespace(rank=rank, operation=operation, odd=told and operation != usual)
        for rank, operation in _by_rank(of_ranks).items()
    ]


def parting(dumps: Mapping[str, Dump]) -> tuple[int, str] | None:
    """The first operation in which ranks differ, and what each launched there.

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
    """A map of which ranks had gradients, by parameter and step; None if unknown."""
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
    """The cells with a given number of ranks as one SVG path; style: none, some or all."""
    label = "no rank" if ranks == 0 else f"all {world}" if ranks == world else f"{ranks} of {world}"
    style = "none" if ranks == 0 else "all" if ranks == world else "some"
    # What some ranks have stays clearly apart from what none and what all have.
    shade = round(0.12 + 0.58 * ranks / world, 2) if style == "some" else 1.0
    return SimpleNamespace(ranks=ranks, label=label, style=style, shade=shade, path=path)


def cells(values: Sequence[int], ranks: int) -> str:
    """An SVG path around the cells with this number of ranks."""
    box = f"h{CELL - 1}v{ROW - 2}h-{CELL - 1}z"
    return "".join(f"M{step * CELL} 1{box}" for step, value in enumerate(values) if value == ranks)


def _heat_row(names: Sequence[str], values: list[int], world: int) -> SimpleNamespace:
    """Parameters with equal presence; `values` are numbers of ranks per step."""
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
    """Bars of collectives and bytes per case, with a legend; None if there are none."""
    found = {kind for case in cases for kind in case["collectives"]}
    kinds = [kind for kind in KINDS if kind in found] + sorted(found.difference(KINDS))
    if not kinds:
        return None
    units = {"sent": size, "waited": duration, "in_flight": duration}
    bars = [_bars(cases, kinds, key, text) for key, text in units.items()]
    rows = [
        SimpleNamespace(case=case, bars=of_case)
        for case, *of_case in zip(cases, *bars, strict=True)
    ]
    return SimpleNamespace(rows=rows, legend=[(colour_of(kind), kind) for kind in kinds])


def colour_of(kind: str) -> int:
    """The colours of the page by kind of collective."""
    return KINDS.index(kind) if kind in KINDS else COLOURS - 1


def _bars(
    cases: Sequence[Case], kinds: Sequence[str], key: str, text: Callable[[float], str]
) -> list[SimpleNamespace]:
    """Bars of one quantity per step and case, in percent of the longest."""
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
