"""The exact recipes people know, as group keys.

    {**samestep.presets.keller(), "params": matrices}      a group
    samestep.MuonAdamW(model, preset="nanochat")           a whole model

Each function gives the keys of its Muon, or with `rule="adamw"` those that its authors
use for the other parameters. Anything may be overridden after it.
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


def keller(rule: RuleName = "muon") -> Group:
    """Keller Jordan's Muon (github.com/KellerJordan/Muon); learning rate in spectral units."""
    if rule == "adamw":
        return _adamw(lr=3e-4, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    return {
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


def moonlight(rule: RuleName = "muon") -> Group:
    """Moonlight's Muon (arXiv 2502.16982): summed momentum, updates of AdamW's size."""
    if rule == "adamw":
        return _adamw(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
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


PRESETS: dict[str, Callable[[RuleName], Group]] = {
    "torch": torch,
    "keller": keller,
    "moonlight": moonlight,
    "nanochat": nanochat,
}


def preset_options(name: str, rule: RuleName) -> Group:
    """The keys of a preset by name, without the key "rule"."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is not known; choose one of {sorted(PRESETS)}")
    return {key: value for key, value in PRESETS[name](rule).items() if key != "rule"}
