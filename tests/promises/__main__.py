"""Tries promises and writes their page."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from samestep.tooling.output import write_files
from tests.promises.layouts import LAYOUTS, OPTIONS
from tests.promises.page import receipt, render
from tests.promises.trying import Cell, cells, try_cells

ROOT = Path(__file__).parent.parent.parent
OUT = ROOT / "out"
RECEIPT = ROOT / "receipts" / "promises.json"
PAGE = ROOT / "docs" / "promises.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of a subject or of the name of a promise")
    parser.add_argument("--layout", choices=LAYOUTS, nargs="*", default=list(LAYOUTS))
    parser.add_argument("--option", choices=[name or "none" for name in OPTIONS])
    parser.add_argument("--render", action="store_true", help="the page of the committed receipt")
    args = parser.parse_args()
    if args.render:
        PAGE.write_text(render(json.loads(RECEIPT.read_text())))
        return 0
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
        write_files(OUT, {RECEIPT.name: text.encode(), PAGE.name: render(made).encode()})
        print(f"wrote {RECEIPT.name} and {PAGE.name} into {OUT.name}/, for receipts/ and docs/")
    return min(broken, 1)


if __name__ == "__main__":
    sys.exit(main())
