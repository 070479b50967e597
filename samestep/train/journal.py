"""The journal of a run: log.jsonl, progress on the terminal, loss.png."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

from samestep.tooling.output import png_file, write_files

LOG = "log.jsonl"
PICTURE = "loss.png"
Row = dict[str, Any]


class Journal:
    """The log of a run, one JSON object per line; only rank 0 keeps one.

    Rows with `loss` are training steps, rows with `val_loss` validations, rows with `event` starts
    and saves, for example. `step` is the number of steps done.
    """

    def __init__(self, folder: Path, active: bool) -> None:
        self._folder = folder
        self._active = active

    def rows(self) -> list[Row]:
        """Return all rows so far, without the incomplete line of a process that was killed."""
        path = self._folder / LOG
        found = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    def go_back_to(self, step: int) -> None:
        """Remove the rows after a step, which the run will do again."""
        if self._active:
            kept = [_line(row) for row in self.rows() if row["step"] <= step]
            write_files(self._folder, {LOG: "".join(kept).encode()})

    def add(self, *rows: Row) -> None:
        if self._active:
            with (self._folder / LOG).open("a") as log:
                log.writelines(map(_line, rows))

    def draw(self) -> bool:
        """Draw the losses so far; return False without losses or matplotlib, or off rank 0."""
        if not self._active or find_spec("matplotlib") is None:
            return False
        rows = self.rows()
        if not any(row.get("loss") is not None for row in rows):
            return False
        write_files(self._folder, {PICTURE: picture(rows)})
        return True


def _line(row: Row) -> str:
    """Return a row as a line of JSON: NaN and infinity become null, paths strings."""
    plain = {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in row.items()}
    return json.dumps(plain, default=str) + "\n"


def picture(rows: list[Row]) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=140, layout="constrained")
    axes = figure.add_subplot()
    curves: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("loss", "training", {"linewidth": 1.0, "alpha": 0.6, "color": "#1f5fa8"}),
        ("val_loss", "validation", {"marker": "o", "markersize": 4, "color": "#c2571a"}),
    )
    for key, label, style in curves:
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    for row in rows:
        if row.get("event") == "resumed":
            axes.axvline(row["step"], color="#888888", linestyle="dotted", linewidth=1.0)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return png_file(figure)


class Display:
    """The progress of a run: a bar if there are a terminal and rich, else lines."""

    def __init__(self, speaks: bool, progress: Any = None, task: Any = None) -> None:
        self._speaks = speaks
        self._progress = progress
        self._task = task

    def show(self, step: int, steps: int, text: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=step, total=steps, text=text)
        elif self._speaks:
            self.say(f"step {step}/{steps}  {text}")

    def say_on_every_rank(self, text: str) -> None:
        """Write a line of this rank, even if only rank 0 writes others."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        elif self._speaks:
            self.say_on_every_rank(text)


@contextmanager
def display(speaks: bool) -> Iterator[Display]:
    """Yield a display of progress, which is taken down at the end."""
    if not (speaks and sys.stdout.isatty() and find_spec("rich")):
        yield Display(speaks)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    columns = TextColumn("step"), MofNCompleteColumn(), BarColumn()
    with Progress(*columns, TextColumn("{task.fields[text]}"), Left()) as progress:
        yield Display(speaks, progress, progress.add_task("train", total=None, text=""))
