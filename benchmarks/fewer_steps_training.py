"""Muon with fewer steps of Polar Express, trained beside the usual five: a small GPT, CPU.

    python -m benchmarks.fewer_steps_training --out out/bench

All ways of a seed begin with the same weights and see the same batches, at one learning rate: the
best for the usual five of 0.006, 0.012, 0.024 and 0.048 with seeds 0 and 1. The loss is that of
validation at the end, in nats per byte. docs/benchmarks.md has the table.
"""

import copy
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import heading, run_script, write_json
from benchmarks.rivals import CONTEXT, batches, made
from examples.demo import Run
from examples.gpt import GPT, GPTConfig
from samestep.lab.bench.gpu.measure import in_turn
from samestep.rules.orthogonalize import Start, orthogonalize_flops, step_coefficients
from samestep.train.corpus import Corpus, load_corpus, validation_starts, windows

METHODS = {5: "polar-express", 4: "polar-express-4", 3: "polar-express-3"}


class Way(NamedTuple):
    """A number of steps, and the start before them."""

    steps: int
    start: Start

    def flops(self, m: int, n: int, dtype: torch.dtype) -> int:
        """Of its products; a start has one more where the first step needs another Gram matrix."""
        of_start = 2 * m * m * n if self.start != "norm" and dtype.itemsize == 2 else 0
        table = step_coefficients(METHODS[self.steps])
        return of_start + orthogonalize_flops(m, n, table, dtype=dtype)


USUAL = Way(5, "norm")
WAYS = (USUAL, Way(4, "norm"), Way(4, "gram"), Way(3, "gram"), Way(3, "norm"))
HELD_OUT = 512  # sequences that the loss at the end is of


@dataclass(frozen=True)
class Options:
    """Of which model, and for how long."""

    steps: int = 300
    width: int = 128
    layers: int = 2
    seeds: int = 3
    lr: float = 0.012
    out: Path = Path("out/bench")


def flops(optimizer: torch.optim.Optimizer, way: Way) -> int:
    """Floating-point operations of all orthogonalizations of an optimizer step, in 32 bits."""
    [group] = [group for group in optimizer.param_groups if group["rule"] == "muon"]
    sides = [sorted(block.shape) for block in group["params"]]
    return sum(way.flops(m, n, torch.float32) for m, n in sides)


def runs_of(options: Options, seed: int) -> dict[Way, Run]:
    """A training of each way, all from the same weights."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(context=CONTEXT, width=options.width, layers=options.layers))
    runs = {}
    for way in WAYS:
        own: dict[str, Any] = {"orthogonalize": METHODS[way.steps], "ns_start": way.start}
        copied = copy.deepcopy(model)
        runs[way] = made(str(way), copied, "muon", options.lr, options.steps, **own)
    return runs


def train(options: Options, corpus: Corpus, seed: int) -> list[dict[str, Any]]:
    """All ways of a seed, step by step in turns."""
    runs = runs_of(options, seed)
    for step, given in enumerate(batches(corpus, options.steps, seed), 1):
        for run in in_turn(list(runs.values()), step):
            run.step(*given)
    starts = validation_starts(corpus.validation, CONTEXT, HELD_OUT)
    held_out = windows(corpus.validation, starts, CONTEXT)
    return [
        {
            **way._asdict(),
            "seed": seed,
            "loss": run.validate(*held_out),
            "flops": flops(run.optimizer, way),
        }
        for way, run in runs.items()
    ]


def table(receipt: Mapping[str, Any]) -> list[str]:
    """Markdown: means and standard deviations over seeds, and each seed beside its usual five."""
    lines = [
        "| steps, `ns_start` | loss at the end | more than 5 norm's, each seed | FLOPs |",
        "|---|---|---|---|",
    ]
    found: dict[Way, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for run in receipt["runs"]:
        found[Way(run["steps"], run["start"])].append(run)
    for way, runs in found.items():
        losses = [run["loss"] for run in runs]
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        pairs = zip(runs, found[USUAL], strict=True)
        apart = ", ".join(f"{run['loss'] - usual['loss']:+.3f}" for run, usual in pairs)
        share = runs[0]["flops"] / found[USUAL][0]["flops"]
        lines.append(
            f"| {way.steps} {way.start} | {statistics.fmean(losses):.3f} ± {spread:.3f} | "
            f"{'-' if way == USUAL else apart} | {share:.0%} |"
        )
    return lines


def main(options: Options) -> None:
    torch.set_num_threads(1)  # so small a model is no faster on more
    begun, corpus = time.process_time(), load_corpus()
    runs: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        runs += train(options, corpus, seed)
        print(f"seed {seed + 1} of {options.seeds}", flush=True)
    found = {
        **heading("fewer_steps_training", options),
        "corpus_sha256": corpus.sha256,
        "cpu_seconds": time.process_time() - begun,
        "runs": runs,
    }
    print("\n".join(table(found)))
    write_json(options.out, "fewer_steps_training.json", found)


if __name__ == "__main__":
    run_script(main, Options)
