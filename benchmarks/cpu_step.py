"""One optimizer step on CPU: samestep against an unbatched fp32 twin, interleaved in one run.

The parameters are those of a GPT: per layer four d x d, one 4d x d and one d x 4d matrix and
two norms; an embedding and a head of `vocabulary` rows. Both optimizers run the same quintic
Newton-Schulz with the same scale, on the same gradients.
"""

import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

import samestep
from benchmarks import heading, run_script, write_json
from samestep.lab.bench.gpu.measure import take_turn
from samestep.lab.bench.gpu.report import Screen
from samestep.lab.bench.step_contestants import with_gradients
from samestep.models.parameter_sets import gpt
from samestep.rules.orthogonalize import orthogonalize_flops

# What users write today: one Newton-Schulz per matrix in fp32, beside torch's foreach AdamW


class UnbatchedMuon(torch.optim.Optimizer):
    """torch.optim.Muon's algorithm without its bfloat16 cast, one matrix at a time.

    torch's own class computes in bfloat16, which this kind of CPU emulates: a comparison
    with it would measure the emulation.
    """

    def __init__(self, params: Sequence[Tensor], lr: float = 1e-3, weight_decay: float = 0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, mu = group["lr"], group["momentum"]
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                momentum = state["momentum"].lerp_(param.grad, 1 - mu)
                X = param.grad.lerp(momentum, mu)
                tall = X.shape[0] > X.shape[1]
                X = X.T if tall else X
                X = X / X.norm().clamp(min=1e-7)
                for _ in range(5):
                    A = X @ X.T
                    B = torch.addmm(A, A, A, beta=-4.7750, alpha=2.0315)
                    X = torch.addmm(X, B, X, beta=3.4445)
                X = X.T if tall else X
                param.mul_(1 - lr * group["weight_decay"])
                param.add_(X, alpha=-lr * 0.2 * max(param.shape) ** 0.5)


class Twin:
    """UnbatchedMuon for the matrices and torch.optim.AdamW(foreach=True) for the rest."""

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        self.muon = UnbatchedMuon(matrices)
        self.adamw = torch.optim.AdamW(others, foreach=True)

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()


# The benchmark


@dataclass(frozen=True)
class Options:
    """What to measure."""

    widths: tuple[int, ...] = (256, 512)
    layers: int = 6
    vocabulary: int = 8192
    rounds: Annotated[int, "interleaved repetitions; the medians are compared"] = 7
    out: Path = Path("out/bench")


CPU = torch.device("cpu")
Parameters = list[nn.Parameter]


def gpt_parameters(width: int, layers: int, vocabulary: int) -> tuple[Parameters, Parameters]:
    """(matrices, all other parameters), with random values and gradients."""
    matrices, tables = gpt(width, layers, vocabulary)
    norms = ((width,),) * (2 * layers + 1)
    return with_gradients(matrices, CPU), with_gradients((*norms, *tables), CPU)


def measure(width: int, options: Options) -> dict[str, float]:
    """Medians of both optimizers and of their parts, from alternating steps."""
    torch.manual_seed(0)
    matrices, others = gpt_parameters(width, options.layers, options.vocabulary)
    copies = gpt_parameters(width, options.layers, options.vocabulary)
    muon: dict[str, Any] = {
        "rule": "muon", "params": matrices,
        "orthogonalize": "newton-schulz", "adjust_lr": "match_rms_adamw",
    }  # fmt: skip
    adamw: dict[str, Any] = {
        "rule": "adamw",
        "params": others,
        "betas": (0.9, 0.999),
        "weight_decay": 0.01,
    }
    ours = samestep.MuonAdamW([muon, adamw])
    ours_muon, ours_adamw = samestep.MuonAdamW([muon]), samestep.MuonAdamW([adamw])
    twin = Twin(*copies)
    steps: dict[str, Callable[[], object]] = {
        "ours": ours.step, "twin": twin.step,
        "ours_muon": ours_muon.step, "twin_muon": twin.muon.step,
        "ours_adamw": ours_adamw.step, "twin_adamw": twin.adamw.step,
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(options.rounds + 1):
        for name, step in steps.items():
            elapsed = take_turn(step, CPU).ms
            if round_number > 0:  # the first round allocates state and warms up
                times[name].append(elapsed)
    result = {name: statistics.median(values) for name, values in times.items()}
    sizes = [(param.shape[0], param.shape[1]) for param in matrices]
    flops = sum(orthogonalize_flops(*size) for size in sizes)
    plain = sum(orthogonalize_flops(*size, execution="standard") for size in sizes)
    result["ours_gflops_per_s"] = flops / result["ours_muon"] / 1e6
    result["twin_gflops_per_s"] = plain / result["twin_muon"] / 1e6
    result["flops_ratio"] = flops / plain
    result["ratio"] = result["ours"] / result["twin"]
    result["parameters"] = sum(param.numel() for param in matrices + others)
    return result


def main(options: Options) -> None:
    screen = Screen()
    results = {width: measure(width, options) for width in options.widths}
    columns = ["width", "parameters", "twin", "samestep", "ratio", "Muon", "AdamW", "GFLOP/s"]
    rows = [
        [
            str(width), f"{r['parameters'] / 1e6:.1f} M", f"{r['twin']:.1f}", f"{r['ours']:.1f}",
            f"{r['ratio']:.2f}",
            f"{r['ours_muon']:.1f} / {r['twin_muon']:.1f}",
            f"{r['ours_adamw']:.1f} / {r['twin_adamw']:.1f}",
            f"{r['ours_gflops_per_s']:.0f} / {r['twin_gflops_per_s']:.0f}",
        ]
        for width, r in results.items()
    ]  # fmt: skip
    screen.table("optimizer step on CPU, ms (medians, interleaved)", columns, rows, texts=0)
    screen.say("ratio: samestep / twin, smaller is better; pairs are samestep / twin")
    receipt = {
        **heading("cpu_step", options),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "milliseconds": results,
    }
    write_json(options.out, "cpu_step.json", receipt)


if __name__ == "__main__":
    run_script(main, Options)
