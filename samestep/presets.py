"""The exact recipes people know, as group keys.

    {**samestep.presets.keller(), "params": matrices}      a group
    samestep.MuonAdamW(model, preset="nanochat")           a whole model

Each function gives the keys of its Muon, or with `rule="adamw"` those that its authors
use for the other parameters. Anything may be overridden after it. Orthogonalization runs in
`compute_dtype=None` but for `torch`; docs/coming_from.md tells how far each is from its original.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch as _torch

Group = dict[str, Any]
RuleName = Literal["muon", "adamw"]


def _adamw(**options: Any) -> Group:
    return {"rule": "adamw", **options}


def torch(rule: RuleName = "muon") -> Group:
    """`torch.optim.Muon` and `torch.optim.AdamW` with their defaults, bit for bit in fp32.

    Like torch it orthogonalizes in bfloat16, which is very slow on CPUs without bfloat16
    units: set `compute_dtype` to torch.float32 there.
    """
    if rule == "adamw":
        return _adamw(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    return {
        "rule": "muon",
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "momentum_form": "ema",
        "nesterov": True,
        "orthogonalize": "newton-schulz",
        "execution": "standard",
        "eps": 1e-7,
        "eps_form": "clamp",
        "adjust_lr": "original",
        "compute_dtype": _torch.bfloat16,
    }


def keller(rule: RuleName = "muon", *, kernel: tuple[int, int] | None = None) -> Group:
    """Keller Jordan's Muon (github.com/KellerJordan/Muon); learning rate in spectral units.

    `kernel`: for a group of convolutions (out, in, *kernel), which his code flattens to
    (out, in x kernel), but scales by sqrt(max(1, height / width)) of the kernel.
    """
    if rule == "adamw":
        return _adamw(lr=3e-4, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    group: Group = {
        "rule": "muon",
        "lr": 0.02,
        "weight_decay": 0.0,
        "momentum": 0.95,
        "momentum_form": "ema",
        "nesterov": True,
        "orthogonalize": "newton-schulz",
        "eps": 1e-7,
        "eps_form": "add",
        "adjust_lr": "original",
    }
    if kernel is not None:
        height, width = kernel
        scale = max(1.0, height / width) ** 0.5
        group |= {"flatten": True, "adjust_lr": None, "update_scale": scale}
    return group


def moonlight(rule: RuleName = "muon") -> Group:
    """Moonlight's Muon (arXiv 2502.16982): summed momentum, updates of AdamW's size.

    Its AdamW adds eps before the correction of the second moment.
    """
    if rule == "adamw":
        return _adamw(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, eps_hat=True)
    return {
        "rule": "muon",
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "momentum_form": "sum",
        "nesterov": True,
        "orthogonalize": "newton-schulz",
        "eps": 1e-7,
        "eps_form": "add",
        "adjust_lr": "match_rms_adamw",
    }


def nanochat(rule: RuleName = "muon") -> Group:
    """nanochat's Muon (github.com/karpathy/nanochat): Polar Express, NorMuon, cautious decay.

    Its AdamW parameters each have rates of their own there; set the per-role learning
    rates of `MuonAdamW` for those.
    """
    if rule == "adamw":
        return _adamw(lr=4e-3, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)
    return {
        "rule": "muon",
        "lr": 0.02,
        "weight_decay": 0.0,
        "momentum": 0.95,
        "momentum_form": "ema",
        "nesterov": True,
        "equilibrate": True,
        "orthogonalize": "polar-express",
        "eps": 1e-6,
        "eps_form": "add",
        "renormalize": True,
        "variance_beta2": 0.9,
        "adjust_lr": "original",
        "cautious": True,
        "scale_decay": True,
    }


def dion(rule: RuleName = "muon") -> Group:
    """dion's Muon and AdamW (github.com/microsoft/dion) with their defaults."""
    if rule == "adamw":
        return _adamw(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    return {
        "rule": "muon",
        "lr": 0.01,
        "weight_decay": 0.01,
        "momentum": 0.95,
        "momentum_form": "sum",
        "nesterov": False,
        "orthogonalize": "polar-express",
        "norm_factor": 1.02,
        "eps": 1e-8,
        "eps_form": "add",
        "adjust_lr": "unit_rms_norm",
    }


def dion_normuon(rule: RuleName = "muon") -> Group:
    """dion's NorMuon, which evens out rows whatever the shape, as the paper's code does."""
    if rule == "adamw":
        return dion(rule)
    return {
        **dion(),
        "variance_beta2": 0.95,
        "variance_axis": "rows",
        "variance_eps": 1e-8,
        "variance_eps_form": "add",
    }


def emerging_optimizers(rule: RuleName = "muon") -> Group:
    """Muon of Emerging-Optimizers (github.com/NVIDIA-NeMo/Emerging-Optimizers) by its defaults.

    Its `scale_mode`: "spectral" is `adjust_lr="sqrt_max"`, "shape_scaling" is "original",
    "unit_rms_norm" has the same name; `extra_scale_factor` is `update_scale`.
    """
    if rule == "adamw":
        return _adamw(lr=3e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    return {
        "rule": "muon",
        "lr": 3e-4,
        "weight_decay": 0.01,
        "momentum": 0.95,
        "momentum_form": "ema",
        "nesterov": False,
        "orthogonalize": "quintic",
        "eps": 1e-15,
        "eps_form": "clamp",
        "adjust_lr": "sqrt_max",
    }


def megatron(rule: RuleName = "muon") -> Group:
    """Megatron-LM's Muon and Adam (`--optimizer muon`) with the defaults of its flags.

    It is Emerging-Optimizers'. For fused QKV give `split_sizes="interleaved:Q+K+VxGROUPS"`, with
    the rows of one group.
    """
    return emerging_optimizers(rule)


def torchtitan(rule: RuleName = "muon") -> Group:
    """torchtitan's DistMuon, which is torch's Muon, and its default AdamW."""
    if rule == "adamw":
        return _adamw(lr=8e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    return {key: value for key, value in torch().items() if key != "compute_dtype"}


def deepspeed(rule: RuleName = "muon", *, kernel: tuple[int, int] | None = None) -> Group:
    """DeepSpeed's Muon and its auxiliary Adam: Keller Jordan's."""
    return keller(rule, kernel=kernel)


PRESETS: dict[str, Callable[[RuleName], Group]] = {
    "torch": torch,
    "keller": keller,
    "moonlight": moonlight,
    "nanochat": nanochat,
    "dion": dion,
    "dion_normuon": dion_normuon,
    "emerging_optimizers": emerging_optimizers,
    "megatron": megatron,
    "torchtitan": torchtitan,
    "deepspeed": deepspeed,
}
KERNEL_SCALED = ("keller", "deepspeed")  # convolutions by their kernels, not as the matrices are


def preset_options(name: str, rule: RuleName) -> Group:
    """The keys of a preset by name, without the key "rule"."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"preset {name!r} is not known; choose one of {sorted(PRESETS)}")
    return {key: value for key, value in PRESETS[name](rule).items() if key != "rule"}
