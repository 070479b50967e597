"""Writes what is made of code and receipts: python -m tests.pages.

samestep/pages.json has what commands say of themselves; pages have tables of receipts.
"""

from pathlib import Path

import samestep
from samestep import cli
from samestep.tooling.pages import Page, as_json
from tests import tables

STORED = Path(samestep.__file__).parent / "pages.json"


def pages() -> dict[str, Page]:
    return {name: cli.live_page(name) for name in cli.COMMANDS}


if __name__ == "__main__":
    STORED.write_text(as_json(pages()), encoding="utf-8")
    tables.write()
