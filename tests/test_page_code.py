"""The Python of users' pages runs, each page from its first line on with nothing given."""

from pathlib import Path

import pytest

from tests.ranks import run_forked
from tests.test_docs import DOCS, run_page

# Pages that stand alone, and on how many ranks each is read.
PAGES = {"options": 1, "troubleshooting": 2}


@pytest.mark.parametrize(("page", "ranks"), PAGES.items())
def test_the_code_of_a_page_runs(page: str, ranks: int, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_forked(ranks, lambda rank: len(run_page(DOCS / f"{page}.md")))
