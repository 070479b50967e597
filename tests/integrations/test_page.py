"""The Python of docs/trainers.md runs as it stands, with the packages that it is about."""

import pytest

from tests.ranks import run_forked
from tests.test_docs import DOCS, run_page

for package in ("transformers", "accelerate", "lightning"):
    pytest.importorskip(package, reason="make test-integrations installs it")


@pytest.mark.filterwarnings("ignore")  # theirs
def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_forked(1, lambda rank: len(run_page(DOCS / "trainers.md")))
