"""What the checks of every step cost: those that the register of assumptions names, timed in place.

On a GPU the parameters are those of `samestep bench step --set gpt-1280`, on a CPU those of a
GPT of width 256; in one process, so that checks which only ranks have are not in
it. A check is host time, and its share is that of the wall clock of the step.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import nn

import samestep
from benchmarks import gpt_parameters, heading, run_script, write_json
from samestep.lab.bench.gpu.measure import settle
from samestep.lab.bench.step_contestants import make_parameters
from samestep.models.parameter_sets import SETS
from samestep.optimizer.assumptions import REGISTER

WARMUP = 5
BAR = 0.01  # of a step


@contextmanager
def timed_checks(spent: Counter[str]) -> Iterator[None]:
    """Add to `spent` the nanoseconds in each check, wherever it is known by name."""
    checks = [e.check for e in REGISTER if e.when == "in every step" and e.check is not None]
    with ExitStack() as patches:
        for check in checks:  # module:qualified name
            module, _, name = check.partition(":")
            owner: Any = import_module(module)
            *classes, last = name.split(".")
            for part in classes:
                owner = getattr(owner, part)
            plain = getattr(owner, last)
            modules = [module for key, module in sys.modules.items() if key.startswith("samestep")]
            places = [each for each in modules if getattr(each, last, None) is plain]
            for place in [owner] if classes else places:
                patches.enter_context(patch.object(place, last, _timed(plain, check, spent)))
        yield


def _timed(function: Callable[..., Any], name: str, spent: Counter[str]) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        start = time.perf_counter_ns()
        try:
            return function(*args, **options)
        finally:
            spent[name] += time.perf_counter_ns() - start

    return timed


def parameters(device: torch.device) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices, all others), with gradients."""
    if device.type == "cpu":
        return gpt_parameters(width=256, layers=6, vocabulary=8192)
    made = make_parameters(SETS["gpt-1280"], device)
    return made.matrices, made.others


def measure(device: torch.device, steps: int) -> dict[str, Any]:
    """Milliseconds of a step, and of all checks in it."""
    torch.manual_seed(0)
    matrices, others = parameters(device)
    groups = [{"params": matrices, "rule": "muon"}, {"params": others, "rule": "adamw"}]
    opt = samestep.MuonAdamW(groups)
    spent: Counter[str] = Counter()
    times, shares = [], []
    with timed_checks(spent):
        for number in range(WARMUP + steps):
            settle(device)
            spent.clear()
            start = time.perf_counter()
            opt.step()
            settle(device)
            elapsed = time.perf_counter() - start
            if number >= WARMUP:
                times.append(1e3 * elapsed)
                shares.append(1e-9 * sum(spent.values()) / elapsed)
    return {
        "step_ms": statistics.median(times),
        "share": statistics.median(shares),
        "checks_us": {name: 1e-3 * ns for name, ns in sorted(spent.items())},
    }


@dataclass(frozen=True)
class Options:
    """Where to measure."""

    device: Literal["cpu", "cuda"] = "cpu"
    steps: int = 30
    out: Path = Path("out/bench")


def main(options: Options) -> int:
    """Print a line for each check, write JSON; 1 where checks take more than their share."""
    device = torch.device(options.device)
    found = measure(device, options.steps)
    for check, spent in found["checks_us"].items():
        print(f"{check:70} {spent:8.1f} us")
    total = sum(found["checks_us"].values())
    print(f"all {total:.1f} us of a step of {found['step_ms']:.2f} ms: {100 * found['share']:.3f}%")
    receipt = {**heading("check_cost", options, device=device), **found}
    write_json(options.out, f"check_cost_{device.type}.json", receipt)
    return int(found["share"] > BAR)


if __name__ == "__main__":
    run_script(main, Options)
