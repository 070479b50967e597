"""The built wheel with other versions of torch and Python: `make test-matrix`.

    python -m tests.install_matrix --python 3.11 3.14 --torch 2.9 2.13

Each cell is an environment of its own, made by uv (which finds interpreters, or downloads them),
with torch, the wheel, and a copy of the tests outside of the checkout: `samestep doctor` must find
nothing broken, then the core's tests run. It is deleted before the next; the libraries of a torch
are downloaded once for all versions of Python. With torch's CUDA wheels from PyPI about 8 GB are on
the disk at a time, and less than 2 GB with its CPU wheels, which are taken if their index can be
reached. Prints the table of docs/dev/releasing.md, and exits with 1 if a cell has failed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

from samestep.version import PYTHON, TORCH
from tests.dist import ROOT, build

# All minor versions from the oldest to the newest that are supported.
PYTHONS, TORCHES = (
    tuple(f"{oldest[0]}.{minor}" for minor in range(oldest[1], newest[1] + 1))
    for oldest, newest in (PYTHON, TORCH)
)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "numpy")
CORE = ("test_step", "test_state_dict", "test_replicated", "test_flat", "test_sharded")
INSTALLING, TESTING = 1200.0, 1800.0  # seconds


class Cell(NamedTuple):
    """What came of a pair of versions: passed, failed, or not available."""

    python: str
    torch: str
    outcome: str
    detail: str
    seconds: float = 0.0
    versions: str = ""


class Matrix:
    """Runs cells one after the other in a folder."""

    def __init__(self, folder: Path, uv: str) -> None:
        self.folder, self.uv = folder, uv
        self.environment = os.environ | {
            "UV_CACHE_DIR": str(folder / "cache"),
            "UV_HTTP_TIMEOUT": "300",  # seconds: the wheels are large, and 30 were too few
        }
        for name in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"):
            self.environment.pop(name, None)
        self.index = ["--index-url", CPU_INDEX] if _reached(CPU_INDEX) else []
        shutil.rmtree(folder / "built", ignore_errors=True)
        _, self.wheel = build(folder / "built", folder / "built" / "scratch")
        self.tests = folder / "elsewhere"
        shutil.rmtree(self.tests, ignore_errors=True)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "tests", self.tests / "tests", ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", self.tests)  # pytest's settings

    def run(self, python: str, torch: str) -> Cell:
        """Install and test one cell."""
        start = time.monotonic()
        env = self.folder / "cell"
        shutil.rmtree(env, ignore_errors=True)
        inside = str(env / "bin" / "python")
        install = [self.uv, "pip", "install", "-q", "--python", inside]
        made = self._do([self.uv, "venv", "-q", "--python", python, str(env)])
        if made.returncode:
            return Cell(python, torch, "not available", _why(made))
        got = self._do([*install, *self.index, f"torch=={torch}.*"])
        if got.returncode:
            return Cell(python, torch, "not available", _why(got))
        got = self._do([*install, str(self.wheel), *TOOLS])
        if got.returncode:
            return Cell(python, torch, "failed", _why(got))
        code = (
            "import platform, samestep, torch; from pathlib import Path; "
            f"assert Path(samestep.__file__).is_relative_to({str(env)!r}), samestep.__file__; "
            "print(f'Python {platform.python_version()}, torch {torch.__version__}')"
        )
        found = self._do([inside, "-W", "ignore", "-c", code])
        if found.returncode:
            return Cell(python, torch, "failed", _why(found))
        healthy = self._do([inside, "-W", "ignore", "-m", "samestep", "doctor", "--timeout", "300"])
        if healthy.returncode:
            return Cell(python, torch, "failed", f"samestep doctor: {healthy.stdout[-300:]}")
        pytest = [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations", "0"]
        # torch.compile warns of the very first 3.13, and warnings are errors in our tests.
        pytest += ["-W", "ignore:Guards may run slower on Python:RuntimeWarning"]
        ran = self._do([*pytest, *(f"tests/{name}.py" for name in CORE)], TESTING)
        (self.folder / f"python{python}_torch{torch}.log").write_text(ran.stdout + ran.stderr)
        summary = re.findall(r"(?m)^=*\s*(\d+ (?:passed|failed|error).*?) in ", ran.stdout)
        outcome = "failed" if ran.returncode else "passed"
        detail = summary[-1] if summary else _why(ran)
        return Cell(python, torch, outcome, detail, time.monotonic() - start, found.stdout.strip())

    def forget(self, *packages: str) -> None:
        """Give back the disk of what the next cell does not need; of all if none is named."""
        shutil.rmtree(self.folder / "cell", ignore_errors=True)
        self._do([self.uv, "cache", "clean", "-q", *packages])

    def _do(
        self, command: list[str], patience: float = INSTALLING
    ) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command, cwd=self.tests, env=self.environment, capture_output=True, text=True,
                timeout=patience,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            late = f"not done after {patience:.0f} s: {' '.join(command[:4])} ..."
            return subprocess.CompletedProcess(command, 1, "", late)


def _reached(index: str) -> bool:
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=20):
            return True
    except OSError:
        return False


def _why(done: "subprocess.CompletedProcess[str]") -> str:
    """How what a command has said begins and ends, in one line."""
    text = " ".join((done.stderr or done.stdout).split())
    return text if len(text) < 300 else f"{text[:150]} ... {text[-150:]}"


def table(cells: list[Cell]) -> str:
    """Rows are versions of torch, columns of Python; below it what is to say of single cells."""
    pythons = sorted({cell.python for cell in cells}, key=_number)
    torches = sorted({cell.torch for cell in cells}, key=_number)
    known = {(cell.python, cell.torch): cell for cell in cells}
    head = " | ".join(f"Python {python}" for python in pythons)
    lines = [f"| torch | {head} |", "|" + "---|" * (len(pythons) + 1)]
    notes = []
    for torch in torches:
        row = []
        for python in pythons:
            cell = known.get((python, torch))
            row.append("not run" if cell is None else _shown(cell))
            if cell is not None and cell.outcome != "passed":
                notes.append(f"- torch {torch}, Python {python}: {cell.detail}")
        lines.append(f"| {torch} | {' | '.join(row)} |")
    return "\n".join([*lines, *([""] if notes else []), *notes, ""])


def _shown(cell: Cell) -> str:
    return cell.detail if cell.outcome == "passed" else f"**{cell.outcome}**"


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="X.Y")
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="X.Y")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "matrix")
    parser.add_argument("--uv", default="uv", help="the program uv: pip install uv")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    uv = shutil.which(options.uv)
    if uv is None:
        parser.error(f"there is no {options.uv}: pip install uv")
    matrix = Matrix(options.out.resolve(), str(Path(uv).absolute()))  # it runs elsewhere
    cells = []
    try:
        for torch in options.torch:
            for python in options.python:
                cell = matrix.run(python, torch)
                cells.append(cell)
                sys.stdout.write(json.dumps(cell._asdict()) + "\n")
                sys.stdout.flush()
                matrix.forget("torch")
            matrix.forget()  # its CUDA libraries: the next torch has others
    finally:
        matrix.forget()
        shutil.rmtree(matrix.tests, ignore_errors=True)
        (options.out / "cells.json").write_text(json.dumps([c._asdict() for c in cells], indent=1))
    sys.stdout.write(table(cells))
    return int(any(cell.outcome == "failed" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
