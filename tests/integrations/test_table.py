"""The page has the table of the rows that there are."""

from __future__ import annotations

from tests.integrations.table import BEGIN, END, PAGE, ROWS, cells


def test_the_page_has_all_rows_and_none_that_failed():
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[0] for row in rows] == [row.name for row in ROWS]
    assert all("NO" not in row for row in rows)
    assert all(row[3] == "yes" for row in rows)


def test_a_row_is_made_of_outcomes():
    row = next(row for row in ROWS if row.name == "torchtitan: FSDP2")
    resumed = "tests/integrations/test_torchtitan.py::test_a_resumed_run_is_the_run_without_a_break"
    clipped = "tests/integrations/test_torchtitan.py::test_two_ranks_go_on_as_one_does"
    assert cells(row, {}) == ["-"] * 5
    found = {f"{resumed}[1]": "passed", f"{resumed}[2]": "passed", clipped: "passed"}
    assert cells(row, found) == ["yes"] * 5
    assert cells(row, {**found, f"{resumed}[2]": "failed"}) == ["yes", "NO", "NO", "NO", "yes"]
    assert cells(row, {**found, clipped: "failed"})[4] == "NO"
    assert cells(row, {**found, f"{resumed}[2]": "skipped"}) == ["yes", "-", "-", "yes", "yes"]
