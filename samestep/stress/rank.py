"""What one rank does in a case: train, send samples, and say how it ended."""

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from samestep.comm.collectives import CollectiveError
from samestep.comm.diagnosis.recorder import FlightRecorder, Record
from samestep.comm.integrity.agreement import RanksDisagreeError
from samestep.mesh.groups import DuplicateGroupError
from samestep.mesh.replicate_list import ReplicateListError
from samestep.parallel.replicas import ReplicasDifferError
from samestep.placements.whole.piece_state import PiecesDisagreeError
from samestep.stress.layouts import Layout
from samestep.stress.relay import Relay
from samestep.stress.sample import Ending, Sample, take_sample
from samestep.stress.scenario import Scenario
from samestep.stress.training import Training, without_onednn

Message = Sample | Ending
LAST_FLIGHTS = 32


class Work(NamedTuple):
    """A case as its ranks see it. `patch` changes the code under test while it runs.

    due: the steps after which a sample is taken.
    folder: where checkpoints are kept, if the scenario has any.
    begun: the steps that `one_process` has taken, and saved there.
    """

    scenario: Scenario
    layout: Layout
    steps: int
    due: frozenset[int]
    reduction: str
    patch: Callable[[], AbstractContextManager[object]] = nullcontext
    folder: Path | None = None
    begun: int = 0


def run_rank(
    work: Work,
    rank: int,
    send: Callable[[Message], None],
    device: torch.device | None = None,
    note: Callable[[str], None] = lambda operation: None,
) -> None:
    """Train, and send a sample whenever one is due, then an ending. `note` hears every launch."""
    step = 0
    error: Exception | None = None
    training: Training | None = None
    with work.patch(), without_onednn(), FlightRecorder(LAST_FLIGHTS) as recorder:
        recorder.on_launch.append(lambda record: note(record.name))
        if work.scenario.churns:
            recorder.on_launch.append(lambda record: _churn(record, device))
        try:
            relay = Relay(work.scenario, work.layout, rank, work.reduction, device, work.folder)
            step = 0 if work.layout.one_process else work.begun
            training = relay.begin(step)
            while step < work.steps:
                training = relay.before(step, training, recorder)
                training.step(step)
                step += 1
                if step in work.due:
                    send(take_sample(step, training, recorder))
        except Exception as caught:
            error = caught
        ending = Ending(
            step,
            None if error is None else _described(error),
            None if error is None else _kind(error),
            getattr(error, "positions", {}),
            recorder.dump(),
            {kind: asdict(total) for kind, total in recorder.totals.items()},
            "" if training is None else training.fingerprint(),
            () if training is None else training.optimizer.schedule_lines(),
        )
    send(ending)
    if error is not None:
        raise error  # so that ranks which hang elsewhere are not waited for


def _kind(error: Exception) -> str:
    if isinstance(error, CollectiveError):
        return "hang"
    if isinstance(error, ReplicasDifferError):
        return "replicas"
    if isinstance(error, ReplicateListError | DuplicateGroupError):
        return "contract"
    if isinstance(error, PiecesDisagreeError):
        return "state"
    return "plan" if isinstance(error, RanksDisagreeError) else "error"


def _described(error: Exception) -> str:
    if isinstance(error, CollectiveError | RanksDisagreeError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.name}, line {last.lineno})"


def _churn(record: Record, device: torch.device | None) -> None:
    """Take memory of the sizes that are in flight, fill it with garbage, and give it back."""
    for parts in (1, 2, len(record.ranks)):
        torch.full((record.elements // parts + 1,), float("nan"), device=device)
