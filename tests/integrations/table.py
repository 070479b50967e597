"""Which trainers work, with versions: runs the tests of integrations and writes what they found.

    python -m tests.integrations.table [--write]

`--write` puts the table into docs/integrations.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "integrations.md"
BEGIN, END = "<!-- table: make test-integrations -->", "<!-- end of the table -->"
RESUMED = "test_a_resumed_run_is_the_run_without_a_break"


class Row(NamedTuple):
    """A way to train, and the tests that show it.

    `%` is the number of ranks in their names; without it they are of two.
    """

    name: str
    packages: tuple[str, ...]
    tests: str  # a pattern


ROWS = (
    Row(
        "Hugging Face Trainer: DDP, accumulation, bf16",
        ("transformers", "accelerate"),
        rf"test_trainer\.py::{RESUMED}\[(one line|accumulation|bf16|no clipping|AdamW)-%\]",
    ),
    Row(
        "the same with state that ranks share (zero2)",
        ("transformers", "accelerate"),
        rf"test_trainer\.py::{RESUMED}\[zero2.*-%\]",
    ),
    Row(
        "the same with FSDP2",
        ("transformers", "accelerate"),
        r"test_trainer\.py::test_fsdp2\[.*\]",
    ),
    Row(
        "trl: SFTTrainer, peft_config", ("trl", "peft"), r"test_trl_and_peft\.py::test_trl\[.*-%\]"
    ),
    Row(
        "peft: LoRA, DoRA",
        ("peft", "transformers"),
        r"test_trl_and_peft\.py::test_adapters_in_the_trainer\[.*-%\]",
    ),
    Row(
        "accelerate: DDP, accumulation, bf16",
        ("accelerate",),
        rf"test_accelerate\.py::{RESUMED}\[(one line|accumulation|bf16)-%\]",
    ),
    Row(
        "the same with state that ranks share (zero2)",
        ("accelerate",),
        rf"test_accelerate\.py::{RESUMED}\[zero2-%\]",
    ),
    Row("the same with FSDP2", ("accelerate",), rf"test_accelerate\.py::{RESUMED}\[fsdp2.*-%\]"),
    Row(
        "Lightning: DDP, every sharding, accumulation, bf16-mixed with clipping",
        ("lightning",),
        rf"test_lightning\.py::{RESUMED}\[.*-%\]",
    ),
    Row(
        "Lightning: ModelParallelStrategy with FSDP2",
        ("lightning",),
        r"test_lightning\.py::test_a_model_that_is_sharded\[.*\]",
    ),
    Row(
        "DistributedDataParallel, every sharding",
        ("torch",),
        r"test_ddp\.py::test_a_run_that_goes_on_from_a_file_of_rank_0\[.*\]",
    ),
)


class Outcomes:
    """What became of each test; a plugin of pytest."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.found[report.nodeid] = report.outcome


def cell(row: Row, ranks: int, found: dict[str, str]) -> str:
    """Whether all tests passed ("yes") or one failed ("NO"); "-": none for so many ranks."""
    if "%" not in row.tests and ranks != 2:
        return "-"
    pattern = row.tests.replace("%", str(ranks)) + "$"
    results = {result for name, result in found.items() if re.search(pattern, name)}
    if "failed" in results:
        return "NO"
    return "yes" if "passed" in results else "-"


def packages(row: Row) -> str:
    try:
        return ", ".join(f"{name} {version(name).partition('+')[0]}" for name in row.packages)
    except PackageNotFoundError as error:
        return f"{error.name} is not installed"


def table(found: dict[str, str]) -> str:
    lines = ["| trainer | tried with | 1 rank | 2 ranks |", "|---|---|---|---|"]
    for row in ROWS:
        cells = [cell(row, ranks, found) for ranks in (1, 2)]
        lines.append(f"| {row.name} | {packages(row)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into docs/integrations.md")
    asked = parser.parse_args()
    outcomes = Outcomes()
    code = pytest.main(["-q", "--durations=0", str(HERE)], plugins=[outcomes])
    text = table(outcomes.found)
    sys.stdout.write(f"\n{text}\n")
    if asked.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main())
