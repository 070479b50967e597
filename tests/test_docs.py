"""What pages name is there: files, links, modules that are run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FOLDERS = ("samestep", "benchmarks", "tests", "examples")
FILES = {
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
}
OF_USERS = {"file.py", "train.py", "yours.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page):
    text = page.read_text()
    named = set(re.findall(r"[\w./-]+\.py\b", text)) - OF_USERS
    missing = {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in FILES)}
    for module in re.findall(r"python -m ([\w.]+)", text):
        path = module.replace(".", "/")
        if path.startswith(FOLDERS) and not {f"{path}.py", f"{path}/__main__.py"} & FILES:
            missing.add(module)
    for link in re.findall(r"\]\(([^)#]+)", text):
        if "://" not in link and not (page.parent / link).exists():
            missing.add(link)
    assert missing == set()
