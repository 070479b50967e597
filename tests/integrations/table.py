"""Which trainers work, with versions: runs the tests of integrations and writes what they found.

    python -m tests.integrations.table [--write] [FILE ...]

`--write` puts the table into docs/trainers.md, if every row was run. Given files are run alone:
of the others the table has what became of them before, which out/integrations.json keeps.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "trainers.md"
KEPT = HERE.parent.parent / "out" / "integrations.json"
BEGIN, END = "<!-- table: make test-integrations -->", "<!-- end of the table -->"
RESUMED = "test_a_resumed_run_is_the_run_without_a_break"
AS_ONE = "test_two_ranks_train_what_one_trains_with_all_data"


class Row(NamedTuple):
    """A way to train, and the tests that show it.

    tests: a pattern, with `%` for the number of ranks; without it they are of two. Each compares
        a resumed run with the run without a break.
    clipped: a pattern of tests that compare clipped gradients of two ranks with those of one, or
        refuse to clip what is clipped; None: the optimizer itself clips.
    compared: the tests compare parameters of all ranks.
    """

    name: str
    packages: tuple[str, ...]
    tests: str
    clipped: str | None
    compared: bool = True


ROWS = (
    Row(
        "Hugging Face Trainer: DDP, accumulation, bf16",
        ("transformers", "accelerate"),
        rf"test_trainer\.py::{RESUMED}\[(one line|accumulation|bf16|no clipping|AdamW)-%\]",
        rf"test_trainer\.py::({AS_ONE}|test_what_is_refused)",
    ),
    Row(
        "Trainer with state that ranks share (zero2)",
        ("transformers", "accelerate"),
        rf"test_trainer\.py::{RESUMED}\[zero2.*-%\]",
        rf"test_trainer\.py::({AS_ONE}|test_what_is_refused)",
    ),
    Row(
        "Trainer with FSDP2",
        ("transformers", "accelerate"),
        r"test_trainer\.py::test_fsdp2\[.*\]",
        r"test_trainer\.py::test_fsdp2\[.*\]",
    ),
    Row(
        "trl: SFTTrainer, peft_config",
        ("trl", "peft"),
        r"test_trl_and_peft\.py::test_trl\[.*-%\]",
        rf"test_trainer\.py::({AS_ONE}|test_what_is_refused)",
    ),
    Row(
        "peft: LoRA, DoRA",
        ("peft", "transformers"),
        r"test_trl_and_peft\.py::test_adapters_in_the_trainer\[.*-%\]",
        rf"test_trainer\.py::({AS_ONE}|test_what_is_refused)",
    ),
    Row(
        "accelerate: DDP, accumulation, bf16",
        ("accelerate",),
        rf"test_accelerate\.py::{RESUMED}\[(one line|accumulation|bf16)-%\]",
        rf"test_accelerate\.py::{AS_ONE}\[ddp\]",
    ),
    Row(
        "accelerate with state that ranks share (zero2)",
        ("accelerate",),
        rf"test_accelerate\.py::{RESUMED}\[zero2-%\]",
        rf"test_accelerate\.py::{AS_ONE}\[ddp\]",
    ),
    Row(
        "accelerate with FSDP2",
        ("accelerate",),
        rf"test_accelerate\.py::{RESUMED}\[fsdp2[^-]*-2\]",
        rf"test_accelerate\.py::{AS_ONE}\[fsdp2\]",
    ),
    Row(
        "Lightning: DDP, every sharding, accumulation, bf16-mixed with clipping",
        ("lightning",),
        rf"test_lightning\.py::{RESUMED}\[.*-%\]",
        rf"test_lightning\.py::{AS_ONE}",
    ),
    Row(
        "Lightning: ModelParallelStrategy with FSDP2",
        ("lightning",),
        r"test_lightning\.py::test_a_model_that_is_sharded\[.*\]",
        r"test_lightning\.py::test_a_model_that_is_sharded\[0\.5\]",
    ),
    Row(
        "DistributedDataParallel, every sharding",
        ("torch",),
        r"test_ddp\.py::test_a_run_that_goes_on_from_a_file_of_rank_0\[.*\]",
        r"test_ddp\.py::test_a_run_that_goes_on_from_a_file_of_rank_0\[.*\]",
    ),
    Row(
        "torchtitan: FSDP2",
        ("torchtitan",),
        rf"test_torchtitan\.py::{RESUMED}\[%\]",
        r"test_torchtitan\.py::(test_two_ranks_go_on_as_one_does|test_what_is_refused)",
    ),
    Row(
        "torchtitan: pipeline with two parts on each rank",
        ("torchtitan",),
        r"test_torchtitan\.py::test_a_pipeline_with_two_parts_on_each_rank",
        r"test_torchtitan\.py::(test_a_pipeline_with_two_parts_on_each_rank|test_what_is_refused)",
    ),
    Row(
        "Ray Train: two workers, one is killed",
        ("ray",),
        r"test_ray\.py::test_a_killed_worker",
        None,
        compared=False,
    ),
)


class Outcomes:
    """What became of each test; a plugin of pytest."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.found[report.nodeid] = report.outcome


