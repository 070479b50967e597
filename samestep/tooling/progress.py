"""A progress bar in the process that has the terminal, fed by the rank that knows."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Report = Callable[[int, int], None]  # done, in all


@contextmanager
def progress_bar(what: str) -> Iterator[Report]:
    """Yield a function that reports progress; the bar disappears at the end.

    Forked ranks may call it, and all is shown in this process: a rank that is killed then leaves no
    hidden cursor, and never waits for the terminal.
    """
    columns = TextColumn(what), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn()
    progress = Progress(*columns, TextColumn("left"), transient=True, refresh_per_second=4)
    task = progress.add_task(what, total=None)
    read, write = os.pipe()
    os.set_blocking(write, False)

    def report(done: int, total: int) -> None:
        with suppress(BlockingIOError):
            os.write(write, f"{done} {total}\n".encode())

    def show() -> None:
        with os.fdopen(read) as lines:
            for line in lines:
                done, total = map(int, line.split())
                progress.update(task, completed=done, total=total)
                progress.start()  # not before the first report: ranks have to be forked until then

    reader = threading.Thread(target=show, daemon=True)
    reader.start()
    try:
        yield report
    finally:
        os.close(write)
        reader.join(timeout=5.0)
        progress.stop()
