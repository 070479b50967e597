"""All contestants of a field in turns, on the same parameters and gradients."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samestep.bench.gpu.accuracy import Accuracy, Reference, accuracy_of, polynomial
from samestep.bench.gpu.kernels import kernels
from samestep.bench.gpu.peers import give_back_memory, reason
from samestep.bench.gpu.timing import Times, in_turn, settle, take_turn, times_of
from samestep.bench.step.contestants import Contestant, Entry
from samestep.bench.step.sets import Parameters

FLAT = 1.3  # a Gaussian matrix has a spread of 2, an orthogonalized one hardly above 1


class NotAStepError(Exception):
    """A contestant did something, but no step of its rule."""


@dataclass
class Result:
    """What one contestant has shown; `failed` says why there is nothing, or no more."""

    contestant: Contestant
    failed: str | None = None
    first_s: float | None = None  # with compilation and tuning
    times: Times | None = None
    host: Times | None = None
    state_bytes: int | None = None
    extra_bytes: int | None = None  # at the peak of a step, beyond what was there before
    accuracy: list[Accuracy] = field(default_factory=list)  # of both probes
    turns: list[float] = field(default_factory=list)

    @property
    def ms(self) -> float | None:
        """The median, of those that came through."""
        return self.times.median if self.times is not None and self.failed is None else None

    def as_json(self) -> dict[str, Any]:
        """For the receipt."""
        return {
            "name": self.contestant.name,
            "what": self.contestant.what,
            "field": self.contestant.field,
            "ours": self.contestant.ours,
            "failed": self.failed,
            "first_step_s": self.first_s,
            "ms": None if self.times is None else self.times._asdict(),
            "host_ms": None if self.host is None else self.host._asdict(),
            "turns_ms": self.turns,
            "state_bytes": self.state_bytes,
            "extra_bytes": self.extra_bytes,
            "gaussian": self.accuracy[0]._asdict() if self.accuracy else None,
            "power_law": self.accuracy[1]._asdict() if self.accuracy else None,
        }


class Field:
    """Contestants that are compared with each other."""

    def __init__(
        self, parameters: Parameters, device: torch.device, say: Callable[[str], None]
    ) -> None:
        self._parameters = parameters
        self._device = device
        self._say = say
        self._entries: dict[str, Entry] = {}
        self._exact: dict[tuple[Any, int], Tensor] = {}

    def run(self, contestants: Sequence[Contestant], rounds: int, warmup: int) -> list[Result]:
        """Build and warm up one after the other, then measure in turns."""
        results = [Result(contestant) for contestant in contestants]
        for result in results:
            self._guarded(result, lambda result: self._prepare(result, warmup))
            outcome = result.failed or f"ready, first step {result.first_s:.1f} s"
            self._say(f"  {result.contestant.name}: {outcome}")
        host: dict[str, list[float]] = {result.contestant.name: [] for result in results}
        for number in range(rounds):
            for result in in_turn(results, number):
                if result.failed is None:
                    self._guarded(result, lambda r: self._turn(r, host[r.contestant.name]))
        for result in results:
            if result.turns:
                result.times = times_of(result.turns)
                result.host = times_of(host[result.contestant.name])
        return results

    def _guarded(self, result: Result, action: Callable[[Result], None]) -> None:
        """One failure ends one contestant, not the run."""
        try:
            with kernels(result.contestant.kernels, self._device):
                action(result)
                settle(self._device)
        except Exception as error:
            result.failed = reason(error)
            self._entries.pop(result.contestant.name, None)
        if result.failed is not None:
            give_back_memory(self._device)

    def _prepare(self, result: Result, warmup: int) -> None:
        begin = time.perf_counter()
        entry = result.contestant.build(self._parameters)
        self._entries[result.contestant.name] = entry
        for number in range(warmup):
            entry.step()
            if number == 0:
                settle(self._device)
                result.first_s = time.perf_counter() - begin
        result.state_bytes = entry.state_bytes()
        self._check(result, entry)

    def _turn(self, result: Result, host: list[float]) -> None:
        turn = take_turn(self._entries[result.contestant.name].step, self._device)
        result.turns.append(turn.ms)
        host.append(turn.host_ms)

    @torch.no_grad()
    def _check(self, result: Result, entry: Entry) -> None:
        """One more step, looked at: memory, what it changed, and that Muon was Muon."""
        parameters, probes = self._parameters.all, self._parameters.probes
        before = _sums(parameters)
        for probe in probes:
            probe.zero_()  # nothing to decay or to round: it becomes the update itself
        result.extra_bytes = self._extra_bytes(entry.step)
        after = _sums(parameters)
        if not after.isfinite().all():
            raise NotAStepError("parameters are not finite after the step")
        unchanged = int((before == after).sum())
        if unchanged:
            raise NotAStepError(f"{unchanged} of {len(parameters)} parameters did not change")
        if result.contestant.field == "muon":
            exact = [self._exact_for(entry.reference, number) for number in range(len(probes))]
            result.accuracy = [
                accuracy_of(-probe, value, scaled=True)
                for probe, value in zip(probes, exact, strict=True)
            ]
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

    def _exact_for(self, reference: Reference | None, number: int) -> Tensor | None:
        """The exact polynomial of a probe's gradient; several contestants share one."""
        if reference is None:
            return None
        key = (str(reference), number)
        if key not in self._exact:
            grad = self._parameters.probes[number].grad
            assert grad is not None
            self._exact[key] = polynomial(grad, reference)
        return self._exact[key]


def _sums(parameters: Sequence[Tensor]) -> Tensor:
    """A number for each that no step leaves as it is."""
    return torch.stack([p.sum(dtype=torch.float64) for p in parameters])
