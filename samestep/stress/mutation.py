"""Running mutants: the case as it is must pass, and fail by the named check once it is patched."""

import time
from dataclasses import dataclass

from samestep.stress.campaign import Campaign, Case
from samestep.stress.judge import Finding
from samestep.stress.mutants import Mutant
from samestep.stress.ranks import ForkedRanks

HEALTHY_WATCHDOG = 120.0  # seconds; a slow collective of a busy machine is no hang


@dataclass(frozen=True)
class MutantResult:
    """Which checks a mutant failed. `first` is the finding of the expected check, if it is one."""

    mutant: Mutant
    unpatched: str  # status of the case without the bug
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def caught(self) -> bool:
        """By the check that its story names, and not by a case that fails anyway."""
        healthy = self.unpatched in ("exact", "within_tolerance")
        return healthy and self.mutant.expected in self.checks

    @property
    def checks(self) -> list[str]:
        """The checks that failed."""
        return [finding.check for finding in self.findings]

    @property
    def first(self) -> Finding | None:
        """What is to be told."""
        expected = [f for f in self.findings if f.check == self.mutant.expected]
        return next(iter([*expected, *self.findings]), None)


class MutantRunner:
    """Runs mutants on forked ranks; a healthy case that several mutants share runs once.

    `watchdog` is for the mutants that have to hang. Where nothing has to, a slow machine must not
    be taken for one that hangs, neither with the bug nor without.
    """

    def __init__(self, watchdog: float, seed: int = 0) -> None:
        self._watchdog = watchdog
        self._seed = seed
        self._healthy: dict[Case, str] = {}

    def run(self, mutant: Mutant) -> MutantResult:
        """Run its case as it is, unless that is known, then with the bug.

        Where layouts have to disagree, the case as it is stands for the first layout.
        """
        start = time.monotonic()
        ranks = ForkedRanks(mutant.world, HEALTHY_WATCHDOG)
        campaign = Campaign(ranks)
        place = mutant.scenario, mutant.layout, mutant.world
        case = Case(*place, mutant.steps, 1, mutant.reduction, self._seed)
        against_itself = mutant.expected == "layouts"
        if case not in self._healthy or against_itself:
            self._healthy[case] = campaign.run(case).status
        if not against_itself:
            campaign.forget_first_layout()
        if mutant.expected == "hang":
            ranks.watchdog = self._watchdog
        result = campaign.run(case, patch=mutant.patch)
        seconds = time.monotonic() - start
        return MutantResult(mutant, self._healthy[case], tuple(result.findings), seconds)
