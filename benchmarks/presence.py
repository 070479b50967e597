"""What it costs to find out which gradients exist: one small all-reduce per step, on gloo ranks."""

import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch

from benchmarks import heading, run_script, timed, write_json
from samestep.comm.groups import registry
from samestep.comm.presence import PresenceAgreement
from samestep.lab.bench.gpu.report import Screen
from samestep.launch.forked import run_forked
from samestep.tooling.output import check_folder


@dataclass(frozen=True)
class Options:
    """What to measure."""

    ranks: tuple[int, ...] = (2, 4, 8)
    parameters: Annotated[int, "a GPT of 12 layers has about as many"] = 150
    rounds: int = 50
    out: Path = Path("out/bench")


def measure(rank: int, options: Options) -> list[float]:
    """Milliseconds of each round, from a barrier to the answer."""
    names = [str(number) for number in range(options.parameters)]
    presence = PresenceAgreement(names, [registry.of()], torch.device("cpu"))
    times = []
    for step in range(options.rounds):
        here = [(number + rank + step) % 3 > 0 for number in range(options.parameters)]
        times.append(1e3 * timed(partial(presence.agree, here, None, None)))
    return times


def main(options: Options) -> None:
    check_folder(options.out)
    title = f"presence of {options.parameters} parameters, ms per step"
    screen, rows, results = Screen(), [], {}
    for ranks in options.ranks:
        per_rank = run_forked(ranks, measure, options, timeout=300)
        slowest = [max(times) for times in zip(*per_rank, strict=True)]
        results[ranks] = slowest
        numbers = (statistics.median(slowest), min(slowest), max(slowest))
        rows.append([str(ranks), *(f"{number:.2f}" for number in numbers)])
    screen.table(title, ("ranks", "median", "least", "most"), rows, texts=0)
    receipt = {**heading("presence", options), "milliseconds": results}
    write_json(options.out, "presence.json", receipt)


if __name__ == "__main__":
    run_script(main, Options)
