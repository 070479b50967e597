"""Bars as a picture, where matplotlib is installed."""

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple


class Bar(NamedTuple):
    """One contestant."""

    label: str
    value: float
    ours: bool


class Panel(NamedTuple):
    """Contestants side by side."""

    title: str
    bars: Sequence[Bar]
    floor: float | None = None


def draw(title: str, panels: Sequence[Panel], unit: str) -> bytes | None:
    """A PNG; None without matplotlib."""
    if find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    height = 0.3 * max(len(panel.bars) for panel in panels) + 1.0
    figure = Figure(figsize=(6.5 * columns, height * rows + 0.5), dpi=120, layout="constrained")
    figure.suptitle(title, fontweight="bold")
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        labels = [bar.label for bar in panel.bars]
        colors = ["#1f5fa8" if bar.ours else "#c2571a" for bar in panel.bars]
        drawn = axes.barh(labels, [bar.value for bar in panel.bars], color=colors)
        axes.bar_label(drawn, fmt=" {:.3g}", fontsize=8)
        axes.margins(x=0.12)
        axes.invert_yaxis()
        if panel.floor is not None:
            axes.axvline(panel.floor, color="#444444", linestyle="dotted", linewidth=1.2)
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel(unit, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()
