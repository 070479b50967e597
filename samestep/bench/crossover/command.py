"""`samestep bench crossover`: run the ranks, show the table, write the receipt."""

import json
import math
import os
import platform
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from samestep.bench.crossover.measure import Job, Measured, Report, measure
from samestep.bench.crossover.options import Options
from samestep.bench.crossover.picture import draw
from samestep.groups.crossover import Measurement, receipt
from samestep.launch import TorchrunRank, run_forked, torchrun_rank
from samestep.tooling.output import check_folder, write_files
from samestep.tooling.progress import from_other_processes, progress_bar
from samestep.version import __version__

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
    content = receipt(_asked(options), _ran(options, ranks, job, measured), measured.measurements)
    console.print(closing_table(measured.measurements, conditions))
    console.print(verdict_text(content["crossover"], job.sizes))
    files = {
        "crossover.json": json.dumps(content, indent=2).encode() + b"\n",
        "crossover.png": draw(measured.measurements, content["crossover"], conditions),
    }
    write_files(options.out, files)
    console.print(f"Wrote {' and '.join(files)} to {options.out}.", soft_wrap=True)


def closing_table(measurements: Sequence[Measurement], title: str) -> Table:
    """Both ways side by side."""
    table = Table(title=title)
    for column in ("elements", "all-reduce ms", "shard ms", "shard / all-reduce", "faster"):
        table.add_column(column, justify="right")
    for each in measurements:
        faster = "all-reduce" if each.shard_ms > each.all_reduce_ms else "shard"
        times = f"{each.all_reduce_ms:.3f}", f"{each.shard_ms:.3f}", f"{each.ratio:.2f}"
        table.add_row(f"{each.size:,}", *times, faster)
    return table


def verdict_text(crossover: int, sizes: Sequence[int]) -> str:
    """The verdict in words."""
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


def _asked(options: Options) -> dict[str, Any]:
    return {
        "world_size": options.world_size,
        "backend": options.backend,
        "sizes": list(options.sizes),
        "rounds": options.rounds,
        "reduction": options.reduction,
        "out": str(options.out),
    }


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
