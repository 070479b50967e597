"""Rates of a device from a receipt of `samestep bench step`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

import samestep
from samestep.estimate.blueprint import Blueprint, blueprint
from samestep.estimate.grid import one_axis
from samestep.estimate.hardware import PRESETS, Hardware
from samestep.estimate.work import local_work
from samestep.models.parameter_sets import SETS

OURS, OURS_ADAMW = "ours", "ours-adamw"


def measured_ms(receipt: Mapping[str, Any], contestant: str = OURS) -> float:
    """The median step of the receipt's only set."""
    (found,) = (c for c in receipt["sets"][0]["contestants"] if c["name"] == contestant)
    return float(found["ms"]["median"])


def one_process(name: str, *, muon: bool = True) -> Blueprint:
    """A set of `samestep bench step` on one device, clipping on."""
    shapes = SETS[name]
    params = [
        (f"{'matrix' if place < len(shapes.matrices) else 'other'}.{place}", shape)
        for place, shape in enumerate((*shapes.matrices, *shapes.others))
    ]
    named = [(n, torch.nn.Parameter(torch.empty(s, device="meta"))) for n, s in params]
    rules = {"matrix": "muon" if muon else "adamw", "other": "adamw"}
    groups = [
        {"params": [pair for pair in named if pair[0].startswith(kind)], "rule": rule}
        for kind, rule in rules.items()
    ]
    optimizer = samestep.MuonAdamW(groups, max_grad_norm=1.0 if muon else None)
    return blueprint(optimizer, one_axis(1), device=torch.device("cuda"))


def hardware_of(receipt: Mapping[str, Any], like: str = "h200x8") -> Hardware:
    """The device that a receipt is of; links are a preset's.

    Bytes travel at the measured speed of a copy. What AdamW alone takes beyond that is time per
    call; what Muon takes beyond both is time of products.
    """
    name = receipt["sets"][0]["set"]
    found = replace(
        PRESETS[like],
        name=f"{receipt['device']['name']}, from {name}",
        source=f"samestep bench step, {receipt['date']}",
        bytes_rate=1e12 * receipt["ceilings"]["terabytes_per_second"],
        product_rates={1: 1e30},
        call=0.0,
    )
    adamw = local_work(one_process(name, muon=False), found)
    beyond = 1e-3 * measured_ms(receipt, OURS_ADAMW) - float(adamw.seconds(found))
    found = replace(found, call=beyond / float(adamw.pieces))
    muon = local_work(one_process(name), found)
    products = 1e-3 * measured_ms(receipt) - float(muon.seconds(found))
    return replace(found, product_rates={1: float(muon.flops) / products})
