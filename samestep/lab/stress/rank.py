"""Runs one rank of a case: it trains, saves, resumes, sends samples, and reports its end."""

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import samestep
from samestep.comm.collectives import CollectiveError
from samestep.comm.diagnosis.recorder import FlightRecorder, Record
from samestep.comm.integrity.agreement import RanksDisagreeError
from samestep.comm.messages import gather_everywhere
from samestep.lab.stress.layouts import EVERY_LAYOUT, LAYOUT_SETS, LAYOUTS, Layout
from samestep.lab.stress.scenario import CLOSED_LOOP_STEPS, Scenario
from samestep.lab.stress.sharded_training import new_training
from samestep.lab.stress.training import Training, without_onednn
from samestep.mesh.build import DuplicateGroupError
from samestep.mesh.replicate_list import ReplicateListError
from samestep.parallel.replicas import ReplicasDifferError
from samestep.parallel.spmd import PartitionError
from samestep.shards.state_store import PartsDisagreeError

Patch = Callable[[], AbstractContextManager[object]]
BEGUN = "begun"  # the checkpoint of `begin_alone`
LAST_FLIGHTS = 32
CHECKS_BY_ERROR: dict[type[Exception], str] = {
    CollectiveError: "hang",
    ReplicasDifferError: "replicas",
    ReplicateListError: "contract",
    PartitionError: "contract",
    DuplicateGroupError: "contract",
    PartsDisagreeError: "state",
    RanksDisagreeError: "plan",
}


@dataclass(frozen=True)
class Sample:
    """Parameters and state after `step` steps, and the collectives so far."""

    step: int
    params: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]
    collectives: int = 0
    digest: str = ""  # of the collectives, in order


@dataclass(frozen=True)
class Ending:
    """The end of a rank's run; `error` is None if it finished."""

    step: int  # taken
    error: str | None = None
    kind: str | None = None  # of the error: the check that failed, or "error"
    positions: dict[int, str] = field(default_factory=dict)  # rank -> the collective it was in
    flights: dict[str, Any] = field(default_factory=dict)  # the recorder's last operations
    totals: dict[str, Any] = field(default_factory=dict)  # per kind of collective
    fingerprint: str = ""
    schedule: tuple[str, ...] = ()
    program: dict[str, int] = field(default_factory=dict)  # what was counted of XLA's


Message = Sample | Ending


def take_sample(step: int, training: Training, recorder: FlightRecorder) -> Sample:
    """Collect parameters and state of one step; collective, because ranks may hold shards."""
    recorder.stop()  # sampling is no part of the run
    params = training.parameters()
    state = {
        name: {key: value.cpu() for key, value in entries.items()}
        for name, entries in training.state().items()
    }
    log = training.log(recorder)
    recorder.start()
    return Sample(step, params, state, *log)


def begin_alone(
    scenario: Scenario, steps: int, folder: Path, device: torch.device | None = None
) -> None:
    """Take the first steps on one process with the gradients of all ranks, and save them."""
    training = new_training(scenario, LAYOUTS["one_process"], 0, device=device)
    for step in range(steps):
        training.step(step)
    samestep.save(folder / BEGUN, training.model, training.optimizer)


@dataclass(frozen=True)
class Case:
    """A scenario in a layout."""

    scenario: str
    layout: str
    world: int
    steps: int
    sample_every: int
    reduction: str = "ordered"
    seed: int = 0
    also_after: tuple[int, ...] = ()  # further samples, where shorter cases have theirs

    def due(self, scenario: Scenario) -> set[int]:
        """Return the steps after which a sample is taken: at fixed intervals and the last.

        A closed loop also has a sample at the last step that is compared with the reference.
        """
        known = {*range(self.sample_every, self.steps + 1, self.sample_every), *self.also_after}
        last = {min(self.steps, CLOSED_LOOP_STEPS)} if scenario.loop == "closed" else set()
        return {step for step in known if step <= self.steps} | last | {self.steps}


class Work(NamedTuple):
    """A case as its ranks run it; `patch` changes the tested code during the run.

    folder: where checkpoints are kept, if the scenario has any.
    begun: the steps that `one_process` has taken, and saved there.
    """

    case: Case
    scenario: Scenario
    patch: Patch = nullcontext
    folder: Path = Path()
    begun: int = 0

    @property
    def layout(self) -> Layout:
        return EVERY_LAYOUT[self.case.layout]

    @property
    def due(self) -> set[int]:
        """Return the steps after which a sample is taken."""
        return self.case.due(self.scenario)


