"""Strong and weak scaling, owner balance and exposed communication over the number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from samestep.estimate.hardware import Hardware
from samestep.estimate.timeline import simulate
from samestep.estimate.work import balance
from samestep.mesh.degrees import Degrees
from samestep.planning.cluster import Settings, stage_blueprint
from samestep.planning.figures import training_of
from samestep.planning.model import Model, load_model
from samestep.planning.options import Options
from samestep.planning.pictures import curves
from samestep.planning.tables import Picture, Table
from samestep.stress.report.numbers import duration
from samestep.tooling.request import BadRequestError

RANKS = (8, 64, 512, 4096)
SHARED_BY = 64  # ranks that share state; beyond, their groups are copies of each other
TOKENS = 4096  # of a rank on the fewest ranks


@dataclass(frozen=True)
class Point:
    """One number of ranks."""

    ranks: int
    shared_by: int
    balance: float
    bound: float
    step: float
    exposed: float
    iteration_strong: float  # the batch is divided among all ranks
    iteration_weak: float  # every rank has as many tokens


@dataclass(frozen=True)
class Scaling:
    """The curves, as numbers and as a table with a picture."""

    content: list[dict[str, Any]]
    table: Table


def scaling(options: Options, hardware: Hardware) -> Scaling:
    """Data parallel alone, whatever mesh was asked for."""
    model = load_model(options.model, getattr(torch, options.dtype))
    settings = Settings(
        sharding=options.sharding,
        buffers=options.buffers,
        muon=options.rule == "muon",
        master_weights=options.dtype == "bfloat16",
    )
    tokens = options.tokens or TOKENS
    points = [point(model, settings, hardware, ranks, tokens) for ranks in RANKS]
    rows = [
        [
            f"{p.ranks:,}", f"{p.shared_by:,}", f"{p.balance:.2f}", f"{p.bound:.2f}",
            duration(p.step), duration(p.exposed),
            f"{points[0].iteration_weak / p.iteration_weak:.0%}",
            f"{points[0].iteration_strong * RANKS[0] / (p.iteration_strong * p.ranks):.0%}",
        ]
        for p in points
    ]  # fmt: skip
    table = Table(
        "Scaling with data parallel ranks",
        f"Weak: {tokens:,} tokens on every rank. Strong: as many tokens in all as {RANKS[0]} ranks "
        "have there. Efficiency against the fewest ranks.",
        ["ranks", "share state", "balance", "bound", "step", "exposed", "weak", "strong"],
        rows,
        [Picture.of("scaling", picture(points, model.name))],
    )
    return Scaling([vars(p) for p in points], table)


def picture(points: Sequence[Point], name: str) -> bytes:
    """The curves."""
    return curves(
        [p.ranks for p in points],
        {
            "busiest owner / mean": {
                "balanced": [p.balance for p in points],
                "bound": [p.bound for p in points],
            },
            "seconds of a step": {
                "step": [p.step for p in points],
                "exposed": [max(p.exposed, 1e-9) for p in points],
            },
            "seconds of an iteration": {
                "weak": [p.iteration_weak for p in points],
                "strong": [p.iteration_strong for p in points],
            },
        },
        name,
    )


def point(model: Model, settings: Settings, hardware: Hardware, ranks: int, tokens: int) -> Point:
    """Groups of at most `SHARED_BY` ranks share state; zero3 shards inside, and copies outside."""
    copies = max(1, ranks // SHARED_BY)
    device = torch.device("cpu" if hardware.on_cpu else "cuda")
    degrees = Degrees(ranks, replicate=copies)
    plan = stage_blueprint(model, degrees, settings, device, 0)
    found = [balance(placement) for placement in plan.placements]
    spread = next((each for each in found if each is not None), None)
    if spread is None:
        raise BadRequestError("--scaling is about Muon's owners, and no matrix follows Muon here")
    step = simulate(plan, hardware)
    share = max(1, tokens * RANKS[0] // ranks)
    strong, weak = (
        simulate(plan, hardware, training=training_of(each, model, degrees, settings))
        for each in (share, tokens)
    )
    return Point(
        ranks,
        ranks // copies,
        spread.ratio,
        spread.bound_ratio,
        step.seconds,
        step.exposed_seconds,
        strong.seconds,
        weak.seconds,
    )
