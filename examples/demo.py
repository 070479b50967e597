"""Train a small byte-level GPT twice, with AdamW and with MuonAdamW, and compare.

    python -m examples.demo --out out/train

The text is the source of the standard library of the Python that runs this, so there is nothing
to download. Both runs start from the same weights, see the same batches for the same number of
steps under the same schedule, and take turns, so that a busy machine slows both alike.

The default learning rate is the best of both. Powers of two times 0.003 were tried at the default
size, from 0.003 to 0.096 for AdamW and from 0.006 to 0.048 for MuonAdamW, the best three of each
with seeds 1 and 2: 0.024 ended with the lowest mean validation loss in either sweep (AdamW: 1.947,
1.913 and 1.970 nats at 0.012, 0.024 and 0.048; MuonAdamW: 1.688, 1.656 and 1.659). For AdamW,
betas of (0.9, 0.99) ended higher.
"""

import copy
import io
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

import samestep
from examples.gpt import GPT, GPTConfig
from samestep.tooling.request import BadRequestError, parse_flags
from samestep.train.corpus import Corpus, load_corpus, windows

VALIDATION_WINDOWS = 64
VALIDATIONS_PER_RUN = 20
RECENT_BATCHES = 20
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
COLORS = {"AdamW": "#c2571a", "MuonAdamW": "#1f5fa8"}


@dataclass(frozen=True)
class Options:
    """Train a small byte-level GPT with AdamW and with MuonAdamW, and compare the two."""

    out: Annotated[Path, "folder for result.json and loss.png; made if missing"] = Path("out/train")
    steps: Annotated[int, "training steps of each run"] = 300
    batch_size: Annotated[int, "sequences per step"] = 16
    context: Annotated[int, "bytes per sequence"] = 64
    width: Annotated[int, "channels of the model; a multiple of 8"] = 128
    layers: Annotated[int, "transformer layers"] = 4
    seed: Annotated[int, "decides the initial weights and the batches"] = 0
    lr: Annotated[float, "peak learning rate of both runs"] = 0.024

    def check(self) -> None:
        """Refuse values that cannot run."""
        for name in ("steps", "batch_size", "context", "width", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must be from 0 to 2**63 - 1, got {self.seed}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"--lr must be above 0, got {self.lr}")

    @property
    def model(self) -> GPTConfig:
        """The shape of the model these options ask for."""
        return GPTConfig(context=self.context, width=self.width, layers=self.layers)

    @property
    def warmup(self) -> int:
        """Steps over which the learning rate rises to its peak."""
        return max(1, self.steps // 10)


def flag(name: str) -> str:
    """Return the command-line spelling of a field."""
    return "--" + name.replace("_", "-")


def schedule(step: int, steps: int, warmup: int) -> float:
    """Return the share of the peak learning rate: a linear rise, then a linear fall to zero."""
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


@dataclass
class Run:
    """One model with its optimizer, and what was measured while it trained."""

    name: str
    model: GPT
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    train_loss: list[float] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[float, float, float]:
        """Train on one batch; return its loss, the seconds it took, those in the optimizer."""
        start = time.perf_counter()
        loss = self.model.loss(inputs, targets)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        before_optimizer = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        self.scheduler.step()
        return loss.item(), end - start, end - before_optimizer

    @torch.no_grad()
    def validate(self, inputs: Tensor, targets: Tensor) -> float:
        """Return the mean loss over the held-out windows."""
        return self.model.loss(inputs, targets).item()

    def parameters_by_rule(self) -> dict[str, int]:
        """Count the parameters that each update rule handles."""
        counts: dict[str, int] = {}
        for group in self.optimizer.param_groups:
            size = sum(parameter.numel() for parameter in group["params"])
            counts[group["rule"]] = counts.get(group["rule"], 0) + size
        return counts


def make_runs(options: Options) -> list[Run]:
    """Build the two runs, from the same initial weights."""
    torch.manual_seed(options.seed)
    adamw_model = GPT(options.model)
    muon_model = copy.deepcopy(adamw_model)
    adamw = samestep.AdamW(adamw_model, lr=options.lr, weight_decay=WEIGHT_DECAY, betas=BETAS)
    muon = samestep.MuonAdamW(muon_model, lr=options.lr, weight_decay=WEIGHT_DECAY, betas=BETAS)

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: schedule(step, options.steps, options.warmup)
        )

    return [
        Run("AdamW", adamw_model, adamw, scheduler(adamw)),
        Run("MuonAdamW", muon_model, muon, scheduler(muon)),
    ]


