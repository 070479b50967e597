"""All figures of a plan, from which the tables, the page and the JSON are made.

`judge` recommends a ZeRO stage from these figures, with the reason.
"""

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from samestep.lab.common.numbers import duration, size
from samestep.lab.estimate.activations import Activations, Batch
from samestep.lab.estimate.choices import Choices, choices
from samestep.lab.estimate.cluster import STAGES, Job, Stage
from samestep.lab.estimate.collectives import Collective, Launches
from samestep.lab.estimate.fsdp import fsdp_collectives, fsdp_peak, passes_1f1b
from samestep.lab.estimate.grid_plan import GridPlan
from samestep.lab.estimate.ledger import Then
from samestep.lab.estimate.memory import RankMemory, rank_memory, whole_gradients
from samestep.lab.estimate.sends import LayerSends, StageSends
from samestep.lab.estimate.timeline import Timeline, simulate
from samestep.lab.estimate.training import training_of
from samestep.lab.estimate.work import OwnerBalance, balance
from samestep.mesh.degrees import Degrees

# From "when to use each" of Megatron's documentation: shares of the device's memory.
USE = {
    "none": "nothing is sharded: every rank updates all that it holds",
    "zero1": "state is sharded; gradients stay whole",
    "zero2": "state and gradients are sharded; parameters stay whole",
    "zero3": "parameters are sharded too, and gathered layer by layer in forward and backward",
}


@dataclass(frozen=True)
class GroupTraffic:
    """The collectives of one kind in a step, along some axes of the mesh."""

    axes: str
    ranks: int
    kind: str
    by: str  # the optimizer; FSDP2, layers or stages in forward and backward
    collectives: int
    mean_sent: float  # bytes per rank and step
    most_sent: float


@dataclass(frozen=True)
class StageNeeds:
    """Memory and traffic of one pipeline stage, which need no simulation.

    activations: None without tokens, or where nobody knows the shape of the model.
    beside: other memory when most activations are alive: memory that stays, gradients of other
        micro-batches, units that FSDP2 has gathered.
    """

    stage: int
    parameters: int
    worst_rank: int  # in the stage
    memory: RankMemory  # of that rank
    least_kept: int
    most_kept: int
    traffic: list[GroupTraffic]
    activations: Activations | None
    beside: RankMemory

    @property
    def peak(self) -> int:
        """Return the peak bytes of the step, or of forward and backward if that is more."""
        return max(self.memory.peak, self.model_peak)

    @property
    def model_peak(self) -> int:
        """Return the peak bytes of forward and backward; 0 where activations are unknown."""
        return 0 if self.activations is None else self.beside.peak + self.activations.peak

    @property
    def sent(self) -> float:
        """Return the mean over ranks of the bytes that a rank sends per step."""
        return sum(each.mean_sent for each in self.traffic)


@dataclass(frozen=True)
class StageFigures(StageNeeds):
    """All figures of one pipeline stage, simulated times (in seconds) included."""

    owners: list[OwnerBalance]
    choices: Choices
    step_seconds: float
    parts: dict[str, float]
    exposed_seconds: float
    idle_seconds: float
    operations: int


def stage_needs(job: Job, plan: GridPlan, stage: int) -> StageNeeds:
    degrees, batch = job.degrees, job.batch
    micro_batches = degrees.pp if batch is None else batch.micro_batches  # as many as stages
    memories = {rank: rank_memory(plan, rank) for rank in sample_ranks(plan)}
    traffic = _traffic(plan, Launches(plan).of_step(), "optimizer")
    units, passes, times = job.units(stage), "FB", micro_batches
    if degrees.pp > 1:
        passes, times = passes_1f1b(stage, degrees.pp, micro_batches), 1
    traffic += _traffic(plan, fsdp_collectives(units, passes=passes), "FSDP2", times)
    of_units = fsdp_peak(units, passes)
    memories = {rank: memory.or_then(of_units) for rank, memory in memories.items()}
    worst = max(memories, key=lambda rank: memories[rank].peak)
    beside, activations = memories[worst].at(of_units), None
    if batch is not None and job.layers is not None:
        activations = job.layers.of_rank(stage)
        traffic += _of_model(plan, LayerSends(job.layers).of_rank(stage), degrees, batch)
        if micro_batches > 1 and job.settings.sharding != "zero3":
            beside = beside.at(Then(whole_gradients(plan, worst), 0, 0))
    kept = [memory.stays for memory in memories.values()]
    parameters = sum(param.numel() for param in job.module(stage).parameters())
    return StageNeeds(
        stage, parameters, worst, memories[worst], min(kept), max(kept), traffic, activations,
        beside,
    )  # fmt: skip


