"""Milliseconds by CUDA events, by the clock on a CPU, and their spread."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

Contestant = TypeVar("Contestant")


class Turn(NamedTuple):
    """One measurement, per call."""

    ms: float  # until the device was done
    host_ms: float  # until the calls returned


class Times(NamedTuple):
    """Many measurements in milliseconds."""

    median: float
    low: float
    high: float
    middle_half: float  # between the first and the third quarter


def take_turn(call: Callable[[], object], device: torch.device, calls: int = 1) -> Turn:
    """Time some calls from an idle device on."""
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
    """Median and spread."""
    quarter = [0.0] * 3
    if len(values) > 1:
        quarter = statistics.quantiles(values, n=4, method="inclusive")
    return Times(statistics.median(values), min(values), max(values), quarter[2] - quarter[0])


def in_turn(contestants: Sequence[Contestant], round_number: int) -> list[Contestant]:
    """All of them in an order of this round: who comes next to a heavy one finds a slower clock."""
    return random.Random(round_number).sample(contestants, len(contestants))


def settle(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
