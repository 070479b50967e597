"""Keys of another rule or library raise with the right name; keys that nobody knows are kept."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.groups.group_keys import OF_THE_OPTIMIZER, PEERS
from samestep.rules import RULES


def build(*keys: dict[str, Any]) -> samestep.MuonAdamW:
    groups = [{"params": [nn.Parameter(torch.ones(4, 4))], **own} for own in keys]
    return samestep.MuonAdamW(groups)


@pytest.mark.parametrize(
    ("rule", "key", "value"),
    [
        ("adamw", "renormalize", True),
        ("adamw", "momentum", 0.9),
        ("adamw", "adjust_lr_fn", "original"),
        ("adamw", "split_sizes", (2, 2)),
        ("adamw", "flatten", True),
        ("muon", "betas", (0.9, 0.95)),
        ("muon", "amsgrad", True),
        ("muon", "fused", True),
    ],
)
def test_an_option_of_the_other_rule_is_refused_in_a_group(rule: str, key: str, value: Any):
    other = "muon" if rule == "adamw" else "adamw"
    says = rf"param_groups\[1\]: '{key}' is no option of rule '{rule}' but of rule '{other}'"
    with pytest.raises(ValueError, match=says):
        build({"rule": "muon"}, {"rule": rule, key: value})


def test_an_option_of_the_other_rule_is_refused_in_a_group_that_is_added():
    opt = build({"rule": "muon"})
    bias = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match=r"param_groups\[1\]: 'nesterov' is no option of rule"):
        opt.add_param_group({"params": [bias], "rule": "adamw", "nesterov": True})
    assert len(opt.param_groups) == 1
    with pytest.raises(ValueError, match=r"param_groups\[0\]: 'betas' is no option of rule 'muon'"):
        samestep.Muon([{"params": [nn.Parameter(torch.ones(4, 4))], "betas": (0.9, 0.95)}])


# A value that asks for something, and the name it has here.
VALUES = {
    "algorithm": "adamw", "kind": "muon", "matched_adamw_rms": 0.4, "split_qkv": True,
    "weight_decay_method": "l2", "use_decoupled_weight_decay": False,
    "decoupled_weight_decay": False, "adam_w_mode": False, "bias_correction": False,
    "dampening": 0.1, "num_heads": 8, "newton_schulz_func": len, "qkv_split_shapes": [1],
    "is_qkv_fn": len,
}  # fmt: skip


@pytest.mark.parametrize("rule", ["muon", "adamw"])
@pytest.mark.parametrize("key", PEERS)
def test_a_spelling_of_another_library_is_refused(key: str, rule: str):
    with pytest.raises(ValueError, match=rf"param_groups\[0\]: '{key}' is .*") as caught:
        build({"rule": rule, key: VALUES.get(key, 0.5)})
    assert PEERS[key].whose in str(caught.value)
    assert PEERS[key].here in str(caught.value)
    named = re.match(r'"(\w+)"', PEERS[key].here)  # the first word is a key of ours
    if named is not None:
        assert named[1] in {"rule", *RULES["muon"].defaults, *RULES["adamw"].defaults}


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("mu", "momentum"),
        ("epsilon", "eps"),
        ("cautious_wd", "cautious"),
        ("num_heads", "split_sizes"),
        ("wd", "weight_decay"),
        ("num_ns_steps", "ns_steps"),
        ("learning_rate", "lr"),
    ],
)
def test_a_spelling_of_another_library_names_the_right_one(key: str, right: str):
    with pytest.raises(ValueError, match=rf'write "{right}"'):
        build({"rule": "muon", key: 0.5})
    with pytest.raises(TypeError, match=rf'unexpected keyword: .{key}. is .* write "{right}"'):
        samestep.MuonAdamW(nn.Linear(3, 3), **{key: 0.5})
    with pytest.raises(ValueError, match=rf'overrides: .* write "{right}"'):
        samestep.MuonAdamW(nn.Linear(3, 3), overrides={"weight": {key: 0.5}})


def test_groups_of_another_library_without_a_rule_are_told_of_theirs():
    with pytest.raises(ValueError, match=r"'use_muon' is Keller Jordan's .*\"rule\": \"muon\""):
        build({"use_muon": True, "lr": 0.02, "momentum": 0.95})
    with pytest.raises(ValueError, match=r"'kind' is nanochat's .*\"rule\": \"muon\""):
        build({"kind": "adamw", "betas": (0.8, 0.95)})
    with pytest.raises(ValueError, match="a parameter group has no rule"):
        build({"betas": (0.8, 0.95)})


@pytest.mark.parametrize("key", ["max_grad_norm", "master_weights", "sharding", "preset"])
def test_an_option_of_the_whole_optimizer_is_refused_in_a_group(key: str):
    assert key in OF_THE_OPTIMIZER
    with pytest.raises(ValueError, match=f"'{key}' concerns the whole optimizer.*pass {key}="):
        build({"rule": "muon", key: 1.0})


def test_keys_that_nobody_knows_are_kept_and_harmless_ones_too():
    kept = {
        "initial_lr": 0.1, "name": "head", "layer_id": 3, "lr_scale": 0.5, "swa_lr": 0.1,
        "max_lr": 0.1, "min_lr": 0.0, "base_momentum": 0.85, "max_momentum": 0.95, "wd_mult": 1.0,
        "lr_mult": 1.0, "foreach": None, "capturable": False, "differentiable": False,
        "decoupled_weight_decay": True, "dampening": 0, "kind": "decay", "num_heads": None,
        "is_expert_parallel": False,
    }  # fmt: skip
    opt = build({"rule": "adamw", **kept}, {"rule": "muon", **kept})
    for group in opt.param_groups:
        assert {key: group[key] for key in kept} == kept


def test_a_rule_of_ones_own_may_have_an_option_of_any_name(monkeypatch: pytest.MonkeyPatch):
    own = type("Own", (type(RULES["adamw"]),), {"name": "own"})()
    own.defaults = {**RULES["adamw"].defaults, "mu": 0.5, "momentum": 0.5}
    monkeypatch.setitem(RULES, "own", own)
    opt = build({"rule": "own", "mu": 0.25, "momentum": 0.75})
    assert opt.param_groups[0]["mu"] == 0.25


@pytest.mark.parametrize("kind", ["OneCycleLR", "CyclicLR"])
def test_what_schedulers_and_files_of_torch_put_into_groups_is_no_mistake(kind: str):
    def trained(start: int) -> tuple[samestep.MuonAdamW, Any]:
        opt = build({"rule": "muon"}, {"rule": "adamw"})
        if kind == "OneCycleLR":
            schedule: Any = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=9)
        else:
            schedule = torch.optim.lr_scheduler.CyclicLR(opt, 0.01, 0.1)
        for _ in range(start):
            for group in opt.param_groups:
                group["params"][0].grad = torch.ones(4, 4)
            opt.step()
            schedule.step()
        return opt, schedule

    opt, _ = trained(3)
    assert "momentum" in opt.param_groups[1]  # of the rule "adamw"
    again, _ = trained(0)
    again.load_state_dict(opt.state_dict())
    theirs = torch.optim.AdamW([nn.Parameter(torch.ones(3))], amsgrad=False)
    ours = samestep.AdamW([nn.Parameter(torch.ones(3))])
    ours.load_state_dict(theirs.state_dict())
    matrix = torch.optim.Muon([nn.Parameter(torch.ones(3, 3))])
    samestep.Muon([nn.Parameter(torch.ones(3, 3))]).load_state_dict(matrix.state_dict())


KINDS = [samestep.MuonAdamW, samestep.Muon, samestep.AdamW]


@pytest.mark.parametrize("kind", KINDS)
def test_ways_of_torch_that_ask_for_nothing_are_taken(kind: Any):
    """Frameworks pass them on to any optimizer; None is what torch's have by default."""
    for value in (None, False):
        ways = dict.fromkeys(("foreach", "capturable", "differentiable", "fused"), value)
        for opt in (
            kind([("a", nn.Parameter(torch.ones(4, 4)))], **ways),
            kind([{"params": [nn.Parameter(torch.ones(4, 4))], "rule": "muon", **ways}])
            if kind is not samestep.AdamW
            else kind([{"params": [nn.Parameter(torch.ones(4, 4))], **ways}]),
        ):
            opt.param_groups[0]["params"][0].grad = torch.ones(4, 4)
            opt.step()
    assert not kind([("a", nn.Parameter(torch.ones(4, 4)))], foreach=True).defaults.get("fused")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("way", "out"), [("capturable", "cuda_graph=True"), ("differentiable", "take torch's")]
)
def test_ways_of_torch_that_are_not_done_are_refused(kind: Any, way: str, out: str):
    with pytest.raises(ValueError, match=f"{way}=True .*leave it out.*{out}"):
        kind([("a", nn.Parameter(torch.ones(4, 4)))], **{way: True})
    rule = "adamw" if kind is samestep.AdamW else "muon"
    group = {"params": [nn.Parameter(torch.ones(4, 4))], "rule": rule, way: True}
    with pytest.raises(ValueError, match=f"{way}=True .*leave it out.*{out}"):
        kind([group])


def test_the_fused_kernel_is_of_adamw():
    with pytest.raises(ValueError, match=r"fused=True is torch's kernel for AdamW.*leave it out"):
        samestep.Muon([nn.Parameter(torch.ones(4, 4))], fused=True)
    (group,) = samestep.AdamW([nn.Parameter(torch.ones(4, 4))], fused=True).param_groups
    assert group["fused"] is True


def test_maximize_goes_the_other_way():
    for kind in KINDS:
        ends = []
        for sign, maximize in ((1, False), (-1, True)):
            param = nn.Parameter(torch.eye(4))
            param.grad = sign * torch.arange(16.0).view(4, 4)
            opt = kind([("a", param)], maximize=maximize)
            opt.step()
            ends.append(param.detach())
        assert torch.equal(*ends)
