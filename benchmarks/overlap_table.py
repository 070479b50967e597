"""What the overlap benchmark has shown, as tables, sentences and JSON."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.overlap_training import FREE, Case, Sample, described

BAR = 0.7  # by how much exposed communication shall fall

Rounds = Sequence[Sequence[Sample]]


class Row(NamedTuple):
    """One case on one link, in milliseconds, against the same case on a free link."""

    case: Case
    link: str
    step: float
    compute: float  # the step on a free link
    backward: float  # there
    skew: float  # inside waits there: for other ranks, since the link costs nothing
    busy: float  # that the modelled link is
    exposed: float
    waited: float  # more than on a free link, inside waits
    skipping: float  # exposed in steps in which a rank left out a layer

    @property
    def hidden(self) -> float:
        """The share of communication that does not show."""
        return 1 - self.exposed / self.busy


def median_ms(samples: Iterable[Sample], of: Callable[[Sample], float]) -> float:
    """The median step."""
    return 1e3 * statistics.median(map(of, samples))


def row(samples: Mapping[tuple[Case, str], Rounds], case: Case, link: str, *picked: int) -> Row:
    """From the samples of some rounds, or of all."""

    def steps(name: str) -> list[Sample]:
        rounds = samples[case, name]
        return [
            step for i, steps in enumerate(rounds) if not picked or i in picked for step in steps
        ]

    def more(of: Callable[[Sample], float], only: Callable[[Sample], bool]) -> float:
        taken, free = filter(only, steps(link)), filter(only, steps(FREE))
        return median_ms(taken, of) - median_ms(free, of)

    return Row(
        case=case,
        link=link,
        step=median_ms(steps(link), lambda s: s.whole),
        compute=median_ms(steps(FREE), lambda s: s.whole),
        backward=median_ms(steps(FREE), lambda s: s.backward),
        skew=median_ms(steps(FREE), lambda s: s.waited),
        busy=median_ms(steps(link), lambda s: s.link),
        exposed=more(lambda s: s.whole, lambda s: True),
        waited=more(lambda s: s.waited, lambda s: True),
        skipping=more(lambda s: s.whole, lambda s: s.skips),
    )


class Results:
    """All samples of a run."""

    def __init__(self, samples: dict[tuple[Case, str], list[list[Sample]]]) -> None:
        self.samples = samples

    def rows(self, keep: Callable[[Case, str], bool]) -> list[Row]:
        """Every case on every link but the free one."""
        return [
            row(self.samples, case, link)
            for case, link in self.samples
            if link != FREE and keep(case, link)
        ]

    def fall(self, case: Case, link: str, *picked: int) -> float:
        """By which share overlap makes exposed communication fall."""
        plain = row(self.samples, case.without, link, *picked)
        return 1 - row(self.samples, case, link, *picked).exposed / plain.exposed

    def falls(self, case: Case, link: str) -> list[float]:
        """In every round alone."""
        return [self.fall(case, link, i) for i in range(len(self.samples[case, link]))]

    def table(self, title: str, rows: Sequence[Row]) -> Table:
        """Rows for the screen."""
        table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False)
        for column in ("link", "layout", "overlap"):
            table.add_column(column, no_wrap=True)
        for column in ("step", "free", "busy", "exposed", "hidden", "wait", "skip", "less"):
            table.add_column(column, justify="right", no_wrap=True)
        for r in rows:
            plain = r.case == r.case.without
            table.add_row(
                r.link,
                f"{r.case.sharding} P/{r.case.parts}",
                r.case.overlap,
                *(f"{ms:.0f}" for ms in (r.step, r.compute, r.busy, r.exposed)),
                f"{r.hidden:.0%}",
                f"{r.waited:.0f}",
                f"{r.skipping:.0f}",
                "" if plain else f"{self.fall(r.case, r.link):.0%}",
            )
        return table

    def bar_line(self, case: Case, link: str) -> str:
        """How a case did against the bar."""
        fall, rounds = self.fall(case, link), self.falls(case, link)
        verdict = "met" if fall >= BAR else "not met"
        return (
            f"{case.sharding} on the {link} link: exposed communication falls by {fall:.0%} "
            f"({min(rounds):.0%} to {max(rounds):.0%} in single rounds); the bar is {BAR:.0%}: "
            f"{verdict}."
        )

    def summary(self) -> list[dict[str, Any]]:
        """Everything for JSON."""
        return [
            {
                **described(r.case),
                **{key: value for key, value in r._asdict().items() if key != "case"},
                "hidden": r.hidden,
                "falls_by": self.fall(r.case, r.link),
                "falls_by_in_single_rounds": self.falls(r.case, r.link),
                "samples_ms": self._whole(r.case, r.link),
                "samples_free_ms": self._whole(r.case, FREE),
            }
            for r in self.rows(lambda *_: True)
        ]

    def _whole(self, case: Case, link: str) -> list[list[float]]:
        return [[1e3 * step.whole for step in steps] for steps in self.samples[case, link]]
