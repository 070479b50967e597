"""On a GPU: every layout ends with the same bits, and near a reference in float64.

Needs one GPU. Ranks that are processes share it, with gloo between them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import samestep
from samestep.fsdp import use_ordered_reduction
from samestep.lab.stress.reference import Reference
from tests.gpu import needs_gpu
from tests.ranks import run_forked

pytestmark = needs_gpu

LAYOUTS = {
    "none": {"sharding": "none"},
    "zero2": {"sharding": "zero2"},
    "flat": {"sharding": "zero2", "buffers": "flat"},
    "fsdp2": {},
}


class Layer(nn.Module):
    """Square, wide, tall and uneven matrices, a stack of experts, a bias."""

    def __init__(self, width, rows):
        super().__init__()
        shapes = {
            "query": (width, width), "out": (width, width), "up": (4 * width, width),
            "down": (width, 4 * width), "odd": (rows, width + 3), "experts": (3, width, 72),
            "bias": (rows,),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self, *key):
        return weighed(self, *key)


def noise(shape, *key):
    seed = 0
    for number in key:
        seed = 100 * seed + number
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weighed(module, *key):
    """A linear loss: the gradient of every parameter is the noise that was drawn for it."""
    weights = enumerate(module.parameters())
    return sum((param * noise(param.shape, *key, place).cuda()).sum() for place, param in weights)


class Given(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(515, 96)
        self.layers = nn.ModuleList([Layer(96, 37), Layer(96, 37), Layer(320, 101)])
        with torch.no_grad():
            for place, param in enumerate(self.parameters()):
                param.copy_(0.05 * noise(param.shape, place))

    @property
    def parts(self):
        return [self.embedding, *self.layers]

    def forward(self, rank, step):
        losses = [layer(step, rank, number) for number, layer in enumerate(self.layers, 1)]
        return sum(losses, weighed(self.embedding, step, rank, 0))

    def gradients(self, rank, step):
        """What backward gives, by name."""
        names = {param: name for name, param in self.named_parameters()}
        return {
            names[param]: noise(param.shape, step, rank, number, place)
            for number, part in enumerate(self.parts)
            for place, param in enumerate(part.parameters())
        }


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """How products are computed is measured once for all layouts, whoever else measures it too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


STEPS = 10
SHARED = {"lr": 1e-2, "overrides": {"*.experts": {"rule": "muon"}}}


def ended(layout, **options):
    """What both ranks end with: values and state by name."""

    def job(rank):
        torch.cuda.set_device(0)
        model = Given().cuda()
        given = dict(LAYOUTS[layout])
        if layout == "fsdp2":
            mesh = init_device_mesh("cuda", (2,))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            use_ordered_reduction(model)
        else:
            given["reduction"] = "ordered"
        opt = samestep.MuonAdamW(
            model, max_grad_norm=1.0, bucket_size=100_000, **SHARED, **given, **options
        )
        for step in range(STEPS):
            model(rank, step).backward()
            opt.step()
            opt.zero_grad()
        assert float(opt.metrics()["grad_norm"]) > 10.0  # it clips
        values = {name: opt.full_parameter(name).cpu() for name, _ in model.named_parameters()}
        state = {
            f"{name}.{key}": value.cpu()
            for name, entries in opt.whole_state().items()
            for key, value in entries.items()
        }
        return values | state

    first, second = run_forked(2, job)
    assert differing(second, first) == []  # replicas
    return first


CUTS = {"query": 0, "up": 0, "out": 1, "down": 1, "odd": 0, "experts": 1, "bias": 0}


