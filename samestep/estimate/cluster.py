"""A model on a cluster: for every pipeline stage the plans of all its ranks."""

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

import samestep
from samestep.estimate.blueprint import Blueprint, blueprint
from samestep.estimate.fsdp import Unit
from samestep.estimate.model import (
    Model,
    is_expert,
    layers_of,
    own_submodule,
    shallow,
    stage_of,
)
from samestep.estimate.stack import Share, stack_blueprint, stack_grid, stack_units
from samestep.groups.routing import EMBEDDING_NAME
from samestep.mesh.degrees import Degrees
from samestep.tooling.request import BadRequestError

Stage = Literal["none", "zero1", "zero2", "zero3"]
STAGES: tuple[Stage, ...] = ("none", "zero1", "zero2", "zero3")
# Matrices that take in what others have cut: they are cut along their columns.
TAKES_IN = re.compile(r"(^|\.)(o_proj|out|out_proj|down|down_proj|c_proj|wo|w2|dense_4h_to_h)\.")
WHOLE = re.compile(r"router|gate\.weight$|norm|_a_proj|kv_a")
ON_HEADS = re.compile(r"(^|[._])(q|k|query|key)_?(layer)?norm")


@dataclass(frozen=True)
class Settings:
    """Keywords of the optimizer, as far as a plan asks for them."""

    sharding: Stage = "zero2"
    buffers: str = "per_parameter"
    overlap: bool = True
    overlap_gathers: bool = True  # too, with flat buffers
    muon: bool = True
    master_weights: bool = True
    clip: bool = True
    bucket_size: int = 25 * (1 << 18)
    muon_schedule: str = "parallel"
    owners: str = "balanced"
    reduction: str = "fast"


def blueprints(
    model: Model, degrees: Degrees, settings: Settings, device: torch.device
) -> Iterator[Blueprint]:
    """One per pipeline stage."""
    for stage in range(degrees.pp):
        yield stage_blueprint(model, degrees, settings, device, stage)


def stage_blueprint(
    model: Model, degrees: Degrees, settings: Settings, device: torch.device, stage: int
) -> Blueprint:
    """All ranks of one pipeline stage; raises BadRequestError for what does not exist."""
    _check(degrees, settings)
    spreads = settings.sharding == "zero3" or degrees.tp > 1
    module = stage_of(model.module, stage, degrees.pp)
    if degrees.ep > 1:
        module = _with_own_experts(module, degrees.ep, cut=not spreads)
    optimizer = _optimizer(module, settings, spreads)
    if spreads:
        shards = settings.sharding == "zero3"
        return stack_blueprint(
            optimizer, degrees, guessed_share, stage=stage, shards=shards, device=device
        )
    grid = stack_grid(degrees, stage)
    own = {}
    if degrees.ep > 1:
        for index, group in enumerate(optimizer.param_groups):
            names = zip(group["param_names"], group["params"], strict=True)
            if all(is_expert(name, param) for name, param in names):
                own[index] = grid.peers("data")
    return blueprint(
        optimizer,
        grid,
        everyone=grid.peers("data", "expert"),
        outer=grid.peers("replicate") if degrees.replicate > 1 else None,
        own_peers=own,
        device=device,
    )


def fsdp_units(module: nn.Module, degrees: Degrees) -> list[Unit]:
    """What FSDP2 gathers at once: layer by layer, experts apart, as a rank has them."""
    found = layers_of(module)
    layers = {} if found is None else {f"{found[0]}.{i}": m for i, m in enumerate(found[1])}
    return stack_units(module, layers, guessed_share, degrees)


def _check(degrees: Degrees, settings: Settings) -> None:
    if degrees.tp > 1 and settings.sharding in ("zero1", "zero2"):
        raise BadRequestError(
            f"sharding {settings.sharding} does not go with tp={degrees.tp}: what tensor parallel "
            "cuts are DTensors, which stay where they are; take zero3 (FSDP2 over it), or none"
        )
    if degrees.replicate > 1 and degrees.ep > 1 and settings.sharding != "zero3":
        raise BadRequestError(
            f"replicate={degrees.replicate} with ep={degrees.ep} needs --sharding zero3: experts "
            "with ranks of their own exclude an outer group"
        )
    if settings.buffers == "flat" and settings.sharding in ("none", "zero3"):
        raise BadRequestError(f"flat buffers are for zero1 and zero2, not {settings.sharding}")


def _optimizer(module: nn.Module, settings: Settings, spreads: bool) -> samestep.MuonAdamW:
    stacks = any(is_expert(name, param) for name, param in module.named_parameters())
    flat = settings.buffers == "flat"
    keywords: dict[str, object] = {"muon_schedule": settings.muon_schedule}
    if not spreads:
        keywords |= {"sharding": settings.sharding, "buffers": settings.buffers}
        keywords |= {"overlap_grad_reduce": settings.overlap, "reduction": settings.reduction}
        gathers = settings.overlap and settings.overlap_gathers and flat
        keywords["overlap_param_gather"] = gathers
    if not flat:
        keywords["owners"] = settings.owners
    rule = "muon" if settings.muon else "adamw"
    overrides: dict[object, dict[str, object]] = {}
    if not settings.muon:
        overrides = {(lambda name, param: True): {"rule": "adamw"}}
    elif stacks:
        overrides = {"*experts*": {"rule": rule}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return samestep.MuonAdamW(
            module,
            overrides=overrides,  # type: ignore[arg-type]
            master_weights=settings.master_weights,
            max_grad_norm=1.0 if settings.clip else None,
            bucket_size=settings.bucket_size,
            **keywords,  # type: ignore[arg-type]
        )


def _with_own_experts(module: nn.Module, ep: int, *, cut: bool) -> nn.Module:
    """Every rank of the expert axis holds its experts alone."""
    own = shallow(module)
    for name, param in list(own.named_parameters()):
        if is_expert(name, param):
            if param.shape[0] % ep:
                raise BadRequestError(f"ep={ep} does not divide {param.shape[0]} experts ({name})")
            if cut:
                owner, _, last = name.rpartition(".")
                smaller = param.new_empty((param.shape[0] // ep, *param.shape[1:]))
                setattr(own_submodule(own, owner), last, nn.Parameter(smaller))
    return own


def guessed_share(name: str, param: Tensor) -> Share:
    """What a plan would say, by the names that models use."""
    takes_in = bool(TAKES_IN.search(f"{name}."))
    if is_expert(name, param):
        return Share(1 + takes_in, is_expert=True)
    if WHOLE.search(name):
        return Share(own_positions=bool(ON_HEADS.search(name)))
    if param.ndim < 2:  # a bias is cut with the outputs of its layer
        return Share(0 if name.endswith(".bias") and not takes_in else None)
    return Share(1 if takes_in or EMBEDDING_NAME.search(name) else 0)
