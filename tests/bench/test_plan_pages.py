"""Tables of docs/plan.md are those of their receipts, and receipts are what plans say today."""

import json
from pathlib import Path

import pytest

from benchmarks.pages import put_table
from benchmarks.plan_tables import RECEIPT, TABLES
from benchmarks.scaling import tables_of
from tests.soak import SOAK

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MEASURED = "scale"  # seconds and memory of one run
QUICK = ("muon", "timelines", "parallel_muon")
SCALING = json.loads((RESULTS / "scaling.json").read_text())


def receipt():
    return json.loads((RESULTS / RECEIPT).read_text())["tables"]


def page():
    return (ROOT / "docs" / "plan.md").read_text()


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_the_tables_of_the_receipt(name):
    lines = receipt()[name]
    assert len(lines) > 3
    assert "\n\n" + "\n".join(lines) + "\n\n" in page(), (
        f"python -m benchmarks.plan_tables --only {name} --out benchmarks/results "
        "--page docs/plan.md"
    )


@pytest.mark.parametrize("name", [n for n in TABLES if (SOAK and n != MEASURED) or n in QUICK])
def test_the_receipt_is_what_plans_say(name):
    assert list(TABLES[name]()) == receipt()[name], (
        f"python -m benchmarks.plan_tables --only {name} --out benchmarks/results "
        "--page docs/plan.md"
    )


@pytest.mark.parametrize(("above", "lines"), [*tables_of(SCALING)], ids=SCALING["models"])
def test_the_page_has_the_tables_of_scaling(above, lines):
    assert f"\n{above}\n\n" + "\n".join(lines) + "\n\n" in page(), (
        "python -m benchmarks.scaling --out benchmarks/results --page docs/plan.md"
    )


def test_a_table_is_put_in_the_place_of_that_with_its_header(tmp_path):
    path, head = tmp_path / "page.md", "| a | b |\n|---|---|\n"
    path.write_text(f"one:\n\n{head}| 1 | 2 |\n\ntwo:\n\n{head}\nend\n")
    put_table(path, [*head.splitlines(), "| 3 | 4 |"], "\ntwo:\n")
    assert path.read_text() == f"one:\n\n{head}| 1 | 2 |\n\ntwo:\n\n{head}| 3 | 4 |\n\nend\n"
