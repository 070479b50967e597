"""Statements of the documents, line by line: each has a state, and names what is there."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "tests" / "data" / "documents.md"
STATES = ("works", "differs", "left out", "open")
KEPT = ("tests/", "receipts/", "benchmarks/results/")


class Row(NamedTuple):
    """A statement. number: of the document and of the row in it."""

    number: tuple[int, int]
    statement: str
    state: str
    why: str

    @property
    def named(self) -> list[str]:
        """Tests and receipts."""
        return [name for name in re.findall(r"`([^`]+)`", self.why) if name.startswith(KEPT)]


def rows_of(text: str) -> list[Row]:
    found = []
    for line in text.splitlines():
        number = re.match(r"\| (\d+)\.(\d+) \|", line)
        if number:
            cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
            assert len(cells) == 4, line
            found.append(Row((int(number[1]), int(number[2])), *cells[1:]))
    return found


@cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def is_there(name: str) -> bool:
    """Whether `tests/file.py::function`, or a file or folder, exists."""
    path, _, function = name.partition("::")
    if not (ROOT / path).exists():
        return False
    return not function or function in functions_of(ROOT / path)


ROWS = rows_of(PAGE.read_text())


@pytest.mark.parametrize("state", STATES)
def test_every_row_has_a_state_and_what_belongs_to_it(state):
    assert {row.state for row in ROWS} <= set(STATES)
    for row in [row for row in ROWS if row.state == state]:
        words = re.sub(r"`[^`]*`", "", row.why).split()
        if state == "works":
            assert row.named, row
        else:
            assert len(words) >= 2, row


def test_every_test_and_receipt_is_there():
    assert [(row.number, name) for row in ROWS for name in row.named if not is_there(name)] == []


def test_what_is_not_there_would_be_seen():
    assert is_there("tests/test_documents.py::test_what_is_not_there_would_be_seen")
    assert not is_there("tests/test_documents.py::test_that_nobody_has_written")
    assert not is_there("tests/test_nothing.py")
    assert not is_there("receipts/soak_16/receipt.json")
    (row,) = rows_of("| 7.1 | it is so | works | as `tests/a.py::test_b` and `code` say |")
    assert row == ((7, 1), "it is so", "works", "as `tests/a.py::test_b` and `code` say")
    assert row.named == ["tests/a.py::test_b"]


def test_rows_are_numbered_and_no_statement_is_there_twice():
    for document in range(5):
        numbers = [row.number[1] for row in ROWS if row.number[0] == document]
        assert numbers == list(range(1, len(numbers) + 1)), document
    assert {row.number[0] for row in ROWS} == set(range(5))
    assert len({(row.number[0], row.statement) for row in ROWS}) == len(ROWS)


def test_the_page_counts_its_rows():
    counted = Counter((row.number[0], row.state) for row in ROWS)
    text = PAGE.read_text()
    for document in range(5):
        counts = [counted[document, state] for state in STATES]
        assert f"| {document} | {sum(counts)} | {' | '.join(map(str, counts))} |" in text
    counts = [sum(row.state == state for row in ROWS) for state in STATES]
    assert f"| all | {len(ROWS)} | {' | '.join(map(str, counts))} |" in text
