"""Stored pages of all commands: help and completion without importing torch.

`pages.json` beside the package's modules is written by `python -m tests.pages`, and a test holds
it against the commands themselves.
"""

import json
import re
import textwrap
from functools import cache
from importlib.resources import files
from typing import NamedTuple

# Of a package that is on no index yet.
INSTALL = 'pip install ".[cli]" in a checkout of the repository'


class Page(NamedTuple):
    """A command: a line, its help on 80 columns, and the values of each flag that has a list."""

    line: str
    help: str
    flags: dict[str, list[str]]


@cache
def stored_pages() -> dict[str, Page]:
    text = files("samestep").joinpath("pages.json").read_text(encoding="utf-8")
    return {name: Page(**page) for name, page in json.loads(text).items()}


def as_json(pages: dict[str, Page]) -> str:
    return json.dumps({name: page._asdict() for name, page in pages.items()}, indent=1) + "\n"


def broken_lines(text: str, width: int = 80) -> str:
    """With every line that is longer broken, and nothing at the ends of lines."""
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(line, width, subsequent_indent=indent) or [""]
    return "\n".join(lines) + "\n"


def flags_in(text: str) -> dict[str, list[str]]:
    """The flags in a help of unbroken lines, each with its values: `--backend {gloo,nccl}`."""
    found: dict[str, list[str]] = {}
    for flag, values in re.findall(r"(--[a-z][a-z0-9-]*)(?: \{([^}]*)\})?", text):
        choices = values.split(",") if values not in ("", "None") else []  # {None}|INT
        found[flag] = found.get(flag) or choices
    return dict(sorted(found.items()))
