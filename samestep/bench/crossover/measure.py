"""What every rank does: both ways in turns, for every size in every round."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.bench.crossover.ways import Way
from samestep.comm.collectives import maximum, total
from samestep.comm.groups import RankGroup, rank_group
from samestep.groups.crossover import Measurement
from samestep.groups.distribution import Reduction

WARMUP = 2  # rounds that are not counted: they connect, allocate and fill caches
STEPS_ELEMENTS = 1 << 18  # small parameters are stepped several times per measurement
MOST_STEPS = 5

Report = Callable[[int, int], None]  # rounds done, rounds in all


class Job(NamedTuple):
    """What to measure, the same on every rank."""

    sizes: tuple[int, ...]
    rounds: int
    reduction: Reduction
    backend: str


class Measured(NamedTuple):
    """What a rank found; only rank 0's is looked at."""

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
    pairs = [
        [Way(size, group, device, ordered=ordered, sharded=sharded) for sharded in (False, True)]
        for size in job.sizes
    ]
    times = torch.zeros(len(job.sizes), 2, job.rounds, dtype=torch.float64)
    for number in range(WARMUP + job.rounds):
        for index, pair in enumerate(pairs):
            # Neither way is always the one that comes second.
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                elapsed = _milliseconds(pair[which], job.sizes[index], control, device)
                if number >= WARMUP:
                    times[index, which, number - WARMUP] = elapsed
        report(number + 1, WARMUP + job.rounds)
    return times


def _milliseconds(way: Way, size: int, control: RankGroup, device: torch.device) -> float:
    steps = max(1, min(MOST_STEPS, STEPS_ELEMENTS // size))
    total("start", torch.zeros(1), control).wait()  # no rank begins before all are here
    start = time.perf_counter()
    for _ in range(steps):
        way.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start) / steps
