"""`samestep bench orthogonalize`: how long does it take on this GPU, shape by shape?"""

import gc
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from samestep.kernels.choice import missing_products
from samestep.lab.bench.gpu.measure import (
    Ceilings,
    Contest,
    Reference,
    Shown,
    Turn,
    accuracy_of,
    our_reference,
    power_law,
    take_turn,
)
from samestep.lab.bench.gpu.options import FOLDER, Contestant, SharedOptions, peer, read, who
from samestep.lab.bench.gpu.report import Panel, Screen, accuracy_cells, begin, draw, leave, number
from samestep.lab.common.floor import least_flops
from samestep.rules.orthogonalize import POLYNOMIALS, orthogonalize
from samestep.tooling.request import BadRequestError, Flag

# Functions that orthogonalize a 16-bit batch (B, m, n): ours, torch's, and peers'

QUINTIC = POLYNOMIALS["newton-schulz"].coefficients[0]


class Shape(NamedTuple):
    """A batch of matrices."""

    matrices: int
    rows: int
    cols: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


class Function(NamedTuple):
    """A contestant: the function that is timed, and the polynomial that it is to compute."""

    call: Callable[[Tensor], Tensor]
    reference: Reference | None


def _ours(method: str = "polar-express", **options: Any) -> Function:
    return Function(lambda X: orthogonalize(X, method=method, **options), our_reference(method))


def _torch_single() -> Function:
    """The function of torch.optim.Muon for each matrix; it scales its argument, hence the copy."""
    one: Any = peer("torch.optim._muon")._zeropower_via_newtonschulz

    def call(X: Tensor) -> Tensor:
        for matrix in X:
            last: Tensor = one(matrix.clone(), QUINTIC, 5, 1e-7)
        return last[None]

    return Function(call, Reference([QUINTIC] * 5))


def _dion_triton() -> Function:
    module = peer("dion.newton_schulz_triton")
    try:
        reference = Reference(peer("gram_newton_schulz").YOU_COEFFICIENTS)  # the same, readable
    except ImportError:
        reference = None
    return Function(module.newton_schulz_triton, reference)


def _dion_polar() -> Function:
    module = peer("dion.polar_express")
    return Function(module.polar_express_triton, Reference(module._POLAR_EXPRESS_COEFFS, 1.02))


def _gram(**options: Any) -> Function:
    package = peer("gram_newton_schulz")
    table = package.POLAR_EXPRESS_COEFFICIENTS
    call = package.GramNewtonSchulz(
        ns_coefficients=table, gram_newton_schulz_reset_iterations=[2], **options
    )
    return Function(call, Reference(table))


CONTESTANTS = (
    Contestant("ours", "samestep's orthogonalize", _ours, ours=True),
    Contestant(
        "ours-float16", "the same with compute_dtype=float16",
        partial(_ours, compute_dtype=torch.float16), ours=True,
    ),
    Contestant("torch-single", "torch.optim.Muon's function, matrix by matrix", _torch_single),
    Contestant(
        "torch-batched", "the same polynomial on the batch, in plain torch",
        partial(_ours, "newton-schulz", execution="standard", compute_dtype=torch.bfloat16),
        kernels=False,
    ),
    Contestant(
        "torch-gram", "samestep's orthogonalize in plain torch (SAMESTEP_KERNELS=0)",
        partial(_ours, compute_dtype=torch.bfloat16), kernels=False,
    ),
    Contestant("dion-triton", "dion's newton_schulz_triton", _dion_triton),
    Contestant(
        "dion-polar", "dion's polar_express_triton, compiled", _dion_polar, default=False
    ),
    Contestant("gram", "gram-newton-schulz with its kernels", _gram),
    Contestant(
        "gram-torch", "gram-newton-schulz in plain torch", partial(_gram, ns_use_kernels=False)
    ),
)  # fmt: skip


SHAPES = (
    "12x768x768", "12x768x3072", "16x1280x1280", "16x1280x5120", "96x2048x2048", "48x2048x8192",
    "8x2048x2048", "8x2048x8192", "4x4096x4096", "4x4096x11008",
)  # fmt: skip
MOST_ON_CPU = 1 << 16  # elements


