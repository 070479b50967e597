"""What `samestep.stress.check` costs beside a training step, on gloo ranks.

A GPT with tied embeddings trains on random tokens; the slower rank counts. The bar: a check in
every hundredth step takes less than 1% of the time.
"""

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch

import samestep
from benchmarks import batch, gpt_config, heading, load_line, run_script, timed, write_json
from examples.gpt import GPT
from samestep.lab.bench.gpu.report import Screen
from samestep.launch.forked import run_forked
from samestep.stress import check
from samestep.tooling.output import check_folder

STEPS_PER_CHECK = 100
BAR = 1.0  # percent


OPTIMIZERS: dict[str, Callable[[GPT], torch.optim.Optimizer]] = {
    "MuonAdamW zero2": lambda model: samestep.MuonAdamW(model, sharding="zero2"),
    "AdamW zero2": lambda model: samestep.AdamW(model, sharding="zero2"),
    "AdamW none": lambda model: samestep.AdamW(model, sharding="none"),  # all state is compared
}


@dataclass(frozen=True)
class Options:
    """What to measure."""

    width: int = 768
    layers: int = 12
    vocabulary: int = 32768
    sequences: int = 2
    tokens: int = 128
    ranks: int = 2
    steps: Annotated[int, "timed training steps, after one that warms up"] = 3
    checks: Annotated[int, "timed checks while ranks agree"] = 10
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    out: Path = Path("out/bench")


class Times(NamedTuple):
    """Seconds of each repetition on one rank."""

    gradients: list[float]  # forward and backward
    step: list[float]
    check: list[float]
    locate: list[float]  # a check that finds one differing element in the largest parameter


def measure(rank: int, name: str, options: Options) -> tuple[Times, int]:
    """Train, check in turns, and check once more with a difference; gives the parameter count."""
    torch.manual_seed(0)
    sizes = {"vocab_size": options.vocabulary, "context": options.tokens}
    model = GPT(gpt_config(options.width, options.layers, **sizes))
    model.head.weight = model.embedding.weight
    optimizer = OPTIMIZERS[name](model)
    times = Times([], [], [], [])
    for number in range(options.steps + 1):
        loss: Any = partial(model.loss, *batch(options, number))
        moments = Times(
            [timed(lambda loss=loss: loss().backward())],  # type: ignore[misc]
            [timed(optimizer.step)],
            [
                timed(lambda: check(model, optimizer))
                for _ in range(-(-options.checks // options.steps))
            ],
            [],
        )
        optimizer.zero_grad()
        if number > 0:  # the first one warms up
            for kept, new in zip(times, moments, strict=True):
                kept.extend(new)
    if rank == options.ranks - 1:
        with torch.no_grad():
            model.embedding.weight[-1, -1] += 1.0
    times.locate.append(timed(lambda: check(model, optimizer, raise_on_drift=False)))
    return times, sum(param.numel() for param in model.parameters())


def main(options: Options) -> None:
    check_folder(options.out)
    screen, rows, results = Screen(), [], {}
    load = os.getloadavg()[0]
    title = f"one check on {options.ranks} ranks: seconds, medians of the slower rank"
    columns = ("", "gradients", "step", "check", "% of all", "% of steps", "locate")
    for name in options.optimizers:
        screen.progress(f"{name} ...")
        per_rank = run_forked(
            options.ranks, measure, name, options, timeout=3600, collective_timeout=300
        )
        parameters = per_rank[0][1]
        gradients, step, one_check, locate = (
            statistics.median(map(max, zip(*kinds, strict=True)))
            for kinds in zip(*(times for times, _ in per_rank), strict=True)
        )
        share = 100 * one_check / (STEPS_PER_CHECK * (gradients + step))
        share_of_optimizer = 100 * one_check / (STEPS_PER_CHECK * step)
        shown = one_check, share, share_of_optimizer, locate
        rows.append([name, f"{gradients:.2f}", f"{step:.2f}", *(f"{each:.3f}" for each in shown)])
        results[name] = {
            "seconds": [times._asdict() for times, _ in per_rank],
            "percent_of_steps": share,
            "percent_of_optimizer_steps": share_of_optimizer,
        }
    receipt = heading("check", options, load) | {"parameters": parameters, "results": results}
    screen.table(title, columns, rows)
    worst = max(result["percent_of_steps"] for result in results.values())
    met = "met" if worst < BAR else "MISSED"
    screen.say(
        f"gradients: forward and backward. %: of {STEPS_PER_CHECK} times both, and of "
        f"{STEPS_PER_CHECK} optimizer steps. locate: a check that finds a difference.\n"
        f"{parameters / 1e6:.1f} million parameters. The bar of {BAR:g}% is {met}: at most "
        f"{worst:.4f}%. {load_line(receipt)}"
    )
    write_json(options.out, "check.json", receipt)


if __name__ == "__main__":
    run_script(main, Options)
