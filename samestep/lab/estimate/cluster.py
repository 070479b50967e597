"""A model on a cluster: for every pipeline stage the plans of all its ranks.

These functions plan what the hybrid stack of `samestep.parallel` does:

    shares = plan_shares(model_on_meta, plan, degrees)
    stack_on_grid(optimizer, degrees, shares)

Tensor and expert parallel shard a parameter first, then FSDP2 shards the part of a rank. For a
model without a parallel plan, shares are guessed from common names of parameters.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import samestep
from samestep.groups.distribution import Offload
from samestep.groups.routing import EMBEDDING_NAME
from samestep.groups.state_flags import StateWord, state_dtypes_of
from samestep.lab.estimate.activations import Batch, LayerMemory
from samestep.lab.estimate.fsdp import Unit
from samestep.lab.estimate.grid import Beside, Grid
from samestep.lab.estimate.grid_plan import GridPlan, Spread, SpreadOver, plan_on_grid
from samestep.lab.estimate.hardware import Hardware, device_of
from samestep.lab.estimate.model import Model, is_expert, known_options, layers_of
from samestep.layout.boxes import Cut
from samestep.mesh.degrees import Degrees
from samestep.optimizer.rule_optimizer import RuleOptimizer
from samestep.parallel.lora import FACTORS
from samestep.parallel.plan import Plan
from samestep.tooling.request import BadRequestError

ROOT = ("", False)  # the unit of what is in no block
Stage = Literal["none", "zero1", "zero2", "zero3"]
STAGES: tuple[Stage, ...] = ("none", "zero1", "zero2", "zero3")
# Matrices that take in what others have cut: they are cut along their columns.
TAKES_IN = re.compile(r"(^|\.)(o_proj|out|out_proj|down|down_proj|c_proj|wo|w2|dense_4h_to_h)\.")
WHOLE = re.compile(r"router|gate\.weight$|norm|_a_proj|kv_a")
ON_HEADS = re.compile(r"(^|[._])(q|k|query|key)_?(layer)?norm")


class Share(NamedTuple):
    """The placement of a parameter before FSDP2 shards it.

    model_dim: the dim that tensor parallel shards; None: every rank has a copy.
    is_expert: whether the parameter is a stack of experts, which the expert axis shards.
    own_positions: ranks with copies see different positions: each has a summand of the gradient.
    is_factor: whether the parameter is a LoRA factor, which FSDP2 leaves alone.
    """

    model_dim: int | None = None
    is_expert: bool = False
    own_positions: bool = False
    is_factor: bool = False


ShareOf = Callable[[str, Tensor], Share]  # by name


def plan_shares(model: nn.Module, plan: Plan, degrees: Degrees) -> ShareOf:
    """Return a function that gives each parameter's share under a parallel plan, by name."""
    from samestep.parallel.apply import shard_rules  # with all of FSDP2, which no guess needs

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
    """The mesh axes of a pipeline stage, by purpose."""

    def __init__(self, degrees: Degrees) -> None:
        self.sizes = {axis: size for axis, size in degrees.sizes.items() if axis != "pipe"}
        self.copies = ("replicate",) if degrees.replicate > 1 else ()
        spread = degrees.ep > 1 and degrees.ep_carries_data
        self.dense = ("data", "expert") if spread else ("data",)
        self.has_fsdp = prod(self.sizes[axis] for axis in (*self.copies, *self.dense)) > 1

    def inner(self, share: Share) -> dict[str, Cut]:
        """Return the cut of a parameter before FSDP2, by mesh axis."""
        axes = {"expert": Cut(0)} if share.is_expert else {}
        axes |= {"model": Cut(share.model_dim)}
        return {axis: cut for axis, cut in axes.items() if self.sizes[axis] > 1}

    def shard(self, share: Share) -> tuple[str, ...]:
        """Return the mesh axes that FSDP2 flattens into one to shard over."""
        return ("data",) if share.is_expert else self.dense


def stack_grid(degrees: Degrees, stage: int = 0) -> Grid:
    return Grid(_Axes(degrees).sizes, {"pipe": Beside(stage, degrees.pp)})


def stack_spread(degrees: Degrees, share_of: ShareOf, *, fsdp: bool = True) -> Spread:
    """Return the layout of parameters; `fsdp=False`: replicated where FSDP2 would shard."""
    axes = _Axes(degrees)
    by_fsdp = fsdp and axes.has_fsdp

    def spread(name: str, param: Tensor) -> SpreadOver | None:
        share = share_of(name, param)
        inner = axes.inner(share)
        if share.is_factor:
            if axes.has_fsdp and not fsdp:
                raise ValueError(
                    f"{name!r} is a LoRA factor, and LoRA can only be planned with --sharding zero3"
                )
            return _factor(axes, share)
        after = tuple((axis,) for axis in inner)
        if not by_fsdp:
            sums = share.own_positions and "model" in inner
            where = (after.index(("model",)),) if sums else ()
            return SpreadOver(after, tuple(inner.values()), where) if inner else None
        before = prod(axes.sizes[axis] for axis, cut in inner.items() if cut.dim == 0)
        of_data = Cut(0, before, strided=True) if before > 1 else Cut(0)
        mesh = (*((axis,) for axis in axes.copies), axes.shard(share), *after)
        kept = (Cut(),) * len(axes.copies)
        return SpreadOver(mesh, (*kept, of_data, *inner.values()), padded=True, by_fsdp=True)

    return spread