def shape_of(text: str) -> Shape:
    """Read "12x768x3072"."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
        raise BadRequestError(f"--shape must be like 12x768x3072, got {text!r}")
    return Shape(*map(int, text.split("x")))


@dataclass
class Options(SharedOptions):
    """Time the orthogonalization of batches of 16-bit matrices on this GPU, in turns.

        samestep bench orthogonalize
        samestep bench orthogonalize --shape 16x1280x5120 --peer-path ~/dion

    Compares samestep's functions with torch's and other packages'.
    """

    variants: Annotated[tuple[str, ...], who(CONTESTANTS)] = ()
    out: Annotated[Path, FOLDER] = Path("out/bench-orthogonalize")
    rounds: Annotated[int, "measurements of each variant; the median counts"] = 10
    shape: Annotated[
        tuple[Shape, ...],
        Flag("batches: matrices x rows x columns", metavar="BxMxN", read=shape_of),
    ] = tuple(map(shape_of, SHAPES))


def parse(words: Sequence[str], prog: str) -> Options:
    options = read(Options, CONTESTANTS, words, prog)
    options.shape = tuple(dict.fromkeys(options.shape))
    if options.device == "cpu" and any(prod(shape) > MOST_ON_CPU for shape in options.shape):
        raise BadRequestError(
            f"--device cpu only works with --shape of at most {MOST_ON_CPU} elements"
        )
    return options


# All contestants in turns on one batch

MOST_ROWS = 1280  # singular values of larger matrices would take longer than all the rest
TURN_MS = 10.0  # as many calls as this takes are timed at once
MOST_CALLS = 20


@dataclass
class Result(Shown):
    """The results of a contestant on one shape."""

    calls: int = 1  # per turn


def make_batch(shape: Shape, device: torch.device) -> Tensor:
    """Gaussian matrices; the second has singular values 1, 1/2, 1/3, ..."""
    torch.manual_seed(0)
    batch = torch.randn(shape, device=device).bfloat16()
    if shape[0] > 1:
        batch[1] = power_law(*shape[1:], device)
    return batch


class Measurement(Contest[Result]):
    """The contestants on one batch of matrices, in turns."""

    shown = Result

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__(device)
        self.shape = shape
        self._batch = make_batch(shape, device)
        self._sum = self._batch.sum(dtype=torch.float64)

    @torch.no_grad()
    def _prepare(self, result: Result, warmup: int) -> None:
        if result.contestant.ours and missing_products(self._device) is None:
            from samestep.update import measure

            measure.settle([self.shape[1:]], self._device, None)  # as an optimizer does
        function = result.contestant.build()
        self._entries[result.contestant.name] = function
        found = function.call(self._batch)
        if not found.isfinite().all():
            raise ArithmeticError("the result of the orthogonalization is not finite")
        if self._batch.sum(dtype=torch.float64) != self._sum:
            self._batch = make_batch(self.shape, self._device)
            raise ArithmeticError("the orthogonalization overwrote its input")
        self._look_at(result, found, function.reference)
        del found
        for _ in range(warmup - 1):
            function.call(self._batch)
        ms = take_turn(lambda: function.call(self._batch), self._device).ms
        result.calls = max(1, min(MOST_CALLS, int(TURN_MS / ms))) if ms else MOST_CALLS

    @torch.no_grad()
    def _turn(self, result: Result) -> Turn:
        call = self._entries[result.contestant.name].call
        return take_turn(lambda: call(self._batch), self._device, result.calls)

    def _look_at(self, result: Result, found: Tensor, reference: Reference | None) -> None:
        count, rows, cols = self.shape
        if min(rows, cols) > MOST_ROWS or count < 2:
            return
        if len(found) != count:  # matrix by matrix, and only the last was kept
            call = self._entries[result.contestant.name].call
            found = torch.cat([call(self._batch[number : number + 1]) for number in range(2)])
        result.accuracy = [
            accuracy_of(found[at], self._exact_for(reference, at, self._batch[at]))
            for at in range(2)
        ]


# How far ours is ahead of the best peer, shape by shape

EVERY_SHAPE = 1.0
MEAN = 1.2


class Lead(NamedTuple):
    """The lead of ours over the best peer on one shape."""

    shape: Shape
    best_peer: str
    ratio: float  # milliseconds of the best peer / ours


def lead(shape: Shape, results: Sequence[Result]) -> Lead | None:
    """Ours as shipped against the best peer; None if one of them is missing."""
    ours = next((r.ms for r in results if r.contestant.name == "ours"), None)
    peers = [(r.ms, r.contestant.name) for r in results if r.ms and not r.contestant.ours]
    if not ours or not peers:
        return None
    ms, name = min(peers)
    return Lead(shape, name, ms / ours)


def geometric_mean(leads: Sequence[Lead]) -> float | None:
    return statistics.geometric_mean(each.ratio for each in leads) if leads else None


def lines(leads: Sequence[Lead], shapes: int) -> list[str]:
    mean = geometric_mean(leads)
    if mean is None or len(leads) < shapes:
        return [f"not measured  the lead on {shapes - len(leads)} of {shapes} shapes"]
    least, states = min(leads, key=lambda each: each.ratio), ("NOT MET", "met")
    return [
        f"{states[least.ratio >= EVERY_SHAPE]:12} at least as fast as the best peer on every "
        f"shape: least {least.ratio:.2f} x {least.best_peer} on {least.shape}",
        f"{states[mean >= MEAN]:12} geometric mean: {mean:.2f}, bar >= {MEAN:g}",
    ]


# The command


def run(options: Options) -> int:
    screen = Screen()
    device, ceilings, content = begin("samestep orthogonalize", options, screen)
    contestants = [c for c in CONTESTANTS if c.name in options.variants]
    content["shapes"] = []
    panels: list[Panel] = []
    leads: list[Lead] = []
    for shape in options.shape:
        measurement = Measurement(shape, device)
        results = measurement.run(contestants, options.rounds, options.warmup)
        del measurement
        gc.collect()
        ahead = lead(shape, results)
        leads += [] if ahead is None else [ahead]
        told = as_json(shape, results, ahead, ceilings)
        panels.append(Panel(str(shape), results, told["floor_ms"]))
        times = [f"{r.contestant.name} {'out' if r.ms is None else f'{r.ms:.3g}'}" for r in results]
        screen.progress(f"{shape} ms: {', '.join(times)}")
        content["shapes"].append(told)
        content["geometric_mean_of_leads"] = geometric_mean(leads)
        content["bars"] = lines(leads, len(panels))
        leave(options.out, "orthogonalize", content, None)  # what ends the run leaves this
    show(content, [contestant.name for contestant in contestants], screen)
    picture = draw("Orthogonalization", panels)
    files = leave(options.out, "orthogonalize", content, picture)
    screen.wrote(files, options.out)
    return 0


def as_json(
    shape: Shape, results: Sequence[Result], ahead: Lead | None, ceilings: Ceilings
) -> dict[str, Any]:
    flops = shape[0] * least_flops(*shape[1:])  # whatever was done beyond that
    return {
        "shape": list(shape),
        "floor_ms": 1e3 * flops / ceilings.flops,  # of the products alone
        "best_peer": None if ahead is None else ahead.best_peer,
        "lead": None if ahead is None else ahead.ratio,
        "contestants": [
            {
                **result.as_json(),
                "calls_per_turn": result.calls,
                "tflops": flops / (result.ms * 1e-3) / 1e12 if result.ms else None,
            }
            for result in results
        ],
    }


def show(content: Mapping[str, Any], names: Sequence[str], screen: Screen) -> None:
    """The record for the receipt."""
    times, rates, accuracy = [], [], []
    for told in content["shapes"]:
        shape, everybody = str(Shape(*told["shape"])), told["contestants"]
        medians = [None if each["failed"] else each["ms"]["median"] for each in everybody]
        ahead = [number(told["lead"]), told["best_peer"] or "-"]
        times.append([shape, *(number(ms, 3) for ms in medians), *ahead])
        rates.append([shape, *(number(each["tflops"], 0) for each in everybody)])
        accuracy += [
            [f"{shape} {each['name']}", *accuracy_cells(each)]
            for each in everybody
            if each["gaussian"]
        ]
    screen.table("Milliseconds (median)", ["", *names, "x best peer", "which is"], times)
    screen.table("TFLOP/s of the least work", ["", *names], rates)
    columns = ["", "Gaussian", "distance", "power law", "distance"]
    screen.table("Singular values", columns, accuracy)
    everywhere = [each for told in content["shapes"] for each in told["contestants"]]
    for name in names:
        found = (each["failed"] for each in everywhere if each["name"] == name)
        failures = dict.fromkeys(filter(None, found))
        if failures:
            screen.say(f"{name} is out: {'; '.join(failures)}")
    for line in content["bars"]:
        screen.say(line)