def train(options: Options, corpus: Corpus, runs: list[Run], console: Console) -> list[int]:
    """Train the runs in turns; return the steps after which they were validated.

    Ctrl-C ends it early. A run's lists grow only once all runs have finished the step, so what
    was measured stays comparable whenever that happens.
    """
    generator = torch.Generator().manual_seed(options.seed)
    context = options.context
    spread = torch.linspace(0, len(corpus.validation) - context - 1, VALIDATION_WINDOWS)
    held_out = windows(corpus.validation, spread.long(), context)
    every = math.ceil(options.steps / VALIDATIONS_PER_RUN)
    validated_at: list[int] = []

    def validate(step: int) -> None:
        losses = [run.validate(*held_out) for run in runs]
        for run, loss in zip(runs, losses, strict=True):
            run.validation_loss.append(loss)
        validated_at.append(step)

    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss: {task.fields[losses]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("train", total=options.steps, losses="")
        try:
            validate(0)
            for step in range(1, options.steps + 1):
                last_start = len(corpus.train) - context
                starts = torch.randint(last_start, (options.batch_size,), generator=generator)
                batch = windows(corpus.train, starts, context)
                measured = [run.step(*batch) for run in runs]
                for run, (loss, seconds, optimizer_seconds) in zip(runs, measured, strict=True):
                    run.train_loss.append(loss)
                    run.step_seconds.append(seconds)
                    run.optimizer_seconds.append(optimizer_seconds)
                losses = "  ".join(f"{run.name} {recent(run.train_loss):.3f}" for run in runs)
                progress.update(task, advance=1, losses=losses)
                if step % every == 0 or step == options.steps:
                    validate(step)
        except KeyboardInterrupt:
            console.print(f"Stopped after {len(runs[0].train_loss)} of {options.steps} steps.")
    return validated_at


def recent(losses: Sequence[float]) -> float:
    """Return the mean of the last batches' losses: one batch says little."""
    return statistics.fmean(losses[-RECENT_BATCHES:])


def smooth(losses: Sequence[float]) -> list[float]:
    """Return the mean around each loss, of as many on either side as there are, up to 1/25."""
    reach = len(losses) // 25
    return [
        statistics.fmean(losses[max(0, index - reach) : index + reach + 1])
        for index in range(len(losses))
    ]


def first_step_below(target: float, steps: Sequence[int], losses: Sequence[float]) -> int | None:
    """Return the first of ``steps`` whose loss is no higher than ``target``."""
    return next((s for s, loss in zip(steps, losses, strict=True) if loss <= target), None)


def summarize(
    options: Options, corpus: Corpus, runs: list[Run], validated_at: list[int], seconds: float
) -> dict[str, Any]:
    """Collect everything result.json holds."""
    target = runs[0].validation_loss[-1]
    tokens = options.batch_size * options.context
    summary: dict[str, Any] = {
        "asked": {**asdict(options), "out": str(options.out)},
        "completed": len(runs[0].train_loss) == options.steps,
        "steps_done": len(runs[0].train_loss),
        "seconds": seconds,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "samestep": samestep.__version__,
        },
        "machine": {"architecture": platform.machine(), "threads": torch.get_num_threads()},
        "model": asdict(options.model),
        "weight_decay": WEIGHT_DECAY,
        "betas": list(BETAS),
        "corpus": {
            "train_bytes": len(corpus.train),
            "validation_bytes": len(corpus.validation),
            "train_files": len(corpus.train_files),
            "validation_files": len(corpus.validation_files),
            "sha256": corpus.sha256,
        },
        "validated_at": validated_at,
        "target_validation_loss": target,
        "runs": {},
    }
    for run in runs:
        step_seconds = statistics.median(run.step_seconds)
        summary["runs"][run.name] = {
            "final_train_loss": recent(run.train_loss),
            "final_validation_loss": run.validation_loss[-1],
            "final_train_bits_per_byte": recent(run.train_loss) / math.log(2),
            "final_validation_bits_per_byte": run.validation_loss[-1] / math.log(2),
            "steps_to_target": first_step_below(target, validated_at, run.validation_loss),
            "median_step_ms": 1e3 * step_seconds,
            "median_optimizer_ms": 1e3 * statistics.median(run.optimizer_seconds),
            "tokens_per_second": tokens / step_seconds,
            "parameters_by_rule": run.parameters_by_rule(),
            "train_loss": run.train_loss,
            "validation_loss": run.validation_loss,
            "step_seconds": run.step_seconds,
            "optimizer_seconds": run.optimizer_seconds,
        }
    return summary


def closing_table(summary: dict[str, Any]) -> Table:
    """Lay the two runs side by side."""
    runs: dict[str, dict[str, Any]] = summary["runs"]
    table = Table(title=f"Byte-level GPT, {summary['steps_done']} steps each")
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")

    def row(label: str, *keys: str, form: str) -> None:
        table.add_row(label, *(form.format(*(run[key] for key in keys)) for run in runs.values()))

    both_units = "{:.3f} / {:.3f}"
    row(
        "train loss, nats / bits per byte",
        "final_train_loss",
        "final_train_bits_per_byte",
        form=both_units,
    )
    row(
        "validation loss, nats / bits per byte",
        "final_validation_loss",
        "final_validation_bits_per_byte",
        form=both_units,
    )
    reached = (run["steps_to_target"] for run in runs.values())
    table.add_row(
        f"steps to validation loss {summary['target_validation_loss']:.3f}",
        *("not reached" if steps is None else str(steps) for steps in reached),
    )
    row("ms per step (median)", "median_step_ms", form="{:.1f}")
    row("ms of it in the optimizer", "median_optimizer_ms", form="{:.1f}")
    row("tokens per second", "tokens_per_second", form="{:,.0f}")
    for rule in sorted({rule for run in runs.values() for rule in run["parameters_by_rule"]}):
        counts = (run["parameters_by_rule"].get(rule, 0) for run in runs.values())
        table.add_row(f"parameters updated by {rule}", *(f"{count:,}" for count in counts))
    return table


