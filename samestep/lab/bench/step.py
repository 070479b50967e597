"""`samestep bench step`: how long does a step of the optimizer take on this GPU?"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
from torch import Tensor

from samestep.lab.bench.gpu.measure import (
    Ceilings,
    Contest,
    Shown,
    Turn,
    accuracy_of,
    distance_to,
    polar_factor,
    settle,
    take_turn,
)
from samestep.lab.bench.gpu.options import FOLDER, SharedOptions, chosen, forget_compiled, read, who
from samestep.lab.bench.gpu.report import (
    Panel,
    Screen,
    Verdict,
    accuracy_cells,
    begin,
    draw,
    leave,
    number,
)
from samestep.lab.bench.step_contestants import CONTESTANTS, Entry, Parameters, make_parameters
from samestep.lab.common.floor import step_floor
from samestep.models.parameter_sets import SETS, Shapes, count
from samestep.tooling.request import BadRequestError


@dataclass
class Options(SharedOptions):
    """Time one optimizer step on this GPU: samestep's and those of other packages, in turns.

        samestep bench step
        samestep bench step --set llama-8b-slice --peer-path ~/dion ~/nanochat
        samestep bench step --device cpu --set tiny    # only to try it

    The floor is the least time that the matrix products and memory traffic of a step can take.
    """

    variants: Annotated[tuple[str, ...], who(CONTESTANTS)] = ()
    out: Annotated[Path, FOLDER] = Path("out/bench-step")
    rounds: Annotated[int, "measurements of each variant; the median counts"] = 20
    set: Annotated[tuple[str, ...], f"sets of parameters: {', '.join(SETS)}"] = (
        "gpt-1280",
        "gpt-2048",
    )


def parse(words: Sequence[str], prog: str) -> Options:
    options = read(Options, CONTESTANTS, words, prog)
    options.set = chosen("--set", options.set, list(SETS))
    if options.device == "cpu" and options.set != ("tiny",):
        raise BadRequestError("--device cpu only works with --set tiny")
    return options


# All contestants of a field in turns, on the same parameters and gradients

PROBES = ("Gaussian", "power law")  # of the first shape: those whose polynomial is compared
FLAT = 1.3  # a Gaussian matrix has a spread of 2, an orthogonalized one hardly above 1


class NotAStepError(Exception):
    """A contestant did something, but no step of its rule."""


@dataclass
class Result(Shown):
    """The results of a contestant's step."""

    first_s: float | None = None  # with compilation and tuning
    state_bytes: int | None = None
    extra_bytes: int | None = None  # at the peak of a step, beyond what was there before

    def as_json(self) -> dict[str, Any]:
        return super().as_json() | {
            "field": self.contestant.field,
            "first_step_s": self.first_s,
            "host_ms": None if self.host is None else self.host._asdict(),
            "state_bytes": self.state_bytes,
            "extra_bytes": self.extra_bytes,
        }