def _factor(axes: _Axes, share: Share) -> SpreadOver:
    """Return the layout of a LoRA factor: at most tensor parallel shards it, FSDP2 does not."""
    outer = [(axis,) for axis in axes.copies] + [axes.dense]
    same_tokens = not axes.has_fsdp and axes.sizes["expert"] > 1
    mesh = [*outer, *([("expert",)] if same_tokens else [])]
    cuts, summed = [Cut() for _ in mesh], list(range(len(outer)))
    if axes.sizes["model"] > 1:
        if share.model_dim is None:
            summed.append(len(mesh))
        mesh.append(("model",))
        cuts.append(Cut(share.model_dim))
    return SpreadOver(tuple(mesh), tuple(cuts), tuple(summed))


def stack_on_grid(
    optimizer: RuleOptimizer,
    degrees: Degrees,
    share_of: ShareOf,
    *,
    stage: int = 0,
    fsdp: bool = True,
    device: torch.device | None = None,
    hardware: Hardware | None = None,
) -> GridPlan:
    """Plan one stage's optimizer in one process, for all ranks of that stage."""
    grid = stack_grid(degrees, stage)
    everyone, outer = grid.peers(*grid.sizes), None
    if not fsdp and degrees.replicate > 1 and degrees.tp * degrees.ep == 1:
        everyone, outer = grid.peers("data"), grid.peers("replicate")
    if degrees.pp > 1 and fsdp:  # as `Stack` chooses it
        same = degrees.ep > 1 and not degrees.ep_carries_data
        everyone = grid.peers("expert" if same else "data")
    spread = stack_spread(degrees, share_of, fsdp=fsdp)
    return plan_on_grid(
        optimizer, grid, everyone=everyone, outer=outer, spread=spread, device=device,
        hardware=hardware,
    )  # fmt: skip


def stack_units(
    module: nn.Module, blocks: Mapping[str, nn.Module], share_of: ShareOf, degrees: Degrees
) -> list[Unit]:
    """Return the FSDP2 units: outermost, blocks, stacks of experts; [] without FSDP2.

    Units are in the order in which forward enters them. blocks: modules by name, as in a plan.
    """
    axes, grid = _Axes(degrees), stack_grid(degrees)
    if not axes.has_fsdp:
        return []
    outer = grid.peers(*axes.copies)
    found: dict[tuple[str, bool], list[Tensor]] = defaultdict(list)
    summands: dict[tuple[str, bool], list[Tensor]] = defaultdict(list)
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
        found[key].append(part)
        if share.own_positions and share.model_dim is None and param.requires_grad:
            summands[key].append(part)
    return [
        Unit(
            name or "outermost",
            tuple(params),
            reshards=bool(name),
            shard=grid.peers("data") if is_expert else grid.peers(*axes.dense),
            replicate=outer,
            model=grid.peers("model"),
            summands=tuple(summands[name, is_expert]),
            early=() if name else tuple(early),
            brings_tokens=degrees.ep if is_expert else 1,
        )
        for (name, is_expert), params in sorted(found.items(), key=lambda unit: unit[0] != ROOT)
    ]


def _part(param: Tensor, axes: _Axes, share: Share) -> Tensor:
    """Return a meta tensor of the shape that a rank's part has before FSDP2 shards it."""
    sizes = list(param.shape)
    for axis, cut in axes.inner(share).items():
        if cut.dim is not None:
            sizes[cut.dim] //= axes.sizes[axis]
    part = torch.empty(sizes, dtype=param.dtype, device="meta")
    return part.requires_grad_(param.requires_grad)


@dataclass(frozen=True)
class Settings:
    """Keywords of the optimizer that a plan depends on, and the pipeline stages per rank."""

    sharding: Stage = "zero2"
    buffers: str = "per_parameter"
    overlap: bool = True
    overlap_gathers: bool = True  # too, with flat buffers
    muon: bool = True
    master_weights: bool = True
    state: StateWord = "float32"  # how moments are kept
    remainders: bool = False  # of main copies
    clip: bool = True
    bucket_size: int | None = None
    muon_schedule: str = "parallel"
    owners: str = "balanced"
    reduction: str = "fast"
    stages_per_rank: int = 1
    offload: Offload | None = None