def bits_of(nats: Any) -> Any:
    """Losses in bits, from those in nats."""
    return nats / math.log(2)


def nats_of(bits: Any) -> Any:
    """Losses in nats, from those in bits."""
    return bits * math.log(2)


def draw(summary: dict[str, Any]) -> bytes:
    """Draw the loss curves; return a PNG."""
    runs: dict[str, dict[str, Any]] = summary["runs"]
    steps = range(1, summary["steps_done"] + 1)
    smoothed = {name: smooth(run["train_loss"]) for name, run in runs.items()}
    figure = Figure(figsize=(9, 5), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for name, run in runs.items():
        color = COLORS[name]
        axes.plot(steps, run["train_loss"], color=color, alpha=0.12, linewidth=0.8)
        axes.plot(steps, smoothed[name], color=color, linewidth=2.2, label=f"{name}, training")
        axes.plot(
            summary["validated_at"],
            run["validation_loss"],
            color=color,
            linestyle="none",
            marker="o",
            markersize=4.5,
            markerfacecolor="white",
            label=f"{name}, validation",
        )
    # The first steps fall from ln(256) and would flatten all that follows.
    shown_from = len(steps) // 12
    top = max(curve[shown_from] for curve in smoothed.values())
    bottom = min(min(smoothed[name] + run["validation_loss"]) for name, run in runs.items())
    margin = 0.1 * (top - bottom) + 0.01
    axes.set(xlim=(0, 1.01 * len(steps)), ylim=(bottom - margin, top + margin))
    mark_steps_to_target(axes, summary)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    bits = axes.secondary_yaxis("right", functions=(bits_of, nats_of))
    bits.set_ylabel("bits per byte")
    parameters = sum(runs["AdamW"]["parameters_by_rule"].values())
    tokens = summary["asked"]["batch_size"] * summary["asked"]["context"]
    figure.suptitle("MuonAdamW and AdamW on the same batches", fontsize=14, fontweight="bold")
    axes.set_title(
        f"GPT of {parameters / 1e6:.2f} M parameters on the Python standard library's source, "
        f"{tokens:,} bytes per step",
        fontsize=10,
        color="#555555",
    )
    axes.legend(frameon=False, loc="upper right")
    axes.grid(alpha=0.25)
    axes.spines["top"].set_visible(False)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def mark_steps_to_target(axes: Axes, summary: dict[str, Any]) -> None:
    """Show where MuonAdamW passes the validation loss that AdamW ends with."""
    target, done = summary["target_validation_loss"], summary["steps_done"]
    muon = summary["runs"]["MuonAdamW"]
    reached = muon["steps_to_target"]
    if not reached or reached == done:
        return
    axes.hlines(target, 0, done, color="#444444", linestyle="dotted", linewidth=1.2)
    loss = muon["validation_loss"][summary["validated_at"].index(reached)]
    axes.plot(reached, loss, color=COLORS["MuonAdamW"], marker="o", markersize=8, zorder=3)
    axes.annotate(
        f"AdamW's final validation loss, {target:.2f} nats:\n"
        f"MuonAdamW is below it after {reached} of {done} steps",
        xy=(0, target),
        xytext=(8, -6),
        textcoords="offset points",
        va="top",
        color="#444444",
    )


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside ``path`` and move it there, so that no half-written file is seen."""
    beside = path.with_name(path.name + ".partial")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    console = Console()
    try:
        words = sys.argv[1:] if arguments is None else arguments
        options = parse_flags(Options, words, "python -m examples.demo")
        options.check()
        corpus = load_corpus()
        if options.context >= len(corpus.validation):
            raise ValueError(
                f"--context must be below the {len(corpus.validation)} bytes of validation text, "
                f"got {options.context}"
            )
        runs = make_runs(options)
        options.out.mkdir(parents=True, exist_ok=True)
    except (BadRequestError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    validated_at = train(options, corpus, runs, console)
    seconds = time.perf_counter() - start
    if not runs[0].train_loss:
        console.print("No step was finished: nothing to write.")
        return 130
    summary = summarize(options, corpus, runs, validated_at, seconds)
    write_whole(options.out / "result.json", json.dumps(summary, indent=1).encode())
    write_whole(options.out / "loss.png", draw(summary))
    console.print(closing_table(summary))
    console.print(f"Took {seconds:.0f} s. Wrote result.json and loss.png to {options.out}.")
    return 0 if summary["completed"] else 130


if __name__ == "__main__":
    sys.exit(main())
