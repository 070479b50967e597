"""`samestep bench crossover`: run the ranks, show the table, write the receipt and a picture."""

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from tyro.conf import arg

from samestep.bench.crossover.measure import Job, Measured, Report, measure
from samestep.bench.gpu.report import png_of
from samestep.groups.crossover import Measurement, receipt
from samestep.groups.distribution import Reduction
from samestep.launch import TorchrunRank, run_forked, torchrun_rank
from samestep.tooling.output import check_folder, write_files
from samestep.tooling.progress import from_other_processes, progress_bar
from samestep.tooling.ranks import nccl_devices, number_of_ranks
from samestep.tooling.request import BadRequestError
from samestep.version import __version__

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class Options:
    """Measure from which size on sharding a parameter is faster than updating all of it everywhere.

    Both ways take turns in the same rounds, with the collectives and the AdamW of the optimizer.
    The result is the number to give to an optimizer as `crossover`. Ranks are started here, or
    joined if torchrun has started them:

        torchrun --nproc-per-node 4 -m samestep bench crossover
    """

    world_size: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: 2, or torchrun's)")
    ] = None
    """Number of ranks."""
    backend: Annotated[
        Backend | None,
        arg(metavar="{gloo,nccl}", help_behavior_hint="(default: nccl if possible, else gloo)"),
    ] = None
    """What carries the data; nccl needs a CUDA device for every rank."""
    sizes: tuple[int, ...] = tuple(2**power for power in range(6, 21))
    """Elements of the parameters to measure."""
    rounds: int = 30
    """Measurements of each size and way; medians are compared."""
    reduction: Reduction = "fast"
    """As the optimizer's keyword: ordered adds in rank order."""
    out: Path = Path("out/crossover")
    """Folder for crossover.json and crossover.png; made if missing."""

    def job(self, torchrun: TorchrunRank | None) -> tuple[int, Job]:
        """The number of ranks and what they do; BadRequestError if that cannot run here."""
        ranks = number_of_ranks(self.world_size, torchrun, least=2)
        if not self.sizes:
            raise BadRequestError("--sizes needs at least one number of elements")
        for size in self.sizes:
            if size < 1:
                raise BadRequestError(f"--sizes must be at least 1, got {size}")
        if self.rounds < 1:
            raise BadRequestError(f"--rounds must be at least 1, got {self.rounds}")
        backend = self._backend(ranks if torchrun is None else torchrun.local_world_size)
        return ranks, Job(tuple(sorted(set(self.sizes))), self.rounds, self.reduction, backend)

    def _backend(self, ranks_here: int) -> Backend:
        devices = nccl_devices()
        if self.backend == "nccl" and devices < ranks_here:
            raise BadRequestError(
                f"--backend nccl needs a CUDA device per rank: there are {ranks_here} ranks and "
                f"{devices} devices here"
            )
        return self.backend or ("nccl" if devices >= ranks_here else "gloo")


