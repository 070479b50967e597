"""The Python of users' pages runs, each page from its first line on with nothing given."""

from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.ranks import run_forked
from tests.test_docs import DOCS, run_page

# Pages that stand alone, and on how many ranks each is read.
PAGES = {
    "../README": 2,
    "start": 1,
    "qk_clip": 1,
    "rules": 1,
    "saving_memory": 1,
    "several_gpus": 2,
    "fsdp2": 4,
    "hybrid": 4,
    "options": 1,
    "plan": 1,
    "prove": 2,
    "checkpoints": 2,
    "coming_from": 1,
    "troubleshooting": 2,
}


def rank_of_a_page(rank: int, page: Path) -> list[tuple[str, str]]:
    """The ranks of a test have their process group: what a page makes is that one."""
    made = dict.fromkeys(("init_process_group", "destroy_process_group"), mock.DEFAULT)
    with mock.patch.multiple(dist, **made):
        return run_page(page)


@pytest.mark.parametrize(("page", "ranks"), PAGES.items())
def test_the_code_of_a_page_runs(page: str, ranks: int, tmp_path: Path, monkeypatch):
    """What a block prints, on rank 0, is what the block of text below it says."""
    monkeypatch.chdir(tmp_path)
    path = DOCS / f"{page}.md"
    assert "```python" in path.read_text()
    said = run_forked(ranks, rank_of_a_page, path)[0] if ranks > 1 else run_page(path)
    assert [printed for printed, _ in said] == [text for _, text in said]