def ended_in_parts(**options):
    """What four ranks end with: two data ranks have copies, two others the parts of each."""

    def job(rank):
        torch.cuda.set_device(0)
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "model"))
        model, whole = Given().cuda(), Given()
        axis = mesh["model"]
        for name, param in list(model.named_parameters()):
            owner, _, key = name.rpartition(".")
            place = Shard(CUTS[key]) if key in CUTS else Replicate()
            spread = distribute_tensor(param.detach(), axis, [place], src_data_rank=None)
            model.get_submodule(owner).register_parameter(key, nn.Parameter(spread))
        opt = samestep.MuonAdamW(
            model, max_grad_norm=1.0, bucket_size=100_000, reduction="ordered", **SHARED, **options
        )
        for step in range(STEPS):
            grads = whole.gradients(rank // 2, step)
            for name, param in model.named_parameters():
                full = grads[name].cuda()
                param.grad = distribute_tensor(full, axis, param.placements, src_data_rank=None)
            opt.step()
            opt.zero_grad()
        assert float(opt.metrics()["grad_norm"]) > 10.0  # it clips
        values = {name: opt.full_parameter(name).cpu() for name, _ in model.named_parameters()}
        state = {
            f"{name}.{key}": value.cpu()
            for name, entries in opt.whole_state().items()
            for key, value in entries.items()
        }
        return values | state

    first, *others = run_forked(4, job)
    assert all(differing(other, first) == [] for other in others)
    return first


COPIES = {
    "none": {"sharding": "none"},
    "zero2": {},
    "zero1": {"sharding": "zero1"},
    "gather": {"muon_schedule": "gather"},
}


def test_copies_of_parts_have_the_same_bits():
    """With kernels, in the dtypes of the default, as plain parameters on two ranks."""
    expected = ended("none")
    for layout, options in COPIES.items():
        assert differing(ended_in_parts(**options), expected) == [], layout
    options = {"compute_dtype": torch.float32}
    found = ended_in_parts(block_dtype=torch.float32, **options)
    assert differing(found, ended("none", **options)) == []


def reference():
    """What one process ends with in float64: where from, where to, and by which rule, by name."""
    model = Given()
    opt = samestep.MuonAdamW(model, **SHARED, sharding="none")
    rules = {name: group["rule"] for group in opt.param_groups for name in group["param_names"]}
    begin = {name: param.detach() for name, param in model.named_parameters()}
    exact = Reference(begin, opt.param_groups)
    for step in range(STEPS):
        of_ranks = [model.gradients(rank, step) for rank in range(2)]
        grads = {name: [of_rank[name] for of_rank in of_ranks] for name in begin}
        assert exact.step(grads, divisor=2, max_grad_norm=1.0)
    return begin, exact.params, rules


def differing(found, expected):
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def test_layouts_have_the_same_bits():
    """In fp32, also in the blocks' products and on the way to their owners."""
    options = {"compute_dtype": torch.float32}
    expected = ended("none", **options)
    for layout in ("zero2", "flat"):
        assert differing(ended(layout, **options), expected) == []
    found = ended("fsdp2", block_dtype=torch.float32, **options)
    assert differing(found, expected) == []
    _, exact, rules = reference()
    for name, value in exact.items():
        apart = float((expected[name] - value).abs().max())
        print(f"{name}: {apart:.1e} from float64")  # noqa: T201
        assert apart <= (3e-4 if rules[name] == "muon" else 2e-5), name


def test_layouts_with_products_in_bfloat16():
    """The default: blocks are rounded to 16 bits before they travel, as where they stay."""
    expected = ended("none")
    for layout in ("zero2", "flat"):
        assert differing(ended(layout), expected) == []
    for options in ({}, {"block_dtype": torch.float32}, {"muon_schedule": "gather"}):
        assert differing(ended("fsdp2", **options), expected) == [], options
    begin, exact, _ = reference()
    for name, value in exact.items():
        way = float((value - begin[name]).norm())
        apart = float((expected[name].double() - value).norm()) / way
        print(f"{name}: float64 {apart:.1e}")  # noqa: T201
        assert apart <= 0.017, name  # of the way that it came; 0.0088 on an H200


FACTORS = {"variance_beta2": 0.9, "renormalize": True, "cautious": True}


def test_layouts_with_factors_per_block():
    """Norms are summed by torch, by how many blocks there are; and directions are rounded."""
    expected = ended("none", **FACTORS)
    begin, _, rules = reference()
    for layout, limit, options in (  # limits: sums in float32; rounding to 8 bits, 2^-9 each
        ("zero2", 1e-5, {}),
        ("fsdp2", 1e-5, {"block_dtype": torch.float32}),
        ("fsdp2", 0.005, {}),
    ):
        found = ended(layout, **FACTORS, **options)
        for name in begin:
            way = float((expected[name] - begin[name]).norm())
            apart = float((found[name] - expected[name]).norm()) / way
            print(f"{layout} {options} {name}: {apart:.1e}")  # noqa: T201
            assert apart <= (limit if rules[name] == "muon" else 0.0), (layout, name)
