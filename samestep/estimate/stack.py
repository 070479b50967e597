"""How the hybrid stack lays a model over a mesh, without ranks: what `parallel` does, as data.

    shares = plan_shares(model_on_meta, plan, degrees)
    stack_blueprint(optimizer, degrees, shares)

Tensor and expert parallel cut a parameter first, then FSDP2 shards what is left on a rank.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from samestep.estimate.blueprint import Blueprint, Spread, SpreadOver, blueprint
from samestep.estimate.fsdp import Unit
from samestep.estimate.grid import Beside, Grid
from samestep.layout.dtensor_shards import Cut
from samestep.mesh.degrees import Degrees
from samestep.optimizer.step import RuleOptimizer
from samestep.parallel.apply import shard_rules
from samestep.parallel.lora import FACTORS
from samestep.parallel.plan import Plan

ROOT = ("", False)  # the unit of what is in no block


class Share(NamedTuple):
    """What is decided about a parameter before FSDP2 comes.

    model_dim: the dim that tensor parallel cuts; None: every rank has a copy.
    is_expert: it is a stack of experts, which the expert axis cuts.
    own_positions: ranks with copies see different positions: each has a summand of the gradient.
    is_factor: of LoRA, which FSDP2 leaves alone.
    """

    model_dim: int | None = None
    is_expert: bool = False
    own_positions: bool = False
    is_factor: bool = False


ShareOf = Callable[[str, Tensor], Share]  # by name


def plan_shares(model: nn.Module, plan: Plan, degrees: Degrees) -> ShareOf:
    """What a plan says of the parameters of a model, or of one stage of it."""
    rules = shard_rules(model, plan)
    stacks = {rule.pattern for rule in rules if rule.axis == "expert"}
    dims = {rule.pattern: rule.dim for rule in rules if rule.axis == "model"}
    parts = ("on_heads", "on_stream") if degrees.sequence_parallel else ("on_heads",)
    own = {name for part in parts for name, _ in plan.named(model, part)}

    def share_of(name: str, param: Tensor) -> Share:
        owner, _, key = name.rpartition(".")
        if key in FACTORS:  # cut with the side of the layer that is
            cut = FACTORS.index(key) == 1 - dims.get(f"{owner}.weight", 2)
            return Share(1 - FACTORS.index(key) if cut else None, is_factor=True)
        if name in stacks:
            copied = degrees.expert_tp == 1
            return Share(None if copied else dims[name], is_expert=True, own_positions=copied)
        return Share(dims.get(name), own_positions=owner in own)

    return share_of


class _Axes:
    """The axes of a stage, by what they are for."""

    def __init__(self, degrees: Degrees) -> None:
        self.sizes = {axis: size for axis, size in degrees.sizes.items() if axis != "pipe"}
        self.copies = ("replicate",) if degrees.replicate > 1 else ()
        spread = degrees.ep > 1 and degrees.ep_carries_data
        self.dense = ("data", "expert") if spread else ("data",)
        self.has_fsdp = prod(self.sizes[axis] for axis in (*self.copies, *self.dense)) > 1

    def inner(self, share: Share) -> dict[str, Cut]:
        """What is cut before FSDP2, by axis."""
        axes = {"expert": Cut(0)} if share.is_expert else {}
        axes |= {"model": Cut(share.model_dim)}
        return {axis: cut for axis, cut in axes.items() if self.sizes[axis] > 1}

    def shard(self, share: Share) -> tuple[str, ...]:
        """The axes that FSDP2 shards over as one."""
        return ("data",) if share.is_expert else self.dense


def stack_grid(degrees: Degrees, stage: int = 0) -> Grid:
    """The ranks of one pipeline stage."""
    return Grid(_Axes(degrees).sizes, {"pipe": Beside(stage, degrees.pp)})


def stack_spread(degrees: Degrees, share_of: ShareOf, *, shards: bool = True) -> Spread:
    """How parameters lie; `shards=False`: with copies where FSDP2 would shard."""
    axes = _Axes(degrees)

    def spread(name: str, param: Tensor) -> SpreadOver | None:
        share = share_of(name, param)
        inner = axes.inner(share)
        if share.is_factor:
            return _factor(axes, share, degrees)
        after = tuple((axis,) for axis in inner)
        if not axes.has_fsdp:
            sums = share.own_positions and "model" in inner
            where = (after.index(("model",)),) if sums else ()
            return SpreadOver(after, tuple(inner.values()), where) if inner else None
        before = prod(axes.sizes[axis] for axis, cut in inner.items() if cut.dim == 0)
        of_data = Cut(0, before, strided=True) if before > 1 else Cut(0)
        mesh = (*((axis,) for axis in axes.copies), axes.shard(share), *after)
        kept = (Cut(),) * len(axes.copies)
        cuts = (*kept, of_data if shards else Cut(), *inner.values())
        return SpreadOver(mesh, cuts, padded=shards)

    return spread


def _factor(axes: _Axes, share: Share, degrees: Degrees) -> SpreadOver:
    """Of LoRA: whole on all ranks but those of tensor parallel, with a summand on each."""
    outer = [(axis,) for axis in axes.copies] + [axes.dense]
    alike = []  # axes along which all ranks see the same tokens
    if not axes.has_fsdp and axes.sizes["expert"] > 1:
        alike = [("expert",)]
    model = [("model",)] if axes.sizes["model"] > 1 else []
    mesh = (*outer, *alike, *model)
    of_model = [Cut(share.model_dim)] * len(model)
    cuts = (*(Cut() for _ in (*outer, *alike)), *of_model)
    summed = tuple(range(len(outer)))
    if model and share.model_dim is None:
        summed += (len(mesh) - 1,)
    return SpreadOver(mesh, cuts, summed)


def stack_blueprint(
    optimizer: RuleOptimizer,
    degrees: Degrees,
    share_of: ShareOf,
    *,
    stage: int = 0,
    shards: bool = True,
    device: torch.device | None = None,
) -> Blueprint:
    """What an optimizer of one stage, built in one process, would do on all ranks of it."""
    grid = stack_grid(degrees, stage)
    everyone = grid.peers(*grid.sizes)
    if degrees.pp > 1:  # as `Stack` chooses it
        same = degrees.ep > 1 and not degrees.ep_carries_data
        everyone = grid.peers("expert" if same else "data")
    spread = stack_spread(degrees, share_of, shards=shards)
    return blueprint(optimizer, grid, everyone=everyone, spread=spread, device=device)


def stack_units(
    module: nn.Module, blocks: Mapping[str, nn.Module], share_of: ShareOf, degrees: Degrees
) -> list[Unit]:
    """What FSDP2 gathers at once: the rest, blocks, stacks of experts; [] where it is not.

    In the order in which forward enters them. blocks: modules by name, as in a plan.
    """
    axes, grid = _Axes(degrees), stack_grid(degrees)
    if not axes.has_fsdp:
        return []
    outer = grid.peers(*axes.copies)
    found: dict[tuple[str, bool], list[Tensor]] = {}
    summands: dict[tuple[str, bool], list[Tensor]] = {}
    early: list[Tensor] = []  # forward uses them after the blocks
    for name, param in module.named_parameters():
        share = share_of(name, param)
        if share.is_factor:
            continue
        inside = next((block for block in blocks if name.startswith(f"{block}.")), "")
        key = (name.rpartition(".")[0], True) if share.is_expert else (inside, False)
        part = _part(param, axes, share)
        if key == ROOT and any(other != ROOT for other in found):
            early.append(part)
        found.setdefault(key, []).append(part)
        if share.own_positions and share.model_dim is None and param.requires_grad:
            summands.setdefault(key, []).append(part)
    return [
        Unit(
            name or "outermost",
            tuple(params),
            reshards=bool(name),
            shard=grid.peers("data") if is_expert else grid.peers(*axes.dense),
            replicate=outer,
            model=grid.peers("model"),
            summands=tuple(summands.get((name, is_expert), ())),
            early=() if name else tuple(early),
            brings_tokens=degrees.ep if is_expert else 1,
        )
        for (name, is_expert), params in sorted(found.items(), key=lambda unit: unit[0] != ROOT)
    ]


def _part(param: Tensor, axes: _Axes, share: Share) -> Tensor:
    """As large as what a rank has of a parameter before FSDP2 comes."""
    sizes = list(param.shape)
    for axis, cut in axes.inner(share).items():
        if cut.dim is not None:
            sizes[cut.dim] //= axes.sizes[axis]
    part = torch.empty(sizes, dtype=param.dtype, device="meta")
    return part.requires_grad_(param.requires_grad)