class Field(Contest[Result]):
    """Contestants that are compared with each other."""

    shown = Result

    def __init__(
        self, parameters: Parameters, device: torch.device, say: Callable[[str], None]
    ) -> None:
        super().__init__(device)
        self._parameters = parameters
        self._tell = say
        self._polar: dict[int, Tensor] = {}

    def _say(self, result: Result) -> None:
        outcome = result.failed or f"ready, first step {result.first_s:.1f} s"
        self._tell(f"  {result.contestant.name}: {outcome}")

    def _prepare(self, result: Result, warmup: int) -> None:
        begin = time.perf_counter()
        entry = result.contestant.build(self._parameters)
        self._entries[result.contestant.name] = entry
        for done in range(warmup):
            entry.step()
            if done == 0:
                settle(self._device)
                result.first_s = time.perf_counter() - begin
        result.state_bytes = entry.state_bytes()
        self._check(result, entry)

    def _turn(self, result: Result) -> Turn:
        return take_turn(self._entries[result.contestant.name].step, self._device)

    @torch.no_grad()
    def _check(self, result: Result, entry: Entry) -> None:
        """One more step, looked at: memory, what it changed, and that Muon was Muon."""
        parameters, probes = self._parameters.all, self._parameters.probes
        for probe in probes:
            probe.zero_()  # nothing to decay or to round: it becomes the update itself
        if entry.copies is not None:
            entry.copies.load()
            entry.copies.store()  # what rounding changes is no step
        before = _sums(parameters)
        result.extra_bytes = self._extra_bytes(entry.step)
        if entry.copies is not None:
            entry.copies.store()
        after = _sums(parameters)
        if not after.isfinite().all():
            raise NotAStepError("parameters are not finite after the step")
        unchanged = int((before == after).sum())
        if unchanged:
            raise NotAStepError(f"{unchanged} of {len(parameters)} parameters did not change")
        if result.contestant.field != "adamw":
            found = []
            for number, probe in enumerate(probes):
                assert probe.grad is not None
                if number not in self._polar:
                    self._polar[number] = polar_factor(probe.grad)
                result.polar.append(distance_to(self._polar[number], -probe))
                if number >= len(PROBES):
                    continue
                exact = self._exact_for(entry.reference, number, probe.grad)
                found.append(accuracy_of(-probe, exact, scaled=True))
            result.accuracy = found
            spread = result.accuracy[0].spread
            if not spread < FLAT:
                raise NotAStepError(
                    f"Muon was not running: singular values of an update spread by {spread:.2f}"
                )

    def _extra_bytes(self, step: Callable[[], None]) -> int | None:
        if self._device.type != "cuda":
            step()
            return None
        settle(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        step()
        settle(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


def _sums(parameters: Sequence[Tensor]) -> Tensor:
    """A number for each that no step leaves as it is."""
    return torch.stack([p.sum(dtype=torch.float64) for p in parameters])


# What the step is measured against: bars, met or not

MOST_MS = {"gpt-1280": 13.6, "gpt-2048": 60.0}
AHEAD = {"gpt-1280": 1.35, "gpt-2048": 1.25}  # of the best peer
ADAMW = 1.05  # of torch's fused form
VARIANCE = 1.08  # of the step without variance reduction and cautious decay
MEMORY = 1.3  # of the state


def verdicts(name: str, results: Sequence[Result]) -> list[Verdict]:
    ms = {result.contestant.name: result.ms for result in results}

    def of(name: str, other: str) -> float | None:
        return _ratio(ms.get(name), ms.get(other))

    found = []
    if name in MOST_MS:
        found.append(Verdict("milliseconds of a step", _best(results, ours=True), MOST_MS[name]))
        lead = _ratio(_best(results, ours=False), _best(results, ours=True))
        found.append(Verdict("times as fast as the best peer", lead, AHEAD[name], at_least=True))
    found += [
        Verdict("AdamW against torch's fused", of("ours-adamw", "torch-adamw"), ADAMW),
        Verdict("variance and caution against plain", of("ours-variance", "ours"), VARIANCE),
    ]
    ours = next((r for r in results if r.contestant.name == "ours"), None)
    extra = None if ours is None else _ratio(ours.extra_bytes, ours.state_bytes)
    found.append(Verdict("extra memory against state", extra, MEMORY))
    return found


def _best(results: Sequence[Result], *, ours: bool) -> float | None:
    """The least time: of ours by default or as a graph, or of all peers."""
    mine = ("ours", "ours-graph")
    times = [
        result.ms
        for result in results
        if result.contestant.field == "muon" and result.ms is not None
        if (result.contestant.name in mine if ours else not result.contestant.ours)
    ]
    return min(times, default=None)


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None


# The command

FIELDS = ("muon", "bfloat16", "adamw")
SPEED = (
    "", "ms", "min..max", "IQR", "host ms", "x floor", "TFLOP/s", "% product", "% copy", "x ours",
    "extra GB", "state GB",
)  # fmt: skip
ACCURACY = (
    "", "Gaussian", "distance", "power law", "distance", "to polar factor, median", "worst",
)  # fmt: skip


def run(options: Options) -> int:
    screen = Screen()
    device, ceilings, content = begin("samestep step", options, screen)
    content["sets"] = []
    panels: list[Panel] = []
    for name in options.set:
        results = _measure_set(name, options, device, screen)
        judged = verdicts(name, results) if device.type == "cuda" else []
        told = as_json(name, results, judged, ceilings)
        show(told, judged, screen)
        content["sets"].append(told)
        panels.append(Panel(name, results, told["floor"]["ms"]))
        # After every set: what ends the run later leaves what was measured.
        picture = draw("A step of the optimizer", panels)
        files = leave(options.out, "step", content, picture)
    screen.wrote(files, options.out)
    return 0


def _measure_set(name: str, options: Options, device: torch.device, screen: Screen) -> list[Result]:
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
            contest = Field(parameters, device, screen.progress)
            results += contest.run(mine, options.rounds, options.warmup)
            del contest
            gc.collect()
    del parameters
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return results


def as_json(
    name: str, results: Sequence[Result], judged: Sequence[Verdict], ceilings: Ceilings
) -> dict[str, Any]:
    shapes = SETS[name]
    floor = step_floor(*shapes, clips=True)
    return {
        "set": name,
        "matrix_parameters": count(shapes.matrices),
        "other_parameters": count(shapes.others),
        "floor": {**floor._asdict(), "ms": floor.ms(ceilings)},
        "contestants": [r.as_json() | numbers(r, shapes, results, ceilings) for r in results],
        "bars": [verdict._asdict() | {"met": verdict.met} for verdict in judged],
    }


DERIVED = ("times_floor", "tflops", "percent_of_product", "percent_of_copy", "times_ours")


def numbers(
    result: Result, shapes: Shapes, results: Sequence[Result], ceilings: Ceilings
) -> dict[str, float | None]:
    """Figures that follow from a median; TFLOP/s count the least work, and nothing beyond it."""
    ms, contestant = result.ms, result.contestant
    if not ms:
        return dict.fromkeys(DERIVED)
    muon = contestant.field == "muon"
    work = shapes if muon else Shapes((), shapes.matrices + shapes.others)
    floor = step_floor(*work, clips=contestant.clips)
    per_second = 1e3 / ms
    rival = {"muon": "ours", "bfloat16": "ours-remainder", "adamw": "ours-adamw"}[contestant.field]
    ours = next((r.ms for r in results if r.contestant.name == rival), None)
    if contestant.field == "bfloat16":  # the floor counts 32 bits
        return {**dict.fromkeys(DERIVED), "times_ours": ms / ours if ours else None}
    products = floor.flops > 0
    return {
        "times_floor": ms / floor.ms(ceilings),
        "tflops": floor.flops * per_second / 1e12 if products else None,
        "percent_of_product": 100 * floor.flops * per_second / ceilings.flops if products else None,
        "percent_of_copy": 100 * floor.bytes * per_second / ceilings.bytes,
        "times_ours": ms / ours if ours else None,
    }


def show(told: Mapping[str, Any], judged: Sequence[Verdict], screen: Screen) -> None:
    """The record of a set for the receipt."""
    shown = [each for each in told["contestants"] if each["ms"] and not each["failed"]]
    title = f"{told['set']}: floor {told['floor']['ms']:.3g} ms with clipping"
    screen.table(title, SPEED, [_speed(each) for each in shown])
    rows = [
        [each["name"], *accuracy_cells(each), *_polar(each)] for each in shown if each["gaussian"]
    ]
    screen.table("Singular values of an update, relative to their root mean square", ACCURACY, rows)
    for each in told["contestants"]:
        if each["failed"] is not None:
            screen.say(f"{each['name']} is out: {each['failed']}")
    for verdict in judged:
        screen.say(verdict.line())
    if not judged:
        screen.say("No bars: they are for CUDA.")


def _polar(told: Mapping[str, Any]) -> list[str]:
    """The distance to exact polar factors over all probes: the median and the worst."""
    found = told["polar_distances"]
    return [f"{median(found):.3g}", f"{max(found):.3g}"]


def _speed(told: Mapping[str, Any]) -> list[str]:
    times = told["ms"]
    sizes = [None if b is None else b / 1e9 for b in (told["extra_bytes"], told["state_bytes"])]
    return [
        told["name"],
        f"{times['median']:.2f}",
        f"{times['low']:.2f}..{times['high']:.2f}",
        f"{times['middle_half']:.2f}",
        f"{told['host_ms']['median']:.2f}",
        number(told["times_floor"]),
        *(number(told[key], 0) for key in ("tflops", "percent_of_product", "percent_of_copy")),
        number(told["times_ours"]),
        *(number(size) for size in sizes),
    ]
