"""Everything a plan tells, as numbers: what the table, the page and the JSON are made of.

And from these: which ZeRO stage to choose, and why.
"""

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch

from samestep.estimate.blueprint import Blueprint, Spreading
from samestep.estimate.cluster import (
    STAGES,
    Settings,
    Stage,
    fsdp_units,
    stage_blueprint,
)
from samestep.estimate.collectives import Collective, Launches
from samestep.estimate.fsdp import fsdp_collectives, fsdp_peak, passes_1f1b
from samestep.estimate.hardware import Hardware
from samestep.estimate.memory import RankMemory, rank_memory
from samestep.estimate.model import Model, stage_of
from samestep.estimate.timeline import Timeline, Training, simulate
from samestep.estimate.work import OwnerBalance, balance
from samestep.mesh.degrees import Degrees

# From "when to use each" of Megatron's documentation: shares of the device's memory.
USE = {
    "none": "nothing is sharded: the fewest bytes travel",
    "zero1": "state is sharded; gradients stay whole",
    "zero2": "state and gradients are sharded; parameters stay whole",
    "zero3": "parameters are sharded too, and gathered layer by layer in forward and backward",
}


@dataclass(frozen=True)
class GroupTraffic:
    """Collectives of a step along some axes."""

    axes: str
    ranks: int
    kind: str
    by: str  # the optimizer, or FSDP2 in forward and backward
    collectives: int
    mean_sent: float  # bytes per rank
    most_sent: float


@dataclass(frozen=True)
class StageNeeds:
    """Memory and traffic of one pipeline stage, which need no simulation."""

    stage: int
    parameters: int
    worst_rank: int  # in the stage
    memory: RankMemory  # of that rank
    least_kept: int
    most_kept: int
    traffic: list[GroupTraffic]

    @property
    def peak(self) -> int:
        return self.memory.peak

    @property
    def sent(self) -> float:
        """Bytes per rank, on the average."""
        return sum(each.mean_sent for each in self.traffic)


@dataclass(frozen=True)
class StageFigures(StageNeeds):
    """Everything of one pipeline stage."""

    owners: list[OwnerBalance]
    step_seconds: float
    parts: dict[str, float]
    exposed_seconds: float
    idle_seconds: float
    operations: int


def stage_needs(
    model: Model, degrees: Degrees, settings: Settings, plan: Blueprint, stage: int
) -> StageNeeds:
    module = stage_of(model.module, stage, degrees.pp)
    memories = {rank: rank_memory(plan, rank) for rank in sample_ranks(plan)}
    traffic = list(_traffic(plan, Launches(plan).of_step(), "optimizer"))
    if settings.sharding == "zero3":
        units = fsdp_units(module, degrees)
        passes = passes_1f1b(stage, degrees.pp, degrees.pp)  # as many micro-batches as stages
        traffic += _traffic(plan, fsdp_collectives(units, passes=passes), "FSDP2")
        inside = fsdp_peak(units, passes)
        memories = {rank: memory.or_then(inside) for rank, memory in memories.items()}
    worst = max(memories, key=lambda rank: memories[rank].peak)
    kept = [memory.stays for memory in memories.values()]
    parameters = sum(param.numel() for param in module.parameters())
    return StageNeeds(stage, parameters, worst, memories[worst], min(kept), max(kept), traffic)


def device_of(hardware: Hardware) -> torch.device:
    return torch.device("cpu" if hardware.on_cpu else "cuda")


def stage_figures(
    model: Model,
    degrees: Degrees,
    settings: Settings,
    hardware: Hardware,
    stage: int,
    *,
    training: Training | None = None,
    drawn: int = 0,
) -> tuple[StageFigures, Blueprint, Timeline]:
    """Plan one stage and read everything off it; the timeline shows the first `drawn` ranks."""
    plan = stage_blueprint(model, degrees, settings, device_of(hardware), stage)
    show = range(min(plan.grid.ranks, drawn))
    timeline = simulate(plan, hardware, show=show, training=training)
    figures = StageFigures(
        **vars(stage_needs(model, degrees, settings, plan, stage)),
        owners=[found for found in map(balance, plan.placements) if found is not None],
        step_seconds=timeline.seconds,
        parts=timeline.by_operation,
        exposed_seconds=timeline.exposed_seconds,
        idle_seconds=float(timeline.idle.mean()),
        operations=len(plan.schedule()),
    )
    return figures, plan, timeline


