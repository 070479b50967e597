"""`samestep bench orthogonalize`: measure, show, write."""

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

from samestep.bench.gpu.ceilings import Ceilings, measure_ceilings
from samestep.bench.gpu.options import device_of
from samestep.bench.gpu.peers import make_importable
from samestep.bench.gpu.picture import Bar, Panel, draw
from samestep.bench.gpu.receipt import heading, leave
from samestep.bench.gpu.show import Screen, band, digits, number
from samestep.bench.orthogonalize.bars import Lead, geometric_mean, lead, lines
from samestep.bench.orthogonalize.contestants import CONTESTANTS, Contestant
from samestep.bench.orthogonalize.measure import Measurement, Result, Shape
from samestep.bench.orthogonalize.options import Options, parse
from samestep.estimate.floors import least_flops
from samestep.tooling.output import check_folder

__all__ = ["Options", "parse", "run"]


class Outcome(NamedTuple):
    """Of one shape."""

    shape: Shape
    results: list[Result]
    lead: Lead | None

    @property
    def name(self) -> str:
        """As it is asked for."""
        return "x".join(map(str, self.shape))


def run(options: Options) -> int:
    """Do what the options ask."""
    check_folder(options.out)
    screen = Screen()
    device = device_of(options.device)
    make_importable(options.peer_path)
    ceilings = measure_ceilings(device)
    screen.progress(f"this device: {ceilings.flops / 1e12:.1f} TFLOP/s in a product")
    contestants = [c for c in CONTESTANTS if c.name in options.variants]
    content = heading(
        "samestep orthogonalize", options.command, device, ceilings, options.peer_path
    )
    if content["kernels_missing"] is not None:
        screen.say(f"ours runs without kernels: {content['kernels_missing']}")
    outcomes: list[Outcome] = []
    for shape in options.shapes:
        measurement = Measurement(shape, device)
        results = measurement.run(contestants, options.rounds, options.warmup)
        del measurement
        gc.collect()
        outcomes.append(Outcome(shape, results, lead(shape, results)))
        screen.progress(_line(outcomes[-1]))
        content.update(as_json(outcomes, ceilings))
        leave(options.out, "orthogonalize", content, None)  # what ends the run leaves this
    show(outcomes, contestants, screen)
    picture = draw("Orthogonalization", panels(outcomes, ceilings), "ms (median)")
    files = leave(options.out, "orthogonalize", content, picture)
    if picture is None:
        screen.say("No picture: matplotlib is not installed.")
    screen.say(f"Wrote {' and '.join(files)} to {options.out}.")
    return 0


def _line(outcome: Outcome) -> str:
    times = [
        f"{r.contestant.name} {'out' if r.ms is None else f'{r.ms:.3g}'}" for r in outcome.results
    ]
    return f"{outcome.name} ms: {', '.join(times)}"


def show(outcomes: Sequence[Outcome], contestants: Sequence[Contestant], screen: Screen) -> None:
    """Tables of time, rate and accuracy, failures in words, and the bars."""
    names = [contestant.name for contestant in contestants]
    rows = []
    for outcome in outcomes:
        ahead = outcome.lead
        cells = ["-", "-"] if ahead is None else [f"{ahead.ratio:.2f}", ahead.best_peer]
        rows.append([outcome.name, *(number(r.ms, 3) for r in outcome.results), *cells])
    screen.table("Milliseconds (median)", ["", *names, "x best peer", "which is"], rows)
    rates = [[o.name, *(number(r.tflops(o.shape), 0) for r in o.results)] for o in outcomes]
    screen.table("TFLOP/s of the least work", ["", *names], rates)
    rows = [
        [f"{outcome.name} {result.contestant.name}", *_cells(result)]
        for outcome in outcomes
        for result in outcome.results
        if result.accuracy
    ]
    columns = ["", "Gaussian", "distance", "power law", "distance"]
    screen.table("Singular values", columns, rows)
    for name, failures in _failures(outcomes).items():
        screen.say(f"{name} is out: {'; '.join(failures)}")
    for line in lines([o.lead for o in outcomes if o.lead is not None], len(outcomes)):
        screen.say(line)


def _cells(result: Result) -> list[str]:
    cells = [(band(a.low, a.high), digits(a.distance)) for a in result.accuracy]
    return [*cells[0], *cells[1]]


def _failures(outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    """By contestant: each reason once."""
    found: dict[str, list[str]] = {}
    for result in (result for outcome in outcomes for result in outcome.results):
        if result.failed is not None:
            reasons = found.setdefault(result.contestant.name, [])
            if result.failed not in reasons:
                reasons.append(result.failed)
    return found


def as_json(outcomes: Sequence[Outcome], ceilings: Ceilings) -> dict[str, Any]:
    """For the receipt."""
    leads = [outcome.lead for outcome in outcomes if outcome.lead is not None]
    return {
        "shapes": [
            {
                "shape": list(outcome.shape),
                "floor_ms": _floor(outcome.shape, ceilings),
                "best_peer": None if outcome.lead is None else outcome.lead.best_peer,
                "lead": None if outcome.lead is None else outcome.lead.ratio,
                "contestants": [result.as_json(outcome.shape) for result in outcome.results],
            }
            for outcome in outcomes
        ],
        "geometric_mean_of_leads": geometric_mean(leads),
        "bars": lines(leads, len(outcomes)),
    }


def _floor(shape: Shape, ceilings: Ceilings) -> float:
    """Milliseconds of the products alone."""
    return 1e3 * shape[0] * least_flops(*shape[1:]) / ceilings.flops


def panels(outcomes: Sequence[Outcome], ceilings: Ceilings) -> list[Panel]:
    """A panel for each shape."""
    return [
        Panel(
            outcome.name,
            [
                Bar(result.contestant.name, result.ms, result.contestant.ours)
                for result in outcome.results
                if result.ms is not None
            ],
            _floor(outcome.shape, ceilings),
        )
        for outcome in outcomes
    ]
