"""Running cases one after the other: reference, ranks, verdict."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from samestep.stress.expected import Expected, due_steps, expected_run
from samestep.stress.judge import Finding, Judge, SampleVerdict
from samestep.stress.layouts import LAYOUTS
from samestep.stress.rank import Work
from samestep.stress.ranks import Ranks
from samestep.stress.sample import Ending, Sample
from samestep.stress.scenario import MakeModel, Recorded, Scenario
from samestep.stress.scenarios import SCENARIOS

Progress = Callable[["Case", int, float], None]  # steps taken, worst difference so far


@dataclass(frozen=True)
class Case:
    """One scenario in one layout."""

    scenario: str
    layout: str
    world: int
    steps: int
    sample_every: int
    reduction: str = "ordered"
    seed: int = 0


@dataclass
class CaseResult:
    """What came of a case. `status`: exact, within_tolerance, failed or interrupted."""

    case: Case
    status: str
    findings: list[Finding]
    samples: list[SampleVerdict]
    endings: dict[int, Ending] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def positions(self) -> dict[int, str]:
        """The collective that each rank was in when something went wrong, where that is known."""
        known = {r: op for end in self.endings.values() for r, op in end.positions.items()}
        return dict(sorted(known.items()))


class Campaign:
    """Cases on the same ranks, with what they share: models, references, the first layout.

    A scenario's reference and first layout are kept until the next scenario begins.
    """

    def __init__(self, ranks: Ranks, make_model: MakeModel | None = None) -> None:
        self._ranks = ranks
        self._make_model = make_model
        self._shared_by: tuple[Any, ...] | None = None
        self._scenario: Scenario
        self._expected: Expected
        self._base: dict[int, Sample] = {}
        self.presence: dict[str, dict[str, list[int]]] = {}
        self.interrupted: CaseResult | None = None  # what was known of a case at Ctrl-C

    def run(
        self,
        case: Case,
        progress: Progress = lambda case, step, worst: None,
        patch: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> CaseResult:
        """Run one case to its end, whatever that is; only Ctrl-C comes through."""
        start = time.monotonic()
        self._prepare(case, lambda step: progress(case, step, 0.0))
        exact = case.reduction == "ordered"
        judge = Judge(self._scenario, self._expected, dict(self._base), exact)
        samples: dict[int, Sample] = {}

        def on_sample(of_ranks: Sequence[Sample]) -> None:
            samples[of_ranks[0].step] = of_ranks[0]
            judge.add(of_ranks)
            progress(case, of_ranks[0].step, judge.worst)

        work = Work(
            self._scenario,
            LAYOUTS[case.layout],
            case.steps,
            case.sample_every,
            case.reduction,
            patch,
        )
        try:
            endings = self._ranks.run(work, on_sample)
        except KeyboardInterrupt:
            status = "failed" if judge.findings else "interrupted"
            seconds = time.monotonic() - start
            self.interrupted = CaseResult(case, status, judge.findings, judge.verdicts, {}, seconds)
            raise
        judge.end(endings)
        if not self._base:
            self._base = samples
        seconds = time.monotonic() - start
        return CaseResult(case, judge.status(), judge.findings, judge.verdicts, endings, seconds)

    def forget_first_layout(self) -> None:
        """The next case is held against the reference alone."""
        self._base = {}

    def _prepare(self, case: Case, progress: Callable[[int], None]) -> None:
        kind = SCENARIOS[case.scenario]
        scenario = kind(case.seed, case.world, self._make_model if kind.takes_any_model else None)
        due = due_steps(scenario, case.steps, case.sample_every)
        key = (case.scenario, case.world, case.reduction, case.seed)
        if key == self._shared_by and due <= self._expected.samples.keys():
            return  # also a shorter case, if the longer one has its samples
        expected = expected_run(scenario, case.steps, case.sample_every, progress)
        if scenario.loop == "recorded":
            scenario = Recorded(scenario, expected.gradients)
        self._scenario, self._expected, self._base = scenario, expected, {}
        self._shared_by = key
        self.presence[case.scenario] = expected.presence
