"""State in fewer bits: bytes per parameter, time of a step, and the loss that is left.

python -m benchmarks.small_state step --out DIR     # beside bitsandbytes and torchao, if there
python -m benchmarks.small_state train --out DIR    # needs one GPU; --device cpu: a small model
python -m benchmarks.small_state error --out DIR    # likewise

`step`: one optimizer step on the parameters of a GPT, with random gradients, in turns. `train`: the
GPT of `gpu_training`, in each format from the same seeds: a difference between formats counts if it
is larger than that between seeds. What is done is written after every training. `error`: beside one
such training with state in 32 bits, optimizers with each format take every step from its weights
and its gradients, so that only state differs, whose errors add up; how far updates are apart.
"""

import copy
import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import samestep
from benchmarks import gpt_config, heading, run_script, write_json
from samestep.lab.bench.client.llama import set_rate
from samestep.lab.bench.client.report import spread
from samestep.lab.bench.client.training import LAST, Batches, ClientOptions
from samestep.lab.bench.gpu.measure import in_rounds, take_turn, times_of
from samestep.lab.bench.gpu.options import device_of
from samestep.lab.bench.step_contestants import with_gradients
from samestep.models.gpt import GPT, GPTConfig
from samestep.models.parameter_sets import SETS, count, gpt
from samestep.tooling.output import check_folder
from samestep.tooling.request import Flag
from samestep.train.corpus import Corpus, load_corpus

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
FORMATS: dict[str, Any] = {
    "32 bits": torch.float32,
    "bf16": torch.bfloat16,
    "bf16_stochastic": "bf16_stochastic",
    "8bit": "8bit",
}


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


@dataclass(frozen=True)
class Options(TrainingOptions):
    """A training's, and which of the three is asked for."""

    mode: Annotated[Literal["step", "train", "error"], Flag(positional=True)] = "step"
    steps: int = 1000
    out: Path = Path("out/small-state")
    set: Annotated[
        str | None, f"step: these parameters, not width and layers: {', '.join(SETS)}"
    ] = None
    rounds: int = 20
    warmup: int = 3
    formats: Annotated[tuple[str, ...], "of state"] = tuple(FORMATS)


def state_dtypes(form: str, *more: str) -> dict[str, Any]:
    """What the optimizer is asked for; `more`: keys beside moments of a remainder."""
    chosen = {key: FORMATS[form] for key in MOMENTS if form != "32 bits"}
    return {**chosen, **dict.fromkeys(more, "remainder")}


# --- a step -----------------------------------------------------------------------------------


class Entry(NamedTuple):
    """An optimizer of some parameters."""

    name: str
    rule: str  # what updates the matrices
    dtype: torch.dtype
    make: Callable[[list[Tensor], list[Tensor]], torch.optim.Optimizer]  # of matrices, and others


def ours(rule: str, form: str, master: str | None = None) -> Entry:
    """`master`: of bfloat16 parameters, "32 bits" or "remainder"."""
    asked = state_dtypes(form, *(["master_weight"] if master == "remainder" else []))

    def make(matrices: list[Tensor], others: list[Tensor]) -> torch.optim.Optimizer:
        options: Any = {"master_weights": master is not None, "state_dtypes": asked}
        if rule == "adamw":
            asked.pop("momentum_buffer", None)
            return samestep.AdamW([*matrices, *others], **options)
        groups = [{"params": matrices, "rule": "muon"}, {"params": others, "rule": "adamw"}]
        return samestep.MuonAdamW(groups, **options)

    kept = form if master is None else f"{form}, master {master}"
    return Entry(f"samestep {kept}", rule, torch.bfloat16 if master else torch.float32, make)


def peers() -> Iterator[Entry]:
    """AdamW in 8 bits of others, where they are installed."""
    for module, name in (("bitsandbytes.optim", "AdamW8bit"), ("torchao.optim", "AdamW8bit")):
        try:
            kind = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, RuntimeError) as error:
            print(f"without {module}: {error}")
            continue

        def make(
            matrices: list[Tensor], others: list[Tensor], kind: Any = kind
        ) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = kind([*matrices, *others])
            return optimizer

        yield Entry(f"{module}.{name}", "adamw", torch.float32, make)


