"""Pictures of plans: timelines, memory by stage, and how a model scales with the number of ranks.

Scaling is strong and weak, with owner balance and exposed communication.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from samestep.estimate.activations import Batch
from samestep.estimate.cluster import Settings, Stage, stage_blueprint
from samestep.estimate.figures import StageNeeds
from samestep.estimate.hardware import Hardware
from samestep.estimate.model import Model
from samestep.estimate.tables import Picture, Table
from samestep.estimate.timeline import Span, Timeline, simulate
from samestep.estimate.training import training_of
from samestep.estimate.work import balance
from samestep.mesh.degrees import Degrees
from samestep.stress.report.numbers import duration
from samestep.tooling.request import BadRequestError

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
CURVES = {
    "busiest owner / mean": {"balanced": "balance", "bound": "bound"},
    "seconds of a step": {"step": "step", "exposed": "exposed"},
    "seconds of an iteration": {"weak": "iteration_weak", "strong": "iteration_strong"},
}  # by panel and label, attributes of a `Point`
RANKS = (8, 64, 512, 4096)
SHARED_BY = 64  # ranks that share state; beyond, their groups are copies of each other
TOKENS = 4096  # of a rank on the fewest ranks


def gantt(timelines: Mapping[str, Timeline], title: str) -> bytes:
    """One panel per timeline, on one scale; two rows per rank: host and link."""
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
    return _png(figure)


def _bars(ax: Any, y: float, spans: Sequence[Span], colours: Sequence[str], height: float) -> None:
    places = [(1e3 * span.start, 1e3 * (span.end - span.start)) for span in spans]
    ax.broken_barh(places, (y - height / 2, height), facecolors=list(colours), linewidth=0)


def memory_bars(every: Mapping[Stage, StageNeeds], device_memory: int) -> bytes:
    """What the worst rank holds at its peak, per stage, against the device's memory.

    With activations there are two moments: below the step, that of forward and backward.
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
    apart = "" if counted else ", activations apart"
    ax.set_xlabel(f"GB of the worst rank at its peak{apart} (dashed: the device)")
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
    return _png(figure)


def _png(figure: Figure) -> bytes:
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=120)
    return target.getvalue()


@dataclass(frozen=True)
class Point:
    """One number of ranks."""

    ranks: int
    shared_by: int
    balance: float
    bound: float
    step: float
    exposed: float
    iteration_strong: float  # the batch is divided among all ranks
    iteration_weak: float  # every rank has as many tokens


def picture(points: Sequence[Point], title: str) -> bytes:
    """Lines over the number of ranks, a panel per quantity."""
    figure = Figure(figsize=(4.2 * len(CURVES), 3.4))
    axes = figure.subplots(1, len(CURVES), squeeze=False)
    xs = [p.ranks for p in points]
    for ax, (name, lines) in zip(axes.flat, CURVES.items(), strict=True):
        for label, of_point in lines.items():
            ys = [max(getattr(p, of_point), 1e-9) for p in points]  # a logarithm has no zero
            ax.plot(xs, ys, marker="o", label=label)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(xs, [f"{x:,}" for x in xs], fontsize=7)
        ax.set_title(name, fontsize=9, loc="left")
        ax.set_xlabel("ranks")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.tight_layout()
    return _png(figure)


def scaling(
    model: Model, settings: Settings, hardware: Hardware, tokens: int
) -> tuple[list[dict[str, Any]], Table]:
    """The curves, as numbers and as a table with a picture; no tokens: as many as are usual.

    Of data parallel alone, whatever mesh was asked for.
    """
    tokens = tokens or TOKENS
    points = [point(model, settings, hardware, ranks, tokens) for ranks in RANKS]
    rows = [
        [
            f"{p.ranks:,}", f"{p.shared_by:,}", f"{p.balance:.2f}", f"{p.bound:.2f}",
            duration(p.step), duration(p.exposed),
            f"{points[0].iteration_weak / p.iteration_weak:.0%}",
            f"{points[0].iteration_strong * RANKS[0] / (p.iteration_strong * p.ranks):.0%}",
        ]
        for p in points
    ]  # fmt: skip
    table = Table(
        "Scaling with data parallel ranks",
        f"Weak: {tokens:,} tokens on every rank. Strong: as many tokens in all as {RANKS[0]} ranks "
        "have there. Efficiency against the fewest ranks.",
        ["ranks", "share state", "balance", "bound", "step", "exposed", "weak", "strong"],
        rows,
        [Picture.of("scaling", picture(points, model.name))],
    )
    return [vars(p) for p in points], table


def point(model: Model, settings: Settings, hardware: Hardware, ranks: int, tokens: int) -> Point:
    """Groups of at most `SHARED_BY` ranks share state; zero3 shards inside, and copies outside."""
    copies = max(1, ranks // SHARED_BY)
    degrees = Degrees(ranks, replicate=copies)
    plan = stage_blueprint(model, degrees, settings, hardware, 0)
    spread = next(filter(None, map(balance, plan.placements)), None)
    if spread is None:
        raise BadRequestError("--scaling is about Muon's owners, and no matrix follows Muon here")
    step = simulate(plan, hardware)
    share = max(1, tokens * RANKS[0] // ranks)
    strong, weak = (
        simulate(
            plan, hardware, training=training_of(Batch(each), model, degrees, settings, hardware)
        )
        for each in (share, tokens)
    )
    return Point(
        ranks,
        ranks // copies,
        spread.ratio,
        spread.bound,
        step.seconds,
        step.exposed_seconds,
        strong.seconds,
        weak.seconds,
    )
