"""Tables of figures in pages: put there by the script that makes them, from its receipt."""

from collections.abc import Sequence
from pathlib import Path


def put_table(page: Path, lines: Sequence[str], after: str = "") -> None:
    """Write a table in the place of the one with the same first line.

    lines: The table, its header first.
    after: What stands above the table, where several have that header.
    """
    text = page.read_text()
    begin = text.index(lines[0], text.index(after))
    end = text.index("\n\n", begin)
    page.write_text(text[:begin] + "\n".join(lines) + text[end:])