def entries() -> list[Entry]:
    found = [ours(rule, form) for rule in ("adamw", "muon") for form in FORMATS]
    found += [
        ours(rule, form, master)
        for rule in ("adamw", "muon")
        for form, master in (("32 bits", "32 bits"), ("8bit", "remainder"))
    ]
    return [*found, *peers()]


def bytes_of(tensor: Tensor) -> int:
    """Also of tensors that are made of others, as torchao's are."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        return sum(bytes_of(getattr(tensor, name)) for name in flatten()[0])
    return tensor.numel() * tensor.element_size()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    return sum(bytes_of(t) for state in states for t in state.values() if isinstance(t, Tensor))


def run_step(options: Options) -> None:
    device = device_of(options.device)
    shapes = SETS[options.set] if options.set else gpt(options.width, options.layers, 256)
    total = count(shapes.matrices) + count(shapes.others)
    print(f"{total / 1e6:.1f}M parameters on {device}")
    print(f"{'rule':6} {'state':44} {'bytes/parameter':>15} {'ms':>9} {'spread':>8}")
    # All of them at once, so that they take turns: a chip that grows hot slows all alike.
    optimizers = {}
    for one in entries():
        torch.manual_seed(0)
        matrices, others = (with_gradients(some, device, one.dtype) for some in shapes)
        optimizers[one] = one.make([*matrices], [*others])
    turns = {
        one: lambda _, step=optimizer.step: take_turn(step, device).ms
        for one, optimizer in optimizers.items()
    }
    times = in_rounds(turns, options.rounds, warmup=options.warmup)
    rows = []
    for one, optimizer in optimizers.items():
        own, per = times_of(times[one]), state_bytes(optimizer) / total
        print(f"{one.rule:6} {one.name:44} {per:15.2f} {own.median:9.3f} {own.middle_half:8.3f}")
        row = {"rule": one.rule, "name": one.name, "dtype": str(one.dtype)}
        rows.append({**row, "bytes_per_parameter": per, "ms": own._asdict()})
    content = {
        **heading("small_state", options, device=device_of(options.device)),
        "parameters": total,
        "rows": rows,
    }
    write_json(options.out, "step.json", content)


# --- a training -------------------------------------------------------------------------------


class Trained(NamedTuple):
    """One training."""

    form: str
    seed: int
    final: float  # mean of the last losses
    validation: float
    losses: list[float]


def trained(options: Options, form: str, seed: int, corpus: Corpus) -> Trained:
    """Nobody waits for the device but now and then: times are not asked for here."""
    device = device_of(options.device)
    batches = Batches(corpus, asked_of(options), device, seed)
    torch.manual_seed(seed)
    model = GPT(config_of(options)).to(device)
    asked = state_dtypes(form) or None
    optimizer = optimizer_for(options, state_dtypes=asked)(model)
    losses: list[Tensor] = []
    for number in range(options.steps):
        set_rate(optimizer, number, options.steps)
        losses.append(loss_of(model, *batches.training(number)))
        torch.autograd.backward(losses[-1])
        optimizer.step()
        optimizer.zero_grad()
        losses[-1] = losses[-1].detach()
        if (number + 1) % 100 == 0:
            print(f"seed {seed}, {form}: step {number + 1}, loss {losses[-1].item():.4f}")
    found = torch.stack(losses).tolist()
    with torch.no_grad():
        held_out = [loss_of(model, *each).item() for each in batches.validation()]
    final = statistics.mean(found[-LAST:])
    return Trained(form, seed, final, statistics.mean(held_out), [round(x, 5) for x in found])


def run_train(options: Options) -> None:
    corpus, found = load_corpus(), []
    with torch.device("meta"):
        model = GPT(config_of(options))
    content = {
        **heading("small_state", options, device=device_of(options.device)),
        "parameters": sum(param.numel() for param in model.parameters()),
    }
    for seed in options.seeds:
        for form in options.formats:
            found.append(trained(options, form, seed, corpus))
            last = found[-1]
            print(f"seed {seed}, {form}: {last.final:.4f}, held out {last.validation:.4f}")
            # What is done is written, whatever comes.
            write_json(
                options.out, "train.json", {**content, "runs": [each._asdict() for each in found]}
            )
    print(f"{'state':20} {'mean':>9} {'spread of seeds':>16} {'from the first':>16}")
    first = None
    for form in options.formats:
        finals = [each.final for each in found if each.form == form]
        mean, apart = statistics.mean(finals), spread(finals) or 0.0
        first = mean if first is None else first
        print(f"{form:20} {mean:9.4f} {apart:16.4f} {mean - first:+16.4f}")


# --- the error of an update -------------------------------------------------------------------

SPAN = 100  # steps whose errors are one figure


class Updates:
    """What one optimizer adds to the weights in each step, by rule."""

    def __init__(self, options: Options, form: str, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        asked = state_dtypes(form) or None
        self.optimizer = optimizer_for(options, state_dtypes=asked)(self.model)

    @torch.no_grad()
    def of_step(self, weights: Sequence[Tensor], grads: Sequence[Tensor]) -> dict[str, Tensor]:
        """(elements,) each, in float64, from weights and gradients that are not changed."""
        for own, weight, grad in zip(self.model.parameters(), weights, grads, strict=True):
            own.copy_(weight)
            own.grad = grad.clone()
        self.optimizer.step()
        before = dict(zip(self.model.parameters(), weights, strict=True))
        found: dict[str, list[Tensor]] = {}
        for group in self.optimizer.param_groups:
            found.setdefault(group["rule"], []).extend(
                (own.double() - before[own].double()).flatten() for own in group["params"]
            )
        return {rule: torch.cat(parts) for rule, parts in found.items()}


def run_error(options: Options) -> None:
    (seed, *_), device, corpus = options.seeds, device_of(options.device), load_corpus()
    batches = Batches(corpus, asked_of(options), device, seed)
    torch.manual_seed(seed)
    model = GPT(config_of(options)).to(device)
    exact = Updates(options, "32 bits", model)
    others = {form: Updates(options, form, model) for form in options.formats if form != "32 bits"}
    errors: dict[tuple[str, str], list[float]] = {}
    losses = []
    for number in range(options.steps):
        loss = loss_of(exact.model, *batches.training(number))
        exact.optimizer.zero_grad()
        torch.autograd.backward(loss)
        losses.append(round(loss.item(), 5))
        weights = [param.detach().clone() for param in exact.model.parameters()]
        grads = [gradient_of(param).clone() for param in exact.model.parameters()]
        for each in (exact, *others.values()):
            set_rate(each.optimizer, number, options.steps)
        wanted = exact.of_step(weights, grads)
        for form, other in others.items():
            for rule, found in other.of_step(weights, grads).items():
                apart = (found - wanted[rule]).norm() / wanted[rule].norm()
                errors.setdefault((rule, form), []).append(apart.item())
        if (number + 1) % SPAN == 0:
            print(f"step {number + 1}, loss {losses[-1]:.4f}")
    print(f"{'rule':6} {'state':18} {'first steps':>12} {'last steps':>12} {'all':>9}")
    rows = []
    for (rule, form), own in errors.items():
        spans = [statistics.mean(own[n : n + SPAN]) for n in range(0, len(own), SPAN)]
        mean = statistics.mean(own)
        print(f"{rule:6} {form:18} {spans[0]:12.4f} {spans[-1]:12.4f} {mean:9.4f}")
        rows.append({"rule": rule, "form": form, "mean": mean, "spans": spans})
    content = {
        **heading("small_state", options, device=device_of(options.device)),
        "parameters": sum(weight.numel() for weight in weights),
        "steps_of_a_span": SPAN,
        "rows": rows,
        "losses": losses,
    }
    write_json(options.out, "error.json", content)


def gradient_of(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    return param.grad


def main(options: Options) -> None:
    check_folder(options.out)
    {"step": run_step, "train": run_train, "error": run_error}[options.mode](options)


if __name__ == "__main__":
    run_script(main, Options)
