"""The receipt of our rules beside classes of other libraries.

    SAMESTEP_PEERS=/path python -m tests.peers > receipts/peers.json

docs/coming_from.md has the largest difference from each library.
"""

import json
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.peers.checkouts import FOLDER, PACKAGES, folder
from tests.peers.classes import ENTRIES, LIMITS, error

RECEIPT = Path(__file__).parent.parent.parent / "receipts" / "peers.json"
HEAD = "| library | configurations compared | largest difference, float64 | float32 |"


def main() -> None:
    if FOLDER is None:
        sys.exit("set SAMESTEP_PEERS to a folder with the checkouts of peers")
    warnings.simplefilter("ignore")  # theirs
    rows = []
    for entry in ENTRIES:
        found = [max(error(entry, shape, dtype) for shape in entry.shapes) for dtype in LIMITS]
        in_64, in_32 = (float(f"{value:.1e}") for value in found)
        row = {
            "peer": entry.peer, "theirs": entry.what, "here": entry.said,
            "shapes": list(entry.shapes), "float64": in_64, "float32": in_32,
        }  # fmt: skip
        rows.append(row | ({"note": entry.note} if entry.note else {}))
        sys.stderr.write(f"{row}\n")
    commits = [*map(_commit, sorted({*PACKAGES.values()})), f"torch {torch.__version__}"]
    made = {"kind": "tests.peers", "checkouts": commits, "rows": rows}
    sys.stdout.write(json.dumps(made, indent=1) + "\n")


def summary(receipt: Mapping[str, Any]) -> list[str]:
    """A row for each library: how many of its classes, and the largest difference from ours."""
    lines = [HEAD, "|---|---|---|---|"]
    for peer in dict.fromkeys(row["peer"] for row in receipt["rows"]):
        own = [row for row in receipt["rows"] if row["peer"] == peer]
        in_64, in_32 = (max(row[dtype] for row in own) for dtype in ("float64", "float32"))
        lines.append(f"| {peer} | {len(own)} | {in_64:.1e} | {in_32:.1e} |")
    return lines


def _commit(package: str) -> str:
    name = package.partition("/")[0]
    asked = ["git", "-C", str(folder(name)), "log", "-1", "--format=%h of %cs"]
    ran = subprocess.run(asked, capture_output=True, text=True, check=False)
    return f"{name} {ran.stdout.strip() or 'without history'}"


if __name__ == "__main__":
    main()
