"""Run the whole suite again and again, in random order, and list what was not the same each time.

    make test-repeat N=5          # five times
    make test-repeat N=3 BUSY=1   # beside two loops that keep two cores busy

Each run has an order of its own, by a seed that is shown: `pytest --shuffle SEED` runs it again.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
# It ends with whoever started it, however that ended.
SPIN = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


@dataclass(frozen=True)
class Run:
    """One run: its order, its time, and what became of each test."""

    seed: int
    seconds: float
    status: int
    outcomes: dict[str, str]

    @property
    def line(self) -> str:
        """One row of the table."""
        counts = Counter(self.outcomes.values())
        words = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        return f"--shuffle {self.seed:<6} {self.seconds:7.1f} s   {words or 'no results'}"


def outcomes(report: Path) -> dict[str, str]:
    """What became of each test, by a report in JUnit's format. Who failed and erred has failed."""
    if not report.exists():
        return {}
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        failed = kinds & {"failure", "error"} or found.get(name) == "failed"
        found[name] = "failed" if failed else "skipped" if kinds else "passed"
    return found


def differing(runs: list[Run]) -> dict[str, list[str]]:
    """The outcomes, run by run, of each test that failed or did not end the same way each time."""
    names = sorted({name for run in runs for name in run.outcomes})
    each = {name: [run.outcomes.get(name, "missing") for run in runs] for name in names}
    return {name: seen for name, seen in each.items() if set(seen) - {seen[0]} or "failed" in seen}


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes that compute without end; they are gone afterwards."""
    with ExitStack() as ending:
        for _ in range(count):
            loop = subprocess.Popen([sys.executable, "-c", SPIN])
            ending.callback(loop.wait)
            ending.callback(loop.kill)
        yield


def run_once(seed: int, arguments: list[str]) -> Run:
    """Run the suite in one random order; its output goes to ours."""
    with tempfile.TemporaryDirectory(prefix="repeat_") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "--shuffle", str(seed), f"--junitxml={report}"]
        start = time.monotonic()
        status = subprocess.run([*command, *arguments], cwd=ROOT, check=False).returncode
        return Run(seed, time.monotonic() - start, status, outcomes(report))


def say(line: str) -> None:
    """For whoever follows."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def summary(runs: list[Run]) -> int:
    """Show all runs and what differed; 1 if anything did, or failed."""
    say("\n" + "\n".join(run.line for run in runs))
    unlike = differing(runs)
    for name, seen in unlike.items():
        say(f"{' '.join(seen)}   {name}")
    bad = unlike or any(run.status or not run.outcomes for run in runs)
    say("Not the same each time, or failed." if bad else "The same each time, and nothing failed.")
    return 1 if bad else 0


def main(words: list[str]) -> int:
    """Entry point; what it does not know is for pytest."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--busy", type=int, default=0, help="so many loops keep cores busy")
    options, arguments = parser.parse_known_args(words)
    runs = []
    with busy_loops(options.busy):
        for seed in range(options.first_seed, options.first_seed + options.times):
            runs.append(run_once(seed, arguments))
            say(runs[-1].line)
    return summary(runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
