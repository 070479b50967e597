"""`samestep bench step`: measure, show, write."""

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from samestep.bench.gpu.ceilings import HOT, Ceilings, measure_ceilings
from samestep.bench.gpu.options import device_of
from samestep.bench.gpu.peers import forget_compiled, make_importable
from samestep.bench.gpu.picture import Bar, Panel, draw
from samestep.bench.gpu.receipt import heading, leave
from samestep.bench.gpu.show import Screen, band, digits, number
from samestep.bench.step.bars import Verdict, verdicts
from samestep.bench.step.contestants import CONTESTANTS
from samestep.bench.step.measure import Field, Result
from samestep.bench.step.options import Options, parse
from samestep.bench.step.sets import make_parameters
from samestep.estimate.floors import Floor, step_floor
from samestep.models.parameter_sets import SETS, Shapes, count
from samestep.tooling.output import check_folder

__all__ = ["Options", "parse", "run"]

FIELDS = ("muon", "adamw")
SPEED = (
    "", "ms", "min..max", "IQR", "host ms", "x floor", "TFLOP/s", "% product", "% copy", "x ours",
    "extra GB", "state GB",
)  # fmt: skip
ACCURACY = ("", "Gaussian", "distance", "power law", "distance")


class Outcome(NamedTuple):
    """Of one set."""

    name: str
    shapes: Shapes
    results: list[Result]
    verdicts: list[Verdict]

    def floor(self, result: Result) -> Floor:
        """The least work of what a contestant does."""
        contestant = result.contestant
        if contestant.field == "adamw":
            return step_floor((), self.shapes.matrices + self.shapes.others, clips=contestant.clips)
        return step_floor(*self.shapes, clips=contestant.clips)


def run(options: Options) -> int:
    """Do what the options ask."""
    check_folder(options.out)
    screen = Screen()
    device = device_of(options.device)
    make_importable(options.peer_path)
    ceilings = measure_ceilings(device)
    screen.progress(
        f"this device: {ceilings.flops / 1e12:.1f} TFLOP/s in a product, "
        f"{ceilings.hot_flops / 1e12:.1f} after {HOT:.0f} s of them, "
        f"{ceilings.bytes / 1e12:.2f} TB/s in a copy"
    )
    content = heading("samestep step", options.command, device, ceilings, options.peer_path)
    if content["kernels_missing"] is not None:
        screen.say(f"ours runs without kernels: {content['kernels_missing']}")
    content["sets"] = []
    outcomes: list[Outcome] = []
    for name in options.sets:
        outcomes.append(_measure_set(name, options, device, screen))
        show(outcomes[-1], ceilings, screen)
        content["sets"].append(as_json(outcomes[-1], ceilings))
        # After every set: what ends the run later leaves what was measured.
        picture = draw("A step of the optimizer", panels(outcomes, ceilings), "ms (median)")
        files = leave(options.out, "step", content, picture)
    if picture is None:
        screen.say("No picture: matplotlib is not installed.")
    screen.say(f"Wrote {' and '.join(files)} to {options.out}.")
    return 0


def _measure_set(name: str, options: Options, device: torch.device, screen: Screen) -> Outcome:
    shapes = SETS[name]
    total = count(shapes.matrices + shapes.others)
    screen.progress(f"{name}: {total / 1e6:,.0f} million parameters")
    if options.peer_path:
        forget_compiled()
    parameters = make_parameters(shapes, device)
    results: list[Result] = []
    for of in FIELDS:  # one after the other: the states of all would need much memory
        mine = [c for c in CONTESTANTS if c.field == of and c.name in options.variants]
        if mine:
            field = Field(parameters, device, screen.progress)
            results += field.run(mine, options.rounds, options.warmup)
            del field
            gc.collect()
    del parameters
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    judged = verdicts(name, results) if device.type == "cuda" else []
    return Outcome(name, shapes, results, judged)