def outcome(pattern: str, found: dict[str, str]) -> str:
    """Whether all tests of a pattern passed ("yes") or one failed ("NO"); "-": none was run."""
    results = {result for name, result in found.items() if re.search(f"{pattern}$", name)}
    if "failed" in results:
        return "NO"
    return "yes" if "passed" in results else "-"


def cells(row: Row, found: dict[str, str]) -> list[str]:
    """1 rank, 2 ranks, replicas equal, resume exact, clipped once."""
    both = "%" in row.tests
    alone = outcome(row.tests.replace("%", "1"), found) if both else "-"
    two = outcome(row.tests.replace("%", "2"), found)
    of_all = {alone, two} - {"-"}
    exact = "NO" if "NO" in of_all else "yes" if of_all else "-"
    clipped = "by the optimizer" if row.clipped is None else outcome(row.clipped, found)
    return [alone, two, two if row.compared else "-", exact, clipped]


def packages(row: Row) -> str:
    return ", ".join(map(_version, row.packages))


def _version(package: str) -> str:
    path = os.environ.get("TORCHTITAN_PATH")
    if package == "torchtitan" and path:
        asked = ["git", "-C", path, "show", "-s", "--format=%h of %cs", "--abbrev=10"]
        told = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
        return f"torchtitan {told or 'without commits'}"
    try:
        return f"{package} {version(package).partition('+')[0]}"
    except PackageNotFoundError:
        return f"{package} is not installed"


def table(found: dict[str, str]) -> str:
    titles = ["trainer", "tried with", "1 rank", "2 ranks", "replicas equal", "resume exact"]
    titles += ["clipped once"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in ROWS:
        lines.append(f"| {' | '.join([row.name, packages(row), *cells(row, found)])} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into docs/trainers.md")
    parser.add_argument("files", nargs="*", metavar="FILE", help="tests to run; all")
    asked = parser.parse_args()
    outcomes = Outcomes()
    if asked.files and KEPT.exists():
        kept = json.loads(KEPT.read_text())
        outcomes.found = {n: kept[n] for n in kept if n.split("::")[0] not in asked.files}
    code = pytest.main(["-q", "--durations=0", *(asked.files or [str(HERE)])], plugins=[outcomes])
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps(outcomes.found, indent=1))
    text = table(outcomes.found)
    sys.stdout.write(f"\n{text}\n")
    if asked.write:
        missing = [row.name for row in ROWS if cells(row, outcomes.found)[1] == "-"]
        if missing:
            sys.stdout.write(f"\n{PAGE.name} stays as it is: not run were {', '.join(missing)}\n")
        else:
            before, _, rest = PAGE.read_text().partition(BEGIN)
            PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main())