def _of_model(
    plan: GridPlan, sends: StageSends, degrees: Degrees, batch: Batch
) -> Iterator[GroupTraffic]:
    """Yield the traffic of layers and of stages in forward and backward."""
    yield from _traffic(plan, sends.collectives(batch.recompute), "layers", batch.micro_batches)
    if degrees.pp > 1:
        count = sends.neighbours * batch.micro_batches
        size = float(count * sends.boundary)
        yield GroupTraffic("pipe", degrees.pp, "send", "stages", count, size, size)


def stage_figures(
    job: Job, stage: int, *, drawn: int = 0
) -> tuple[StageFigures, GridPlan, Timeline]:
    """Plan one stage and read everything off it; the timeline shows the first `drawn` ranks."""
    plan = job.grid_plan(stage)
    show = range(min(plan.grid.ranks, drawn))
    timeline = simulate(plan, job.hardware, show=show, training=training_of(job, stage))
    figures = StageFigures(
        **vars(stage_needs(job, plan, stage)),
        owners=[found for found in map(balance, plan.placements) if found is not None],
        choices=choices(plan, job.hardware, timeline.seconds),
        step_seconds=timeline.seconds,
        parts=timeline.by_operation,
        exposed_seconds=timeline.exposed_seconds,
        idle_seconds=float(timeline.idle.mean()),
        operations=len(plan.schedule()),
    )
    return figures, plan, timeline