class Relay(NamedTuple):
    """Successive trainings of one rank, each resuming from the last."""

    work: Work
    rank: int
    device: torch.device | None = None

    def begin(self, step: int) -> Training:
        """Start a training, or resume one that a single process has saved before that step."""
        training = self._new(self.work.layout)
        if step:
            _load(self._path(BEGUN), training)
        return training

    def before(self, step: int, training: Training, recorder: FlightRecorder) -> Training:
        """Return the training for a step: the present one, or a new one that loaded its state."""
        place = self.work.scenario.goes_on(step)
        if place is None or self.work.layout.one_process:
            return training
        recorder.stop()  # reading and writing is no part of the run
        path = self._path(f"{self.work.layout.name}_{step}")
        samestep.save(path, training.model, training.optimizer)
        new = self._new(self.work.layout if place == "here" else self._another_layout())
        _load(path, new)
        new.take_over(training)
        recorder.start()
        return new

    def _new(self, layout: Layout) -> Training:
        options = {"reduction": self.work.case.reduction, "device": self.device}
        return new_training(self.work.scenario, layout, self.rank, **options)

    def _path(self, name: str) -> Path:
        """Return the path of a checkpoint on rank 0: ranks of torchrun have their own folders."""
        path, group = self.work.folder / name, dist.group.WORLD
        return path if group is None else gather_everywhere(path, group)[0]

    def _another_layout(self) -> Layout:
        """Return another layout to resume in, half the registry away, so that kinds differ.

        A layout that is not in the registry counts as its last one.
        """
        scenario, own = self.work.scenario, self.work.layout
        family = LAYOUT_SETS["xla"] if own.parameters == "spmd" else LAYOUTS
        known = [EVERY_LAYOUT[name] for name in {**dict.fromkeys(family), own.name: None}]
        layouts = [
            layout
            for layout in known
            if not layout.one_process and not layout.reason_against(type(scenario), scenario.world)
        ]
        return layouts[(layouts.index(own) + len(layouts) // 2) % len(layouts)]


def _load(path: Path, training: Training) -> None:
    """Load into a model with other initial weights, so that missing values show."""
    with torch.no_grad():
        for param in training.model.parameters():
            param.add_(1.0)
    samestep.load(path, training.model, training.optimizer)


def run_rank(
    work: Work,
    rank: int,
    send: Callable[[Message], None],
    device: torch.device | None = None,
    note: Callable[[str], None] = lambda operation: None,
) -> None:
    """Train, send samples and finally the ending; `note` receives every launch."""
    step = 0
    error: Exception | None = None
    training: Training | None = None
    with work.patch(), without_onednn(), FlightRecorder(LAST_FLIGHTS) as recorder:
        recorder.on_launch.append(lambda record: note(record.name))
        if work.scenario.churns:
            recorder.on_launch.append(lambda record: _churn(record, device))
        try:
            relay = Relay(work, rank, device)
            step = 0 if work.layout.one_process else work.begun
            training = relay.begin(step)
            due = work.due
            while step < work.case.steps:
                training = relay.before(step, training, recorder)
                training.step(step)
                step += 1
                if step in due:
                    send(take_sample(step, training, recorder))
        except Exception as caught:
            error = caught
        other = None if error is None else "error"
        ending = Ending(
            step,
            None if error is None else _described(error),
            next((check for of, check in CHECKS_BY_ERROR.items() if isinstance(error, of)), other),
            getattr(error, "positions", {}),
            recorder.dump(),
            {kind: asdict(total) for kind, total in recorder.totals.items()},
            "" if training is None else training.fingerprint(),
            () if training is None else training.optimizer.schedule_lines(),
            {} if training is None or error is not None else training.program(),
        )
    send(ending)
    if error is not None:
        raise error  # so that ranks which hang elsewhere are not waited for


def _described(error: Exception) -> str:
    if isinstance(error, CollectiveError | RanksDisagreeError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.name}, line {last.lineno})"


def _churn(record: Record, device: torch.device | None) -> None:
    """Allocate memory of the sizes in flight, fill it with garbage, and free it."""
    for parts in (1, 2, len(record.ranks)):
        torch.full((record.elements // parts + 1,), float("nan"), device=device)
