"""Compares two receipts of `samestep stress`, and lists the important changes first."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from samestep.lab.common.numbers import count, duration, enumeration, short, size
from samestep.lab.stress.receipt import check_receipt
from samestep.lab.stress.report.numbers import (
    STATUSES,
    Case,
    Pick,
    Receipt,
    Worst,
    between_replicas,
    to_first_layout,
    to_reference,
    worst_of_families,
)

Severity = Literal["worse", "better", "changed"]
Entry = Mapping[str, Any]
Pair = tuple[Case, Case]
Pairs = Mapping[str, tuple[Entry | None, Entry | None]]  # None: only one receipt has it

GROWTH = 2.0  # of a distance, from which on it is told
NOISE = 1.5  # of a time, below which it is not
VERDICTS = ("clean", "interrupted", "failed")
BADNESS = {"exact": 0, "does_not_apply": 0.5, "within_tolerance": 1, "interrupted": 2, "failed": 3}
SAME_WORK = ("world_size", "seed", "steps", "sample_every", "reduction")
NOT_COMPARED = (
    "out", "started", "seconds", "stretches", "command", "requested_backend", "environment",
    "versions",
)  # fmt: skip
STYLES = {"worse": "bold red", "better": "green", "changed": "yellow"}


@dataclass(frozen=True)
class Change:
    """One difference. `where`: scenario/layout, the name of a mutant, or "" for the whole run."""

    severity: Severity
    where: str
    what: str
    before: str
    after: str


def read_receipt(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a receipt; raises ValueError with the path if it is invalid."""
    try:
        content = json.loads(Path(path).read_bytes(), parse_constant=_refuse)
        check_receipt(content)
    except (OSError, ValueError) as error:  # not there, not JSON, not text, or not of that form
        why = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"{os.fspath(path)!r} is no receipt of `samestep stress` (receipt.json): {why}"
        ) from error
    return dict(content)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def compare(first: Receipt, second: Receipt) -> list[Change]:
    """Return all changes from the first to the second receipt; both have passed `check_receipt`."""
    cases = _pairs(first["cases"], second["cases"], ("scenario", "layout"))
    both = {where: (old, new) for where, (old, new) in cases.items() if old and new}
    mutants = _pairs(first["mutants"], second["mutants"], ("name",))
    same_choice = all(first["asked"][key] == second["asked"][key] for key in ("scenario", "layout"))
    same_mutants = first["asked"]["mutants"] == second["asked"]["mutants"]
    of_cases: tuple[Callable[[str, Case, Case], Iterator[Change]], ...] = (
        _status,
        partial(_apart, "difference between replicas", between_replicas),
        partial(_apart, "difference between layouts", to_first_layout),
        partial(_apart, "distance to the reference", to_reference),
        _plan,
        _costs,
    )
    return [
        *_verdict(first, second),
        *_come_and_gone("run", cases, same_choice),
        *chain.from_iterable(look(w, *pair) for look in of_cases for w, pair in both.items()),
        *_come_and_gone("mutant", mutants, same_mutants),
        *_mutants(mutants),
        *_scenarios(first["scenarios"], second["scenarios"]),
        *_surroundings(first, second),
        *_times(first, second, both),
    ]


def changes_table(changes: Sequence[Change]) -> Table:
    table = Table(caption=None if changes else "nothing changed", header_style="bold")
    for column in ("", "where", "what", "before", "after"):
        table.add_column(column, overflow="fold")
    for change in changes:
        severity = Text(change.severity, STYLES[change.severity])
        texts = (change.where, change.what, change.before, change.after)
        table.add_row(severity, *map(Text, texts))  # as Text: [brackets] are not markup
    return table


# --- the run ---------------------------------------------------------------------------------


def _verdict(first: Receipt, second: Receipt) -> Iterator[Change]:
    old, new = first["verdict"], second["verdict"]
    if old != new:
        yield Change(_direction(VERDICTS.index(old), VERDICTS.index(new)), "", "verdict", old, new)


