"""Runs cases one after the other (reference, ranks, verdict), mutants as cases, and lanes.

Lanes run scenarios side by side: each is a process that has ranks of its own. Ranks of one case
wait for each other most of the time, so that two lanes on two cores are faster than one, and
sixteen cores want more.
"""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NoReturn

import torch

from samestep.lab.stress.delays import Delays
from samestep.lab.stress.judge import Expected, Finding, Judge, SampleVerdict, expected_run
from samestep.lab.stress.layouts import EVERY_LAYOUT
from samestep.lab.stress.mutants import Mutant
from samestep.lab.stress.rank import Case, Ending, Patch, Sample, Work, begin_alone
from samestep.lab.stress.ranks import ForkedRanks, Ranks, XlaDevices
from samestep.lab.stress.scenario import MakeModel, Recorded, Scenario
from samestep.lab.stress.scenarios import EVERY_SCENARIO
from samestep.launch.forked import end_with

Progress = Callable[["Case", int, float], None]  # steps taken, worst difference so far
Presence = Mapping[str, Sequence[int]]  # parameter -> ranks that have a gradient, by step
HEALTHY_WATCHDOG = 120.0  # seconds; a slow collective of a busy machine is no hang


CasesByScenario = Sequence[Sequence[Case]]


@dataclass
class CaseResult:
    """The result of a case.

    status: exact, within_tolerance, failed, interrupted, or does_not_apply: it was not run.
    reason: why the case does not apply.
    ended: False if Ctrl-C came first; the result then has what was known at that time.
    """

    case: Case
    status: str
    findings: list[Finding]
    samples: list[SampleVerdict]
    endings: dict[int, Ending] = field(default_factory=dict)
    seconds: float = 0.0
    reason: str = ""
    presence: Presence = field(default_factory=dict)
    ended: bool = True

    @property
    def positions(self) -> dict[int, str]:
        """Return, by rank, the collective that it was in when something went wrong, where known."""
        known = {r: op for end in self.endings.values() for r, op in end.positions.items()}
        return dict(sorted(known.items()))


OnResult = Callable[[CaseResult], None]


class Campaign:
    """Runs cases on the same ranks, which share models, references and the first layout.

    A scenario's reference and first layout are kept until the next scenario begins.
    """

    def __init__(
        self,
        ranks: Ranks,
        make_model: MakeModel | None = None,
        delays: Delays | None = None,
    ) -> None:
        self.ranks = ranks
        self._make_model = make_model
        self._delayed: Patch = nullcontext if delays is None else delays.applied
        self._shared_by: tuple[Any, ...] | None = None
        self._scenario: Scenario
        self._expected: Expected
        self.first_layout: dict[int, Sample] = {}  # by step; the others are held against it

    def run(self, case: Case, patch: Patch = nullcontext) -> CaseResult:
        """Run one case to its end, also if its ranks fail; only Ctrl-C is raised."""
        results: list[CaseResult] = []
        self.run_all([case], results.append, patch=patch)
        return results[0]

    def run_all(
        self,
        cases: Sequence[Case],
        on_result: OnResult,
        progress: Progress = lambda case, step, worst: None,
        patch: Patch = nullcontext,
    ) -> None:
        """Run cases of one scenario on the same ranks as long as none fails."""
        cases = [case for case in cases if not _does_not_apply(case, on_result)]
        if not cases:
            return
        left: deque[Work] = deque()
        judge: Judge | None = None

        def begin_next() -> None:
            nonlocal judge
            judge = Judge(left.popleft(), self._expected, dict(self.first_layout)) if left else None
            if judge is not None:
                progress(judge.work.case, 0, 0.0)

        def on_sample(of_ranks: Sequence[Sample]) -> None:
            assert judge is not None
            judge.add(of_ranks)
            progress(judge.work.case, of_ranks[0].step, judge.worst)

        def on_end(endings: dict[int, Ending]) -> None:
            assert judge is not None
            result = _result(judge, endings)
            self.first_layout = self.first_layout or judge.samples
            begin_next()
            on_result(result)

        try:
            self._prepare(cases, lambda step: progress(cases[0], step, 0.0))
            saves = self._scenario.saves
            with TemporaryDirectory(prefix="stress_") if saves else nullcontext("") as name:
                folder = Path(name)  # for checkpoints
                begun = self._begun_alone(cases, folder)
                both = partial(_entered, self._delayed, patch)
                works = [Work(case, self._scenario, both, folder, begun) for case in cases]
                left.extend(works)
                begin_next()
                self.ranks.run(works, on_sample, on_end)
        except KeyboardInterrupt:
            nothing = CaseResult(cases[0], "interrupted", [], [], ended=False)
            on_result(nothing if judge is None else _result(judge))
            raise

    def _begun_alone(self, cases: Sequence[Case], folder: Path) -> int:
        """Return the steps that one process takes before the ranks start, if the scenario asks."""
        first_sample = min(min(case.due(self._scenario)) for case in cases)
        steps = min(self._scenario.begun_alone, first_sample - 1)
        if steps:
            scenario = self._scenario
            self.ranks.aside(lambda device: begin_alone(scenario, steps, folder, device))
        return steps

    def _prepare(self, cases: Sequence[Case], progress: Callable[[int], None]) -> None:
        """Make the reference run with samples for all cases, unless it is known already."""
        first = cases[0]
        kind = EVERY_SCENARIO[first.scenario]
        scenario = kind(first.seed, first.world, self._make_model if kind.takes_any_model else None)
        due = set[int]().union(*(case.due(scenario) for case in cases))
        key = (first.scenario, first.world, first.reduction, first.seed)
        if key == self._shared_by and due <= self._expected.samples.keys():
            return  # also a shorter case, if the longer one has its samples
        expected = self.ranks.aside(lambda _: expected_run(scenario, due, progress))
        if scenario.loop == "recorded":
            scenario = Recorded(scenario, expected.gradients)
        self._scenario, self._expected, self._shared_by = scenario, expected, key
        self.first_layout = {}


