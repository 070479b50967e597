"""The page: what each part of it shows, and the template that shows it."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from samestep.stress.report import plot as plots
from samestep.stress.report import presence
from samestep.stress.report.distances import Case, Receipt
from samestep.stress.report.failures import Failure, failure
from samestep.stress.report.matrix import anchor, matrix
from samestep.stress.report.summary import summary
from samestep.stress.report.traffic import Traffic, traffic
from samestep.stress.report.words import STATUSES, count, duration, moment

LOOPS = {
    "open": "gradients do not depend on the parameters",
    "recorded": "every layout gets the gradients of the reference's run",
    "closed": "each layout has the gradients of its own parameters, which amplifies rounding: only "
    "the first steps are held against the reference",
}


@dataclass(frozen=True)
class Section:
    """What the page shows of a scenario."""

    name: str
    anchor: str
    story: str
    loop: str
    loop_story: str
    statuses: list[tuple[str, str]]  # status, how many in words
    failures: list[Failure]
    plot: plots.Plot | None
    heat_map: presence.HeatMap | None
    traffic: Traffic | None


def render(receipt: Receipt) -> str:
    """One page of HTML that loads nothing; `receipt` has passed `check_receipt`."""
    environment = Environment(
        loader=PackageLoader("samestep.stress.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = duration
    return environment.get_template("report.html.jinja").render(
        receipt=receipt,
        asked=receipt["asked"],
        ran=receipt["ran"],
        command=shlex.join(receipt["ran"]["command"]),
        started=moment(receipt["ran"]["started"]),
        summary=summary(receipt),
        matrix=matrix(receipt),
        sections=[section(receipt, name) for name in receipt["scenarios"]],
        statuses=STATUSES,
        plots=plots,
        presence=presence,
    )


def section(receipt: Receipt, name: str) -> Section:
    """Everything about one scenario."""
    scenario = receipt["scenarios"][name]
    cases: Sequence[Case] = [case for case in receipt["cases"] if case["scenario"] == name]
    of_status = {status: [c for c in cases if c["status"] == status] for status in STATUSES}
    return Section(
        name=name,
        anchor=anchor(name),
        story=scenario["story"],
        loop=scenario["loop"],
        loop_story=LOOPS[scenario["loop"]],
        statuses=[
            (status, f"{count(len(found), 'layout')} {STATUSES[status][1]}")
            for status, found in of_status.items()
            if found
        ],
        failures=[failure(case) for case in cases if case["status"] in ("failed", "interrupted")],
        plot=plots.plot(cases, receipt["thresholds"]),
        heat_map=presence.heat_map(scenario["presence"], receipt["ran"]["world_size"]),
        traffic=traffic(cases),
    )
