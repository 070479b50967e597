"""`samestep bench client nanochat`: its GPT and its groups, its optimizer and ours.

Nothing of nanochat is here: model, groups and optimizer are imported from the checkout that
`--peer-path` names. Its training script cannot be imported; what it does to the groups from step to
step is written out below.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from math import cos, pi
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
from torch import Tensor, nn

import samestep
from samestep.lab.bench.client.report import run_client
from samestep.lab.bench.client.training import DTYPES, Client, ClientOptions, read_client
from samestep.lab.bench.gpu.measure import reason
from samestep.lab.bench.gpu.options import FOLDER, Contestant, device_of, make_importable, peer, who
from samestep.presets import preset_options
from samestep.tooling.request import BadRequestError

VOCABULARY = 256  # bytes
WIDTH_PER_LAYER = 64
HEAD_WIDTH = 128
WEIGHT_DECAY = 0.28  # of its training script, for matrices
SPEED = {12: 0.67, 20: 0.62}  # the most of nanochat's time that ours may take, by layers


# Groups


# Its keys, by the kind of a group; ours are called the same, but for one.
KEYS = {
    "adamw": ("lr", "betas", "eps", "weight_decay"),
    "muon": ("lr", "momentum", "ns_steps", "beta2", "weight_decay"),
}
RENAMED = {"beta2": "variance_beta2"}
KEPT = ("params", "initial_lr")  # as they are: ours leaves keys alone that it does not know


def our_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group of nanochat's optimizer as one of ours: the preset, with every value of its own."""
    kind = group["kind"]
    if kind not in KEYS:
        raise ValueError(f"a group of kind {kind!r}, and only {' and '.join(KEYS)} are known here")
    keys = KEYS[kind]
    unknown = [key for key in group if key not in ("kind", *keys, *KEPT)]
    missing = [key for key in keys if key not in group]
    if unknown or missing:
        raise ValueError(
            f"this nanochat's {kind} groups differ from those known here: "
            f"unknown {unknown}, missing {missing}"
        )
    return {
        "rule": kind,
        **preset_options("nanochat", kind),
        **{RENAMED.get(key, key): group[key] for key in keys},
        **{key: group[key] for key in KEPT if key in group},
    }


# What its training script changes from step to step


def rate_share(step: int, steps: int, warmup: int = 40) -> float:
    """The factor on learning rates: a linear rise, then a fall over 65% of the steps, to 5%."""
    fall = round(0.65 * steps)
    if step < warmup:
        return (step + 1) / warmup
    if step <= steps - fall:
        return 1.0
    left = (steps - step) / fall
    return left + (1 - left) * 0.05


def muon_momentum(step: int, steps: int) -> float:
    """From 0.85 to 0.97 in 400 steps; to 0.9 while learning rates fall."""
    fall = round(0.65 * steps)
    if step < 400:
        return 0.85 + 0.12 * step / 400
    done = step - (steps - fall)
    return 0.97 - 0.07 * done / fall if done >= 0 else 0.97


def muon_decay(step: int, steps: int) -> float:
    return WEIGHT_DECAY * 0.5 * (1 + cos(pi * step / steps))


def set_groups(optimizer: Any, step: int, steps: int) -> None:
    """Before a step: the same lines for its optimizer and for ours."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * rate_share(step, steps)
        if (group.get("kind") or group["rule"]) == "muon":
            group["momentum"] = muon_momentum(step, steps)
            group["weight_decay"] = muon_decay(step, steps)


# The optimizers


def its_optimizer(model: nn.Module, lr_scale: float = 1.0) -> Any:
    """The optimizer as the model sets it up; every learning rate times `lr_scale`."""
    with redirect_stdout(sys.stderr):
        optimizer: Any = model.setup_optimizer(weight_decay=WEIGHT_DECAY)  # type: ignore[operator]
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = lr_scale * group["lr"]
    return optimizer


def our_optimizer(model: nn.Module, lr_scale: float = 1.0, **options: Any) -> samestep.MuonAdamW:
    """Ours for the same groups; like nanochat's, without 32-bit copies of 16-bit embeddings."""
    groups = its_optimizer(model, lr_scale).param_groups
    mapped = [our_group(group) for group in groups]
    return samestep.MuonAdamW(mapped, master_weights=False, **options)


