"""The page: the verdict in one sentence, the numbers behind it, and a section for each scenario."""

import shlex
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from samestep.stress.report import parts
from samestep.stress.report import plot as plots
from samestep.stress.report.numbers import (
    STATUSES,
    Case,
    Receipt,
    Worst,
    between_replicas,
    count,
    duration,
    enumeration,
    moment,
    short,
    size,
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
    """One page of HTML that loads nothing; `receipt` has passed `check_receipt`."""
    environment = Environment(
        loader=PackageLoader("samestep.stress.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "size": size}
    return environment.get_template("report.html.jinja").render(
        receipt=receipt,
        asked=receipt["asked"],
        ran=receipt["ran"],
        command=shlex.join(receipt["ran"]["command"]),
        started=moment(receipt["ran"]["started"]),
        summary=summary(receipt),
        matrix=parts.matrix(receipt),
        sections=[_section(receipt, name) for name in receipt["scenarios"]],
        statuses=STATUSES,
        plots=plots,
        presence=parts,
    )


def _section(receipt: Receipt, name: str) -> dict[str, Any]:
    """What the page shows of a scenario."""
    scenario = receipt["scenarios"][name]
    cases = [case for case in receipt["cases"] if case["scenario"] == name]
    by_status = Counter(case["status"] for case in cases)
    return {
        "name": name,
        "anchor": parts.anchor(name),
        "story": scenario["story"],
        "loop": scenario["loop"],
        "loop_story": LOOPS[scenario["loop"]],
        "statuses": [
            (status, f"{count(by_status[status], 'layout')} {words}")
            for status, (_, words) in STATUSES.items()
            if by_status[status]
        ],
        "failures": [
            parts.failure(case) for case in cases if case["status"] in ("failed", "interrupted")
        ],
        "plot": plots.plot(cases, receipt["thresholds"]),
        "heat_map": parts.heat_map(scenario["presence"], receipt["ran"]["world_size"]),
        "traffic": parts.traffic(cases),
    }


# --- the verdict -----------------------------------------------------------------------------


class Tile(NamedTuple):
    """A number with its name, and what is to be known about it.

    tone: good, flag, bad or plain.
    """

    name: str
    value: str
    note: str
    tone: str = "plain"


def summary(receipt: Receipt) -> SimpleNamespace:
    """`headline: rest.` is the verdict's sentence."""
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
    """How cases of which none failed have ended."""
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
    """Those that make sense in their layout, and were run."""
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
    """Of a distance that is to be zero; if it is not, the tile gets the tone `nonzero`."""
    if found.distance == 0:
        return Tile(name, "0", note, "good")
    return Tile(name, short(found.distance), f"{found.family}, step {found.step:,}", nonzero)
