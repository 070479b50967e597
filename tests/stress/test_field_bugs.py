"""The table of the field's bugs: every row has a link and a mutant; all are caught."""

import json
import re
from pathlib import Path

import pytest

from samestep.lab.stress.campaign import MutantRunner
from samestep.lab.stress.mutants import MUTANTS, field
from tests.limits import limit
from tests.soak import SOAK

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "prove.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "](https" in line]
NAMES = [re.findall(r"\| `(\w+)` \|$", row) for row in ROWS]
# Reported in 2025 and 2026, and asked for by users of samestep.
ASKED = {
    "DeepSpeed": (7807, 8090, 8438, 8439, 8441, 8443, 8463),
    "Megatron-LM": (6920,),
    "nanochat": (843,),
    "dion": (74,),
    "prime-rl": (3437,),
}


def test_every_row_has_a_link_and_a_mutant():
    assert len(ROWS) > 20
    for row, names in zip(ROWS, NAMES, strict=True):
        assert re.search(r"\[#\d+\]\(https://github\.com/[\w-]+/[\w-]+/(issues|pull)/\d+\)", row)
        assert [name for name in names if name in MUTANTS] == names
        assert len(names) == 1
    for label, number in re.findall(r"\[#(\d+)\]\(\S+/(\d+)\)", PAGE):
        assert label == number


def test_what_was_asked_for_is_there():
    for project, numbers in ASKED.items():
        for number in numbers:
            assert re.search(rf"github\.com/[\w-]+/{project}/(issues|pull)/{number}\)", PAGE)


def test_the_receipt_has_all_of_them_caught():
    found = json.loads((ROOT / "receipts" / "field_bugs" / "receipt.json").read_text())["mutants"]
    assert {each["name"] for each in found} == {name for (name,) in NAMES}
    assert all(each["caught"] for each in found)


def test_mutants_of_the_page_are_on_it():
    here = {name for name in MUTANTS if hasattr(field, name)}
    assert len(here) == 15
    assert here <= {name for (name,) in NAMES}


@pytest.mark.skipif(not SOAK, reason="make soak, or the commands of the page")
@pytest.mark.parametrize("name", sorted({name for (name,) in NAMES}))
def test_all_are_caught(name):
    result = MutantRunner(watchdog=limit(2.0)).run(MUTANTS[name])
    assert result.unpatched == "exact"
    assert result.caught, result.findings
