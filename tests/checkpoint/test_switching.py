"""Trainings that switch over: state of others goes on here, on any number of ranks and layout.

Files are of the packages themselves, as `foreign/make_*.py` says; each has also the parameters of
the run that went on there, for 20 steps.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import samestep
from samestep.checkpoint.converting import convert
from tests.checkpoint.foreign.net import ADAMW, AFTER, BEFORE, Net, adamw_groups, tokens_of
from tests.ranks import run_forked
from tests.soak import SOAK

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning")
FILES = Path(__file__).parent / "foreign" / "files"
NEAR = {"adamw": 2e-5, "muon": 3e-4}  # those of the harness
LAYOUTS = {
    "zero2": {"sharding": "zero2", "crossover": 8, "bucket_size": 100},
    "flat": {"sharding": "zero1", "buffers": "flat", "bucket_size": 90},
    "fsdp2": {},
}
WRONG = {"lr": 9.0}  # whoever loads: options come with the state


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What the packages have written."""
    folder = tmp_path_factory.mktemp("files")
    for packed in FILES.glob("*.tar.gz"):
        with tarfile.open(packed) as archive:
            archive.extractall(folder, filter="data")
    return folder


def named(model, groups):
    names = {param: name for name, param in model.named_parameters()}
    return [{**g, "params": [(names[p], p) for p in g["params"]]} for g in groups]


def adamw(model, **options):
    return samestep.AdamW(named(model, adamw_groups(model)), **WRONG, **options)


def muon(model, **options):
    names = {"up.weight", "down.weight"}
    groups = [
        {"params": [n for n, _ in model.named_parameters() if n in names], "rule": "muon"},
        {"params": [n for n, _ in model.named_parameters() if n not in names], "rule": "adamw"},
    ]
    return samestep.MuonAdamW(model, groups=groups, **WRONG, **options)


def goes_on(folder, make, rank, world, layout):
    """Load in a layout, and train: gives the parameters."""
    model = Net(seed=7)
    options = {} if world == 1 else LAYOUTS[layout]
    if layout == "fsdp2" and world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for part in (model.up, model.down, model):
            fully_shard(part, mesh=mesh)
    optimizer = make(model, **options)
    samestep.load(folder, model, optimizer)
    train(model, optimizer, rank, world)
    return {name: optimizer.full_parameter(name) for name, _ in model.named_parameters()}


def train(model, optimizer, rank, world):
    for step in range(BEFORE, BEFORE + AFTER):
        model(tokens_of(step, rank, world)).backward()
        optimizer.step()
        optimizer.zero_grad()


def distance(found, expected):
    return max((found[name] - value).abs().max().item() for name, value in expected.items())


def distances(folder, sources, pairs):
    """How far every pair of a world and a layout is, of every source that it is asked of."""
    far = {}
    for world in sorted({world for _, world, _ in pairs}):
        mine = [pair for pair in pairs if pair[1] == world]

        def job(rank, mine=mine):
            found = {}
            for name, world, layout in mine:
                make, at_end = sources[name]
                found[name, world, layout] = distance(
                    goes_on(folder / name, make, rank, world, layout), at_end
                )
            return found

        for of_rank in [job(0)] if world == 1 else run_forked(world, job):
            for pair, value in of_rank.items():
                far[pair] = max(value, far.get(pair, 0.0))
    return far


def converted(files, folder):
    """Every source in our format: how its optimizer is built here, and where its run came to."""
    sources = {}

    def take(name, source, make, expected, **options):
        convert(source, folder / name, **options)
        sources[name] = (make, torch.load(expected))

    take("torch", *run_of_torch(folder))
    for name in ("zero1", "zero2", "zero3", "universal_zero2", "universal_zero3"):
        at_end = files / "deepspeed" / name.removeprefix("universal_") / "expected.pt"
        take(name, files / "deepspeed" / name, adamw, at_end)
    of_megatron, of_dion = files / "megatron", files / "dion" / "muon"
    at_end, names = of_megatron / "expected.pt", of_megatron / "names.json"
    take("fully_reshardable", of_megatron / "fully_reshardable", adamw, at_end)
    take("dp_reshardable", of_megatron / "dp_reshardable", adamw, at_end, names=names)
    at_end = of_dion / "expected.pt"
    take("dion", of_dion / "step5.pt", muon, at_end, names=NAMES_OF_DION)
    take("dion dcp", of_dion / "dcp", muon, at_end)
    return sources


def test_state_of_others_goes_on(files, tmp_path):
    """torch, DeepSpeed, Megatron and dion: as near as runs of ours are that never stopped.

    The usual run has every source, world and layout, and of their pairs a few.
    """
    sources = converted(files, tmp_path)
    every = [(name, 1, "one") for name in sources]
    several = [(name, n, layout) for name in sources for n in (2, 4) for layout in LAYOUTS]
    far = distances(tmp_path, sources, every + (several if SOAK else several[::20]))
    assert {world for _, world, _ in far} == {1, 2, 4}
    assert {layout for _, _, layout in far} == {"one", *LAYOUTS}
    for (name, world, layout), value in far.items():
        limit = NEAR["muon" if name.startswith("dion") else "adamw"]
        assert value < limit, (name, world, layout, value)


def test_momentum_kept_otherwise(files, tmp_path):
    """A sum becomes an average, and the run is the same; without the factor it is not."""
    folder = files / "dion" / "muon"
    convert(folder / "dcp", tmp_path / "ema", preset="torch")
    convert(folder / "dcp", tmp_path / "sum")
    expected = torch.load(folder / "expected.pt")
    same = ("orthogonalize", "norm_factor", "adjust_lr", "eps", "eps_form", "nesterov", "execution")

    def run(name, form):
        model = Net(seed=7)
        optimizer = muon(model)
        samestep.load(tmp_path / "sum", model, optimizer)
        group = optimizer.param_groups[0]
        of_dion = {key: group[key] for key in same}
        samestep.load(tmp_path / name, model, optimizer)
        momentum = optimizer.state[model.up.weight]["momentum_buffer"].clone()
        assert group["momentum_form"] == ("ema" if name == "ema" else "sum")
        group |= {**of_dion, "momentum_form": form, "compute_dtype": None}
        train(model, optimizer, 0, 1)
        found = {name: optimizer.full_parameter(name) for name, _ in model.named_parameters()}
        return momentum, distance(found, expected)

    (ema, near), (summed, far) = run("ema", "ema"), run("sum", "ema")
    assert torch.allclose(ema, summed * 0.05, rtol=1e-6)
    assert near < NEAR["muon"] < far


NAMES_OF_DION = [
    ["up.weight", "down.weight"],
    ["embed.weight", "up.bias", "norm.weight", "norm.bias", "head.weight"],
]


def run_of_torch(folder):
    model = Net()
    opt = torch.optim.AdamW(named(model, adamw_groups(model)), **ADAMW)
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            content = {"model": model.state_dict(), "optimizer": opt.state_dict()}
            torch.save(content, folder / "torch.pt")
        model(tokens_of(step)).backward()
        opt.step()
        opt.zero_grad()
    torch.save(model.state_dict(), folder / "expected.pt")
    return folder / "torch.pt", adamw, folder / "expected.pt"
