"""Lines and tables on the screen: with rich where it is installed, else as plain text."""

import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TextIO

WIDTH = 160  # of output that is no terminal: tables must not be folded


class Screen:
    """Says things at once, so that a log shows how far a run is."""

    def __init__(self, progress_to: TextIO | None = None) -> None:
        self._begin = time.perf_counter()
        self._progress_to = progress_to  # None: where results go

    def say(self, text: str) -> None:
        """One line."""
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def progress(self, text: str) -> None:
        """One line with the seconds since the start."""
        stream = self._progress_to or sys.stdout
        stream.write(f"[{time.perf_counter() - self._begin:6.1f} s] {text}\n")
        stream.flush()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """The first column is text, the others numbers."""
        if find_spec("rich") is None:
            self.say("\n" + plain_table(title, columns, rows))
            return
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=WIDTH)
        table = Table(title=escape(title))
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width."""
    lines = [list(columns), *map(list, rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    texts = []
    for line in lines:
        cells = [
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        texts.append("  ".join(cells).rstrip())
    return "\n".join([title, *texts])


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def digits(value: float | None) -> str:
    """Two digits of a small number, or a dash where there is none."""
    return "-" if value is None else f"{value:.2g}"


def band(low: float, high: float) -> str:
    """Smallest and largest."""
    return f"{low:.3g}..{high:.3g}"
