"""The verdict in one sentence, and the numbers behind it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.stress.report.distances import (
    Case,
    Receipt,
    Worst,
    worst_between_replicas,
    worst_to_first_layout,
    worst_to_reference,
)
from samestep.stress.report.words import STATUSES, count, duration, enumeration, short

SYMBOLS = {"clean": "✓", "failed": "✗", "interrupted": "…"}


@dataclass(frozen=True)
class Tile:
    """A number with its name, and what is to be known about it.

    tone: good, flag, bad or plain.
    """

    name: str
    value: str
    note: str
    tone: str = "plain"


@dataclass(frozen=True)
class Summary:
    """`headline: rest.` is the verdict's sentence."""

    verdict: str
    symbol: str
    headline: str
    rest: str
    tiles: list[Tile]


def summary(receipt: Receipt) -> Summary:
    """What came of the whole run."""
    verdict = receipt["verdict"]
    headline, rest = _sentence(receipt)
    return Summary(verdict, SYMBOLS[verdict], headline, "; ".join(rest), _tiles(receipt))


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
    """How far things are apart, and from the reference."""
    cases, limits = receipt["cases"], receipt["thresholds"]
    replicas, layouts = worst_between_replicas(cases), worst_to_first_layout(cases)
    reference = worst_to_reference(cases, limits)
    told = []
    if replicas is not None:
        steps = f"after up to {max(case['steps_taken'] for case in cases):,} steps"
        apart = [(name, w) for name, w in (("replica", replicas), ("layout", layouts)) if w]
        same = [f"every {name}" for name, worst in apart if worst.distance == 0]
        told += [f"{' and '.join(same)} bit-identical {steps}"] if same else []
        told += [
            f"{name}s up to {short(worst.distance)} apart"
            for name, worst in apart
            if worst.distance > 0
        ]
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
    """Those of which something is known."""
    cases, limits, mutants = receipt["cases"], receipt["thresholds"], receipt["mutants"]
    samples = [sample for case in cases for sample in case["samples"]]
    tiles = []
    if (replicas := worst_between_replicas(cases)) is not None:
        note = f"exactly, in {count(len(samples), 'sample')}"
        tiles.append(_zero_tile("replicas differ by", replicas, note, "bad"))
    if (layouts := worst_to_first_layout(cases)) is not None:
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
    note = (
        f"{steps} in {count(len(_applying(cases)), 'run')}"
        if cases
        else count(len(mutants), "mutant")
    )
    if (stretches := len(receipt["ran"].get("stretches", ()))) > 1:
        note += f", in {stretches} stretches"
    return [*tiles, Tile("time", duration(receipt["ran"]["seconds"]), note)]


def _zero_tile(name: str, worst: Worst, note: str, nonzero: str) -> Tile:
    """Of a distance that is to be zero; if it is not, the tile gets the tone `nonzero`."""
    if worst.distance == 0:
        return Tile(name, "0", note, "good")
    return Tile(name, short(worst.distance), f"{worst.family}, step {worst.step:,}", nonzero)
