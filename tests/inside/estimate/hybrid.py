"""The hybrid stack twice: as real ranks run it, and as plans without ranks."""

import warnings
from dataclasses import replace
from types import MappingProxyType

import torch

import samestep
from samestep.lab.estimate.cluster import plan_shares, stack_on_grid, stack_units
from samestep.lab.estimate.fsdp import fsdp_collectives, passes_1f1b
from samestep.lab.stress.layouts import LAYOUTS_ON_REQUEST, Layout
from samestep.lab.stress.scenarios.hybrid import HybridGPT, HybridLoRA
from samestep.mesh.degrees import Degrees
from samestep.parallel.lora import add_lora
from samestep.parallel.pipeline import GPT_STAGES
from samestep.parallel.stages import cut

SHAPE = replace(
    HybridGPT.config, vocab_size=144, width=64, heads=4, kv_heads=2, experts=4, expert_size=48
)
# Every step is clipped: gradients of a group have scaled copies then, which a peak counts with.
MORE = MappingProxyType({"bucket_size": 9000, "max_grad_norm": 1e-3})
# Axes alone that no layout of the harness has: two copies, and a pipeline of plain parameters.
ALONE = (
    Layout("hybrid_hsdp", "", parameters="hybrid", mesh={"replicate": 2}),
    Layout("hybrid_pp", "", parameters="hybrid", mesh={"pp": 2}),
    Layout(
        "hybrid_whole_experts",
        "",
        parameters="hybrid",
        mesh={"tp": 2, "ep": 2, "sequence_parallel": True, "expert_tensor_parallel": 1},
    ),
)
# The others on request are mistakes, which are made to be refused.
HYBRID = [layout for layout in LAYOUTS_ON_REQUEST.values() if layout.parameters == "hybrid"]
LAYOUTS = {layout.name: layout for layout in (*HYBRID, *ALONE)}


class Model(HybridGPT):
    """Tensors of which numbers of steps and the like are a small part."""

    config = SHAPE

    def options(self):
        return {**super().options(), **MORE}


class Measured(Model):
    """With sizes of updates, and variances that belong to whole blocks."""

    def options(self):
        return {**super().options(), "update_rms": True, "variance_beta2": 0.9}


class Factors(HybridLoRA):
    """The same where factors alone are trained; wide ones, for the reason above."""

    config = SHAPE

    def adapt(self, model, mesh=None):
        if mesh is not None and mesh.dense.size() > 1:
            mesh = None
        add_lora(model, ["*.attention.[qv]", "*.attention.out"], rank=32, mesh=mesh)

    def options(self):
        return {**super().options(), **MORE}


def layouts_on(world):
    """Those that apply to so many ranks."""
    found = LAYOUTS.values()
    return [layout.name for layout in found if layout.reason_against(Model, world) is None]


def degrees_of(name, world):
    return Degrees(world, **LAYOUTS[name].mesh)


def stage_on_meta(scenario, degrees, stage):
    """The model of one stage, as the stack cuts it."""
    with torch.device("meta"):
        model = scenario._plain_model()
    if degrees.pp > 1:
        cut(model, GPT_STAGES, degrees.pp, [stage])
    scenario.adapt(model)
    return model


def foreseen(name, scenario, reduction, stage):
    """The plan of a stage, and what FSDP2 sends there."""
    degrees = degrees_of(name, scenario.world)
    model = stage_on_meta(scenario, degrees, stage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = samestep.MuonAdamW(model, **scenario.options(), reduction=reduction)
    (plan,) = scenario.plans()
    shares = plan_shares(model, plan, degrees)
    units = stack_units(model, dict(plan.named(model, "blocks")), shares, degrees)
    passes = passes_1f1b(stage, degrees.pp, degrees.pp)
    grid_plan = stack_on_grid(optimizer, degrees, shares, stage=stage)
    return grid_plan, fsdp_collectives(units, passes=passes)
