"""Pipelines as passes in time slots: the order of a rank's passes, and how long the rank waits.

The orders are those of torch's schedules: 1F1B with one stage per rank, interleaved 1F1B with
several. With stages of equal length a rank is idle for

    (p - 1) / (v m + p - 1)

of the time, with p ranks, m micro-batches and v stages per rank (Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", arXiv 2104.04473).
"""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


class Pass(NamedTuple):
    """A forward ("F") or backward ("B") pass of one stage over one micro-batch."""

    kind: str
    stage: int  # of all stages: rank, rank + ranks, ...
    micro_batch: int


class Slot(NamedTuple):
    """The time in which a pass runs, in seconds."""

    run: Pass
    start: float
    end: float


def bubble(ranks: int, micro_batches: int, per_rank: int = 1) -> Fraction:
    """Return the share of the time in which a rank waits, if all stages take equally long."""
    return Fraction(ranks - 1, per_rank * micro_batches + ranks - 1)


def passes_of(rank: int, ranks: int, micro_batches: int, per_rank: int = 1) -> list[Pass]:
    """Return the passes of a rank in order: 1F1B with one stage per rank, else interleaved."""
    total = per_rank * micro_batches
    if per_rank == 1:  # first "F", then a backward pass for every forward pass
        ahead = min(micro_batches, ranks - rank)
        kinds = "F" * ahead + "BF" * (micro_batches - ahead) + "B" * ahead
    else:
        ahead = min(total, (per_rank - 1) * ranks + 2 * (ranks - 1 - rank))
        kinds = "F" * ahead + "FB" * (total - ahead) + "B" * ahead
    done = Counter[str]()
    found = []
    for kind in kinds:
        turn, inside = divmod(done[kind], ranks)  # rounds of as many micro-batches as ranks
        done[kind] += 1
        if per_rank == 1:
            found.append(Pass(kind, rank, done[kind] - 1))
            continue
        turn, local = divmod(turn, per_rank)
        local = local if kind == "F" else per_rank - 1 - local
        found.append(Pass(kind, local * ranks + rank, turn * ranks + inside))
    return found


def most_in_flight(passes: Sequence[Pass]) -> dict[int, int]:
    """Return by stage how many micro-batches await backward when most of a rank's do."""
    now, most = Counter[int](), Counter[int]()
    for kind, stage, _ in passes:
        now[stage] += 1 if kind == "F" else -1
        if now.total() > most.total():
            most = now.copy()
    return dict(most)


def play(
    ranks: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    send: float = 0.0,
) -> list[list[Slot]]:
    """Return every rank's passes with times; `forward` and `backward` are seconds per stage.

    A pass begins when its rank is free and its input has come, `send` seconds after the neighbour's
    pass that made the input has ended.
    """
    stages = len(forward)
    per_rank = stages // ranks
    orders = [passes_of(rank, ranks, micro_batches, per_rank) for rank in range(ranks)]
    ends: dict[Pass, float] = {}
    slots: list[list[Slot]] = [[] for _ in range(ranks)]
    while any(len(slots[rank]) < len(orders[rank]) for rank in range(ranks)):
        before = len(ends)
        for rank in range(ranks):
            for run in orders[rank][len(slots[rank]) :]:
                needs = _needs(run, stages)
                if needs is not None and needs not in ends:
                    break
                free = slots[rank][-1].end if slots[rank] else 0.0
                came = 0.0
                if needs is not None:
                    away = needs.stage % ranks != rank
                    came = ends[needs] + (send if away else 0.0)
                start = max(free, came)
                took = (forward if run.kind == "F" else backward)[run.stage]
                ends[run] = start + took
                slots[rank].append(Slot(run, start, ends[run]))
        if len(ends) == before:
            raise ValueError(f"a schedule of {ranks} ranks with {per_rank} stages each deadlocks")
    return slots


def _needs(run: Pass, stages: int) -> Pass | None:
    """Return the pass whose result a pass takes as input; None: the input is the batch."""
    if run.kind == "F":
        return run._replace(stage=run.stage - 1) if run.stage else None
    if run.stage == stages - 1:
        return run._replace(kind="F")
    return run._replace(stage=run.stage + 1)