def _surroundings(first: Receipt, second: Receipt) -> Iterator[Change]:
    def changed(part: str, old: Entry, new: Entry, keys: Iterable[str]) -> Iterator[Change]:
        for key in keys:
            if old.get(key) != new.get(key):
                texts = _text(old.get(key)), _text(new.get(key))
                yield Change("changed", "", f"{part} {key}", *texts)

    for part in ("thresholds", "asked", "ran"):
        keys = [key for key in first[part] if key not in NOT_COMPARED]
        yield from changed(part, first[part], second[part], keys)
    for part in ("versions", "environment"):
        old, new = first["ran"][part], second["ran"][part]
        yield from changed(part, old, new, sorted(old.keys() | new.keys()))


def _times(first: Receipt, second: Receipt, both: Mapping[str, Pair]) -> Iterator[Change]:
    """Yield large changes of run time, which are never rated as worse or better."""
    times = [("", first["ran"]["seconds"], second["ran"]["seconds"])]
    for where, (old, new) in both.items():
        if _same_work(old, new) and old["steps_taken"] == new["steps_taken"]:
            times.append((where, old["seconds"], new["seconds"]))
    for where, before, after in times:
        if max(before, after) > NOISE * min(before, after):
            texts = (duration(before), duration(after))
            yield Change("changed", where, "time (may be noise)", *texts)


# --- cases -----------------------------------------------------------------------------------


def _come_and_gone(noun: str, pairs: Pairs, same: bool) -> Iterator[Change]:
    """Yield cases that only one of the receipts has; not rated if the requests differed."""
    for where, (old, new) in pairs.items():
        if new is None and old is not None:
            text, _ = _ended(old)
            yield Change("worse" if same else "changed", where, noun, text, "gone")
        elif old is None and new is not None:
            text, bad = _ended(new)
            good: Severity = "better" if same else "changed"
            yield Change("worse" if bad else good, where, noun, "not there", text)


def _ended(entry: Entry) -> tuple[str, bool]:
    """Return how a case or a mutant ended, in words, and whether that is bad."""
    if "caught" in entry:
        return "caught" if entry["caught"] else "escaped", not entry["caught"]
    return STATUSES[entry["status"]][1], entry["status"] == "failed"


def _status(where: str, old: Case, new: Case) -> Iterator[Change]:
    texts = (_status_text(old), _status_text(new))
    if old["status"] != new["status"]:
        direction = _direction(BADNESS[old["status"]], BADNESS[new["status"]])
        yield Change(direction, where, "status", *texts)
    elif [f["check"] for f in old["findings"]] != [f["check"] for f in new["findings"]]:
        yield Change("changed", where, "findings", *texts)


def _status_text(case: Case) -> str:
    found = [f"{finding['check']} after step {finding['step']:,}" for finding in case["findings"]]
    return ": ".join([STATUSES[case["status"]][1], *([enumeration(found)] if found else [])])


def _apart(what: str, pick: Pick, where: str, old: Case, new: Case) -> Iterator[Change]:
    """Yield changes of the differences between ranks: larger, no longer zero, or zero now.

    The distance to the reference is never to be zero, and depends on the work that was done.
    """
    before, after = worst_of_families(old, pick), worst_of_families(new, pick)
    both = [(before[family], after[family]) for family in before if family in after]
    grown = [pair for pair in both if pair[1].distance > GROWTH * pair[0].distance]
    zeroed = [pair for pair in both if pair[0].distance > 0 == pair[1].distance]
    worse: Severity = "worse"
    if pick is to_reference:
        worse, zeroed = "worse" if _same_work(old, new) else "changed", []
    found: tuple[tuple[Severity, list[tuple[Worst, Worst]]], ...]
    found = (worse, grown), ("better", zeroed)
    for severity, pairs in found:
        if pairs:
            families = ", ".join(of_new.family for _, of_new in pairs)
            yield Change(severity, where, f"{what}: {families}", *_told(pairs))


