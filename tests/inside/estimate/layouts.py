"""Every layout of the harness twice: as real ranks run it, and as a plan without ranks."""

import warnings
from types import MappingProxyType

import torch

import samestep
from samestep.lab.estimate.grid import Grid
from samestep.lab.estimate.grid_plan import SpreadOver, plan_on_grid
from samestep.lab.stress.layouts import LAYOUTS
from samestep.lab.stress.models import Matrices, named_params
from samestep.lab.stress.scenario import RATES, GradientScenario
from samestep.layout.boxes import Cut
from tests.soak import SOAK

SHAPES = {
    "embedding": (70, 24),
    "first": (24, 24),
    "up": (60, 24),
    "down": (24, 60),
    "experts": (4, 12, 24),
    "norm": (24,),
    "second": (24, 24),
    "head": (70, 24),
}
WIDER = {name: tuple(4 * size for size in shape) for name, shape in SHAPES.items()}
ON_FOUR = ("zero2", "flat_zero2_overlap", "hsdp", "tp_fsdp2", "ep_fsdp2")
MUON = ("first", "second", "up", "down", "experts")


class AllPresent(GradientScenario):
    """Every rank has a gradient for everything, each its own."""

    name, story = "all_present", "for counting"
    shapes = SHAPES
    more = MappingProxyType({})

    def own_model(self):
        return Matrices(self.shapes)

    def options(self):
        groups = [
            {"params": ["embedding", "norm", "head"], "rule": "adamw"},
            {"params": list(MUON), "rule": "muon"},
        ]
        return {**RATES, "crossover": 64, "bucket_size": 1500, "groups": groups, **self.more}

    def gradient(self, of):
        return self.drawn(of)


class Clipped(AllPresent):
    """With a norm, sizes of updates, and variances that belong to whole blocks."""

    more = MappingProxyType({"max_grad_norm": 1.0, "update_rms": True, "variance_beta2": 0.9})


class Large(AllPresent):
    """Tensors of which numbers of steps and the like are a small part."""

    shapes = WIDER
    more = MappingProxyType({"bucket_size": 20_000, "crossover": 1024})

    def loss(self, model, step, rank, micro):
        """Gradients come as from a real backward: one by one, the last parameter's first."""
        params = named_params(model)
        grads = self.known_gradients(model, step, rank, micro)
        return sum((params[name] * grad).sum() for name, grad in grads.items())


def layouts_on(world):
    """Those that apply to so many ranks, but the one that has no other rank."""
    return [
        layout
        for layout in LAYOUTS.values()
        if not layout.one_process and layout.reason_against(AllPresent, world) is None
    ]


def some_on(world):
    """A sample, each layout at one number of ranks: on four those to which it matters."""
    if SOAK:
        return layouts_on(world)
    return [layout for layout in layouts_on(world) if (layout.name in ON_FOUR) == (world == 4)]


def grid_and_spread(layout, world):
    """How the harness places the parameters of a layout: see `stress.sharded_training`."""
    if layout.parameters == "plain":
        return Grid({"data": world}), None
    if layout.parameters == "fsdp2":
        return Grid({"data": world}), lambda name, param: SpreadOver(
            (("data",),), (Cut(0),), padded=True
        )
    if layout.parameters == "hsdp":
        over = SpreadOver((("replicate",), ("data",)), (Cut(), Cut(0)), padded=True)
        return Grid({"replicate": 2, "data": world // 2}), lambda name, param: over
    assert layout.parameters in ("tp_fsdp2", "ep_fsdp2"), f"say how {layout.name!r} is placed"
    inner = 2 if world > 2 and world % 2 == 0 else world
    names = list(SHAPES)

    def spread(name, param):
        if layout.parameters == "ep_fsdp2":
            dim = 0 if param.dim() == 3 else None
        else:
            dim = names.index(name) % 2 if param.dim() > 1 else None
        outer = Cut(0, inner, strided=True) if dim == 0 else Cut(0)
        return SpreadOver((("data",), ("model",)), (outer, Cut(dim)))

    return Grid({"data": world // inner, "model": inner}), spread


def grid_plan_of(layout, scenario, world, reduction, hardware=None):
    """From a model on the meta device, in this process alone."""
    with torch.device("meta"):
        model = Matrices(scenario.shapes)
    options = {**scenario.options(), **layout.options, "reduction": reduction}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = samestep.MuonAdamW(model, **options)
    grid, spread = grid_and_spread(layout, world)
    return plan_on_grid(optimizer, grid, spread=spread, hardware=hardware)