def show(outcome: Outcome, ceilings: Ceilings, screen: Screen) -> None:
    """A table, failures in words, and the bars."""
    shown = [result for result in outcome.results if result.ms is not None]
    floor = step_floor(*outcome.shapes, clips=True).ms(ceilings)
    title = f"{outcome.name}: floor {floor:.3g} ms with clipping"
    screen.table(title, SPEED, [_speed(outcome, result, ceilings) for result in shown])
    rows = [_accuracy(result) for result in shown if result.accuracy]
    screen.table("Singular values of an update, relative to their root mean square", ACCURACY, rows)
    for result in outcome.results:
        if result.failed is not None:
            screen.say(f"{result.contestant.name} is out: {result.failed}")
    for verdict in outcome.verdicts:
        screen.say(verdict.line())
    if not outcome.verdicts:
        screen.say("No bars: they are for CUDA.")


def _speed(outcome: Outcome, result: Result, ceilings: Ceilings) -> list[str]:
    times, host = result.times, result.host
    assert times is not None
    assert host is not None
    derived = numbers(outcome, result, ceilings)
    sizes = [None if b is None else b / 1e9 for b in (result.extra_bytes, result.state_bytes)]
    return [
        result.contestant.name,
        f"{times.median:.2f}",
        f"{times.low:.2f}..{times.high:.2f}",
        f"{times.middle_half:.2f}",
        f"{host.median:.2f}",
        number(derived["times_floor"]),
        number(derived["tflops"], 0),
        number(derived["percent_of_product"], 0),
        number(derived["percent_of_copy"], 0),
        number(derived["times_ours"]),
        *(number(size) for size in sizes),
    ]


def _accuracy(result: Result) -> list[str]:
    cells = [(band(a.low, a.high), digits(a.distance)) for a in result.accuracy]
    return [result.contestant.name, *cells[0], *cells[1]]


DERIVED = ("times_floor", "tflops", "percent_of_product", "percent_of_copy", "times_ours")


def numbers(outcome: Outcome, result: Result, ceilings: Ceilings) -> dict[str, float | None]:
    """What follows from a median; TFLOP/s count the least work, not what was done beyond it."""
    ms = result.ms
    if not ms:
        return dict.fromkeys(DERIVED)
    floor = outcome.floor(result)
    per_second = 1e3 / ms
    rival = "ours" if result.contestant.field == "muon" else "ours-adamw"
    ours = next((r.ms for r in outcome.results if r.contestant.name == rival), None)
    products = floor.flops > 0
    return {
        "times_floor": ms / floor.ms(ceilings),
        "tflops": floor.flops * per_second / 1e12 if products else None,
        "percent_of_product": 100 * floor.flops * per_second / ceilings.flops if products else None,
        "percent_of_copy": 100 * floor.bytes * per_second / ceilings.bytes,
        "times_ours": ms / ours if ours else None,
    }


def as_json(outcome: Outcome, ceilings: Ceilings) -> dict[str, Any]:
    """For the receipt."""
    floor = step_floor(*outcome.shapes, clips=True)
    return {
        "set": outcome.name,
        "matrix_parameters": count(outcome.shapes.matrices),
        "other_parameters": count(outcome.shapes.others),
        "floor": {**floor._asdict(), "ms": floor.ms(ceilings)},
        "contestants": [
            result.as_json() | numbers(outcome, result, ceilings) for result in outcome.results
        ],
        "bars": [verdict._asdict() | {"met": verdict.met} for verdict in outcome.verdicts],
    }


def panels(outcomes: Sequence[Outcome], ceilings: Ceilings) -> list[Panel]:
    """A panel for each set."""
    return [
        Panel(
            outcome.name,
            [
                Bar(result.contestant.name, result.ms, result.contestant.ours)
                for result in outcome.results
                if result.ms is not None
            ],
            step_floor(*outcome.shapes, clips=True).ms(ceilings),
        )
        for outcome in outcomes
    ]
