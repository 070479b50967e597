"""Measurements on a GPU: time, what the device can reach, and how exact a result is.

Accuracy is how orthogonal a result is, and how far from its own polynomial computed in float64.
Two matrices are looked at: a Gaussian one, and one whose singular values fall as 1, 1/2, 1/3, ...
"""

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar
from unittest import mock

import torch
from torch import Tensor

from samestep.kernels import choice
from samestep.lab.bench.gpu.options import Contestant
from samestep.rules.orthogonalize import POLYNOMIALS, step_coefficients

# Milliseconds by CUDA events, by the clock on a CPU, and their spread

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class Turn(NamedTuple):
    """Milliseconds per call of one measurement, on the device and on the host."""

    ms: float  # until the device was done
    host_ms: float  # until the calls returned


class Times(NamedTuple):
    """Statistics of many measurements, in milliseconds."""

    median: float
    low: float
    high: float
    middle_half: float  # between the first and the third quarter


def take_turn(call: Callable[[], object], device: torch.device, calls: int = 1) -> Turn:
    """Time `calls` calls that begin on an idle device; return the milliseconds per call."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        elapsed = 1e3 * (time.perf_counter() - begin) / calls
        return Turn(elapsed, elapsed)
    event: Any = torch.cuda.Event
    first, last = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    first.record()
    for _ in range(calls):
        call()
    last.record()
    host = 1e3 * (time.perf_counter() - begin)
    last.synchronize()
    return Turn(first.elapsed_time(last) / calls, host / calls)


def times_of(values: Sequence[float]) -> Times:
    quarter = [0.0] * 3
    if len(values) > 1:
        quarter = statistics.quantiles(values, n=4, method="inclusive")
    return Times(statistics.median(values), min(values), max(values), quarter[2] - quarter[0])


def in_turn(contestants: Sequence[T], round_number: int) -> list[T]:
    """Return the contestants in a random order that depends on the number of the round alone.

    The order changes because a contestant that follows a heavy one finds a slower GPU clock.
    """
    return random.Random(round_number).sample(contestants, len(contestants))


def in_rounds(
    calls: Mapping[K, Callable[[int], V]],
    rounds: int,
    *,
    warmup: int = 0,
    tell: Callable[[int], object] = lambda done: None,
) -> dict[K, list[V]]:
    """Call each function once per round, in an order of that round; return its results by key.

    calls: Functions of the number of the round, which is below 0 in warm-up rounds. Results of
        warm-up rounds are dropped.
    tell: Called after each round with the number of rounds done, warm-up included.
    """
    found: dict[K, list[V]] = {key: [] for key in calls}
    for number in range(-warmup, rounds):
        for key in in_turn(list(calls), number):
            value = calls[key](number)
            if number >= 0:
                found[key].append(value)
        tell(number + warmup + 1)
    return found


def settle(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# What this device reaches: a large matrix product, a large copy

TURNS = 10
HOT = 2.0  # seconds of products without a pause


class Ceilings(NamedTuple):
    """Measured peak rates of this device, which no step is expected to exceed."""

    flops: float  # per second, of a 16-bit product (32-bit on a CPU) of random values
    bytes: float  # per second, read and written by a copy
    hot_flops: float  # of the product when the chip draws all the power it may, and slows down


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure a product of 8192^3 and a copy of 4 GiB; on a CPU, smaller ones."""
    on_gpu = device.type == "cuda"
    size, elements = (8192, 1 << 30) if on_gpu else (256, 1 << 20)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=product)

    product_ms = _median(multiply, device)
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    copy_ms = _median(lambda: target.copy_(source), device)
    hot_ms = product_ms
    if on_gpu:
        take_turn(multiply, device, calls=round(HOT / (product_ms * 1e-3)))
        hot_ms = take_turn(multiply, device, calls=round(0.2 / (product_ms * 1e-3))).ms
    flops = 2 * size**3
    return Ceilings(
        flops=flops / (product_ms * 1e-3),
        bytes=8 * elements / (copy_ms * 1e-3),
        hot_flops=flops / (hot_ms * 1e-3),
    )


def _median(call: Callable[[], object], device: torch.device) -> float:
    turns = [take_turn(call, device).ms for _ in range(3 + TURNS)]
    return times_of(turns[3:]).median


# Contestants: with our kernels switched off for a while, and when they fail


