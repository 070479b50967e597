"""What every rank does: both ways to update a parameter in turns, for every size in every round."""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.collectives import (
    exchange_segments,
    gather_segments,
    maximum,
    reduce_segments,
    total,
)
from samestep.comm.groups import RankGroup, rank_group
from samestep.groups.crossover import Measurement
from samestep.groups.distribution import Reduction
from samestep.plan.transfers import prefers_exchange
from samestep.rules import AdamWRule
from samestep.rules.state import initial_state
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
