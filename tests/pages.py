"""Write samestep/pages.json, what commands say of themselves: python -m tests.pages."""

from pathlib import Path

import samestep
from samestep import cli
from samestep.tooling.pages import Page, as_json

STORED = Path(samestep.__file__).parent / "pages.json"


def pages() -> dict[str, Page]:
    return {name: cli.live_page(name) for name in cli.COMMANDS}


if __name__ == "__main__":
    STORED.write_text(as_json(pages()), encoding="utf-8")
