"""Draws the map of a mesh as nested frames."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from samestep.mesh.degrees import Degrees
from samestep.tooling.output import png_file

# From the outermost frame to the innermost; the model axis is a row of cells.
FRAMES = {"pipe": "#444444", "replicate": "#7a4fa3", "data": "#1f5fa8", "expert": "#c2571a"}
CELL, GAP, LABEL = 1.0, 0.22, 0.34
MOST_RANKS = 256
LOOK: Any = {"boxstyle": "round,pad=0,rounding_size=0.12", "linewidth": 1.3}


def draw(degrees: Degrees, hosts: Sequence[str] = ()) -> bytes:
    """Draw one frame per coordinate on each axis; returns a PNG."""
    if degrees.world > MOST_RANKS:
        raise ValueError(
            f"a picture can show at most {MOST_RANKS} ranks, and the mesh has "
            f"{degrees.world}: leave the picture out"
        )
    nested = [(axis, degrees.sizes[axis]) for axis in FRAMES if axis in degrees.axes]
    width, height = _size(nested, degrees.tp)
    scale = min(0.75, 24 / width, 24 / height)
    figure = Figure(figsize=(width * scale + 0.4, height * scale + 0.9), dpi=120)
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.96 - 0.6 / (height * scale + 0.9)))
    axes.set_xlim(-GAP, width + GAP)
    axes.set_ylim(height + GAP, -GAP)
    axes.set_axis_off()

    def frame(
        nested: Sequence[tuple[str, int]], place: dict[str, int], left: float, top: float
    ) -> None:
        if not nested:
            for model in range(degrees.tp):
                rank = degrees.rank(place | {"model": model})
                label = f"{rank}\n{hosts[rank][:10]}" if any(hosts) else str(rank)
                box = (left + model * CELL, top), CELL * 0.94, CELL * 0.94
                axes.add_patch(
                    FancyBboxPatch(*box, edgecolor="#2e7d32", facecolor="#e8f3e8", **LOOK)
                )
                x, y = left + (model + 0.47) * CELL, top + 0.47 * CELL
                axes.text(x, y, label, ha="center", va="center", fontsize=8 if any(hosts) else 10)
            return
        (axis, count), *inner = nested
        width, height = _size(inner, degrees.tp)
        for index in range(count):
            step = index * ((width if _beside(axis) else height + LABEL) + 3 * GAP)
            x, y = (left + step, top) if _beside(axis) else (left, top + step)
            box = (x, y), width + 2 * GAP, height + 2 * GAP + LABEL
            axes.add_patch(FancyBboxPatch(*box, edgecolor=FRAMES[axis], facecolor="none", **LOOK))
            axes.text(x + GAP / 2, y + LABEL, f"{axis} {index}", color=FRAMES[axis], fontsize=7)
            frame(inner, place | {axis: index}, x + GAP, y + GAP + LABEL)

    frame(nested, {}, 0.0, 0.0)
    figure.suptitle(degrees.name, fontweight="bold")
    return png_file(figure)


def _size(nested: Sequence[tuple[str, int]], tp: int) -> tuple[float, float]:
    """Width and height of nested frames."""
    if not nested:
        return tp * CELL, CELL
    (axis, count), *inner = nested
    width, height = _size(inner, tp)
    width, height = width + 2 * GAP, height + 2 * GAP + LABEL
    if _beside(axis):
        return count * width + (count - 1) * GAP, height
    return width, count * height + (count - 1) * GAP


def _beside(axis: str) -> bool:
    return axis in ("pipe", "expert")