@contextmanager
def kernels(on: bool, device: torch.device) -> Iterator[None]:
    """Run the block with samestep's kernels as shipped, or with all of them switched off."""
    if on:
        yield
        return
    try:
        with mock.patch.dict(os.environ, {choice.SWITCH: "0"}):
            _decide_again(device)
            yield
    finally:
        _decide_again(device)


def _decide_again(device: torch.device) -> None:
    """Decide anew which kernels this device can use, now and not inside a timed turn."""
    choice.missing.cache_clear()
    choice.missing_products.cache_clear()
    choice.missing_products(device)


def reason(error: BaseException) -> str:
    """Return the reason why a contestant is out, in one line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()[:200]}" if lines else type(error).__name__


def give_back_memory(device: torch.device) -> None:
    if device.type == "cuda":
        with suppress(RuntimeError):  # a device that is lost says so to everybody
            torch.cuda.empty_cache()


# Accuracy, and what else a contestant shows

Table = Sequence[Sequence[float]]  # (a, b, c) for each iteration


class Reference(NamedTuple):
    """The polynomial that a contestant claims to compute."""

    table: Table
    norm_factor: float = 1.0


class Accuracy(NamedTuple):
    """Measures of a result's distance from orthogonality and from its polynomial."""

    low: float  # smallest singular value
    high: float  # largest
    spread: float  # of fourth against second moments: 1 if all singular values are equal
    distance: float | None  # relative, from the polynomial in float64; None: not known


def our_reference(method: str = "polar-express") -> Reference:
    return Reference(step_coefficients(method, 5), POLYNOMIALS[method].norm_factor)


def power_law(rows: int, cols: int, device: torch.device) -> Tensor:
    """Return a matrix of singular values ~ 1, 1/2, 1/3, ... with the norm of a Gaussian one."""
    count = min(rows, cols)
    left, _ = torch.linalg.qr(torch.randn(rows, count, device=device))
    right, _ = torch.linalg.qr(torch.randn(cols, count, device=device))
    values = 1 / torch.arange(1, count + 1, device=device, dtype=torch.float32)
    scale = (rows * cols) ** 0.5 / values.norm()
    matrix: Tensor = (left * (values * scale)) @ right.mT
    return matrix


def _gaussian(rows: int, cols: int, device: torch.device) -> Tensor:
    return torch.randn(rows, cols, device=device)