@dataclass(frozen=True)
class Job:
    """The request for a plan: a model on a cluster, and the batch of a rank, if known.

    Methods raise BadRequestError for a combination that samestep does not have.
    """

    model: Model
    degrees: Degrees
    settings: Settings
    hardware: Hardware
    batch: Batch | None = None

    @property
    def layers(self) -> LayerMemory | None:
        """Return the layers' activations; None where the batch or the shape is unknown."""
        if self.batch is None or self.model.shape is None:
            return None
        dtype, on_cpu = next(self.model.module.parameters()).dtype, self.hardware.on_cpu
        return LayerMemory(self.model.shape, self.degrees, self.batch, dtype, on_cpu=on_cpu)

    def module(self, stage: int) -> nn.Module:
        """Return the module with the parameters of one pipeline rank."""
        return self.model.stage(stage, self.degrees.pp, self.settings.stages_per_rank)

    def stages(self) -> Iterator[int]:
        """Yield the first of all pipeline stages whose parameters have the same shapes.

        Plans of such stages are equal, and the first holds activations of the most micro-batches.
        """
        seen = set()
        for stage in range(self.degrees.pp):
            shapes = tuple(tuple(param.shape) for param in self.module(stage).parameters())
            if shapes not in seen:
                seen.add(shapes)
                yield stage

    def grid_plan(self, stage: int) -> GridPlan:
        """Plan all ranks of one pipeline stage."""
        degrees, hardware = self.degrees, self.hardware
        device = device_of(hardware)
        _check(degrees, self.settings)
        shards = self.settings.sharding == "zero3"
        module = self.module(stage)
        _check_experts(module, degrees.ep)
        optimizer = _optimizer(module, self.settings, shards)
        try:
            return stack_on_grid(
                optimizer, degrees, guessed_shares(degrees), stage=stage, fsdp=shards,
                device=device, hardware=hardware,
            )  # fmt: skip
        except ValueError as error:  # flat buffers, and parts that are not equal
            raise BadRequestError(str(error)) from error

    def units(self, stage: int) -> list[Unit]:
        """Return a rank's FSDP2 units: one per layer, experts apart.

        Experts see only the tokens that choose them, if the model's shape is known.
        """
        if self.settings.sharding != "zero3":
            return []
        module = self.module(stage)
        found = layers_of(module)
        layers = {} if found is None else {f"{found[0]}.{i}": m for i, m in enumerate(found[1])}
        units = stack_units(module, layers, guessed_shares(self.degrees), self.degrees)
        return [
            unit._replace(brings_tokens=unit.brings_tokens * self.model.active_share)
            if all(param.ndim == 3 for param in unit.params)
            else unit
            for unit in units
        ]


def _check(degrees: Degrees, settings: Settings) -> None:
    if degrees.replicate > 1 and degrees.tp * degrees.ep > 1 and settings.sharding != "zero3":
        raise BadRequestError(
            f"replicate={degrees.replicate} with tp={degrees.tp}, ep={degrees.ep} needs "
            "--sharding zero3; the others average gradients over all copies at once: "
            f"give dp={degrees.replicate * degrees.data} without replicate"
        )
    if settings.buffers == "flat" and settings.sharding in ("none", "zero3"):
        raise BadRequestError(f"flat buffers are for zero1 and zero2, not {settings.sharding}")


def _optimizer(module: nn.Module, settings: Settings, spreads: bool) -> samestep.MuonAdamW:
    flat = settings.buffers == "flat"
    keywords: dict[str, Any] = {"muon_schedule": settings.muon_schedule}
    if not spreads:
        keywords |= {"sharding": settings.sharding, "buffers": settings.buffers}
        keywords |= {"overlap_grad_reduce": settings.overlap, "reduction": settings.reduction}
        gathers = settings.overlap and settings.overlap_gathers and flat
        keywords["overlap_param_gather"] = gathers
    if not flat:
        keywords["owners"] = settings.owners
    keywords["state_dtypes"] = state_dtypes_of(settings.state, remainders=settings.remainders)
    if not settings.muon:
        keywords["overrides"] = {(lambda name, param: True): {"rule": "adamw"}}
    else:
        keywords["overrides"], keywords["split_sizes"] = known_options(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return samestep.MuonAdamW(
            module,
            master_weights=settings.master_weights,
            max_grad_norm=1.0 if settings.clip else None,
            bucket_size=settings.bucket_size,
            offload=settings.offload,
            **keywords,
        )


def _check_experts(module: nn.Module, ep: int) -> None:
    for name, param in module.named_parameters():
        if is_expert(name, param) and param.shape[0] % ep:
            raise BadRequestError(f"ep={ep} does not divide {param.shape[0]} experts ({name})")


def guessed_shares(degrees: Degrees) -> ShareOf:
    """Return a function that guesses the share of each parameter from its name."""
    return partial(guessed_share, own_stream=degrees.sequence_parallel)


def guessed_share(name: str, param: Tensor, *, own_stream: bool = False) -> Share:
    """Guess a parameter's share; `own_stream`: tensor parallel ranks see different positions."""
    takes_in = bool(TAKES_IN.search(f"{name}."))
    if is_expert(name, param):
        return Share(1 + takes_in, is_expert=True)
    if WHOLE.search(name):
        return Share(own_positions=own_stream or bool(ON_HEADS.search(name)))
    if param.ndim < 2:  # a bias is cut with the outputs of its layer
        return Share(0 if name.endswith(".bias") and not takes_in else None)
    return Share(1 if takes_in or EMBEDDING_NAME.search(name) else 0)