def contestants(lr_scale: float = 1.0) -> tuple[Contestant, ...]:
    def ours(**options: Any) -> Callable[[nn.Module], Any]:
        return lambda model: our_optimizer(model, lr_scale, **options)

    mine: dict[str, Any] = {"ours": True, "rival": "nanochat"}
    aside = mine | {"default": False}
    return (
        Contestant("nanochat", "nanochat's own", lambda model: its_optimizer(model, lr_scale)),
        Contestant("ours", "samestep.MuonAdamW with default options", ours(), **mine),
        Contestant("ours-graph", "the same, cuda_graph=True", ours(cuda_graph=True), **aside),
        Contestant("ours-eager", "the same, cuda_graph=False", ours(cuda_graph=False), **aside),
        Contestant(
            "ours-plain-torch", "the same without kernels (SAMESTEP_KERNELS=0)", ours(), **aside,
            kernels=False,
        ),
    )  # fmt: skip


# Options


@dataclass
class Options(ClientOptions):
    """Train nanochat's model with its own optimizer and with samestep's; compare loss and time.

        samestep bench client nanochat --peer-path ~/nanochat
        samestep bench client nanochat --peer-path ~/nanochat --layers 20 --seeds 0

    nanochat itself comes from the checkout that --peer-path names.
    """

    variants: Annotated[tuple[str, ...], who(contestants())] = ()
    out: Annotated[Path, FOLDER] = Path("out/bench-nanochat")
    lr_scale: Annotated[
        float,
        "factor of every learning rate; nanochat's own script uses sqrt(bytes of a step / 524288)",
    ] = 1.0


# The model


def load(options: Options) -> Any:
    """The module with the model; BadRequestError says what is missing."""
    make_importable(options.peer_path)
    try:
        # There it looks for the dtype of its passes when it is imported.
        told = mock.patch.dict(os.environ, {"NANOCHAT_DTYPE": options.pass_dtype})
        with told, redirect_stdout(sys.stderr):
            gpt, common = peer("nanochat.gpt"), peer("nanochat.common")
    except ImportError as error:
        raise BadRequestError(f"nanochat cannot be imported: {reason(error)}") from error
    if DTYPES[options.pass_dtype] != common.COMPUTE_DTYPE:
        raise BadRequestError(
            f"--dtype is {options.pass_dtype}, but nanochat was imported with "
            f"{common.COMPUTE_DTYPE}"
        )
    if not hasattr(gpt.GPT, "setup_optimizer"):
        raise BadRequestError("this nanochat's GPT has no setup_optimizer: use a newer checkout")
    return gpt


def config_of(gpt: Any, options: Options) -> Any:
    """The model of so many layers, as its training script makes it, for bytes."""
    heads = -(-WIDTH_PER_LAYER * options.layers // HEAD_WIDTH)
    return gpt.GPTConfig(
        sequence_len=options.sequence,
        vocab_size=VOCABULARY,
        n_layer=options.layers,
        n_head=heads,
        n_kv_head=heads,
        n_embd=heads * HEAD_WIDTH,
    )


def make_model(gpt: Any, options: Options, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with redirect_stdout(sys.stderr):
        with torch.device("meta"):
            model: nn.Module = gpt.GPT(config_of(gpt, options))
        model.to_empty(device=device_of(options.device))
        model.init_weights()  # type: ignore[operator]
    return model


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = model(inputs, targets)
    return loss


# The command


def parse(words: Sequence[str], prog: str) -> Options:
    options = read_client(Options, contestants(), words, prog)
    if not 0 < options.lr_scale < float("inf"):
        raise BadRequestError(f"--lr-scale must be above 0, got {options.lr_scale}")
    return options


def run(options: Options) -> int:
    gpt = load(options)
    config = config_of(gpt, options)
    client = Client(
        "nanochat",
        lambda seed: make_model(gpt, options, seed),
        loss_of,
        lambda optimizer, step: set_groups(optimizer, step, options.steps),
        {
            "what": "nanochat's GPT",
            "config": {key: value for key, value in vars(config).items() if key[0] != "_"},
            "dtype": options.pass_dtype,
            "compiled": options.compiled,
            "lr_scale": options.lr_scale,
            "weight_decay": WEIGHT_DECAY,
        },
    )
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # as its training script does
    try:
        return run_client(client, contestants(options.lr_scale), options, SPEED.get(options.layers))
    finally:
        torch.set_float32_matmul_precision(before)
