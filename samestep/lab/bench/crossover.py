"""`samestep bench crossover`: from which size on is it faster to share a parameter's update?

Every rank updates parameters in both ways in turns, for every size in every round; then a table, a
receipt and a picture.
"""

import math
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor

from samestep.comm.collectives import (
    exchange_segments,
    gather_segments,
    maximum,
    reduce_segments,
    total,
)
from samestep.comm.groups import RankGroup, rank_group
from samestep.groups.crossover import Measurement, receipt
from samestep.groups.distribution import Reduction
from samestep.lab.bench.gpu.measure import in_rounds
from samestep.lab.bench.gpu.report import Screen, leave
from samestep.lab.common.provenance import versions
from samestep.launch import TorchrunRank, torchrun_rank
from samestep.launch.forked import nccl_devices, run_forked
from samestep.plan.transfers import prefers_exchange
from samestep.rules import AdamWRule
from samestep.rules.state import initial_state
from samestep.tooling.output import check_folder, png_file
from samestep.tooling.progress import Report, progress_bar
from samestep.tooling.request import BadRequestError, Flag, number_of_ranks
from samestep.update.plain import Operand, StepScalars, update_elementwise


class Way:
    """A parameter, its gradient, and AdamW's state of the part [start, stop) updated here."""

    def __init__(
        self, size: int, group: RankGroup, device: torch.device, *, ordered: bool, sharded: bool
    ) -> None:
        self.group, self.ordered, self.sharded = group, ordered, sharded
        values = torch.Generator().manual_seed(size)
        self.param = torch.randn(size, generator=values).to(device)
        self.grad = torch.randn(size, generator=values).to(device).mul_(1 + group.rank)
        bounds = [size * rank // group.size for rank in range(group.size + 1)]
        self.sizes = [stop - start for start, stop in pairwise(bounds)]
        self.own = self.param
        if sharded:
            self.own = self.param[bounds[group.rank] : bounds[group.rank + 1]]
        self.rule = AdamWRule()
        defaults = self.rule.defaults
        self.scalars = StepScalars().refill(0, device, self.rule.scalars(defaults))
        self.options = {key: defaults[key] for key in defaults.keys() - self.rule.schedulable}
        self.state = initial_state(self.rule, self.own, None, defaults, master_weights=False)

    @torch.no_grad()
    def step(self) -> None:
        """Reduce, update, and gather what the others have updated."""
        buffer = self.grad.clone()  # reductions may write into it, and the optimizer packs too
        if not self.sharded and not self.ordered:
            self._update(total("all-reduce", buffer, self.group).wait())
            return
        if prefers_exchange(on_cpu=buffer.device.type == "cpu", ordered=self.ordered):
            summed = exchange_segments("exchange", buffer, self.sizes, self.group).wait()
        else:
            summed = reduce_segments("reduce-scatter", buffer, self.sizes, self.group).wait()
        if not self.sharded:
            sums = gather_segments("sums", summed, self.sizes, self.group).wait()
            self._update(torch.cat(sums))
            return
        self._update(summed)
        gathered = gather_segments("all-gather", self.own, self.sizes, self.group).wait()
        for part, arrived in zip(torch.split(self.param, self.sizes), gathered, strict=True):
            part.copy_(arrived)

    def _update(self, summed: Tensor) -> None:
        mean = summed.div_(self.group.size)
        update_elementwise(
            self.rule, Operand(self.own, mean, self.state), self.scalars, self.options
        )


WARMUP = 2  # rounds that are not counted: they connect, allocate and fill caches
STEPS_ELEMENTS = 1 << 18  # small parameters are stepped several times per measurement
MOST_STEPS = 5


class Job(NamedTuple):
    """The sizes to measure, the same on every rank."""

    sizes: tuple[int, ...]
    rounds: int
    reduction: Reduction
    backend: str


class Measured(NamedTuple):
    """The findings of a rank; only rank 0's are looked at."""

    measurements: list[Measurement]
    device_name: str
    threads: int


def measure(job: Job, local_rank: int, report: Report) -> Measured:
    """Measure on this rank of the default process group, which must be gloo's."""
    control = rank_group()
    assert control is not None
    group, device = control, torch.device("cpu")
    if job.backend == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        measured = rank_group(dist.new_group(backend="nccl"))
        assert measured is not None
        group = measured
    times = _times(job, group, control, device, report)
    slowest = maximum("timings", times, control).wait()  # a step ends when the last rank's does
    medians = [[statistics.median(way) for way in size] for size in slowest.tolist()]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Measured(
        [Measurement(size, *ways) for size, ways in zip(job.sizes, medians, strict=True)],
        name,
        torch.get_num_threads(),
    )


def _times(
    job: Job, group: RankGroup, control: RankGroup, device: torch.device, report: Report
) -> Tensor:
    """Milliseconds per step: (sizes, ways, rounds)."""
    ordered = job.reduction == "ordered"

    def turn(_: int, way: Way, size: int) -> float:
        return _milliseconds(way, size, control, device)

    turns = {
        (size, sharded): partial(
            turn, way=Way(size, group, device, ordered=ordered, sharded=sharded), size=size
        )
        for size in job.sizes
        for sharded in (False, True)
    }
    in_all = WARMUP + job.rounds
    times = in_rounds(turns, job.rounds, warmup=WARMUP, tell=lambda done: report(done, in_all))
    ways = [[times[size, sharded] for sharded in (False, True)] for size in job.sizes]
    return torch.tensor(ways, dtype=torch.float64)


def _milliseconds(way: Way, size: int, control: RankGroup, device: torch.device) -> float:
    steps = max(1, min(MOST_STEPS, STEPS_ELEMENTS // size))
    total("start", torch.zeros(1), control).wait()  # no rank begins before all are here
    start = time.perf_counter()
    for _ in range(steps):
        way.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start) / steps


Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class Options:
    """Measure from which size on sharding a parameter is faster than an all-reduce of its gradient.

        samestep bench crossover
        torchrun --nproc-per-node 4 -m samestep bench crossover

    Smaller parameters are updated whole on every rank, larger ones in shards. The result is the
    value for the optimizer's keyword `crossover`. Ranks are started here, or joined if torchrun has
    started them.

    Exit status: 0, measured; 1, a rank failed; 2, refused, and the error says why.
    """

    SECTIONS: ClassVar[Mapping[str, str]] = {
        "world_size": "ranks",
        "sizes": "what is measured",
        "out": "the result",
    }

    world_size: Annotated[int | None, Flag("number of ranks", default="2, or torchrun's")] = None
    backend: Annotated[
        Backend | None,
        Flag(
            "backend of torch.distributed; nccl needs a CUDA device per rank",
            default="nccl if possible, else gloo",
        ),
    ] = None
    sizes: Annotated[tuple[int, ...], "numbers of elements of the parameters to measure"] = tuple(
        2**power for power in range(6, 21)
    )
    rounds: Annotated[int, "measurements of each size; medians are compared"] = 30
    reduction: Annotated[Reduction, "how gradients are summed, as the optimizer's keyword"] = "fast"
    out: Annotated[Path, "folder for crossover.json and crossover.png; made if missing"] = Path(
        "out/crossover"
    )

    def job(self, torchrun: TorchrunRank | None) -> tuple[int, Job]:
        """The number of ranks and what they do; BadRequestError if that cannot run here."""
        ranks = number_of_ranks(self.world_size, torchrun, least=2)
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
    return png_file(figure)


COLLECTIVE_TIMEOUT = 60.0  # seconds; ends every hang but one that all ranks share


def run(options: Options) -> None:
    """Do what the options ask; under torchrun only rank 0 shows and writes anything."""
    torchrun = torchrun_rank()
    ranks, job = options.job(torchrun)
    if torchrun is not None and torchrun.rank > 0:
        _measure_under_torchrun(job, torchrun, lambda done, total: None)
        return
    check_folder(options.out)
    screen = Screen()
    conditions = f"{ranks} {job.backend} ranks, {job.reduction} reduction, {job.rounds} rounds"
    screen.say(f"{conditions}, {len(job.sizes)} sizes up to {job.sizes[-1]:,} elements")
    with progress_bar("round") as report:
        if torchrun is not None:
            measured = _measure_under_torchrun(job, torchrun, report)
        else:
            measured = _measure_on_forked_ranks(job, ranks, report)
    asked = {**asdict(options), "sizes": list(options.sizes), "out": str(options.out)}
    content = receipt(asked, _ran(options, ranks, job, measured), measured.measurements)
    screen.table(conditions, COLUMNS, map(cells, measured.measurements), texts=0)
    screen.say(verdict_text(content["crossover"], job.sizes))
    picture = draw(measured.measurements, content["crossover"], conditions)
    screen.wrote(leave(options.out, "crossover", content, picture), options.out)


COLUMNS = ("elements", "all-reduce ms", "shard ms", "shard / all-reduce", "faster")


def cells(each: Measurement) -> list[str]:
    faster = "all-reduce" if each.shard_ms > each.all_reduce_ms else "shard"
    times = f"{each.all_reduce_ms:.3f}", f"{each.shard_ms:.3f}", f"{each.ratio:.2f}"
    return [f"{each.size:,}", *times, faster]


def verdict_text(crossover: int, sizes: Sequence[int]) -> str:
    if crossover > sizes[-1]:
        return f"Sharding is not faster up to {sizes[-1]:,} elements: crossover={crossover}"
    where = f"from {crossover:,} elements on"
    if crossover == sizes[0]:
        where = f"at every size from {crossover:,} elements, the smallest measured"
    return f"Sharding is at least as fast {where}: crossover={crossover}"


def _measure_on_forked_ranks(job: Job, ranks: int, report: Report) -> Measured:
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
        "versions": versions(),
    }