@contextmanager
def _entered(*patches: Patch) -> Iterator[None]:
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch())
        yield


def _result(judge: Judge, endings: dict[int, Ending] | None = None) -> CaseResult:
    """Build the result of a case; without endings the case was interrupted."""
    status = "failed" if judge.findings else "interrupted"
    if endings is not None:
        judge.end(endings)
        status = judge.status()
    seen = judge.findings, judge.verdicts, endings or {}, time.monotonic() - judge.started
    return CaseResult(
        judge.work.case, status, *seen, presence=judge.expected.presence, ended=endings is not None
    )


def _does_not_apply(case: Case, on_result: OnResult) -> bool:
    """Report a case whose scenario cannot run in its layout; return whether that is so."""
    reason = EVERY_LAYOUT[case.layout].reason_against(EVERY_SCENARIO[case.scenario], case.world)
    if reason is not None:
        on_result(CaseResult(case, "does_not_apply", [], [], reason=reason))
    return reason is not None


# --- mutants ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class MutantResult:
    """The checks that failed under a mutant; `first` is the expected check's finding, if any."""

    mutant: Mutant
    unpatched: str  # status of the case without the bug
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def caught(self) -> bool:
        """Whether the expected check failed, and the case passes without the mutant."""
        healthy = self.unpatched in ("exact", "within_tolerance")
        return healthy and self.mutant.expected in self.checks

    @property
    def checks(self) -> list[str]:
        return [finding.check for finding in self.findings]

    @property
    def first(self) -> Finding | None:
        expected = [f for f in self.findings if f.check == self.mutant.expected]
        return next(iter([*expected, *self.findings]), None)


class MutantRunner:
    """Runs mutants on forked ranks; a healthy case that several mutants share runs once.

    `watchdog` is the time-out of mutants that have to hang. No other run has it, so that a slow
    machine is not taken for a hang, neither with the bug nor without.
    """

    def __init__(self, watchdog: float, seed: int = 0) -> None:
        self._watchdog = watchdog
        self._seed = seed
        self._healthy: dict[tuple[Case, Delays | None], str] = {}

    def run(self, mutant: Mutant) -> MutantResult:
        """Run the case of a mutant without its bug, unless that is known, and then with it.

        Where layouts have to disagree, the case as it is stands for the first layout.
        """
        start = time.monotonic()
        ranks = ForkedRanks(mutant.world, HEALTHY_WATCHDOG)
        if mutant.device == "xla":
            ranks = XlaDevices(mutant.world, HEALTHY_WATCHDOG)
        elif mutant.device == "cuda":
            ranks = ForkedRanks(mutant.world, HEALTHY_WATCHDOG, "cuda", "nccl")
        campaign = Campaign(ranks, delays=mutant.delays)
        place = mutant.scenario, mutant.layout, mutant.world
        case = Case(*place, mutant.steps, mutant.sample_every, mutant.reduction, self._seed)
        against_itself = mutant.expected == "layouts"
        known = case, mutant.delays
        if known not in self._healthy or against_itself:
            self._healthy[known] = campaign.run(case).status
        if not against_itself:
            campaign.first_layout = {}  # held against the reference alone
        if mutant.expected == "hang":
            ranks.watchdog = self._watchdog
        result = campaign.run(case, patch=mutant.patch)
        seconds = time.monotonic() - start
        return MutantResult(mutant, self._healthy[known], tuple(result.findings), seconds)


