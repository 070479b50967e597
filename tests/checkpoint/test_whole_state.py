"""The whole state dict of one process, torch's or ours, on several ranks in every layout.

After the cases of torch's ZeroRedundancyOptimizer: state of a local optimizer is loaded by all
ranks, comes back whole and the same, and both take the same steps from there.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import samestep
from tests.checkpoint.foreign.net import ADAMW, BEFORE, Net, adamw_groups, muon_groups, tokens_of
from tests.ranks import run_forked
from tests.soak import SOAK, some, twin

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning")
LAYOUTS = {
    "none": {"sharding": "none"},
    "zero1": {"sharding": "zero1", "crossover": 8, "bucket_size": 100},
    "zero2": {"sharding": "zero2", "crossover": 8, "bucket_size": 100},
    "flat zero1": {"sharding": "zero1", "buffers": "flat", "bucket_size": 90},
    "flat zero2": {"sharding": "zero2", "buffers": "flat", "bucket_size": 90},
    "fsdp2": {},
    "hsdp": {},
}
NEAR = {"torch": 2e-5, "torch amsgrad": 2e-5, "ours": 3e-4, "ours bf16": 1e-2}
LATER = 3 if SOAK else 2
TORCHS = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 1e-2}


def named(model, params):
    names = {param: name for name, param in model.named_parameters()}
    return [(names[param], param) for param in params]


def build(kind, model, **layout):
    """Ours for a kind of state; with other options, which the state brings along."""
    if kind.startswith("torch"):
        groups = [{**g, "params": named(model, g["params"])} for g in adamw_groups(model)]
        return samestep.AdamW(groups, lr=9.0, amsgrad="amsgrad" in kind, **layout)
    matrices, others = muon_groups(model)
    groups = [
        {"params": named(model, matrices), "rule": "muon", "split_sizes": {"up*": (3, 6)}},
        {"params": named(model, others), "rule": "adamw"},
    ]
    return samestep.MuonAdamW(
        groups, lr=0.01, variance_beta2=0.9, master_weights="bf16" in kind, **layout
    )


def saved_by_one(kind):
    """A model and its optimizer after some steps: a bytes object each, and where they go on to."""
    model = Net().to(torch.bfloat16 if "bf16" in kind else torch.float32)
    if kind.startswith("torch"):
        opt = torch.optim.AdamW(adamw_groups(model), **ADAMW, amsgrad="amsgrad" in kind)
    else:
        opt = build(kind, model)
    train(model, opt, range(BEFORE))
    saved = io.BytesIO()
    torch.save((model.state_dict(), opt.state_dict()), saved)
    names = {param: name for name, param in model.named_parameters()}
    whole = {names[p]: {k: t.clone() for k, t in own.items()} for p, own in opt.state.items()}
    train(model, opt, range(BEFORE, BEFORE + LATER))
    return saved.getvalue(), copy.deepcopy(whole), dict(model.state_dict())


def train(model, opt, steps, rank=0, world=1):
    for step in steps:
        model(tokens_of(step, rank, world)).backward()
        opt.step()
        opt.zero_grad()


def sharded(model, layout, world):
    if layout == "fsdp2":
        mesh = init_device_mesh("cpu", (world,))
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "parts"))
    else:
        return
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh)


def loads(kind, layout, rank, world, saved):
    """What is wrong with a load into this layout."""
    data, whole, at_end = saved
    of_model, of_optimizer = torch.load(io.BytesIO(data), weights_only=True)
    model = Net(seed=3).to(torch.bfloat16 if "bf16" in kind else torch.float32)
    model.load_state_dict(of_model)
    sharded(model, layout, world)
    opt = build(kind, model, **LAYOUTS[layout])
    train(model, opt, range(50, 51), rank, world)  # state that has to go
    with torch.no_grad():
        for name, param in model.named_parameters():
            value = of_model[name]
            if hasattr(param, "placements"):
                value = torch.distributed.tensor.distribute_tensor(
                    value, param.device_mesh, param.placements
                )
            param.copy_(value)
    opt.load_state_dict(of_optimizer)
    found = opt.whole_state()
    wrong = [
        f"{name} {key}"
        for name, state in whole.items()
        for key, value in state.items()
        if not torch.equal(found[name][key].reshape(value.shape), value)
    ]
    train(model, opt, range(BEFORE, BEFORE + LATER), rank, world)
    for name, value in at_end.items():
        away = (opt.full_parameter(name).float() - value.float()).abs().max().item()
        if away > NEAR[kind]:
            wrong.append(f"{name} after {LATER} steps: {away:.1e}")
    if kind.startswith("torch") and opt.param_groups[1]["lr"] != 0.02:
        wrong.append("options")
    return wrong


KINDS = list(NEAR)


@twin
@pytest.mark.parametrize("world", some([2, 4]))
def test_whole_state_loads_in_every_layout(world):
    """Of torch.optim.AdamW and of ours, also with amsgrad, variance, fused rows and masters."""
    saved = {kind: saved_by_one(kind) for kind in KINDS}
    layouts = [name for name in LAYOUTS if name != "hsdp" or world == 4]
    if not SOAK:
        layouts = layouts[::2] if world == 2 else [*layouts[1::2], "hsdp"]
    pairs = [
        (kind, layout)
        for number, kind in enumerate(KINDS)
        for place, layout in enumerate(layouts)
        if SOAK or number % len(layouts) == place  # every kind and every layout
    ]
    assert {layout for _, layout in pairs} == set(layouts)
    assert {kind for kind, _ in pairs} == set(KINDS)

    def job(rank):
        return {pair: loads(*pair, rank, world, saved[pair[0]]) for pair in pairs}

    for of_rank in run_forked(world, job):
        assert {pair: wrong for pair, wrong in of_rank.items() if wrong} == {}


def beside_torch(rank, sharding):
    """Ours and torch's under DDP, with a weight that comes and goes; then states change hands.

    Gives the largest distance between both after any step.
    """
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    ours_model = DistributedDataParallel(model, find_unused_parameters=True)  # as on rank 0
    theirs_model = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    ours = samestep.AdamW(ours_model, **TORCHS, sharding=sharding, crossover=1)
    theirs = torch.optim.AdamW(theirs_model.parameters(), **TORCHS)
    apart = []

    def step():
        batch = torch.rand(64, 2)
        for trained, opt in ((ours_model, ours), (theirs_model, theirs)):
            opt.zero_grad()
            trained(batch).abs().sum().backward()
            opt.step()
        pairs = zip(ours_model.parameters(), theirs_model.parameters(), strict=True)
        apart.append(max(float((one - other).abs().max()) for one, other in pairs))

    for number in range(20):
        step()
        if number > 10:
            for trained in (ours_model, theirs_model):
                next(trained.parameters()).requires_grad = bool(number % 2)
    ours.consolidate_state_dict(to=0)
    received = [ours.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(received)
    [of_ours], of_theirs = received, copy.deepcopy(theirs.state_dict())
    for mine, yours in ((of_theirs, of_ours), (of_ours, of_theirs)):
        ours.load_state_dict(copy.deepcopy(mine))
        theirs.load_state_dict(copy.deepcopy(yours))
        step()
    return max(apart)


@pytest.mark.parametrize("sharding", ["none", "zero1", "zero2"] if SOAK else ["zero2"])
@pytest.mark.parametrize("world", [2, 4] if SOAK else [2])
def test_states_change_hands_with_torchs_adamw(world, sharding):
    """Where torch compares ZeroRedundancyOptimizer with a local optimizer: no difference."""
    assert run_forked(world, beside_torch, sharding) == [0.0] * world
