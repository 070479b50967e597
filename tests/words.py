"""Words of README and documentation beside their budgets: python -m tests.words.

A word is what white space divides, as `wc -w` counts: code and bars of tables count too. Exits 1
where a budget is exceeded.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Budget(NamedTuple):
    """At most so many words in at most so many pages, which a pattern of the root names."""

    pattern: str
    words: int
    pages: int


BUDGETS = {
    "README": Budget("README.md", 1_200, 1),
    "pages for users": Budget("docs/*.md", 26_000, 20),
    "pages for developers": Budget("docs/dev/*.md", 15_000, 10),
}


def words(text: str) -> int:
    return len(text.split())


def counted(root: Path, budget: Budget) -> dict[str, int]:
    """Words by page."""
    pages = sorted(root.glob(budget.pattern))
    return {
        page.relative_to(root).as_posix(): words(page.read_text(encoding="utf-8")) for page in pages
    }


def exceeded(root: Path = ROOT) -> Iterator[str]:
    """Budgets that are exceeded, a sentence each."""
    for name, budget in BUDGETS.items():
        found = counted(root, budget)
        if sum(found.values()) > budget.words:
            yield f"{name}: {sum(found.values()):,} words; at most {budget.words:,}"
        if len(found) > budget.pages:
            yield f"{name}: {len(found)} pages; at most {budget.pages}"


def main() -> int:
    lines = []
    for name, budget in BUDGETS.items():
        found = counted(ROOT, budget)
        for page, number in sorted(found.items(), key=lambda item: item[1]):
            lines.append(f"{number:8,}  {page}")
        total = f"{sum(found.values()):,} of {budget.words:,}"
        lines += [f"{name}: {total} words, {len(found)} of {budget.pages} pages", ""]
    over = list(exceeded())
    sys.stdout.write("\n".join([*lines, *(over or ["within budget"]), ""]))
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
