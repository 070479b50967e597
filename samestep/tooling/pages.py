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
    """The help of one command: in one line, on 80 columns, and the values of each flag."""

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
    """Break every line that is longer than `width`, and strip spaces at the ends of lines."""
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(line, width, subsequent_indent=indent) or [""]
    return "\n".join(lines) + "\n"


def flags_in(text: str) -> dict[str, list[str]]:
    """Return the flags in a help of unbroken lines, with values: `--backend {gloo,nccl}`.

    Flags in examples, which may be of other commands, and in the texts of options do not count.
    """
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        option = line.strip().partition("  ")[0]
        if not option.startswith("-"):
            continue
        for flag, values in re.findall(r"(--[a-z][a-z0-9-]*)(?: \{([^}]*)\})?", option):
            found[flag] = values.split(",") if values not in ("", "None") else []  # {None}|INT
    return dict(sorted(found.items()))