def _plan(where: str, old: Case, new: Case) -> Iterator[Change]:
    if old["fingerprint"] != new["fingerprint"]:
        yield Change("changed", where, "plan", old["fingerprint"], new["fingerprint"])
    lines, new_lines = list(old["schedule"]), list(new["schedule"])
    if lines != new_lines:
        pairs = enumerate(zip_longest(lines, new_lines, fillvalue="its end"))
        place, (before, after) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
        yield Change(
            "changed",
            where,
            f"schedule from operation {place}",
            f"{before}, of {count(len(lines), 'operation')}",
            f"{after}, of {count(len(new_lines), 'operation')}",
        )


def _costs(where: str, old: Case, new: Case) -> Iterator[Change]:
    """Yield changes in collectives and bytes per step, for cases that did the same work."""
    if old["steps_taken"] != new["steps_taken"]:
        return
    for key, text in (("collectives_per_step", "{:.4g}".format), ("bytes_per_step", size)):
        before, after = old[key], new[key]
        if abs(before - after) > 1e-9 * max(before, after):
            direction = _direction(before, after) if _same_work(old, new) else "changed"
            yield Change(direction, where, key.replace("_", " "), text(before), text(after))


# --- mutants and scenarios -------------------------------------------------------------------


def _mutants(pairs: Pairs) -> Iterator[Change]:
    for where, (old, new) in pairs.items():
        if old is None or new is None:
            continue
        texts = (_catch(old), _catch(new))
        if old["caught"] != new["caught"]:
            yield Change("better" if new["caught"] else "worse", where, "mutant", *texts)
        elif set(old["by"]) != set(new["by"]):
            yield Change("changed", where, "mutant", *texts)
        if old["unpatched"] != new["unpatched"]:
            direction = _direction(BADNESS[old["unpatched"]], BADNESS[new["unpatched"]])
            statuses = (STATUSES[old["unpatched"]][1], STATUSES[new["unpatched"]][1])
            yield Change(direction, where, "without the mutant", *statuses)


def _catch(mutant: Entry) -> str:
    return f"caught by {enumeration(mutant['by'])}" if mutant["by"] else _ended(mutant)[0]


def _scenarios(old: Mapping[str, Entry], new: Mapping[str, Entry]) -> Iterator[Change]:
    for name in (name for name in old if name in new):
        if old[name]["loop"] != new[name]["loop"]:
            yield Change("changed", name, "loop", old[name]["loop"], new[name]["loop"])
        if old[name]["presence"] != new[name]["presence"]:
            texts = (_presence(old[name]["presence"]), _presence(new[name]["presence"]))
            yield Change("changed", name, "presence of gradients", *texts)


def _presence(presence: Entry) -> str:
    ranks = sum(map(sum, presence["ranks_with_gradient"]))
    return f"{count(len(presence['params']), 'parameter')}, {count(ranks, 'gradient')}"


# --- shared ----------------------------------------------------------------------------------


def _pairs(old: Sequence[Entry], new: Sequence[Entry], keys: Sequence[str]) -> Pairs:
    """Pair entries of equal names in order; a repeated name gets the suffix "(2)"."""
    named_old, named_new = _named(old, keys), _named(new, keys)
    return {name: (named_old.get(name), named_new.get(name)) for name in named_old | named_new}


def _named(entries: Sequence[Entry], keys: Sequence[str]) -> dict[str, Entry]:
    named: dict[str, Entry] = {}
    for entry in entries:
        name = unique = "/".join(entry[key] for key in keys)
        number = 1
        while unique in named:
            number += 1
            unique = f"{name} ({number})"
        named[unique] = entry
    return named


def _same_work(old: Case, new: Case) -> bool:
    return all(old[key] == new[key] for key in SAME_WORK)


def _direction(before: float, after: float) -> Severity:
    """Rate a change of a number that is better when smaller."""
    return "worse" if after > before else "better"


def _told(pairs: Sequence[tuple[Worst, Worst]]) -> tuple[str, str]:
    """Describe the largest values before and after."""
    sides = [max(side, key=lambda worst: worst.distance) for side in zip(*pairs, strict=True)]
    before, after = (
        f"{short(worst.distance)} ({worst.family}, step {worst.step:,})" if worst.distance else "0"
        for worst in sides
    )
    return before, after


def _text(value: object) -> str:
    return "none" if value is None else str(value)