Hearers = dict[str, Callable[..., Any]]
PATIENCE = 10.0  # seconds that a lane has to end its ranks


class LaneDiedError(RuntimeError):
    """A process of --lanes ended without a message."""


class Lanes:
    """Processes that run scenarios beside each other, and send their results as they come."""

    def __init__(self, count: int, campaign: Callable[[], Campaign]) -> None:
        self.count = count
        self._campaign = campaign

    def run(self, scenarios: CasesByScenario, on_result: OnResult, progress: Progress) -> None:
        """Run the cases of all scenarios; Ctrl-C ends every lane and is raised."""
        left = iter(range(len(scenarios)))
        # As with ranks: the child of a thread that has used OpenMP may hang in it, so a new one
        # forks. It outlives the lanes, since its end would count as the parent's death.
        forker = ThreadPoolExecutor(1)
        count = min(self.count, len(scenarios))
        lanes = dict(forker.submit(self._start, scenarios).result() for _ in range(count))
        hear: Hearers = {"result": on_result, "step": progress}
        try:
            for pipe in lanes.values():
                pipe.send(next(left, None))
            self._listen(list(lanes.values()), hear, lambda: next(left, None))
        except BaseException as reason:
            for process in lanes:
                process.terminate()
            if isinstance(reason, KeyboardInterrupt):
                del hear["step"]
                with suppress(LaneDiedError):
                    self._listen(list(lanes.values()), hear, lambda: None)
            raise
        finally:
            for process in lanes:
                process.join(PATIENCE)
                process.kill()
                process.join()
            forker.shutdown()

    @staticmethod
    def _listen(pipes: list[Connection], hear: Hearers, next_one: Callable[[], Any]) -> None:
        """Read results from the lanes until every lane has reported its end."""
        while pipes:
            for pipe in connection.wait(pipes):
                assert isinstance(pipe, Connection)
                try:
                    kind, content = pipe.recv()
                except EOFError:
                    why = "a process of --lanes died, perhaps for lack of memory: use fewer --lanes"
                    raise LaneDiedError(why) from None
                if kind == "raised":
                    raise LaneDiedError(f"a process of --lanes failed:\n{content}")
                if kind == "ends":
                    pipes.remove(pipe)
                elif kind == "free":
                    with suppress(BrokenPipeError):  # it is being ended
                        pipe.send(next_one())
                elif kind in hear:
                    hear[kind](*content)

    def _start(self, scenarios: CasesByScenario) -> tuple[ForkProcess, Connection]:
        fork = multiprocessing.get_context("fork")
        mine, theirs = fork.Pipe()
        process = fork.Process(target=self._run_lane, args=(theirs, scenarios, os.getpid()))
        process.start()
        theirs.close()
        return process, mine

    def _run_lane(self, pipe: Connection, scenarios: CasesByScenario, parent: int) -> NoReturn:
        """Run in a forked lane the scenarios that the parent sends; no exit handlers run."""
        try:
            end_with(parent)  # Ctrl-C is for the parent, which then ends its lanes
            torch.set_num_threads(1)
            campaign = self._campaign()
            with suppress(KeyboardInterrupt):  # the parent has heard how far the case was
                while (place := pipe.recv()) is not None:
                    tell = partial(_send, pipe, "result"), partial(_send, pipe, "step")
                    campaign.run_all(scenarios[place], *tell)
                    _send(pipe, "free")
            _send(pipe, "ends")
            os._exit(0)
        except Exception:
            pipe.send(("raised", traceback.format_exc()))
        finally:
            os._exit(1)


def _send(pipe: Connection, kind: str, *content: object) -> None:
    """Write a whole message to a pipe, also if a signal arrives meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        pipe.send((kind, content))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- Ctrl-C and SIGTERM: the first one ends the work, and none disturbs what is written after it

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """Raised when a signal asks this process to end; `status` is its exit status."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


@contextmanager
def stopped_once() -> Iterator[None]:
    """Inside, the first of the signals raises Stopped and all later ones are ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers belong to the main thread
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    # What is ignored already (nohup, a job in the background) stays that way.
    before = {n: was for n in SIGNALS if (was := signal.getsignal(n)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
