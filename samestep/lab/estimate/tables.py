"""The tables of a plan, for the screen and the page."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table as ScreenTable

from samestep.lab.common.numbers import duration, size
from samestep.lab.estimate.activations import Batch
from samestep.lab.estimate.cluster import Stage
from samestep.lab.estimate.figures import StageFigures, StageNeeds


@dataclass(frozen=True)
class Table:
    """A table of text; `prose`: cells are no numbers; `pictures`: alt texts and base64 PNGs."""

    title: str
    about: str
    columns: list[str]
    rows: list[list[str]]
    pictures: list[tuple[str, str]] = field(default_factory=list)
    prose: bool = False

    def show(self, alt: str, png: bytes) -> None:
        """Add a PNG picture, which the page shows below the table."""
        self.pictures.append((alt, base64.b64encode(png).decode()))

    def on_screen(self) -> ScreenTable:
        table = ScreenTable(
            title=self.title, box=SIMPLE_HEAD, title_justify="left", show_edge=False
        )
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number and not self.prose else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


# The operations of a step, by the names of their classes in the plan.
OPERATIONS = {
    "Reduce": "Reduce: sum gradients over ranks",
    "Agree": "Agree: wait for backward, exchange which gradients exist",
    "Average": "Average: divide summed gradients",
    "Clip": "Clip: norm and finite check of gradients",
    "Update": "Update: the rules, Muon and AdamW",
    "Gather": "Gather: send updated parameters",
    "Place": "Place: copy what arrived into parameters",
    "Collect": "Collect: bring blocks to the ranks that own them",
    "Transform": "Transform: orthogonalize blocks",
    "GiveBack": "GiveBack: send orthogonalized blocks back",
    "Sum": "Sum: add up parts of tensors over ranks",
    "Apply": "Apply: write updates into shards",
    "Fetch": "Fetch: state from the host",
    "Return": "Return: state to the host",
    "Measure": "Measure: sizes of updates for metrics",
}


def memory_table(stages: list[StageFigures], ranks: int) -> Table:
    offloaded = any(each.memory.on_host for each in stages)
    rows = []
    for each in stages:
        memory = each.memory
        kept = [memory.main_parameters, memory.state]
        cells = [
            memory.parameters, memory.gradients,
            *([memory.on_host, memory.staging] if offloaded else kept),
            memory.buffers, memory.temporaries, memory.peak,
        ]  # fmt: skip
        rows.append([f"{each.stage}: {each.worst_rank} of {ranks}", *map(size, cells)])
    return Table(
        "Memory of the fullest rank",
        "In a step of the optimizer: gradients when backward is over; buffers (with zero3 units "
        "that FSDP2 has gathered) and temporaries when most is alive. Between steps ranks keep "
        + ", ".join(f"{size(s.least_kept)} to {size(s.most_kept)}" for s in stages[:1])
        + " (first stage).",
        [
            "stage: rank",
            "params",
            "grads",
            *(["on host", "staging"] if offloaded else ["main", "state"]),
            "buffers",
            "temps",
            "peak",
        ],
        rows,
    )


def activations_table(stages: list[StageFigures]) -> Table:
    """Return the table of activations, a column per stage; no rows if they are unknown."""
    known = [(each, each.activations) for each in stages if each.activations is not None]
    parts = dict.fromkeys(name for _, found in known for name in found.kept)
    rows = [["micro-batches in flight", *(str(found.in_flight) for _, found in known)]]
    for name in parts:
        kept = (size(found.kept[name]) if name in found.kept else "-" for _, found in known)
        rows.append([f"kept: {name}", *kept])
    rows.append(["added in backward", *(size(found.passing) for _, found in known)])
    rows.append(["other than activations", *(size(each.beside.peak) for each, _ in known)])
    rows.append(["peak", *(size(each.model_peak) for each, _ in known)])
    return Table(
        "Activations of the fullest rank",
        "In forward and backward: what forward keeps when most micro-batches wait for their "
        "backward pass; what the costliest moment of backward adds; and all else: "
        "parameters, state, gradients of other micro-batches, units that FSDP2 has gathered.",
        ["", *(f"stage {each.stage}" for each, _ in known)],
        rows if known else [],
    )


def traffic_table(figures: StageFigures, stages: int) -> Table:
    rows = [
        [
            f"{each.axes} ({each.ranks})", each.kind, each.by, f"{each.collectives:,}",
            size(each.mean_sent), size(each.most_sent),
        ]
        for each in figures.traffic
    ]  # fmt: skip
    return Table(
        "Traffic of a step" + (f" of stage {figures.stage}" if stages > 1 else ""),
        "Bytes that a rank must send at least: the mean over ranks, and the busiest rank. What "
        "layers and stages send each other while tp, ep or pp cut the model is in it if tokens "
        "were given; experts that take all who come are counted as if chosen equally often.",
        ["axes (ranks)", "kind", "by", "collectives", "mean", "busiest"],
        rows,
    )


def owner_table(figures: StageFigures) -> Table:
    rows = [
        [
            f"{each.axes} ({each.ranks})", f"{each.blocks:,}", f"{each.flops / 1e12:,.4g}",
            f"{each.ratio:.2f}", f"{each.bound:.2f}",
        ]
        for each in figures.owners
    ]  # fmt: skip
    return Table(
        "Owners of Muon's blocks",
        "An owner is the rank that orthogonalizes a block (a matrix) for all. The work of the "
        "busiest rank over the mean; no assignment of whole blocks can be below the bound.",
        ["axes (ranks)", "blocks", "TFLOP", "busiest / mean", "bound"],
        rows,
    )


def choices_table(figures: StageFigures) -> Table:
    return Table(
        "What the plan chose",
        "Choices for the ranks and links of this hardware, with their reasons.",
        ["", "chosen"],
        [list(line) for line in figures.choices.lines()],
        prose=True,
    )


def time_table(figures: StageFigures, batch: Batch | None) -> Table:
    """Return the times of operations on the slowest rank; with a batch, of a whole iteration."""
    rows = [
        [OPERATIONS.get(name, name), duration(seconds)]
        for name, seconds in figures.parts.items()
        if seconds > 0
    ]
    rows.append(["all", duration(figures.step_seconds)])
    rows.append(
        ["mean over ranks: communication that nothing hides", duration(figures.exposed_seconds)]
    )
    rows.append(["mean over ranks: waiting for other ranks", duration(figures.idle_seconds)])
    return Table(
        f"Simulated time of {'an iteration' if batch else 'the optimizer step'}, slowest rank",
        "Operations of the schedule, each with the time that it waits for others. Layers: what "
        "layers send each other. Bubble: a pipeline stage waits for another one.",
        ["operation", "time"],
        rows,
    )


def stages_table(every: Mapping[Stage, StageNeeds], device_memory: int) -> Table:
    rows = [
        [stage, size(needs.peak), f"{needs.peak / device_memory:.0%}", size(needs.sent)]
        for stage, needs in every.items()
    ]
    return Table(
        "Every sharding",
        "Peak memory of the fullest rank, and the mean of the bytes that a rank sends per step.",
        ["sharding", "peak", "of the device", "sent per rank"],
        rows,
    )


def tiles(plan: Mapping[str, Any], figures: StageFigures) -> list[tuple[str, str]]:
    return [
        ("parameters", f"{plan['model']['parameters'] / 1e9:,.4g} B"),
        ("ranks", f"{plan['mesh']['ranks']:,}"),
        ("peak of the fullest rank", size(figures.peak)),
        ("iteration" if plan["tokens"] else "optimizer step", duration(figures.step_seconds)),
        ("exposed communication", duration(figures.exposed_seconds)),
        *([("bubble", f"{plan['bubble']:.0%}")] if plan["bubble"] else []),
    ]
