"""All contestants in turns on one batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samestep.bench.gpu.accuracy import Accuracy, Reference, accuracy_of, polynomial, power_law
from samestep.bench.gpu.kernels import kernels
from samestep.bench.gpu.peers import give_back_memory, reason
from samestep.bench.gpu.timing import Times, in_turn, settle, take_turn, times_of
from samestep.bench.orthogonalize.contestants import Contestant, Function
from samestep.estimate.floors import least_flops
from samestep.kernels.choice import missing_products

Shape = tuple[int, int, int]
MOST_ROWS = 1280  # singular values of larger matrices would take longer than all the rest
TURN_MS = 10.0  # as many calls as this takes are timed at once
MOST_CALLS = 20


@dataclass
class Result:
    """What one contestant has shown on one shape."""

    contestant: Contestant
    failed: str | None = None
    times: Times | None = None
    calls: int = 1  # per turn
    accuracy: list[Accuracy] = field(default_factory=list)  # Gaussian, power law
    turns: list[float] = field(default_factory=list)

    @property
    def ms(self) -> float | None:
        """The median, of those that came through."""
        return self.times.median if self.times is not None and self.failed is None else None

    def tflops(self, shape: Shape) -> float | None:
        """Of the least work, whatever was done beyond it."""
        if not self.ms:
            return None
        return shape[0] * least_flops(*shape[1:]) / (self.ms * 1e-3) / 1e12

    def as_json(self, shape: Shape) -> dict[str, Any]:
        """For the receipt."""
        return {
            "name": self.contestant.name,
            "what": self.contestant.what,
            "ours": self.contestant.ours,
            "failed": self.failed,
            "ms": None if self.times is None else self.times._asdict(),
            "turns_ms": self.turns,
            "calls_per_turn": self.calls,
            "tflops": self.tflops(shape),
            "gaussian": self.accuracy[0]._asdict() if self.accuracy else None,
            "power_law": self.accuracy[1]._asdict() if self.accuracy else None,
        }


def make_batch(shape: Shape, device: torch.device) -> Tensor:
    """Gaussian matrices; the second has singular values 1, 1/2, 1/3, ..."""
    torch.manual_seed(0)
    batch = torch.randn(shape, device=device).bfloat16()
    if shape[0] > 1:
        batch[1] = power_law(*shape[1:], device)
    return batch


class Measurement:
    """One shape."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self._device = device
        self._batch = make_batch(shape, device)
        self._sum = self._batch.sum(dtype=torch.float64)
        self._calls: dict[str, Function] = {}
        self._exact: dict[tuple[str, int], Tensor] = {}

    def run(self, contestants: Sequence[Contestant], rounds: int, warmup: int) -> list[Result]:
        """Warm up one after the other, then measure in turns."""
        results = [Result(contestant) for contestant in contestants]
        for result in results:
            self._guarded(result, lambda result: self._prepare(result, warmup))
        for number in range(rounds):
            for result in in_turn(results, number):
                if result.failed is None:
                    self._guarded(result, self._turn)
        for result in results:
            if result.turns:
                result.times = times_of(result.turns)
        return results

    @torch.no_grad()
    def _guarded(self, result: Result, action: Callable[[Result], None]) -> None:
        """One failure ends one contestant, not the run."""
        try:
            with kernels(result.contestant.kernels, self._device):
                action(result)
        except Exception as error:
            result.failed = reason(error)
        if result.failed is not None:
            give_back_memory(self._device)

    def _prepare(self, result: Result, warmup: int) -> None:
        if result.contestant.ours and missing_products(self._device) is None:
            from samestep.update import measure

            measure.settle([self.shape[1:]], self._device, None)  # as an optimizer does
        function = result.contestant.build()
        self._calls[result.contestant.name] = function
        found = function.call(self._batch)
        if not found.isfinite().all():
            raise ArithmeticError("the result is not finite")
        if self._batch.sum(dtype=torch.float64) != self._sum:
            self._batch = make_batch(self.shape, self._device)
            raise ArithmeticError("the batch was overwritten")
        self._look_at(result, found, function.reference)
        del found
        for _ in range(warmup - 1):
            function.call(self._batch)
        ms = take_turn(lambda: function.call(self._batch), self._device).ms
        result.calls = max(1, min(MOST_CALLS, int(TURN_MS / ms))) if ms else MOST_CALLS
        settle(self._device)

    def _turn(self, result: Result) -> None:
        call = self._calls[result.contestant.name].call
        turn = take_turn(lambda: call(self._batch), self._device, result.calls)
        result.turns.append(turn.ms)

    def _look_at(self, result: Result, found: Tensor, reference: Reference | None) -> None:
        count, rows, cols = self.shape
        if min(rows, cols) > MOST_ROWS or count < 2:
            return
        if len(found) != count:  # matrix by matrix, and only the last was kept
            call = self._calls[result.contestant.name].call
            found = torch.cat([call(self._batch[number : number + 1]) for number in range(2)])
        result.accuracy = [
            accuracy_of(found[number], self._exact_for(reference, number)) for number in range(2)
        ]

    def _exact_for(self, reference: Reference | None, number: int) -> Tensor | None:
        if reference is None:
            return None
        key = (str(reference), number)
        if key not in self._exact:
            self._exact[key] = polynomial(self._batch[number], reference)
        return self._exact[key]
