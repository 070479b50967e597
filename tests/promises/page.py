"""The receipt of what was found, and its page, docs/promises.md."""

from __future__ import annotations

from typing import Any

from samestep.lab.common.provenance import machine
from tests.promises.layouts import LAYOUTS
from tests.promises.listed import PROMISES
from tests.promises.trying import Cell, cells

HEAD = """\
# Promises

Statements that something raises, warns or works (`tests/promises`), tried in every layout and with the
options that matter to them, on gloo ranks: two, and four for tensor parallel (TP, two copies of a model that is cut in two) and
stages (two stages of two data ranks). Made by `make promises` (`python -m tests.promises`), which writes this page and its
[receipt](../receipts/promises.json) only if nothing is broken. `make soak` tries all of it.

Where something works, weights have the bits of one process that is given the mean of the same gradients, and so has the state
where it is asked for; gradients are small multiples of 1/8, whose sums are exact in any order. Where something raises, every rank raises.
"""


def receipt(outcome: dict[Cell, str | None], seconds: float) -> dict[str, Any]:
    """By name of the promise, option and layout: kept, or what was found."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for cell, broken in outcome.items():
        options = found.setdefault(cell.promise.name, {})
        options.setdefault(cell.option, {})[cell.layout] = broken or "kept"
    return {"kind": "make promises", "ran": machine() | {"seconds": seconds}, "promises": found}


def render(receipt: dict[str, Any]) -> str:
    """The page, of a receipt."""
    found = receipt["promises"]
    tried = cells()
    kept = sum(
        found.get(cell.promise.name, {}).get(cell.option, {}).get(cell.layout) == "kept"
        for cell in tried
    )
    every = sum(len(each.options) for each in PROMISES) * len(LAYOUTS)
    reasons: dict[str, int] = {}
    body = [
        f"{len(PROMISES)} promises in {every} cells: kept {kept}, broken {len(tried) - kept}, "
        f"not applicable {every - len(tried)}."
    ]
    for subject in dict.fromkeys(each.subject for each in PROMISES):
        body += ["", f"## {subject}", "", f"| {subject} | with | {' | '.join(LAYOUTS)} |"]
        body.append("|" + "---|" * (len(LAYOUTS) + 2))
        for each in (own for own in PROMISES if own.subject == subject):
            for number, option in enumerate(each.options):
                marks = []
                for layout in LAYOUTS:
                    reason = each.why_not(layout, option)
                    if reason is not None:
                        marks.append(f"[{reasons.setdefault(reason, len(reasons) + 1)}]")
                    else:
                        said = found.get(each.name, {}).get(option, {}).get(layout)
                        marks.append("kept" if said == "kept" else "broken")
                said = f"**{each.kind}**: {each.tried}" if not number else ""
                body.append(f"| {said} | {f'`{option}`' if option else ''} | {' | '.join(marks)} |")
    notes = ["", "## Not applicable", ""]
    notes += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([HEAD, *body, *notes]) + "\n"
