"""Scaling of a plan: the same model on 8, 16, ... 4096 ranks, of which the data ranks grow."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from samestep.lab.common.numbers import duration, size
from samestep.lab.estimate.activations import Batch
from samestep.lab.estimate.choices import choices
from samestep.lab.estimate.cluster import Job
from samestep.lab.estimate.collectives import Launches
from samestep.lab.estimate.figures import sample_ranks
from samestep.lab.estimate.grid_plan import GridPlan
from samestep.lab.estimate.hardware import Hardware
from samestep.lab.estimate.memory import rank_memory
from samestep.lab.estimate.tables import Table
from samestep.lab.estimate.timeline import simulate
from samestep.lab.estimate.training import Training, training_of
from samestep.lab.estimate.work import owner_flops
from samestep.mesh.degrees import Degrees
from samestep.tooling.request import BadRequestError

RANKS = tuple(2**power for power in range(3, 13))
TOKENS = 4096  # of a rank, where nobody says how many


@dataclass(frozen=True)
class Point:
    """One number of ranks; times of the slowest stage, bytes of the worst.

    step, exposed: of the optimizer step alone, with gradients of all parameters at hand.
    iteration, iteration_exposed: forward, backward and step with as many tokens on every rank.
    strong: of an iteration with as many tokens in all as the fewest ranks have.
    sent, most_sent: bytes of the optimizer's collectives per rank: the mean, the busiest rank's.
    owners: FLOPs of Muon on the busiest rank over the mean; 0: no matrix follows it.
    without: ranks that own no block.
    peak: bytes of the worst rank in a step, activations apart.
    """

    ranks: int
    step: float
    exposed: float
    iteration: float
    iteration_exposed: float
    strong: float
    sent: float
    most_sent: float
    owners: float
    without: int
    peak: int
    buckets: int
    levels: int

    @property
    def sent_ratio(self) -> float:
        """The busiest rank's bytes over the mean."""
        return self.most_sent / self.sent if self.sent else 1.0


def numbers_of_ranks(degrees: Degrees, ranks: Sequence[int] = RANKS) -> list[int]:
    """The numbers of ranks that the axes beside data divide."""
    others = degrees.pp * degrees.replicate * degrees.ep * degrees.tp
    found = [number for number in ranks if number % others == 0]
    if not found:
        raise BadRequestError(
            f"--scaling plans at most {max(ranks):,} ranks, and the axes other than dp "
            f"have {others:,} already"
        )
    return found


def batch_of(job: Job) -> Batch:
    """The batch of a rank; by default as many micro-batches as a pipeline has stages."""
    stages, per_rank = job.degrees.pp, job.settings.stages_per_rank
    return job.batch or Batch(TOKENS // stages, stages, stages_per_rank=per_rank)


def points(job: Job) -> Iterator[Point]:
    """The plan on every number of ranks, one after the other."""
    numbers, batch = numbers_of_ranks(job.degrees, RANKS), batch_of(job)
    for ranks in numbers:
        divided = replace(batch, tokens=max(1, batch.tokens * numbers[0] // ranks))
        yield point(replace(job, degrees=replace(job.degrees, world=ranks), batch=batch), divided)


def point(job: Job, divided: Batch) -> Point:
    """One number of ranks; `divided`: a rank's batch where all ranks share one."""
    found, ranks = [], job.degrees.world
    for stage in job.stages():
        weak, strong = (training_of(each, stage) for each in (job, replace(job, batch=divided)))
        found.append(point_of(job.grid_plan(stage), job.hardware, ranks, weak, strong))
    slowest = max(found, key=lambda each: each.iteration)
    return replace(slowest, peak=max(each.peak for each in found))


def point_of(
    plan: GridPlan,
    hardware: Hardware,
    ranks: int,
    weak: Training | None,
    strong: Training | None,
) -> Point:
    """The plan of one stage, in two trainings."""
    step, same, less = (simulate(plan, hardware, training=each) for each in (None, weak, strong))
    sent = plan.grid.zeros()
    for each in Launches(plan).of_step():
        sent += each.spread(each.sent_by_all(), plan.grid)
    flops = torch.stack([owner_flops(each, plan.grid) for each in plan.placements]).sum(0)
    chosen = choices(plan, hardware, step.seconds)
    return Point(
        ranks,
        step.seconds,
        step.exposed_seconds,
        same.seconds,
        same.exposed_seconds,
        less.seconds,
        float(sent.mean()),
        float(sent.max()),
        float(flops.max() / flops.mean()) if bool(flops.any()) else 0.0,
        0 if chosen.owners is None else chosen.owners.without,
        max(rank_memory(plan, rank).peak for rank in sample_ranks(plan)),
        sum(each.buckets for each in chosen.buckets),
        max((each.levels for each in chosen.buckets), default=1),
    )


def table_of(found: Sequence[Point], batch: Batch) -> Table:
    first = found[0]
    rows = [
        [
            f"{p.ranks:,}", duration(p.step), duration(p.exposed), duration(p.iteration),
            f"{p.iteration_exposed / p.iteration:.0%}", size(p.sent), f"{p.sent_ratio:.2f}",
            f"{p.owners:.2f}", f"{p.without:,}", size(p.peak), f"{p.buckets} / {p.levels}",
            f"{first.iteration / p.iteration:.0%}",
            f"{first.strong * first.ranks / (p.strong * p.ranks):.0%}",
        ]
        for p in found
    ]  # fmt: skip
    return Table(
        "Scaling with data parallel ranks",
        "Step: the optimizer's alone. Iteration: with forward and backward of "
        f"{batch.all_tokens:,} tokens on every rank. Busiest: over the mean, in bytes sent and in "
        "FLOPs of owners. Strong: as many tokens in all as the fewest ranks have there. Weak and "
        "strong are efficiencies, against the fewest ranks.",
        [
            "ranks", "step", "exposed", "iteration", "exposed there", "sent", "busiest sent",
            "busiest owner", "own none", "peak", "buckets / levels", "weak", "strong",
        ],
        rows,
    )  # fmt: skip


def as_json(found: Sequence[Point]) -> list[dict[str, Any]]:
    return [{**asdict(each), "sent_ratio": each.sent_ratio} for each in found]
