"""A small model in every layout, with options of every kind, that can be trained and compared."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import samestep
from samestep.fsdp.ordered_reduction import use_ordered_reduction
from samestep.layout.boxes import local_of
from tests.test_sharded import Net, fsdp, loss_of

HIDDEN = 36  # tensor parallel over two ranks can cut it, and three ranks cut it unevenly
OVERRIDES = {"*.up.weight": {"split_sizes": (9, 10, 17)}, "experts": {"rule": "muon"}}
MUON, ADAMW = 3e-4, 2e-5  # how far runs with other sums may drift apart

PLAIN = {
    "one": {},
    "none": {"sharding": "none"},
    "zero1": {"sharding": "zero1", "crossover": 8, "bucket_size": 300},
    "zero2": {"sharding": "zero2", "crossover": 8, "bucket_size": 300},
    "flat zero1": {"buffers": "flat", "sharding": "zero1", "bucket_size": 250},
    "flat zero2": {
        "buffers": "flat",
        "sharding": "zero2",
        "bucket_size": 250,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
}
VARIANTS = {
    "variance": {"variance_beta2": 0.9, "cautious": True},
    "amsgrad": {"amsgrad": True},
    "bf16": {"variance_beta2": 0.9, "master_weights": True},
}


class Case(NamedTuple):
    """A layout on some ranks."""

    layout: str
    world: int
    variant: str = "variance"

    @property
    def name(self):
        return f"{self.layout} on {self.world} {self.variant}".replace(" ", "_")


def layouts_on(world):
    """The layouts that so many ranks can have."""
    if world == 1:
        return ["one"]
    found = [name for name in PLAIN if name != "one"] + ["fsdp2"]
    return found + (["hsdp", "tp"] if world % 2 == 0 and world > 2 else [])


class Model(Net):
    """With a buffer, and other values for another seed."""

    def __init__(self, seed):
        super().__init__(HIDDEN)
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("seen", torch.randn(3, generator=generator))
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(std=0.3, generator=generator)


def build(case, seed=1, **options):
    """A model and its optimizer."""
    model = Model(seed)
    if case.variant == "bf16":
        model = model.bfloat16()
    own = {**VARIANTS[case.variant], "lr": 0.01, "max_grad_norm": 0.7, "overrides": OVERRIDES}
    if case.layout in PLAIN:
        own |= PLAIN[case.layout]
        if case.world > 1:
            own |= {"reduction": "ordered"}
    else:
        _shard(model, case)
        use_ordered_reduction(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model, samestep.MuonAdamW(model, **{**own, **options})


def _shard(model, case):
    if case.layout == "fsdp2":
        fsdp(model, init_device_mesh("cpu", (case.world,)))
        return
    shape = (2, case.world // 2) if case.layout == "hsdp" else (case.world // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
    if case.layout == "hsdp":
        fully_shard(model, mesh=mesh)
        return
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["b"], plan)
    fsdp(model, mesh["a"])


def train(model, opt, steps):
    """All ranks have the same data, so that their number shows in the rounding of sums alone."""
    for step in steps:
        loss_of(model, 0, step).backward()
        opt.step()
        opt.zero_grad()


@torch.no_grad()
def spoil(model, opt):
    """Other values everywhere, and other options: what is not loaded shows."""
    opt.wait_for_parameters()
    values = [*model.parameters(), *model.buffers()]
    for tensor in values + [value for state in opt.state.values() for value in state.values()]:
        local_of(tensor.detach()).mul_(-1).add_(1)  # every rank its own part
    for group in opt.param_groups:
        group["lr"] = 9.0


def snapshot(model, opt):
    """Everything, whole, on every rank. Collective."""
    found = {name: value.clone() for name, value in model.named_buffers()}
    for name, _ in model.named_parameters():
        found[name] = opt.full_parameter(name)
    for name, state in opt.whole_state().items():
        found |= {f"{name}.{key}": tensor for key, tensor in state.items()}
    return found


def local_bits(model, opt):
    """What this rank has in memory, and all options: to see that nothing has changed."""
    values = [*model.state_dict().values()]
    values += [tensor for state in opt.state.values() for tensor in state.values()]
    local = [v.to_local() if hasattr(v, "to_local") else v for v in values]
    return [v.detach().clone() for v in local], [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in opt.param_groups
    ]


def same_bits(one, other):
    return one[1] == other[1] and all(map(torch.equal, one[0], other[0]))


def different(found, expected):
    """Names of what is not equal to the bit."""
    names = found.keys() | expected.keys()
    return sorted(n for n in names if not _equal(found.get(n), expected.get(n)))


def _equal(one, other):
    return one is not None and other is not None and one.dtype == other.dtype and one.equal(other)


def far(found, expected):
    """Names of what is further away than rounding explains."""
    return [
        f"{name}: {(found[name] - value).abs().max():.1e}"
        for name, value in expected.items()
        if value.numel() and (found[name] - value).abs().max() > _tolerance(name)
    ]


def drift(found, expected):
    """How far AdamW's parameters and state are from what is expected, and how far Muon's."""
    furthest = {ADAMW: 0.0, MUON: 0.0}
    for name, value in expected.items():
        if value.numel():
            away = (found[name] - value).abs().max().item()
            furthest[_tolerance(name)] = max(furthest[_tolerance(name)], away)
    return furthest[ADAMW], furthest[MUON]


def _tolerance(name):
    muon = "momentum" in name or any(p in name for p in ("up.weight", "down.weight", "experts"))
    return MUON if muon else ADAMW