def sample_ranks(plan: GridPlan) -> list[int]:
    """Return the first, middle and last rank, and the ranks that own the most of a placement."""
    grid = plan.grid
    found = {0, grid.ranks // 2, grid.ranks - 1}
    for placement in plan.placements:
        owned = [0] * placement.peers.size
        for own in placement.bucket_plans[:1]:
            for bucket in (own.even or own.plan).buckets:
                for place, segment in () if bucket.replicated else bucket.filled:
                    owned[place] += segment.size
        place = owned.index(max(owned))
        of_peers = grid.rank_at(placement.peers, place)
        found.add(of_peers)
        for blocks in placement.block_plans[place : place + 1]:
            in_mesh = [0] * placement.mesh.size
            for planned in chain.from_iterable(chunk.blocks for chunk in blocks.chunks):
                for owner in planned.owners:
                    in_mesh[owner] += planned.box.numel
            # Axes of both are not the same.
            found.add(of_peers + grid.rank_at(placement.mesh, in_mesh.index(max(in_mesh))))
    return sorted(found)


def _traffic(
    plan: GridPlan, launches: Sequence[Collective], by: str, times: int = 1
) -> list[GroupTraffic]:
    """Add up traffic by axes and kind of collective, each launched `times` times."""
    alike: dict[tuple[str, int, str], list[Collective]] = defaultdict(list)
    for each in launches:
        alike[each.peers.name, each.peers.size, each.traffic.kind].append(each)
    found = []
    for key, members in alike.items():
        sent = plan.grid.zeros()
        for each in members:
            sent += each.spread(each.sent_by_all(), plan.grid)
        mean, most = times * float(sent.mean()), times * float(sent.max())
        found.append(GroupTraffic(*key, by, times * len(members), mean, most))
    return found


def figures_as_json(figures: StageFigures) -> dict[str, Any]:
    content = asdict(figures)
    content["memory"] = {
        **figures.memory._asdict(),
        "in_flight": figures.memory.in_flight,
        "peak": figures.memory.peak,
    }
    if figures.activations is not None:
        found = figures.activations
        content["activations"] = {**found._asdict(), "peak": found.peak}
    content["beside"] = {**figures.beside._asdict(), "peak": figures.beside.peak}
    content["peak"] = figures.peak
    content["choices"]["lines"] = figures.choices.lines()
    if figures.choices.owners is not None:
        content["choices"]["owners"]["saves"] = figures.choices.owners.saves
    return content


def cost_of_planning(since: float) -> dict[str, float]:
    """Return the seconds since a time and the peak memory, in bytes, of this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"seconds": time.monotonic() - since, "memory": float(most)}


@dataclass(frozen=True)
class Verdict:
    """The verdict on the requested ZeRO stage, and the recommended one; None: no stage fits."""

    asked: Stage
    fits: bool
    choose: Stage | None
    advice: str
    text: str

    def headline(
        self,
        job: str,
        stages: Sequence[StageFigures],
        device_memory: int,
        *,
        activations: bool,
        iteration: bool,
    ) -> str:
        """The first line of a plan: whether it fits, and the time and bytes that are simulated.

        job: The model and the ranks, as words.
        activations: Whether the memory includes activations.
        iteration: Whether forward and backward are simulated too.
        """
        worst = max(stages, key=lambda each: each.peak)
        slowest = max(stages, key=lambda each: each.step_seconds)
        sent = max(each.sent for each in stages)
        of_what = "with activations" if activations else "activations not counted"
        return (
            f"{'FITS' if self.fits else 'DOES NOT FIT'}: the fullest rank needs "
            f"{size(worst.peak)} of {size(device_memory)} "
            f"({worst.peak / device_memory:.0%}, {of_what}); "
            f"{duration(slowest.step_seconds)} per "
            f"{'iteration' if iteration else 'optimizer step'}; "
            f"{size(sent)} sent per rank and step. "
            f"Simulated for {job}; nothing was run or measured."
        )


def judge(
    asked: Stage,
    peaks: Mapping[Stage, int],
    device_memory: int,
    reserve: float,
    *,
    activations: bool = False,
) -> Verdict:
    """Recommend the least sharding whose fullest rank leaves the reserve free.

    activations: Whether the peaks include activations; if not, the reserve is for them.
    """
    room = (1 - reserve) * device_memory
    fits = peaks[asked] <= device_memory
    choose = next((stage for stage in STAGES if stage in peaks and peaks[stage] <= room), None)
    share = f"{peaks[asked] / 1e9:,.1f} of {device_memory / 1e9:,.1f} GB"
    percent = f"{peaks[asked] / device_memory:.0%}"
    apart = "with activations" if activations else "activations not counted"
    lines = [f"{asked}: the fullest rank needs {share} ({percent})"]
    lines.append(f"it fits, {apart}" if fits else "it does not fit")
    for_whom = "free" if activations else "free for activations"
    if choose is None:
        least = min(peaks, key=lambda stage: peaks[stage])
        advice = (
            f"no sharding leaves {reserve:.0%} {for_whom}: {least} needs the least, "
            f"{peaks[least] / 1e9:,.1f} GB; use more ranks, tensor or pipeline parallel"
            + (", smaller micro-batches or recomputation" if activations else "")
        )
    else:
        advice = (
            f"recommended: --sharding {choose}, {peaks[choose] / device_memory:.0%} of the memory: "
            f"{USE[choose]}"
        )
        before = [stage for stage in STAGES[: STAGES.index(choose)] if stage in peaks]
        if before:
            too_much = ", ".join(f"{s} {peaks[s] / device_memory:.0%}" for s in before)
            advice += f"; less sharding ({too_much}) would not leave {reserve:.0%} {for_whom}"
    return Verdict(asked, fits, choose, advice, "; ".join([*lines, advice]))