def draw(measurements: Sequence[Measurement], crossover: int, conditions: str) -> bytes:
    """Milliseconds per step over the parameter's size, both logarithmic; a PNG."""
    sizes = [each.size for each in measurements]
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for label, color, values in (
        ("all-reduce, update all", "#c2571a", [each.all_reduce_ms for each in measurements]),
        ("shard, update a slice", "#1f5fa8", [each.shard_ms for each in measurements]),
    ):
        axes.plot(sizes, values, color=color, linewidth=2, marker="o", markersize=4, label=label)
    if crossover <= sizes[-1]:
        axes.axvline(crossover, color="#444444", linestyle="dotted", linewidth=1.2)
        right = crossover**2 > sizes[0] * sizes[-1]
        axes.annotate(
            f" crossover {crossover:,} ", (crossover, 0.02), xycoords=axes.get_xaxis_transform(),
            ha="right" if right else "left", color="#444444",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    # Plain numbers: powers need mathematical fonts, which not every installation has.
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.tick_params(axis="x", rotation=30)
    axes.set_xlabel("elements of the parameter")
    axes.set_ylabel("ms per step (median)")
    figure.suptitle("From which size is sharding faster?", fontweight="bold")
    axes.set_title(conditions, fontsize=9, color="#555555")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    return png_of(figure)


COLLECTIVE_TIMEOUT = 60.0  # seconds; ends every hang but one that all ranks share


def run(options: Options) -> None:
    """Do what the options ask; under torchrun only rank 0 shows and writes anything."""
    torchrun = torchrun_rank()
    ranks, job = options.job(torchrun)
    if torchrun is not None and torchrun.rank > 0:
        _measure_under_torchrun(job, torchrun, lambda done, total: None)
        return
    check_folder(options.out)
    console = Console(highlight=False)
    conditions = f"{ranks} {job.backend} ranks, {job.reduction} reduction, {job.rounds} rounds"
    console.print(f"{conditions}, {len(job.sizes)} sizes up to {job.sizes[-1]:,} elements")
    with progress_bar(console, "round") as show:
        if torchrun is not None:
            measured = _measure_under_torchrun(job, torchrun, show)
        else:
            measured = _measure_on_forked_ranks(job, ranks, show)
    asked = {**asdict(options), "sizes": list(options.sizes), "out": str(options.out)}
    content = receipt(asked, _ran(options, ranks, job, measured), measured.measurements)
    console.print(closing_table(measured.measurements, conditions))
    console.print(verdict_text(content["crossover"], job.sizes))
    files = {
        "crossover.json": json.dumps(content, indent=2).encode() + b"\n",
        "crossover.png": draw(measured.measurements, content["crossover"], conditions),
    }
    write_files(options.out, files)
    console.print(f"Wrote {' and '.join(files)} to {options.out}.", soft_wrap=True)


def closing_table(measurements: Sequence[Measurement], title: str) -> Table:
    table = Table(title=title)
    for column in ("elements", "all-reduce ms", "shard ms", "shard / all-reduce", "faster"):
        table.add_column(column, justify="right")
    for each in measurements:
        faster = "all-reduce" if each.shard_ms > each.all_reduce_ms else "shard"
        times = f"{each.all_reduce_ms:.3f}", f"{each.shard_ms:.3f}", f"{each.ratio:.2f}"
        table.add_row(f"{each.size:,}", *times, faster)
    return table


def verdict_text(crossover: int, sizes: Sequence[int]) -> str:
    if crossover > sizes[-1]:
        return f"Sharding is not faster up to {sizes[-1]:,} elements: crossover={crossover}"
    where = f"from {crossover:,} elements on"
    if crossover == sizes[0]:
        where = f"at every size from {crossover:,} elements, the smallest measured"
    return f"Sharding is at least as fast {where}: crossover={crossover}"


def _measure_on_forked_ranks(job: Job, ranks: int, show: Report) -> Measured:
    with from_other_processes(show) as report:
        values: list[Measured] = run_forked(
            ranks,
            lambda rank: measure(job, rank, report if rank == 0 else lambda done, total: None),
            timeout=math.inf,
            collective_timeout=COLLECTIVE_TIMEOUT,
        )
    return values[0]


def _measure_under_torchrun(job: Job, place: TorchrunRank, report: Report) -> Measured:
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT))
    try:
        return measure(job, place.local_rank, report)
    finally:
        dist.destroy_process_group()


def _ran(options: Options, ranks: int, job: Job, measured: Measured) -> dict[str, Any]:
    return {
        "requested_backend": options.backend,
        "actual_backend": job.backend,
        "world_size": ranks,
        "started_by": "samestep" if torchrun_rank() is None else "torchrun",
        "device": "cuda" if job.backend == "nccl" else "cpu",
        "device_name": measured.device_name,
        "threads_per_rank": measured.threads,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "versions": {
            "samestep": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
