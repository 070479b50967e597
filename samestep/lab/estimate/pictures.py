"""Pictures of plans: timelines, memory by stage, and how plans scale with the number of ranks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from samestep.lab.estimate.cluster import Stage
from samestep.lab.estimate.figures import StageNeeds
from samestep.lab.estimate.scaling import Point
from samestep.lab.estimate.timeline import Span, Timeline
from samestep.tooling.output import png_file

COLOURS = {
    "forward": "#a9cbee", "backward": "#f2b872", "Transform": "#4f8fd0", "Update": "#4f8fd0",
    "Collect": "#9bd19b", "Apply": "#9bd19b", "wait": "#c8243b", "transfer": "#7b5ea7",
    "bubble": "#eeeeee", "other": "#bbbbbb",
}  # fmt: skip
LABELS = {
    "forward": "forward", "backward": "backward", "Update": "updates", "Collect": "elementwise",
    "wait": "waiting", "bubble": "bubble", "transfer": "on the link",
}  # fmt: skip
MEMORY = {
    "parameters": "#4f8fd0", "gradients_then": "#f2b872", "main_parameters": "#9bd19b",
    "state": "#2f7d4f", "buffers": "#7b5ea7", "temporaries": "#c9b6e4",
}  # fmt: skip
IN_MODEL = {"kept": "#8c8c8c", "passing": "#d0d0d0"}  # of activations
CURVES: dict[str, Callable[[Point], float]] = {
    "step, ms": lambda p: 1e3 * p.step,
    "exposed communication of it, ms": lambda p: 1e3 * p.exposed,
    "iteration, ms": lambda p: 1e3 * p.iteration,
    "bytes sent, busiest / mean": lambda p: p.sent_ratio,
    "owners' FLOPs, busiest / mean": lambda p: p.owners,
    "peak of the fullest rank, GB": lambda p: p.peak / 1e9,
}
PANELS = 3  # side by side


def gantt(timelines: Mapping[str, Timeline], title: str) -> bytes:
    """Draw a panel per timeline, on one time scale, with two rows per rank: host and link."""
    heights = [0.5 + 0.42 * max(len(t.shown), 1) for t in timelines.values()]
    figure = Figure(figsize=(11, 1.0 + sum(heights)))
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights)
    for ax, (name, timeline) in zip(axes.flat, timelines.items(), strict=True):
        ticks = []
        for row, (rank, shown) in enumerate(timeline.shown.items()):
            host = -2.2 * row
            ticks.append((host - 0.4, f"rank {rank}"))
            colours = [COLOURS.get(s.name.split()[0], COLOURS["other"]) for s in shown.operations]
            _bars(ax, host, shown.operations, colours, 0.8)
            waits = [COLOURS["bubble" if s.name == "stages" else "wait"] for s in shown.waits]
            _bars(ax, host, shown.waits, waits, 0.8)
            _bars(ax, host - 0.75, shown.transfers, [COLOURS["transfer"]], 0.5)
        about = f"{1e3 * timeline.seconds:.3g} ms, {1e3 * timeline.exposed_seconds:.3g} exposed"
        ax.set_title(f"{name}: {about}", loc="left", fontsize=10)
        ax.set_yticks([y for y, _ in ticks], [label for _, label in ticks], fontsize=8)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
    axes[-1, 0].set_xlabel("ms")
    handles = [Patch(color=COLOURS[kind], label=text) for kind, text in LABELS.items()]
    figure.legend(handles=handles, loc="lower center", ncol=len(handles), frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.tight_layout(rect=(0, 0.3 / (1.0 + sum(heights)), 1, 1))
    return png_file(figure, dpi=120)


def _bars(ax: Any, y: float, spans: Sequence[Span], colours: Sequence[str], height: float) -> None:
    places = [(1e3 * span.start, 1e3 * (span.end - span.start)) for span in spans]
    ax.broken_barh(places, (y - height / 2, height), facecolors=list(colours), linewidth=0)


def memory_bars(every: Mapping[Stage, StageNeeds], device_memory: int) -> bytes:
    """Draw the fullest rank's peak memory by sharding, against the device's memory.

    With activations each sharding has two bars: the step, and forward and backward below it.
    """
    moments: list[tuple[str, dict[str, float]]] = []
    for stage, needs in every.items():
        moments.append((stage, {part: getattr(needs.memory, part) for part in MEMORY}))
        if needs.activations is not None:
            besides = {part: getattr(needs.beside, part) for part in MEMORY}
            kept, passing = sum(needs.activations.kept.values()), needs.activations.passing
            moments.append((f"{stage}, model", {**besides, "kept": kept, "passing": passing}))
    figure = Figure(figsize=(8, 1.2 + 0.45 * len(moments)))
    ax = figure.subplots()
    for row, (_, parts) in enumerate(moments):
        left = 0.0
        for part, size in parts.items():
            width = size / 1e9
            ax.barh(-row, width, left=left, color={**MEMORY, **IN_MODEL}[part], height=0.7)
            left += width
        ax.text(left, -row, f" {left:.4g} GB", va="center", fontsize=8)
    ax.axvline(device_memory / 1e9, color="#c8243b", linestyle="--", linewidth=1)
    ax.set_yticks([-row for row in range(len(moments))], [name for name, _ in moments])
    counted = any(needs.activations is not None for needs in every.values())
    apart = "" if counted else ", activations not counted"
    ax.set_xlabel(f"GB of the fullest rank at its peak, simulated{apart} (dashed: the device)")
    ax.margins(x=0.12)
    ax.spines[["top", "right"]].set_visible(False)
    labels = {part: part.replace("_", " ") for part in MEMORY}
    if counted:
        labels |= {"kept": "activations", "passing": "of backward"}
    colours = {**MEMORY, **IN_MODEL}
    handles = [Patch(color=colours[part], label=label) for part, label in labels.items()]
    ax.legend(handles=handles, fontsize=7, ncol=4, loc="lower center", bbox_to_anchor=(0.5, 1.0),
              frameon=False)  # fmt: skip
    figure.tight_layout()
    return png_file(figure, dpi=120)


def scaling_picture(curves: Mapping[str, Sequence[Point]], title: str) -> bytes:
    """Draw quantities over the number of ranks, a panel each; both scales are logarithmic."""
    rows = -(-len(CURVES) // PANELS)
    figure = Figure(figsize=(4.2 * PANELS, 3.2 * rows))
    axes = figure.subplots(rows, PANELS, squeeze=False)
    ticks = sorted({point.ranks for points in curves.values() for point in points})
    for ax, (name, of_point) in zip(axes.flat, CURVES.items(), strict=True):
        for label, points in curves.items():
            drawn = [(p.ranks, of_point(p)) for p in points if of_point(p) > 0]
            ax.plot([x for x, _ in drawn], [y for _, y in drawn], marker="o", ms=3, label=label)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(ticks, [str(x) for x in ticks], fontsize=6)
        ax.set_title(name, fontsize=9, loc="left")
        ax.grid(alpha=0.3)
    for ax in axes[-1]:
        ax.set_xlabel("ranks", fontsize=8)
    if len(curves) > 1:
        axes.flat[0].legend(fontsize=7, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.tight_layout()
    return png_file(figure, dpi=120)
