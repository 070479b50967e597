"""max_grad_norm by rule: a joint norm of each named rule's parameters, the same in every layout."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import samestep
from tests.ranks import run_cases
from tests.test_sharded import Net, fsdp, loss_of

STEPS = 3
LIMITS = {"adamw": 0.05}
OPTIONS = {"lr": 1e-2, "overrides": {"experts": {"rule": "muon"}}}


def backward(model, step, ranks=(0, 1)):
    sum(loss_of(model, rank, step) for rank in ranks).div(len(ranks)).backward()


def of_rule(opt, rule):
    return [p for group in opt.param_groups if group["rule"] == rule for p in group["params"]]


def expected(limits):
    """torch clips each rule's gradients by hand."""
    model = Net()
    opt = samestep.MuonAdamW(model, **OPTIONS)
    norms = []
    for step in range(STEPS):
        backward(model, step)
        norms.append(
            {r: nn.utils.clip_grad_norm_(of_rule(opt, r), m).double() for r, m in limits.items()}
        )
        opt.step()
        opt.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


def distributed(model, mesh):
    """Every parameter cut by its first dim."""
    for name, param in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        placed = distribute_tensor(param.detach(), mesh, [Shard(0)])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(placed))
    return model


LAYOUTS = ["none", "zero2", "flat", "fsdp2", "scaled", "both rules"]


def trained(rank, layout):
    limits = {"adamw": 0.05, "muon": 0.02} if layout == "both rules" else LIMITS
    own = {"zero2": {"sharding": "zero2"}, "flat": {"buffers": "flat"}}.get(layout, {})
    own = {"sharding": "none"} if layout == "none" else own
    model = fsdp(Net()) if layout == "fsdp2" else Net()
    opt = samestep.MuonAdamW(model, **OPTIONS, **own, max_grad_norm=limits, bucket_size=700)
    scaler = samestep.GradScaler("cpu", init_scale=1024.0) if layout == "scaled" else None
    norms = []
    for step in range(STEPS):
        loss = loss_of(model, rank, step)
        if scaler is None:
            loss.backward()
            opt.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        norms.append({key: value.clone() for key, value in opt.metrics().items() if "norm" in key})
        opt.zero_grad()
    return {name: opt.full_parameter(name) for name, _ in model.named_parameters()}, norms


def test_every_layout_clips_the_named_rules_alone():
    for layout, of_ranks in run_cases(2, LAYOUTS, trained):
        limits = {"adamw": 0.05, "muon": 0.02} if layout == "both rules" else LIMITS
        values, norms = expected(limits)
        unclipped, _ = expected({"adamw": math.inf})
        assert (values["head.weight"] - unclipped["head.weight"]).abs().max() > 1e-4
        for found, found_norms in of_ranks:
            for name, value in values.items():
                assert (found[name] - value).abs().max() < 3e-5, (layout, name)
            for step, own in enumerate(found_norms):
                for rule, norm in norms[step].items():
                    torch.testing.assert_close(own[f"grad_norm/{rule}"], norm, rtol=1e-5, atol=0)
                assert own.keys() == {"grad_norm", *(f"grad_norm/{rule}" for rule in limits)}
                parts = torch.stack([own[f"grad_norm/{rule}"] for rule in limits])
                assert own["grad_norm"] >= parts.norm() * (1 - 1e-12)


def staged(rank, case):
    """Two stages of one process each: what rank 0 and rank 1 train is one model."""
    torch.manual_seed(rank)
    params = [("w", nn.Parameter(torch.randn(6, 4))), ("b", nn.Parameter(torch.randn(4)))]
    groups = [
        {"rule": "muon", "params": params[:1]},
        {"rule": "adamw", "params": params[1:] if rank or case == "both" else []},
    ]
    groups = [group for group in groups if group["params"]]
    opt = samestep.MuonAdamW(
        groups, max_grad_norm={"adamw": 0.1}, process_group=torch.distributed.new_subgroups(1)[0],
        stage_group=torch.distributed.group.WORLD,
    )  # fmt: skip
    for _, param in params:
        param.grad = torch.full_like(param, 1.0 + rank)
    opt.step()
    return {key: float(value) for key, value in opt.metrics().items() if "norm" in key}


def test_stages_have_joint_norms_of_rules():
    for case, of_ranks in run_cases(2, ["both", "one"], staged):
        squares = {"both": 4 * (1 + 4), "one": 4 * 4}
        for found in of_ranks:
            assert found["grad_norm/adamw"] == pytest.approx(squares[case] ** 0.5)
        assert of_ranks[0] == of_ranks[1]


def parts_with_copies(rank, _):
    """Tensor parallel shards on pairs, averaged over two pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = Net(32)
    expected_model = copy.deepcopy(model)
    distributed(model, mesh["model"])
    opt = samestep.MuonAdamW(model, **OPTIONS, max_grad_norm=LIMITS)
    alone = {"sharding": "none", "grads": "reduced"}
    one = samestep.MuonAdamW(expected_model, **OPTIONS, max_grad_norm=LIMITS, **alone)
    for step in range(2):
        backward(expected_model, step)
        grads = {name: param.grad for name, param in expected_model.named_parameters()}
        for name, param in model.named_parameters():
            if grads[name] is not None:
                param.grad = distribute_tensor(grads[name], mesh["model"], [Shard(0)])
        opt.step()
        one.step()
        opt.zero_grad()
        one.zero_grad()
    away = [
        float((opt.full_parameter(name) - param.detach()).abs().max())
        for name, param in expected_model.named_parameters()
    ]
    return max(away), float(opt.metrics()["grad_norm/adamw"] - one.metrics()["grad_norm/adamw"])


def test_parts_with_copies():
    for _, of_ranks in run_cases(4, ["tp"], parts_with_copies):
        for away, norm in of_ranks:
            assert away < 1e-6
            assert abs(norm) < 1e-9


def test_what_is_not_finite_skips_the_step_of_all_rules():
    model = Net()
    opt = samestep.MuonAdamW(model, **OPTIONS, max_grad_norm=LIMITS)
    backward(model, 0)
    of_rule(opt, "muon")[0].grad[0, 0] = math.inf  # whose rule has no limit
    before = copy.deepcopy(model.state_dict())
    opt.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not opt.metrics()["grad_norm"].isfinite()
    assert opt.metrics()["grad_norm/adamw"].isfinite()


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ({"adamw": -1.0}, ValueError),
        ({"adamw": "1"}, TypeError),
        ({"adam": 1.0}, ValueError),
        ({}, ValueError),
        ([1.0], TypeError),
    ],
)
def test_limits_that_nobody_understands(limits, error):
    with pytest.raises(error, match="max_grad_norm"):
        samestep.MuonAdamW(Net(), **OPTIONS, max_grad_norm=limits)


def test_what_cannot_clip_by_rule_says_so():
    with pytest.raises(ValueError, match=r'cuda_graph.*max_grad_norm=\{"adamw": 1\}'):
        samestep.MuonAdamW(Net(), max_grad_norm={"adamw": 1}, cuda_graph=True)
    model = Net()
    opt = samestep.MuonAdamW(model, **OPTIONS)
    backward(model, 0)
    with pytest.raises(TypeError, match="max_grad_norm="):
        opt.clip_grad_norm_({"adamw": 1.0})
    limited = samestep.MuonAdamW(model, **OPTIONS, max_grad_norm={"adamw": 1.0})
    with pytest.raises(ValueError, match="clipped twice"):
        limited.clip_grad_norm_(1.0)
    assert 'max_grad_norm={"adamw": 1}' in limited.explain()
