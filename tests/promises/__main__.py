"""Tries promises and writes their receipt."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from samestep.lab.common.provenance import machine
from samestep.tooling.output import write_files
from tests.promises.layouts import LAYOUTS, OPTIONS
from tests.promises.trying import Cell, cells, try_cells

ROOT = Path(__file__).parent.parent.parent
OUT = ROOT / "out"
RECEIPT = ROOT / "receipts" / "promises.json"


def receipt(outcome: dict[Cell, str | None], seconds: float) -> dict[str, Any]:
    """By name of the promise, option and layout: kept, or what was found."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for cell, broken in outcome.items():
        options = found.setdefault(cell.promise.name, {})
        options.setdefault(cell.option, {})[cell.layout] = broken or "kept"
    return {"kind": "make promises", "ran": machine() | {"seconds": seconds}, "promises": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of a subject or of the name of a promise")
    parser.add_argument("--layout", choices=LAYOUTS, nargs="*", default=list(LAYOUTS))
    parser.add_argument("--option", choices=[name or "none" for name in OPTIONS])
    args = parser.parse_args()
    chosen = [
        cell
        for cell in cells()
        if args.only in cell.promise.subject + " " + cell.promise.name
        and cell.layout in args.layout
        and args.option in (None, cell.option or "none")
    ]

    outcome: dict[Cell, str | None] = {}

    def tell(cell: Cell, found: str | None) -> None:
        outcome[cell] = found
        if found:
            print(f"broken: {cell}\n    {found}", flush=True)
        if len(outcome) % 100 == 0:
            print(f"{len(outcome)} of {len(chosen)} tried", flush=True)

    since = time.monotonic()
    try_cells(chosen, tell)
    broken = sum(found is not None for found in outcome.values())
    print(f"kept: {len(outcome) - broken}, broken: {broken}")
    if len(chosen) == len(cells()) and not broken:
        made = receipt(outcome, time.monotonic() - since)
        text = json.dumps(made, indent=1) + "\n"
        write_files(OUT, {RECEIPT.name: text.encode()})
        print(f"wrote {RECEIPT.name} into {OUT.name}/, for receipts/")
    return min(broken, 1)


if __name__ == "__main__":
    sys.exit(main())