def training_of(
    tokens: int, model: Model, degrees: Degrees, settings: Settings, stage: int = 0
) -> Training | None:
    """Forward and backward around a step, with FSDP2's transfers; None for no tokens."""
    if not tokens:
        return None
    sharded = settings.sharding == "zero3"
    module = stage_of(model.module, stage, degrees.pp)
    return Training(tokens, tuple(fsdp_units(module, degrees)) if sharded else ())


def sample_ranks(plan: Blueprint) -> list[int]:
    """First, middle and last, and who holds the most blocks."""
    found = {0, plan.grid.ranks // 2, plan.grid.ranks - 1}
    for placement in plan.placements:
        owned = [0] * placement.peers.size
        if isinstance(placement, Spreading):
            for route in chain.from_iterable(placement.plan.chunks):
                owned[route.owner] += route.box.numel
        else:
            sharded = (bucket.filled for bucket in placement.plan.buckets if not bucket.replicated)
            for rank, segment in chain.from_iterable(sharded):
                owned[rank] += segment.size
        place = owned.index(max(owned))
        found.add(_rank_at(plan, placement.peers.axes, place))
    return sorted(found)


def _rank_at(plan: Blueprint, axes: Sequence[str], place: int) -> int:
    """A rank that has this place among its peers."""
    places = {}
    for axis in reversed(axes):
        place, places[axis] = divmod(place, plan.grid.sizes[axis])
    rank = 0
    for axis, size in plan.grid.sizes.items():
        rank = rank * size + places.get(axis, 0)
    return rank


def _traffic(plan: Blueprint, launches: Sequence[Collective], by: str) -> list[GroupTraffic]:
    alike: dict[tuple[str, int, str], list[Collective]] = defaultdict(list)
    for each in launches:
        alike[each.peers.name, each.peers.size, each.traffic.kind].append(each)
    found = []
    for key, members in alike.items():
        sent = plan.grid.zeros()
        for each in members:
            sent += plan.grid.spread(each.sent_by_all(), each.among or each.peers)
        found.append(GroupTraffic(*key, by, len(members), float(sent.mean()), float(sent.max())))
    return found


def figures_as_json(figures: StageFigures) -> dict[str, Any]:
    content = asdict(figures)
    content["memory"] = {
        **figures.memory._asdict(),
        "in_flight": figures.memory.in_flight,
        "peak": figures.peak,
    }
    return content


def cost_of_planning(since: float) -> dict[str, float]:
    """Seconds and bytes that this process has taken."""
    unit = 1 if sys.platform == "darwin" else 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"seconds": time.monotonic() - since, "memory": float(most)}


@dataclass(frozen=True)
class Verdict:
    """The stage that was asked for, and the one to choose; None: none fits."""

    asked: Stage
    fits: bool
    choose: Stage | None
    text: str


def judge(asked: Stage, peaks: Mapping[Stage, int], device_memory: int, reserve: float) -> Verdict:
    """The least sharding whose worst rank leaves the reserve for activations."""
    room = (1 - reserve) * device_memory
    fits = peaks[asked] <= device_memory
    choose = next((stage for stage in STAGES if stage in peaks and peaks[stage] <= room), None)
    share = f"{peaks[asked] / 1e9:,.1f} of {device_memory / 1e9:,.1f} GB"
    percent = f"{peaks[asked] / device_memory:.0%}"
    lines = [f"{asked}: the worst rank peaks at {share} ({percent})"]
    lines.append("it fits, activations apart" if fits else "it does not fit")
    if choose is None:
        least = min(peaks, key=lambda stage: peaks[stage])
        lines.append(
            f"no stage leaves {reserve:.0%} for activations: {least} needs the least, "
            f"{peaks[least] / 1e9:,.1f} GB; take more ranks, tensor or pipeline parallel"
        )
    else:
        why = f"{USE[choose]}, at {peaks[choose] / device_memory:.0%} of the memory"
        before = [stage for stage in STAGES[: STAGES.index(choose)] if stage in peaks]
        if before:
            too_much = ", ".join(f"{s} {peaks[s] / device_memory:.0%}" for s in before)
            why += f"; less sharding takes more than {1 - reserve:.0%} ({too_much})"
        lines.append(f"choose {choose}: {why}")
    return Verdict(asked, fits, choose, "; ".join(lines))
