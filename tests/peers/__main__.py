"""The table of docs/peers.md:  SAMESTEP_PEERS=/path python -m tests.peers > docs/peers.md"""

import subprocess
import sys
import warnings
from pathlib import Path

import torch

from tests.peers.checkouts import FOLDER, PACKAGES, folder
from tests.peers.classes import ENTRIES, LIMITS, error

TEMPLATE = Path(__file__).with_name("peers.md.in")
HEAD = ["| peer | theirs | here | shapes | float64 | float32 |", "|---|---|---|---|---|---|"]


def main() -> None:
    if FOLDER is None:
        sys.exit("set SAMESTEP_PEERS to a folder with the checkouts of peers")
    warnings.simplefilter("ignore")  # theirs
    lines, notes = list(HEAD), list[str]()
    for entry in ENTRIES:
        found = [max(error(entry, shape, dtype) for shape in entry.shapes) for dtype in LIMITS]
        mark = ""
        if entry.note:
            notes.append(f"({len(notes) + 1}) {entry.note[0].upper()}{entry.note[1:]}.")
            mark = f" ({len(notes)})"
        shapes, errors = ", ".join(entry.shapes), (f"{value:.1e}" for value in found)
        row = (entry.peer, f"{entry.what}{mark}", entry.said, shapes, *errors)
        lines.append(f"| {' | '.join(row)} |")
        sys.stderr.write(f"{lines[-1]}\n")
    commits = [*map(_commit, sorted({*PACKAGES.values()})), f"torch {torch.__version__}"]
    page = TEMPLATE.read_text().format(
        table="\n".join(lines), notes="\n".join(notes), checkouts=", ".join(commits)
    )
    sys.stdout.write(page)


def _commit(package: str) -> str:
    name = package.partition("/")[0]
    asked = ["git", "-C", str(folder(name)), "log", "-1", "--format=%h of %cs"]
    ran = subprocess.run(asked, capture_output=True, text=True, check=False)
    return f"{name} {ran.stdout.strip() or 'without history'}"


if __name__ == "__main__":
    main()
