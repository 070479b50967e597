"""A model trained with one rule and tuned with another: `python -m benchmarks.fine_tuning`.

A small GPT learns the Python source of the standard library byte by byte, with AdamW. Then it is
tuned on another kind of text, the manual in `pydoc_data/topics.py`, which it has not seen: all
weights, or factors of LoRA alone; with AdamW, or with Muon for the matrices. Each way has the same
few learning rates, and the best on the new task counts. Writes a receipt and prints the table of
docs/rules.md.
"""

import copy
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

import samestep
from samestep.lab.common.provenance import machine
from samestep.models.gpt import GPT, GPTConfig
from samestep.parallel.lora import add_lora
from samestep.tooling.request import parse_flags
from samestep.train.corpus import load_corpus, read_bytes, validation_starts, windows

NEW_TASK = "pydoc_data/topics.py"
CONFIG = GPTConfig(context=32, width=64, layers=2, heads=4)
PRETRAINING_RATE = 3e-3
RATES = (1e-3, 3e-3, 1e-2)
LORA = ["blocks.*.attention.*", "blocks.*.mlp.*"]


class Way(NamedTuple):
    """A way to tune: the rule of the matrices, and whether factors of LoRA alone are trained."""

    rule: str
    lora: bool


WAYS = (Way("adamw", False), Way("muon", False), Way("adamw", True), Way("muon", True))


@dataclass(frozen=True)
class Options:
    """Pre-train, tune, and write the receipt."""

    steps: Annotated[int, "of pre-training"] = 250
    tuning_steps: Annotated[int, "of tuning"] = 60
    batch: Annotated[int, "sequences of a step"] = 8
    seeds: Annotated[int, "trainings of each kind"] = 3
    receipt: Annotated[Path, "the receipt to write"] = Path("benchmarks/results/fine_tuning.json")


class Text(NamedTuple):
    """Bytes to train on, and to measure on."""

    train: Tensor
    held_out: Tensor

    def batches(self, count: int, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Sequences at random places, the same for the same seed."""
        random = torch.Generator().manual_seed(seed)
        for _ in range(count):
            last = len(self.train) - CONFIG.context - 1
            starts = torch.randint(last, (batch,), generator=random)
            yield windows(self.train, starts, CONFIG.context)

    @torch.no_grad()
    def loss_of(self, model: GPT) -> float:
        """The mean loss of 64 sequences that are spread over what is held out."""
        starts = validation_starts(self.held_out, CONFIG.context, 64)
        return float(model.loss(*windows(self.held_out, starts, CONFIG.context)))


def texts() -> tuple[Text, Text]:
    """Python, and prose about it."""
    corpus = load_corpus()
    root = Path(sysconfig.get_paths()["stdlib"])
    python = read_bytes(root, [name for name in corpus.train_files if name != NEW_TASK])
    prose = read_bytes(root, [NEW_TASK])
    cut = len(prose) * 9 // 10
    return Text(python, corpus.validation), Text(prose[:cut], prose[cut:])


def optimizer_of(model: GPT, rule: str, rate: float) -> torch.optim.Optimizer:
    """One learning rate for all; matrices and factors follow the rule, the rest AdamW."""
    if rule == "adamw":
        return samestep.AdamW(model, lr=rate)
    has_factors = any("lora_" in name for name, _ in model.named_parameters())
    of_factors: dict[str, Any] = (
        {"overrides": {"*.lora_*": {"rule": "muon"}}} if has_factors else {}
    )
    return samestep.MuonAdamW(model, lr=rate, **of_factors)


def train(
    model: GPT, rule: str, rate: float, text: Text, steps: int, batch: int, seed: int
) -> None:
    """The rate falls to a tenth of itself, by a cosine."""
    optimizer = optimizer_of(model, rule, rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=rate / 10)
    for tokens, targets in text.batches(steps, batch, seed):
        torch.autograd.backward(model.loss(tokens, targets))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def of_seed(options: Options, seed: int) -> list[dict[str, Any]]:
    """All trainings of a seed."""
    torch.set_num_threads(1)
    python, prose = texts()
    rows: list[dict[str, Any]] = []
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    train(model, "adamw", PRETRAINING_RATE, python, options.steps, options.batch, seed)
    rows.append(
        {"seed": seed, "way": None, "python": python.loss_of(model), "prose": prose.loss_of(model)}
    )
    for way in WAYS:
        for rate in RATES:
            tuned = copy.deepcopy(model)
            if way.lora:
                add_lora(tuned, LORA, rank=8, seed=seed)
            few = options.tuning_steps, options.batch
            train(tuned, way.rule, rate, prose, *few, 1000 + seed)
            found = {"python": python.loss_of(tuned), "prose": prose.loss_of(tuned)}
            rows.append({"seed": seed, "way": way._asdict(), "rate": rate, **found})
            print(rows[-1], flush=True)
    return rows


def run(options: Options) -> dict[str, Any]:
    """All seeds side by side, each in a process of its own."""
    with ProcessPoolExecutor(options.seeds, mp_context=get_context("spawn")) as pool:
        of_seeds = pool.map(of_seed, repeat(options), range(options.seeds))
        rows = [row for of_one in of_seeds for row in of_one]
    return {
        "kind": "samestep fine-tuning",
        "command": "python -m benchmarks.fine_tuning",
        "asked": {**asdict(options), "receipt": None, "config": asdict(CONFIG), "rates": RATES},
        "ran": machine(),
        "rows": rows,
    }


def table(content: dict[str, Any]) -> str:
    """The best rate of each way on the new task, means over seeds, and what became of the old."""
    rows = content["rows"]
    before = [row for row in rows if row["way"] is None]
    text = "| tuned | rate | new task | old task | new task at each rate |\n|---|---|---|---|---|\n"
    text += f"| not yet | | {_mean(before, 'prose')} | {_mean(before, 'python')} | |\n"
    for way in WAYS:
        alike = [row for row in rows if row["way"] == way._asdict()]
        by_rate = {rate: [r for r in alike if r["rate"] == rate] for rate in RATES}
        best = min(by_rate, key=lambda rate: _value(by_rate[rate], "prose"))
        kind = "LoRA" if way.lora else "all weights"
        every = ", ".join(f"{_value(found, 'prose'):.3f}" for found in by_rate.values())
        text += f"| {kind}, {_name(way.rule)} | {best:g} | {_mean(by_rate[best], 'prose')}"
        text += f" | {_mean(by_rate[best], 'python')} | {every} |\n"
    return text


def _value(rows: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def _mean(rows: list[dict[str, Any]], key: str) -> str:
    values = [row[key] for row in rows]
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3f} ± {spread:.3f}"


def _name(rule: str) -> str:
    return {"adamw": "AdamW", "muon": "Muon"}[rule]


if __name__ == "__main__":
    asked = parse_flags(Options, sys.argv[1:], "python -m benchmarks.fine_tuning")
    began = time.monotonic()
    found = run(asked)
    asked.receipt.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    print(f"{time.monotonic() - began:.0f} s")
