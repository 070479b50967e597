"""What the step is measured against: bars, met or not."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from samestep.bench.step.measure import Result

MOST_MS = {"gpt-1280": 15.0, "gpt-2048": 62.0}
AHEAD = 1.6  # of every peer, on these sets
ADAMW = 1.05  # of torch's fused form
VARIANCE = 1.08  # of the step without variance reduction and cautious decay
MEMORY = 1.3  # of the state


class Verdict(NamedTuple):
    """One bar."""

    what: str
    value: float | None  # None: there is nothing to judge
    bar: float
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether; None if it was not measured."""
        if self.value is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    def line(self) -> str:
        """In words."""
        state = {True: "met", False: "NOT MET", None: "not measured"}[self.met]
        value = "" if self.value is None else f"{self.value:.3g}, "
        return f"{state:12} {self.what}: {value}bar {'>=' if self.at_least else '<='} {self.bar:g}"


def verdicts(name: str, results: Sequence[Result]) -> list[Verdict]:
    """All bars of a set."""
    ms = {result.contestant.name: result.ms for result in results}
    found = []
    if name in MOST_MS:
        found.append(Verdict("milliseconds of a step", ms.get("ours"), MOST_MS[name]))
        peers = [r for r in results if not r.contestant.ours and r.contestant.field == "muon"]
        for result in peers:
            label = f"times as fast as {result.contestant.name}"
            found.append(Verdict(label, _ratio(result.ms, ms.get("ours")), AHEAD, at_least=True))
    found += [
        Verdict("AdamW against torch's fused", _of(ms, "ours-adamw", "torch-adamw"), ADAMW),
        Verdict("variance and caution against plain", _of(ms, "ours-variance", "ours"), VARIANCE),
    ]
    ours = next((r for r in results if r.contestant.name == "ours"), None)
    extra = None if ours is None else _ratio(ours.extra_bytes, ours.state_bytes)
    found.append(Verdict("extra memory against state", extra, MEMORY))
    return found


def _of(ms: Mapping[str, float | None], name: str, other: str) -> float | None:
    return _ratio(ms.get(name), ms.get(other))


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None
