"""Two claims about Muon, each tried in small trainings of three seeds: what is seen is told.

    python -m benchmarks.muon_claims qkv --out out/bench     # some 10 minutes of one core
    python -m benchmarks.muon_claims gate --out out/bench    # as long

qkv: "Fused queries, keys and values that are orthogonalized as one matrix make training worse." A
GPT whose layers have one weight for all three, with that weight as one block, as three blocks, and
as a block for each head.

gate: "A cautious gate by the sign of the raw gradient ends in NaN in deep models, that by the sign
of the parameter does not." A deep, narrow GPT with nanochat's Muon (equilibration, Polar Express,
variance reduction), without a gate, with nanochat's gate of the decay, with the same gate by the
raw gradient, and with the whole update gated by the raw gradient.

Arms of a seed have the same weights and batches. The text is the source of the standard library of
the Python that runs this. The loss is that of validation, in nats per byte, at the end; a training
whose loss or weights are not finite ends there, and its step is told.
"""

import json
import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

import samestep
from benchmarks import run_script
from samestep.models.gpt import GPT, GPTConfig
from samestep.rules import RULES, MuonRule
from samestep.rules.muon import decay_weights, lr_factor
from samestep.rules.rule import Options as RuleOptions
from samestep.rules.rule import Tensors, Update
from samestep.tooling.output import write_files
from samestep.tooling.request import Flag
from samestep.train.corpus import Corpus, load_corpus, validation_starts, windows

Gate = Literal["none", "decay by parameter", "decay by gradient", "update by gradient"]
QKV_RATES, GATE_RATES = (0.01, 0.03), (0.03, 0.3, 3.0)
TOO_LARGE = 1e4  # nats per byte: as good as not finite


@dataclass(frozen=True)
class Options:
    """Which claim, and how long."""

    claim: Annotated[Literal["qkv", "gate"], Flag("that is tried", positional=True)]
    out: Path = Path("out/bench")
    seeds: int = 3
    steps: Annotated[int, "0: 300 for qkv, 150 for gate"] = 0
    width: Annotated[int, "of the model; 0: 64 for qkv, 32 for gate"] = 0
    layers: Annotated[int, "0: 4 for qkv, 24 for gate"] = 0
    context: int = 64
    batch: Annotated[int, "sequences of a step; 0: 8 for qkv, 4 for gate"] = 0
    rates: Annotated[
        tuple[float, ...],
        "learning rates of the matrices; none: 0.01, 0.03 for qkv, 0.03, 0.3, 3 for gate",
    ] = ()


class GatedMuon(MuonRule):
    """Muon with another gate; (B, rows, cols) blocks of one process alone.

    gate: "decay by gradient" decays a weight where update and raw gradient have one sign (the
        shipped rule: where update and weight have). "update by gradient" leaves out elements of the
        update whose sign is not the gradient's, and enlarges the others by what that took away
        (Liang et al. 2024, arXiv 2411.16085).
    """

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.name = f"muon, {gate}"

    def largest_norm(self, shape: tuple[int, ...], options: RuleOptions) -> float:
        """What is left of a gated update is enlarged, up to a thousand times."""
        return 1e3 * super().largest_norm(shape, options)

    def update(
        self, param: Tensor, grad: Tensor, state: Tensors, scalars: Tensors, options: RuleOptions
    ) -> Update:
        prepared, kept = self.prepare(grad, state, scalars, options)
        direction, of_blocks = self.transform(prepared, state, scalars, options)
        agrees = direction * grad >= 0
        rows, cols = param.shape[-2:]
        rate = scalars["lr"] * lr_factor(rows, cols, options["adjust_lr"])
        decayed_at = rate if options["scale_decay"] else scalars["lr"]
        decay = (decayed_at * scalars["weight_decay"]).to(param.dtype)
        if self.gate == "decay by gradient":
            new = param - param * decay * agrees
        else:
            new = decay_weights(param, direction, decay, cautious=False)
            direction = direction * agrees / agrees.float().mean().clamp_min(1e-3)
        step = new - rate.to(param.dtype) * direction
        return Update(step, {**kept, **of_blocks}, lambda: direction)


GATED: dict[Gate, GatedMuon] = {
    gate: GatedMuon(gate) for gate in ("decay by gradient", "update by gradient")
}


def register_gated() -> None:
    """Make the gated rules known; not on import, since they would stay for whoever imports."""
    for rule in GATED.values():
        if rule.name not in RULES:
            samestep.register_rule(rule)


