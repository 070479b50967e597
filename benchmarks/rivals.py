"""The rules of examples/rules beside AdamW and Muon: a small GPT on the same bytes, CPU.

    python -m benchmarks.rivals --out benchmarks/results/rivals_cpu.json

Every rule has three or four learning rates, the best of which counts; embeddings, norms and the
head are AdamW's at one rate in all runs, but where AdamW has everything. Runs start from the same
weights and take turns in every step, in an order of that step, so that a busy machine slows all
alike. Times are of median steps.
"""

import copy
import json
import platform
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

import samestep
from benchmarks import run_script
from examples.demo import BETAS, VALIDATION_WINDOWS, WEIGHT_DECAY, Run, schedule
from examples.gpt import GPT, GPTConfig
from examples.rules.muonh import MuonH
from examples.rules.soap import SOAP
from samestep.lab.bench.gpu.measure import in_turn
from samestep.train.corpus import Corpus, load_corpus, windows

BATCH, CONTEXT = 16, 64  # sequences of a step, and bytes of a sequence
REST = 0.024  # of AdamW's parameters: the best of `examples.demo`
RATES = {
    "adamw": (0.012, 0.024, 0.048, 0.096),
    "muon": (0.012, 0.024, 0.048),
    "muonh": (0.02, 0.04, 0.08),
    "soap": (0.006, 0.012, 0.024, 0.048),
}


def optimizer(model: GPT, rule: str, rate: float, **options: Any) -> samestep.MuonAdamW:
    """The matrices of the blocks by one rule with these options of it, all else by AdamW."""
    usual: dict[str, Any] = {"lr": REST, "weight_decay": WEIGHT_DECAY, "betas": BETAS}
    matrices = {"rule": rule, "lr": rate, **options}
    others = {"rule": "adamw", "lr": rate if rule == "adamw" else REST}
    params = list(model.named_parameters())
    inner = [pair for pair in params if pair[1].ndim == 2 and "block" in pair[0]]
    names = {name for name, _ in inner}
    rest = [pair for pair in params if pair[0] not in names]
    groups = [{"params": inner, **matrices}, {"params": rest, **others}]
    return samestep.MuonAdamW(groups, **usual)


def made(name: str, model: GPT, rule: str, rate: float, steps: int, **options: Any) -> Run:
    found = optimizer(model, rule, rate, **options)
    warm = max(1, steps // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(found, lambda step: schedule(step, steps, warm))
    return Run(name, model, found, scheduler)


def batches(corpus: Corpus, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences at random places, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(corpus.train) - CONTEXT, (BATCH,), generator=generator)
        yield windows(corpus.train, starts, CONTEXT)


def train(steps: int, width: int, layers: int, seed: int) -> dict[str, Any]:
    corpus = load_corpus()
    torch.manual_seed(seed)
    start = GPT(GPTConfig(context=CONTEXT, width=width, layers=layers))
    runs = {
        (rule, rate): made(f"{rule} {rate}", copy.deepcopy(start), rule, rate, steps)
        for rule, rates in RATES.items()
        for rate in rates
    }
    spread = torch.linspace(0, len(corpus.validation) - CONTEXT - 1, VALIDATION_WINDOWS)
    held_out = windows(corpus.validation, spread.long(), CONTEXT)
    every = max(1, steps // 20)
    validated = [0]
    for run in runs.values():
        run.validation_loss.append(run.validate(*held_out))
    for step, given in enumerate(batches(corpus, steps, seed), 1):
        for run in in_turn(list(runs.values()), step):
            loss, seconds, of_optimizer = run.step(*given)
            run.train_loss.append(loss)
            run.step_seconds.append(seconds)
            run.optimizer_seconds.append(of_optimizer)
        if step % every == 0 or step == steps:
            validated.append(step)
            for run in runs.values():
                run.validation_loss.append(run.validate(*held_out))
    entries = [
        {
            "rule": rule,
            "lr": rate,
            "validation_loss": run.validation_loss,
            "step_ms": 1e3 * statistics.median(run.step_seconds),
            "optimizer_ms": 1e3 * statistics.median(run.optimizer_seconds),
        }
        for (rule, rate), run in runs.items()
    ]
    about = {"steps": steps, "width": width, "layers": layers, "seed": seed, "rest": REST}
    machine = {"machine": platform.machine(), "threads": torch.get_num_threads()}
    return {**about, **machine, "torch": torch.__version__, "at": validated, "runs": entries}


def table(result: dict[str, Any]) -> str:
    """The best rate of each rule, as Markdown; the last column is at AdamW's time."""
    best = {
        rule: min(
            (run for run in result["runs"] if run["rule"] == rule),
            key=lambda run: run["validation_loss"][-1],
        )
        for rule in RATES
    }
    adamw, at = best["adamw"], result["at"]
    end = adamw["validation_loss"][-1]
    whole = adamw["step_ms"] * result["steps"]
    lines = [
        "| rule | lr | loss at the end | steps to AdamW's | optimizer, ms | time to AdamW's |",
        "|---|---|---|---|---|---|",
    ]
    for rule, run in best.items():
        losses = zip(at, run["validation_loss"], strict=True)
        reached = next((step for step, loss in losses if loss <= end), None)
        when = "-" if reached is None else f"{reached * run['step_ms'] / whole:.0%}"
        lines.append(
            f"| `{rule}` | {run['lr']} | {run['validation_loss'][-1]:.3f} | {reached or '-'} | "
            f"{run['optimizer_ms']:.1f} | {when} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Options:
    """Of which model, for how long, and where to."""

    steps: int = 300
    width: int = 64
    layers: int = 2
    seed: int = 0
    out: Annotated[Path | None, "a JSON file to write"] = None


def main(options: Options) -> None:
    for rule in (MuonH(), SOAP()):
        samestep.register_rule(rule)
    result = train(options.steps, options.width, options.layers, options.seed)
    print(table(result))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main, Options)
