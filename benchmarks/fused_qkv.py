"""Fused queries, keys and values as one matrix, as three, or one for each head: small trainings.

    python -m benchmarks.fused_qkv --out out/bench     # some 10 minutes of one core

A GPT whose layers have one weight for queries, keys and values, with Muon, and that weight as one
block, as three blocks, and as a block for each head. Arms of a seed have the same weights and
batches. The text is the source of the standard library of the Python that runs this. The loss is
that of validation, in nats per byte, at the end; a training whose loss or weights are not finite
ends there, and its step is told.
"""

import json
import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch

import samestep
from benchmarks import run_script
from samestep.models.gpt import GPT, GPTConfig
from samestep.tooling.output import write_files
from samestep.train.corpus import Corpus, load_corpus, validation_starts, windows

TOO_LARGE = 1e4  # nats per byte: as good as not finite


@dataclass(frozen=True)
class Options:
    """Of which model, and for how long."""

    out: Path = Path("out/bench")
    seeds: int = 3
    steps: int = 300
    width: int = 64
    layers: int = 4
    context: int = 64
    batch: Annotated[int, "sequences of a step"] = 8
    rates: Annotated[tuple[float, ...], "learning rates"] = (0.01, 0.03)


def qkv_arms(config: GPTConfig) -> dict[str, dict[str, Any]]:
    """Overrides of the fused weights, by arm."""
    q, k, v = config.qkv_sizes
    heads = (config.head_dim,) * (config.heads + 2 * config.kv_heads)
    return {
        "one block": {"split_sizes": (q + k + v,)},
        "three blocks": {"split_sizes": (q, k, v)},
        "a block per head": {"split_sizes": heads},
    }


@torch.no_grad()
def validation_loss(model: GPT, corpus: Corpus, options: Options) -> float:
    starts = validation_starts(corpus.validation, options.context, 96)
    losses = [
        model.loss(*windows(corpus.validation, part, options.context)).item()
        for part in starts.split(options.batch)  # type: ignore[no-untyped-call]
    ]
    return mean(losses)


def train(
    corpus: Corpus,
    config: GPTConfig,
    options: Options,
    seed: int,
    rate: float,
    own: Mapping[str, Any],
) -> dict[str, Any]:
    """One training: its validation loss at the end, or the step at which it was not finite."""
    torch.manual_seed(seed)
    model = GPT(config)
    opt = samestep.MuonAdamW(model, lr=rate, overrides={"*.qkv.weight": dict(own)})
    peaks = [group["lr"] for group in opt.param_groups]
    draw = torch.Generator().manual_seed(seed)
    for step in range(options.steps):
        share = min(1.0, (step + 1) / 30, (options.steps - step) / (0.3 * options.steps))
        for peak, group in zip(peaks, opt.param_groups, strict=True):
            group["lr"] = peak * share
        starts = torch.randint(
            len(corpus.train) - options.context, (options.batch,), generator=draw
        )
        loss = model.loss(*windows(corpus.train, starts, options.context))
        loss.backward()  # type: ignore[no-untyped-call]
        opt.step()
        opt.zero_grad()
        if not loss.item() < TOO_LARGE:
            return {"seed": seed, "loss": None, "not_finite_at": step}
    finite = all(bool(param.isfinite().all()) for param in model.parameters())
    found = validation_loss(model, corpus, options)
    if not (finite and math.isfinite(found)):
        return {"seed": seed, "loss": None, "not_finite_at": options.steps}
    return {"seed": seed, "loss": found, "not_finite_at": None}


def measure(options: Options, corpus: Corpus, say: Callable[[str], None]) -> dict[str, Any]:
    """All arms, rates and seeds in turns; what was asked, what ran, what was found."""
    config = GPTConfig(
        width=options.width, layers=options.layers, heads=4, kv_heads=4, context=options.context,
        fused_qkv=True,
    )  # fmt: skip
    begun = time.process_time()
    rows = []
    for rate in options.rates:
        for name, own in qkv_arms(config).items():
            runs = [
                train(corpus, config, options, seed, rate, own) for seed in range(options.seeds)
            ]
            rows.append({"arm": name, "lr": rate, "runs": runs})
            say(line_of(rows[-1]))
    return {
        "kind": "samestep fused qkv",
        "asked": {key: value for key, value in asdict(options).items() if key != "out"},
        "model": asdict(config),
        "ran": {
            "torch": torch.__version__,
            "samestep": samestep.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "corpus_sha256": corpus.sha256,
            "cpu_seconds": time.process_time() - begun,
        },
        "rows": rows,
    }


def line_of(row: Mapping[str, Any]) -> str:
    """A row of the table: losses of all seeds, and in how many of them it was not finite."""
    losses = [run["loss"] for run in row["runs"] if run["loss"] is not None]
    broken = [run["not_finite_at"] for run in row["runs"] if run["loss"] is None]
    mean_loss = f"{mean(losses):.4f}" if losses else "-"
    each = ", ".join(f"{loss:.4f}" for loss in losses) or "-"
    steps = ", ".join(map(str, broken))
    told = f"{len(broken)} of {len(row['runs'])}" + (f" (step {steps})" if broken else "")
    return f"| {row['lr']:g} | {row['arm']} | {mean_loss} | {each} | {told} |"


def table(found: Mapping[str, Any]) -> list[str]:
    """The table of a page, from a receipt."""
    return [
        "| learning rate | arm | loss, mean | of each seed | not finite |",
        "|---|---|---|---|---|",
        *map(line_of, found["rows"]),
    ]


def main(options: Options) -> None:
    torch.set_num_threads(1)  # so small a model is no faster on more
    found = measure(options, load_corpus(), lambda line: print(line, flush=True))
    print("\n".join(["", *table(found)]))
    write_files(options.out, {"fused_qkv.json": (json.dumps(found, indent=1) + "\n").encode()})


if __name__ == "__main__":
    run_script(main, Options)
