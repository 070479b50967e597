"""Reports of a run: tables, bars and verdicts on the screen, a picture, and JSON on disk."""

import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from samestep.kernels.choice import missing_products
from samestep.lab.bench.gpu.measure import HOT, Ceilings, Shown, measure_ceilings
from samestep.lab.bench.gpu.options import SharedOptions, device_of, make_importable, revisions
from samestep.lab.common.provenance import versions
from samestep.tooling.output import check_folder, json_file, png_file, write_files

# The screen: with rich where it is installed, else plain text

WIDTH = 160  # of output that is no terminal: tables must not be folded


class Screen:
    """Output that is flushed at once, so that a log shows the progress of a run."""

    def __init__(self, progress_to: TextIO | None = None) -> None:
        self._begin = time.perf_counter()
        self._progress_to = progress_to  # None: where results go

    def say(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def wrote(self, files: Sequence[str], folder: Path) -> None:
        if not any(name.endswith(".png") for name in files):
            self.say("No picture: matplotlib is not installed.")
        self.say(f"Wrote {' and '.join(files)} to {folder}.")

    def progress(self, text: str) -> None:
        """Write one line that begins with the seconds since the start."""
        stream = self._progress_to or sys.stdout
        stream.write(f"[{time.perf_counter() - self._begin:6.1f} s] {text}\n")
        stream.flush()

    def table(
        self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1
    ) -> None:
        """Print a table; its first `texts` columns are aligned as texts, the others as numbers."""
        if find_spec("rich") is None:
            self.say("\n" + plain_table(title, columns, rows, texts))
            return
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=WIDTH)
        table = Table(title=escape(title))
        for number, column in enumerate(columns):
            justify: Any = "left" if number < texts else "right"
            table.add_column(column, justify=justify, overflow="fold")
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)


def plain_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1
) -> str:
    lines, said = [columns, *rows], [title]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = "<" * texts + ">" * (len(columns) - texts)
    for line in lines:
        cells = zip(line, sides, widths, strict=True)
        said.append("  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip())
    return "\n".join(said)


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def accuracy_cells(told: Mapping[str, Any]) -> list[str]:
    """Return table cells with each probe's singular values and distance, from a receipt."""
    cells = []
    for probe in (told["gaussian"], told["power_law"]):
        distance = probe["distance"]
        cells.append(f"{probe['low']:.3g}..{probe['high']:.3g}")
        cells.append("-" if distance is None else f"{distance:.2g}")
    return cells


class Verdict(NamedTuple):
    """A measured value beside the bar that it has to reach or stay below."""

    what: str
    value: float | None  # None: there is nothing to judge
    bar: float
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None if nothing was measured."""
        if self.value is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    def line(self) -> str:
        state = {True: "met", False: "NOT MET", None: "not measured"}[self.met]
        value = "" if self.value is None else f"{self.value:.3g}, "
        return f"{state:12} {self.what}: {value}bar {'>=' if self.at_least else '<='} {self.bar:g}"


# Bars as a picture, where matplotlib is installed


class Panel(NamedTuple):
    """One chart: a bar for each contestant that came through, and a line at the floor."""

    title: str
    results: Sequence[Shown]
    floor: float  # milliseconds


def draw(title: str, panels: Sequence[Panel]) -> bytes | None:
    """Draw the panels; return a PNG, or None without matplotlib."""
    if find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    shown = [[(r.contestant, r.ms) for r in p.results if r.ms is not None] for p in panels]
    height = 0.3 * max(map(len, shown)) + 1.0
    figure = Figure(figsize=(6.5 * columns, height * rows + 0.5), dpi=120, layout="constrained")
    figure.suptitle(title, fontweight="bold")
    for place, (panel, bars) in enumerate(zip(panels, shown, strict=True), start=1):
        axes = figure.add_subplot(rows, columns, place)
        names = [contestant.name for contestant, _ in bars]
        colors = ["#1f5fa8" if contestant.ours else "#c2571a" for contestant, _ in bars]
        drawn = axes.barh(names, [ms for _, ms in bars], color=colors)
        axes.bar_label(drawn, fmt=" {:.3g}", fontsize=8)
        axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.axvline(panel.floor, color="#444444", linestyle="dotted", linewidth=1.2)
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel("ms (median)", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return png_file(figure)


# The receipt

FORMAT = 1


def heading(
    kind: str, command: str, device: torch.device, ceilings: Ceilings, peer_paths: Sequence[Path]
) -> dict[str, Any]:
    return {
        "kind": kind,
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "versions": {
            **versions(),
            "cuda": torch.version.cuda,
            "triton": version("triton") if find_spec("triton") else None,
        },
        "device": describe(device),
        "kernels_missing": missing_products(device),
        "peers": revisions(peer_paths),
        "ceilings": {
            "tflops": ceilings.flops / 1e12,
            "tflops_when_hot": ceilings.hot_flops / 1e12,
            "terabytes_per_second": ceilings.bytes / 1e12,
        },
    }


def begin(
    kind: str, options: SharedOptions, screen: Screen
) -> tuple[torch.device, Ceilings, dict[str, Any]]:
    """Prepare a run; return its device, the device's ceilings, and the head of the receipt."""
    check_folder(options.out)
    make_importable(options.peer_path)
    device = device_of(options.device)
    ceilings = measure_ceilings(device)
    screen.progress(
        f"this device: {ceilings.flops / 1e12:.1f} TFLOP/s in a product, "
        f"{ceilings.hot_flops / 1e12:.1f} after {HOT:.0f} s of them, "
        f"{ceilings.bytes / 1e12:.2f} TB/s in a copy"
    )
    content = heading(kind, options.command, device, ceilings, options.peer_path)
    if content["kernels_missing"] is not None:
        screen.say(f"ours runs without kernels: {content['kernels_missing']}")
    return device, ceilings, content


def describe(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"type": "cpu", "name": platform.machine()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "memory": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": [properties.major, properties.minor],
    }


def leave(folder: Path, name: str, content: dict[str, Any], picture: bytes | None) -> list[str]:
    """Write the receipt and the picture to a folder; return the names of the files."""
    files = {f"{name}.json": json_file(content)}
    if picture is not None:
        files[f"{name}.png"] = picture
    write_files(folder, files)
    return list(files)