def _low_rank(rows: int, cols: int, device: torch.device) -> Tensor:
    """Return a matrix of an eighth of the full rank, plus noise of 1% of its size."""
    rank = max(1, min(rows, cols) // 8)
    left, right = torch.randn(rows, rank, device=device), torch.randn(rank, cols, device=device)
    noise = 0.01 * torch.randn(rows, cols, device=device)
    matrix: Tensor = noise + left @ right / rank**0.5
    return matrix


def _uneven(rows: int, cols: int, device: torch.device) -> Tensor:
    """Return a Gaussian matrix whose rows are scaled by factors from 1 to 1/100."""
    sizes = torch.logspace(0, -2, rows, device=device)[:, None]
    return torch.randn(rows, cols, device=device) * sizes


SPECTRA: Mapping[str, Callable[[int, int, torch.device], Tensor]] = {
    "gaussian": _gaussian, "power law": power_law, "low rank": _low_rank, "uneven rows": _uneven,
}  # fmt: skip


def polar_factor(X: Tensor) -> Tensor:
    """Return the polar factor U V^T of X = U S V^T, in float64."""
    X = X.double()
    tall = X.shape[0] > X.shape[1]
    X = X.mT if tall else X
    squares, vectors = torch.linalg.eigh(X @ X.mT)
    roots = squares.clamp_min(float(squares.max()) * 1e-24).rsqrt()
    found = (vectors * roots) @ (vectors.mT @ X)
    turned: Tensor = found.mT if tall else found
    return turned


def distance_to(exact: Tensor, result: Tensor) -> float:
    """Return the distance of `result` from the nearest multiple of `exact`, relative to it."""
    D = result.double()
    fit = (D * exact).sum() / exact.square().sum()
    return float((D / fit - exact).norm() / exact.norm())


def polynomial(X: Tensor, reference: Reference) -> Tensor:
    """Return the reference polynomial of X / (norm of X * `norm_factor`), in float64."""
    X = X.double()
    tall = X.shape[0] > X.shape[1]
    X = X.mT if tall else X
    X = X / (X.norm() * reference.norm_factor)
    for a, b, c in reference.table:
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    return X.mT if tall else X


def accuracy_of(result: Tensor, exact: Tensor | None, *, scaled: bool = False) -> Accuracy:
    """Measure the singular values of a result, and its distance from `exact` if that is given.

    `scaled`: the result is a multiple of an orthogonalized matrix, as an update is. Singular values
    are then relative to their root mean square, and the distance is from the nearest multiple of
    `exact`.
    """
    D = result.double()
    squares = torch.linalg.eigvalsh(D @ D.mT if D.shape[0] <= D.shape[1] else D.mT @ D)
    squares = squares.clamp_min(0)
    mean = squares.mean()
    unit = mean.sqrt() if scaled else torch.ones_like(mean)
    distance = None
    if exact is not None:
        fit = (D * exact).sum() / exact.square().sum() if scaled else 1.0
        distance = float((D / fit - exact).norm() / exact.norm())
    return Accuracy(
        float(squares.min().sqrt() / unit),
        float(squares.max().sqrt() / unit),
        float(squares.square().mean() / mean.square()),
        distance,
    )


@dataclass
class Shown:
    """The results of one contestant; `failed` says why it dropped out, if it did."""

    contestant: Contestant
    failed: str | None = None
    times: Times | None = None
    accuracy: list[Accuracy] = field(default_factory=list)  # Gaussian, power law
    polar: list[float] = field(default_factory=list)  # distances to exact polar factors
    turns: list[float] = field(default_factory=list)  # milliseconds
    host: Times | None = None
    host_turns: list[float] = field(default_factory=list)

    @property
    def ms(self) -> float | None:
        """Return the median time in ms; None if the contestant failed or was not timed."""
        return self.times.median if self.times is not None and self.failed is None else None

    def as_json(self) -> dict[str, Any]:
        accuracy = [found._asdict() for found in self.accuracy] or (None, None)
        return {
            "name": self.contestant.name,
            "what": self.contestant.what,
            "ours": self.contestant.ours,
            "failed": self.failed,
            "ms": None if self.times is None else self.times._asdict(),
            "turns_ms": self.turns,
            **dict(zip(("gaussian", "power_law"), accuracy, strict=True)),
            "polar_distances": self.polar,
        }


ShownT = TypeVar("ShownT", bound=Shown)


class Contest(Generic[ShownT]):
    """Contestants that take turns on one device."""

    shown: type[ShownT]

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._entries: dict[str, Any] = {}  # what each has built
        self._exact: dict[tuple[str, int], Tensor] = {}

    def _prepare(self, result: ShownT, warmup: int) -> None:
        """Build and warm up one contestant."""
        raise NotImplementedError

    def _turn(self, result: ShownT) -> Turn:
        raise NotImplementedError

    def _say(self, result: ShownT) -> None:
        """Report that a contestant is prepared, or has failed; nothing by default."""

    def run(self, contestants: Sequence[Contestant], rounds: int, warmup: int) -> list[ShownT]:
        """Prepare all contestants, time them in turns, and return a result for each."""
        results = [self.shown(contestant) for contestant in contestants]
        for result in results:
            self._guarded(result, lambda result: self._prepare(result, warmup))
            self._say(result)
        for round_number in range(rounds):
            for result in in_turn(results, round_number):
                if result.failed is None:
                    self._guarded(result, self._count)
        for result in results:
            if result.turns:
                result.times = times_of(result.turns)
                result.host = times_of(result.host_turns)
        return results

    def _count(self, result: ShownT) -> None:
        turn = self._turn(result)
        result.turns.append(turn.ms)
        result.host_turns.append(turn.host_ms)

    def _guarded(self, result: ShownT, action: Callable[[ShownT], None]) -> None:
        """Run an action for one contestant; an error ends that contestant, not the run."""
        try:
            with kernels(result.contestant.kernels, self._device):
                action(result)
                settle(self._device)
        except Exception as error:
            result.failed = reason(error)
            self._entries.pop(result.contestant.name, None)
        if result.failed is not None:
            give_back_memory(self._device)

    def _exact_for(self, reference: Reference | None, number: int, matrix: Tensor) -> Tensor | None:
        """Return a matrix's exact polynomial, cached by `number`; None without a reference."""
        if reference is None:
            return None
        key = (str(reference), number)
        if key not in self._exact:
            self._exact[key] = polynomial(matrix, reference)
        return self._exact[key]