def qkv_arms(config: GPTConfig) -> dict[str, dict[str, Any]]:
    """Overrides of the fused weights, by arm."""
    q, k, v = config.qkv_sizes
    heads = (config.head_dim,) * (config.heads + 2 * config.kv_heads)
    return {
        "one block": {"split_sizes": (q + k + v,)},
        "three blocks": {"split_sizes": (q, k, v)},
        "a block per head": {"split_sizes": heads},
    }


def qkv_optimizer(model: GPT, rate: float, own: Mapping[str, Any]) -> samestep.MuonAdamW:
    return samestep.MuonAdamW(model, lr=rate, overrides={"*.qkv.weight": dict(own)})


def gate_optimizer(model: GPT, rate: float, gate: Gate) -> samestep.MuonAdamW:
    """nanochat's Muon, with decay, and its AdamW for what is no matrix."""
    register_gated()
    muon = samestep.presets.nanochat()
    muon |= {"lr": rate, "weight_decay": 0.2, "cautious": gate == "decay by parameter"}
    muon["compute_dtype"] = torch.float32  # 16 bits are slow on a CPU
    muon["rule"] = GATED[gate].name if gate in GATED else "muon"
    blocks = [(name, p) for name, p in model.named_parameters() if name.startswith("blocks.")]
    matrices = [(name, p) for name, p in blocks if p.ndim == 2]
    taken = {name for name, _ in matrices}
    others = [(name, p) for name, p in model.named_parameters() if name not in taken]
    return samestep.MuonAdamW(
        [{**muon, "params": matrices}, {"params": others, "rule": "adamw", "lr": 0.003}]
    )


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
    make: Callable[[GPT, float], samestep.MuonAdamW],
) -> dict[str, Any]:
    """One training: its validation loss at the end, or the step at which it was not finite."""
    torch.manual_seed(seed)
    model = GPT(config)
    opt = make(model, rate)
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


def arms_of(options: Options) -> tuple[GPTConfig, dict[str, Callable[..., Any]]]:
    """The model, and what makes the optimizer of each arm."""
    if options.claim == "qkv":
        config = GPTConfig(
            width=options.width, layers=options.layers, heads=4, kv_heads=4,
            context=options.context, fused_qkv=True,
        )  # fmt: skip
        return config, {
            name: lambda model, rate, own=own: qkv_optimizer(model, rate, own)
            for name, own in qkv_arms(config).items()
        }
    config = GPTConfig(
        width=options.width, layers=options.layers, heads=2, kv_heads=2, context=options.context
    )
    gates: tuple[Gate, ...] = ("none", "decay by parameter", *GATED)
    return config, {
        gate: lambda model, rate, gate=gate: gate_optimizer(model, rate, gate) for gate in gates
    }


def measure(options: Options, corpus: Corpus, say: Callable[[str], None]) -> dict[str, Any]:
    """All arms, rates and seeds in turns; what was asked, what ran, what was found."""
    config, arms = arms_of(options)
    begun = time.process_time()
    rows = []
    for rate in options.rates:
        for name, make in arms.items():
            runs = [
                train(corpus, config, options, seed, rate, make) for seed in range(options.seeds)
            ]
            rows.append({"arm": name, "lr": rate, "runs": runs})
            say(line_of(rows[-1]))
    return {
        "kind": "samestep muon claims",
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


def completed(options: Options) -> Options:
    """With the sizes of the claim in place of zeros."""
    usual = {"steps": 300, "width": 64, "layers": 4, "batch": 8}
    if options.claim == "gate":
        usual = {"steps": 150, "width": 32, "layers": 24, "batch": 4}
    rates = options.rates or (QKV_RATES if options.claim == "qkv" else GATE_RATES)
    sizes: dict[str, Any] = {key: getattr(options, key) or value for key, value in usual.items()}
    return replace(options, rates=rates, **sizes)


def main(options: Options) -> None:
    options = completed(options)
    torch.set_num_threads(1)  # so small a model is no faster on more
    found = measure(options, load_corpus(), lambda line: print(line, flush=True))
    print("\n".join(["", *table(found)]))
    name = f"muon_claims_{options.claim}.json"
    write_files(options.out, {name: (json.dumps(found, indent=1) + "\n").encode()})


if __name__ == "__main__":
    run_script(main, Options)
