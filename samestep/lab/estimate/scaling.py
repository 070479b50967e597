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
    """The figures of one number of ranks, of the slowest stage; `peak` is that of the fullest.

    step, exposed: seconds of the optimizer step alone, when all gradients exist.
    iteration, iteration_exposed: seconds of forward, backward and step, weak scaling: the tokens
        of a rank stay the same.
    strong: seconds of an iteration with strong scaling: the tokens of all ranks stay the same.
    sent, most_sent: bytes of the optimizer's collectives per rank: the mean, the busiest rank's.
    owners: FLOPs of Muon on the busiest rank over the mean; 0: no matrix uses Muon.
    without: number of ranks that own no block.
    peak: bytes of the fullest rank in a step, without activations.
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
        """Return the bytes that the busiest rank sends over the mean."""
        return self.most_sent / self.sent if self.sent else 1.0


def numbers_of_ranks(degrees: Degrees, ranks: Sequence[int] = RANKS) -> list[int]:
    """Return the numbers of ranks that are multiples of the axes other than data."""
    others = degrees.pp * degrees.replicate * degrees.ep * degrees.tp
    found = [number for number in ranks if number % others == 0]
    if not found:
        raise BadRequestError(
            f"--scaling plans at most {max(ranks):,} ranks, and the axes other than dp "
            f"have {others:,} already"
        )
    return found


def batch_of(job: Job) -> Batch:
    """Return the batch of a rank; by default one micro-batch per pipeline rank."""
    stages, per_rank = job.degrees.pp, job.settings.stages_per_rank
    return job.batch or Batch(TOKENS // stages, stages, stages_per_rank=per_rank)


def points(job: Job) -> Iterator[Point]:
    """Yield the figures of a plan on every number of ranks."""
    numbers, batch = numbers_of_ranks(job.degrees, RANKS), batch_of(job)
    for ranks in numbers:
        divided = replace(batch, tokens=max(1, batch.tokens * numbers[0] // ranks))
        yield point(replace(job, degrees=replace(job.degrees, world=ranks), batch=batch), divided)


def point(job: Job, divided: Batch) -> Point:
    """Return the figures of one number of ranks; `divided`: a rank's batch in strong scaling."""
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
    """Return the figures of one stage's plan, in training with weak and with strong scaling."""
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
