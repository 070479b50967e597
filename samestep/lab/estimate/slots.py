"""Pipelines as passes in slots: in which order a rank runs them, and how long it waits.

The orders are those of torch's schedules: 1F1B with one stage per rank, interleaved with several
that lie apart. Stages of equal length are idle for

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
    """When a pass runs."""

    run: Pass
    start: float
    end: float


def bubble(ranks: int, micro_batches: int, per_rank: int = 1) -> Fraction:
    """The share of the time in which a rank waits, where all stages take as long."""
    return Fraction(ranks - 1, per_rank * micro_batches + ranks - 1)


def passes_of(rank: int, ranks: int, micro_batches: int, per_rank: int = 1) -> list[Pass]:
    """The passes of a rank in order; `per_rank` stages of it: 1F1B if one, else interleaved."""
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
    """By stage of a rank, whose micro-batches wait for their backward pass when most of them do."""
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
    """All ranks on clocks; `forward` and `backward` have the time of every stage.

    A pass begins when its rank is free and its neighbour's result has come, `send` after its end.
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
    """The pass whose result another one takes; None: the batch itself."""
    if run.kind == "F":
        return run._replace(stage=run.stage - 1) if run.stage else None
    if run.stage == stages - 1:
        return run._replace(kind="F")
    return run._replace(stage=run.stage + 1)
