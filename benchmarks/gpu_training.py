"""A GPT trained on one GPU with every kernel, and in plain torch: the same loss, less time.

python -m benchmarks.gpu_training --out DIR   # needs one GPU, and torch alone

Bytes of Python's standard library, bfloat16 autocast, clipping, a learning rate that rises and
falls. A seed decides the model and the batches, so that pairs of runs differ in kernels alone. They
take their steps in turns and are timed as those of `samestep bench client` are.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

import samestep
from benchmarks import gpt_config, run_script
from samestep.lab.bench.client.llama import set_rate
from samestep.lab.bench.client.report import final_losses, outcome, spread
from samestep.lab.bench.client.training import (
    Batches,
    Client,
    ClientOptions,
    Race,
    Training,
    median_of,
)
from samestep.lab.bench.gpu.measure import measure_ceilings
from samestep.lab.bench.gpu.options import Contestant, device_of
from samestep.lab.bench.gpu.report import Screen, heading, leave, number
from samestep.models.gpt import GPT, GPTConfig
from samestep.tooling.output import check_folder
from samestep.train.corpus import Corpus, load_corpus


@dataclass(frozen=True)
class TrainingOptions:
    """What every training of the GPT can be asked."""

    width: int = 1024
    layers: int = 12
    steps: int = 200
    sequences: int = 16
    context: int = 512
    lr: float = 2e-3
    seeds: tuple[int, ...] = (0, 1, 2)
    out: Path = Path("out/gpu-training")
    device: Annotated[Literal["cuda", "cpu"], "cpu: to try it"] = "cuda"


def summary(trainings: Sequence[Training]) -> dict[str, Any]:
    """Of one variant, over all seeds; times are those of the second half."""
    found = (median_of(trainings, which) for which in ("iteration_ms", "optimizer_ms"))
    iteration, optimizer = (0.0 if times is None else times.median for times in found)
    final = final_losses(trainings)
    return {
        "final_losses": final,
        "mean": statistics.mean(final),
        "standard_deviation": spread(final) or 0.0,
        "iteration_ms": iteration,
        "optimizer_ms": optimizer,
        "optimizer_share": optimizer / iteration if iteration else 0.0,
        "losses": [training.losses for training in trainings],
    }


def config_of(options: TrainingOptions) -> GPTConfig:
    return gpt_config(options.width, options.layers, context=options.context)


def optimizer_for(options: TrainingOptions, **more: Any) -> Callable[[nn.Module], Any]:
    return lambda model: samestep.MuonAdamW(model, lr=options.lr, max_grad_norm=1.0, **more)


def asked_of(options: TrainingOptions) -> ClientOptions:
    """The same as of a client."""
    return ClientOptions(
        steps=options.steps, batch=options.sequences, sequence=options.context, compile=False,
        every=options.steps, warmup=options.steps // 2,
    )  # fmt: skip


def loss_of(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    kind = inputs.device.type
    with torch.autocast(kind, dtype=torch.bfloat16, enabled=kind != "cpu"):  # slow there
        loss: Tensor = model.loss(inputs, targets)
    return loss


def train(
    variants: Sequence[Contestant],
    options: TrainingOptions,
    corpus: Corpus,
    say: Callable[[str], None],
) -> dict[str, list[Training]]:
    """Each variant from every seed, by its name."""
    device, asked = device_of(options.device), asked_of(options)

    def make_model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return GPT(config_of(options)).to(device)

    client = Client("gpt", make_model, loss_of, lambda opt, n: set_rate(opt, n, options.steps), {})
    runs: dict[str, list[Training]] = {variant.name: [] for variant in variants}
    for seed in options.seeds:
        race = Race(client, variants, asked, device, Batches(corpus, asked, device, seed), seed)
        for training in race.run(lambda done: None):
            if training.final_loss is None:
                raise RuntimeError(outcome(training))
            name = training.contestant.name
            runs[name].append(training)
            say(f"seed {seed}, {name}: final loss {training.final_loss:.4f}")
    return runs


def main(options: TrainingOptions) -> None:
    check_folder(options.out)
    screen, device, corpus = Screen(), device_of(options.device), load_corpus()
    content = heading(
        "samestep training",
        "python -m benchmarks.gpu_training",
        device,
        measure_ceilings(device),
        (),
    )
    what, build = "samestep.MuonAdamW", optimizer_for(options)
    plain = Contestant("plain torch", what, build, kernels=False)
    runs = train([Contestant("kernels", what, build), plain], options, corpus, screen.progress)
    with torch.device("meta"):
        parameters = sum(param.numel() for param in GPT(config_of(options)).parameters())
    told = {name: summary(of_variant) for name, of_variant in runs.items()}
    content |= {
        "settings": {k: v for k, v in asdict(options).items() if k != "out"},
        "variants": told, "parameters": parameters, "bytes_of_text": len(corpus.train),
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
    run_script(main, TrainingOptions)
