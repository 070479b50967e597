"""A progress bar in the process that has the terminal, fed by the rank that knows."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Report = Callable[[int, int], None]  # done, in all


@contextmanager
def progress_bar(console: Console, what: str) -> Iterator[Report]:
    """Give a function that shows how far things are; the bar goes away at the end."""
    columns = (
        TextColumn(what),
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    progress = Progress(*columns, console=console, transient=True, refresh_per_second=4)
    task = progress.add_task(what, total=None)

    def report(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total)
        progress.start()  # not before the first report: ranks may have to be forked until then

    try:
        yield report
    finally:
        progress.stop()


@contextmanager
def from_other_processes(show: Report) -> Iterator[Report]:
    """Give a function that forked ranks may call: what they report is shown in this process.

    A rank that is killed then leaves no hidden cursor, and never waits for the terminal.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)

    def report(done: int, total: int) -> None:
        with suppress(BlockingIOError):
            os.write(write, f"{done} {total}\n".encode())

    def pump() -> None:
        with os.fdopen(read) as lines:
            for line in lines:
                done, total = line.split()
                show(int(done), int(total))

    reader = threading.Thread(target=pump, daemon=True)
    reader.start()
    try:
        yield report
    finally:
        os.close(write)
        reader.join(timeout=5.0)
