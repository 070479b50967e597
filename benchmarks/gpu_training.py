"""A GPT trained on one GPU with every kernel, and in plain torch: the same loss, less time.

python -m benchmarks.gpu_training --out DIR   # needs one GPU, and torch alone

Bytes of Python's standard library, bfloat16 autocast, clipping, a learning rate that rises and
falls. A seed decides the model and the batches, so that pairs of runs differ in kernels alone.
"""

import argparse
import shlex
import statistics
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import samestep
from benchmarks import gpt_config
from samestep.bench.gpu.measure import kernels, measure_ceilings
from samestep.bench.gpu.options import device_of
from samestep.bench.gpu.report import Screen, heading, leave, number
from samestep.models.gpt import GPT, GPTConfig
from samestep.tooling.output import check_folder

LAST = 20  # steps whose mean is the final loss
RISE = 0.1  # of the steps, until the learning rate is there


VARIANTS = {"kernels": True, "plain torch": False}  # whether kernels are on


class Run(NamedTuple):
    """One training."""

    losses: list[float]
    final: float
    iteration_ms: float  # medians of the second half
    optimizer_ms: float


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("out/gpu-training"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it")
    return parser.parse_args(given)


def library_bytes() -> Tensor:
    """The sources of Python's standard library, end to end, uint8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(root.rglob("*.py")) if "-packages" not in str(f.relative_to(root))]
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)


def rate(step: int, steps: int) -> float:
    """The share of the learning rate at a step: up, and down to a tenth."""
    rise = max(1, round(RISE * steps))
    return (step + 1) / rise if step < rise else 1 - 0.9 * (step - rise) / (steps - rise)


def batches(text: Tensor, seed: int, options: argparse.Namespace, device: torch.device) -> Tensor:
    """All of a run: (steps, sequences, context + 1) bytes."""
    generator = torch.Generator().manual_seed(seed)
    length = options.context + 1
    shape = (options.steps, options.sequences, 1)
    starts = torch.randint(len(text) - length, shape, generator=generator)
    return text[starts + torch.arange(length)].to(device)


def config_of(options: argparse.Namespace) -> GPTConfig:
    return gpt_config(options.width, options.layers, context=options.context)


def train(seed: int, text: Tensor, options: argparse.Namespace) -> Run:
    device = device_of(options.device)
    torch.manual_seed(seed)
    model = GPT(config_of(options)).to(device)
    optimizer = samestep.MuonAdamW(model, lr=options.lr, max_grad_norm=1.0)
    losses: list[Tensor] = []
    events: list[list[Any]] = []
    for step, batch in enumerate(batches(text, seed, options, device)):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * rate(step, options.steps)
        events.append([mark(device)])
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model.loss(batch[:, :-1].long(), batch[:, 1:].long())
        loss.backward()  # type: ignore[no-untyped-call]
        events[-1].append(mark(device))
        optimizer.step()
        events[-1].append(mark(device))
        optimizer.zero_grad()
        losses.append(loss.detach())
    values = [float(loss) for loss in losses]
    counted = events[len(events) // 2 :] if device.type == "cuda" else []
    iteration_ms = [begin.elapsed_time(end) for begin, _, end in counted] or [0.0]
    optimizer_ms = [middle.elapsed_time(end) for _, middle, end in counted] or [0.0]
    medians = map(statistics.median, (iteration_ms, optimizer_ms))
    return Run(values, statistics.mean(values[-LAST:]), *medians)


def mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    make: Any = torch.cuda.Event  # without types
    event = make(enable_timing=True)
    event.record()
    return event


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Of one variant, over all seeds."""
    final = [found.final for found in runs]
    iteration = statistics.median(found.iteration_ms for found in runs)
    optimizer = statistics.median(found.optimizer_ms for found in runs)
    return {
        "final_losses": final,
        "mean": statistics.mean(final),
        "standard_deviation": statistics.stdev(final) if len(final) > 1 else 0.0,
        "iteration_ms": iteration,
        "optimizer_ms": optimizer,
        "optimizer_share": optimizer / iteration if iteration else 0.0,
        "losses": [found.losses for found in runs],
    }


def run(options: argparse.Namespace, command: str) -> None:
    check_folder(options.out)
    screen = Screen()
    device = device_of(options.device)
    content = heading("samestep training", command, device, measure_ceilings(device), ())
    text = library_bytes()
    runs: dict[str, list[Run]] = {name: [] for name in VARIANTS}
    for seed in options.seeds:  # in turns, so that all see the same machine
        for name, on in VARIANTS.items():
            with kernels(on, device):
                found = train(seed, text, options)
            runs[name].append(found)
            screen.progress(f"seed {seed}, {name}: final loss {found.final:.4f}")
    with torch.device("meta"):
        parameters = sum(param.numel() for param in GPT(config_of(options)).parameters())
    told = {name: summary(of_variant) for name, of_variant in runs.items()}
    content |= {
        "settings": {k: v for k, v in vars(options).items() if k != "out"},
        "variants": told, "parameters": parameters, "bytes_of_text": len(text),
    }  # fmt: skip
    rows = [
        [
            name,
            " ".join(f"{loss:.4f}" for loss in found["final_losses"]),
            f"{found['mean']:.4f} ± {found['standard_deviation']:.4f}",
            number(found["iteration_ms"]),
            number(found["optimizer_ms"]),
            f"{found['optimizer_share']:.1%}",
        ]
        for name, found in told.items()
    ]
    title = f"{parameters / 1e6:.0f}M parameters, {options.steps} steps, bfloat16 autocast"
    columns = ["", "final loss of each seed", "mean", "iteration ms", "optimizer ms", "share"]
    screen.table(title, columns, rows)
    finals = zip(*(found["final_losses"] for found in told.values()), strict=True)
    pairs = [ours - plain for ours, plain in finals]
    difference = statistics.mean(pairs)
    noise = max(found["standard_deviation"] for found in told.values())
    within = abs(difference) <= noise
    content |= {"from_plain": pairs, "noise": noise, "within_noise": within}
    screen.say(
        f"{'met' if within else 'NOT MET':8} with kernels the loss is {difference:+.4f} from plain "
        f"torch in the mean, and seeds differ by {noise:.4f} (standard deviation)"
    )
    leave(options.out, "training_gpu", content, None)
    screen.say(f"Wrote training_gpu.json to {options.out}.")


if __name__ == "__main__":
    words = sys.argv[1:]
    run(arguments(words), shlex.join(["python", "-m", "benchmarks.gpu_training", *words]))
