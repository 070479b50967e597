"""Keys of another rule or library raise with the right name; keys that nobody knows are kept."""

from __future__ import annotations

import copy
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


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("muon_lr", "matrix_lr="),
        ("adam_lr", "lr= beside matrix_lr="),
        ("adamw_lr", "lr= beside matrix_lr="),
    ],
)
def test_rates_of_rules_are_told_of_rates_of_roles(key: str, right: str):
    with pytest.raises(TypeError, match=rf"'{key}' is \w+'s spelling.*write {right}"):
        samestep.MuonAdamW(nn.Linear(3, 3), **{key: 0.5})


MEANT = {
    "embed_lr": "embedding_lr", "wte_lr": "embedding_lr", "lr_embedding": "embedding_lr",
    "head_lr": "unembedding_lr", "lm_head_lr": "unembedding_lr",
    "head_learning_rate": "unembedding_lr", "norm_lr": "scalar_lr", "bias_lr": "scalar_lr",
    "hidden_lr": "matrix_lr", "matrices_lr": "matrix_lr", "muon_wd": "matrix_decay",
    "norm_weight_decay": "scalar_decay", "adamw_weight_decay": "weight_decay",
    "no_weight_decay": "no_decay", "adam_betas": "betas", "muon_momentum": "momentum",
    "grad_clip": "max_grad_norm", "clip_grad_norm": "max_grad_norm", "max_norm": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm", "zero_stage": "sharding", "group": "groups",
    "state_dtype": "state_dtypes", "overlap": "overlap_grad_reduce", "nesterovv": "nesterov",
    "cpu_offload": "offload", "graph": "cuda_graph", "newton_schulz_steps": "ns_steps",
}  # fmt: skip


@pytest.mark.parametrize(("key", "right"), MEANT.items())
def test_an_unknown_keyword_is_told_of_the_one_that_is_meant(key: str, right: str):
    with pytest.raises(TypeError) as caught:
        samestep.MuonAdamW(nn.Linear(3, 3), **{key: 0.5})
    assert str(caught.value) == f"unexpected keyword {key!r}; did you mean {right!r}?"


@pytest.mark.parametrize("key", ["warmup", "mixed_precision", "world_size", "lars_trust"])
def test_no_keyword_is_suggested_for_what_is_like_none(key: str):
    with pytest.raises(TypeError) as caught:
        samestep.MuonAdamW(nn.Linear(3, 3), **{key: 0.5})
    assert str(caught.value) == f"unexpected keyword {key!r}"


def test_rates_of_parameters_without_a_keyword_are_told_of_groups():
    alone = r"is 'lr' in a parameter group of their own"
    with pytest.raises(TypeError, match=alone + r', or overrides=\{"\*router\*": \{"lr": ...\}\}$'):
        samestep.MuonAdamW(nn.Linear(3, 3), router_lr=0.5)
    for kind, own in ((samestep.Muon, "muon_wd"), (samestep.AdamW, "adam_decay")):
        for key in ("norm_lr", "head_lr", "router_lr"):  # they have no roles
            with pytest.raises(TypeError, match=alone + "$"):
                kind([nn.Parameter(torch.ones(3, 3))], **{key: 0.5})
        with pytest.raises(TypeError, match="did you mean 'weight_decay'"):
            kind([nn.Parameter(torch.ones(3, 3))], **{own: 0.5})
    with pytest.raises(TypeError, match=r'groups \[\{"params": \[...\], "rule": "muon"\}, ...\]'):
        samestep.MuonAdamW(nn.Linear(3, 3), muon_params=[])
    with pytest.raises(TypeError, match="did you mean 'state_dtypes'"):
        samestep.AdamW(nn.Linear(3, 3), state_dtype="8bit")  # which it spells out itself


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


def cycled(kind: str, opt: torch.optim.Optimizer) -> Any:
    if kind == "OneCycleLR":
        return torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=9)
    return torch.optim.lr_scheduler.CyclicLR(opt, 0.01, 0.1, 4)


def train(opt: torch.optim.Optimizer, schedule: Any, steps: int = 1) -> None:
    for _ in range(steps):
        for group in opt.param_groups:
            group["params"][0].grad = torch.linspace(-1, 2, 16).view(4, 4).cos()
        opt.step()
        schedule.step()


@pytest.mark.parametrize("kind", ["OneCycleLR", "CyclicLR"])
@pytest.mark.parametrize("tensors", [False, True])
def test_schedulers_cycle_beta1_of_adamw_as_torch_does(kind: str, tensors: bool):
    """In every kind of optimizer, step by step, and after resuming in the middle."""

    def matrix() -> nn.Parameter:
        return nn.Parameter(torch.eye(4) + 1)

    number: Any = torch.tensor if tensors else float  # schedulers write into tensors

    def of_adamw() -> dict[str, Any]:
        betas = (number(0.9), number(0.99))
        return {"params": [matrix()], "lr": number(0.01), "weight_decay": 0.1, "betas": betas}

    def of_muon() -> dict[str, Any]:
        return {"params": [matrix()], "rule": "muon", "lr": number(0.01)}

    reference = torch.optim.AdamW([of_adamw()], foreach=False)

    def ours() -> tuple[Any, ...]:
        return (
            samestep.MuonAdamW([of_muon(), {**of_adamw(), "rule": "adamw"}]),
            samestep.Muon([of_muon(), {**of_adamw(), "rule": "adamw"}]),
            samestep.AdamW([of_muon(), of_adamw()]),
            samestep.AdamW([of_adamw()]),
        )

    theirs = cycled(kind, reference)
    optimizers = ours()
    schedules = [cycled(kind, opt) for opt in optimizers]
    saved: list[Any] = []
    for step in range(8):
        (wanted,) = reference.param_groups
        for opt in optimizers:
            *muon, adamw = opt.param_groups
            assert [*map(float, adamw["betas"])] == pytest.approx([*map(float, wanted["betas"])])
            assert float(adamw["lr"]) == pytest.approx(float(wanted["lr"]))
            assert "momentum" not in adamw
            for group in muon:
                assert group["momentum"] == pytest.approx(float(wanted["betas"][0]))
                assert "betas" not in group
        if step == 4:  # they go on from what was saved
            saved = [copy.deepcopy((o.state_dict(), s.state_dict())) for o, s in
                     zip(optimizers, schedules, strict=True)]  # fmt: skip
            again = ours()
            schedules = [cycled(kind, opt) for opt in again]
            for new, old, schedule, (state, times) in zip(
                again, optimizers, schedules, saved, strict=True
            ):
                new.load_state_dict(state)
                schedule.load_state_dict(times)
                for one, other in zip(new.param_groups, old.param_groups, strict=True):
                    for mine, before in zip(one["params"], other["params"], strict=True):
                        mine.data.copy_(before.data)
            optimizers = again
        for opt, schedule in zip(optimizers, schedules, strict=True):
            train(opt, schedule)
        train(reference, theirs)
    (expected,) = reference.param_groups[0]["params"]
    for opt in optimizers:
        assert torch.allclose(opt.param_groups[-1]["params"][0], expected, atol=1e-6)


def test_schedulers_of_rates_alone_leave_momentum_alone():
    opt = build({"rule": "muon"}, {"rule": "adamw"})
    kinds = torch.optim.lr_scheduler
    for schedule in (
        kinds.LambdaLR(opt, [lambda step: 0.9**step, lambda step: 0.5**step]),
        kinds.OneCycleLR(opt, [0.1, 0.2], total_steps=9, cycle_momentum=False),
        kinds.CosineAnnealingLR(opt, 5),
    ):
        train(opt, schedule, 2)
    muon, adamw = opt.param_groups
    assert (muon["momentum"], adamw["betas"]) == (0.95, (0.9, 0.95))
    assert muon["lr"] != adamw["lr"]


def test_momentum_that_is_written_by_hand_into_a_group_without_it_is_refused():
    """Whoever schedules Muon's momentum in all groups does not mean AdamW's betas."""
    opt = build({"rule": "muon"}, {"rule": "adamw"})
    for group in opt.param_groups:
        group["momentum"] = 0.9
        group["params"][0].grad = torch.ones(4, 4)
    with pytest.raises(ValueError, match=r"param_groups\[1\]: 'momentum' is no option of rule"):
        opt.step()


def test_files_of_torch_are_loaded_without_how_torch_computed():
    theirs = torch.optim.AdamW([nn.Parameter(torch.ones(3))], foreach=True, capturable=False)
    state = theirs.state_dict()
    state["param_groups"][0] |= {"capturable": True, "differentiable": True}
    ours = samestep.AdamW([nn.Parameter(torch.ones(3))])
    ours.load_state_dict(state)
    ours.param_groups[0]["params"][0].grad = torch.ones(3)
    ours.step()
    matrix = torch.optim.Muon([nn.Parameter(torch.ones(3, 3))])
    samestep.Muon([nn.Parameter(torch.ones(3, 3))]).load_state_dict(matrix.state_dict())
    for decay in (0.0, 0.1):
        coupled = torch.optim.Adam([nn.Parameter(torch.ones(3))], weight_decay=decay).state_dict()
        if decay == 0:
            ours.load_state_dict(coupled)
            continue
        with pytest.raises(ValueError, match=r"decoupled_weight_decay.*decay_form"):
            ours.load_state_dict(coupled)


def test_a_file_with_the_momentum_that_a_scheduler_wrote_beside_betas():
    """Those of versions that let it write there: nobody has read it."""
    opt = build({"rule": "muon"}, {"rule": "adamw"})
    state = opt.state_dict()
    state["param_groups"][1]["momentum"] = 0.85
    opt.load_state_dict(state)
    assert opt.param_groups[1]["betas"] == (0.9, 0.95)
    assert "momentum" not in opt.param_groups[1]


@pytest.mark.parametrize("sizes", [(2, 1, 1), {"*.qkv": (2, 1, 1)}, "heads:2"], ids=str)
def test_split_sizes_may_be_called_qkv_split_sizes(sizes):
    """As the document about MegaCpp's optimizers calls them, in group dicts and in overrides."""
    ways = {
        "groups": lambda key: samestep.MuonAdamW(
            [{"params": [("a.qkv", qkv())], "rule": "muon", key: sizes}]
        ),
        "one rule": lambda key: samestep.Muon([{"params": [("a.qkv", qkv())], key: sizes}]),
        "patterns": lambda key: samestep.MuonAdamW(
            [("a.qkv", qkv())], groups=[{"params": "*", "rule": "muon", key: sizes}]
        ),
    }
    if not isinstance(sizes, dict):
        ways["overrides"] = lambda key: samestep.MuonAdamW(
            [("a.qkv", qkv())], overrides={"a.qkv": {key: sizes}}
        )

    def added(key):
        first = {"params": [("first", nn.Parameter(torch.ones(4, 4)))], "rule": "muon"}
        opt = samestep.MuonAdamW([first])
        opt.add_param_group({"params": [("a.qkv", qkv())], "rule": "muon", key: sizes})
        return opt

    ways["added"] = added
    for name, make in ways.items():
        ours, theirs = make("split_sizes"), make("qkv_split_sizes")
        assert "qkv_split_sizes" not in theirs.param_groups[-1], name
        for opt in (ours, theirs):
            opt.param_groups[-1]["params"][0].grad = torch.arange(16.0).view(4, 4).sin()
            opt.step()
        stepped = [opt.param_groups[-1]["params"][0] for opt in (ours, theirs)]
        assert torch.equal(*stepped), name
        assert not torch.equal(stepped[0], whole_step()), name


def qkv():
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(4, 4))


def whole_step():
    """What a step makes of it as one block."""
    opt = samestep.Muon([qkv()])
    opt.param_groups[0]["params"][0].grad = torch.arange(16.0).view(4, 4).sin()
    opt.step()
    return opt.param_groups[0]["params"][0]


def test_both_names_of_split_sizes_are_refused_and_so_is_theirs_elsewhere():
    with pytest.raises(ValueError, match="split_sizes and qkv_split_sizes mean the same"):
        build({"rule": "muon", "split_sizes": (2, 2), "qkv_split_sizes": (2, 2)})
    with pytest.raises(ValueError, match="'qkv_split_sizes' is no option of rule 'adamw' but of"):
        build({"rule": "adamw", "qkv_split_sizes": (2, 2)})
    with pytest.raises(TypeError, match="qkv_split_sizes must be a list of row counts"):
        build({"rule": "muon", "qkv_split_sizes": 2.5})
    with pytest.raises(TypeError, match="'qkv_split_sizes'; did you mean 'split_sizes'"):
        samestep.MuonAdamW([("a", qkv())], qkv_split_sizes=(2, 2))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("capturable", True, "cuda_graph=True"),
        ("differentiable", True, "use torch's"),
        ("fused", True, "no option of rule 'muon' but of rule 'adamw'"),
        ("betas", (0.9, 0.95), "no option of rule 'muon'"),
        ("max_grad_norm", 1.0, "concerns the whole optimizer"),
        ("mu", 0.9, 'write "momentum"'),
        ("adjust_lr_fn", "original", "set 'adjust_lr'"),
        ("qkv_split_sizes", (2, 2), "set 'split_sizes'"),
    ],
)
def test_a_key_that_would_do_nothing_is_refused_when_it_is_set_later(key, value, says):
    opt = build({"rule": "muon"})
    param = opt.param_groups[0]["params"][0]
    before = param.clone()
    param.grad = torch.ones(4, 4)
    opt.param_groups[0][key] = value
    with pytest.raises(ValueError, match=rf"param_groups\[0\]: .*{re.escape(says)}"):
        opt.step()
    assert torch.equal(param, before)
    del opt.param_groups[0][key]
    opt.step()
    for harmless in (None, False):
        opt.param_groups[0]["capturable"] = harmless
        opt.step()


LIST = {
    "append": lambda groups: groups.append({"params": [nn.Parameter(torch.ones(4, 4))]}),
    "extend": lambda groups: groups.extend(groups),
    "append nonsense": lambda groups: groups.append("nonsense"),
    "pop": lambda groups: groups.pop(),
    "clear": lambda groups: groups.clear(),
    "params": lambda groups: groups[0]["params"].append(nn.Parameter(torch.ones(4, 4))),
}


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("case", LIST)
def test_groups_put_into_the_list_are_told_of_add_param_group(case: str, deferred: bool):
    def changed() -> samestep.MuonAdamW:
        named = [("a", nn.Parameter(torch.ones(4, 4))), ("b", nn.Parameter(torch.ones(4)))]
        opt = samestep.MuonAdamW(named, deferred=deferred)
        LIST[case](opt.param_groups)
        return opt

    says = "cannot be removed" if case in ("pop", "clear") else "add_param_group"
    for use in ("step", "table"):
        with pytest.raises(RuntimeError, match=says):
            getattr(changed(), use)()
    if case == "extend":  # torch saves the same group twice, and its own tests ask for it
        saved = changed().state_dict()["param_groups"]
        assert saved[:2] == saved[2:]
    elif not (deferred and case == "params"):
        with pytest.raises(RuntimeError, match=says):
            changed().state_dict()


def test_nanochats_loop_runs_as_it_is():
    """`base_train.py` reads keys that its own optimizer has set."""
    opt = samestep.MuonAdamW(nn.Sequential(nn.Linear(4, 4)), preset="nanochat", lr=None)
    first = [group["lr"] for group in opt.param_groups]
    for multiplier in (0.5, 0.25):
        for group in opt.param_groups:
            group["lr"] = group["initial_lr"] * multiplier
            if group["kind"] == "muon":
                group["momentum"] = 0.9
        for group in opt.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        opt.step()
        assert [group["lr"] for group in opt.param_groups] == [multiplier * lr for lr in first]
        opt.load_state_dict(opt.state_dict())
    assert [group["initial_lr"] for group in opt.param_groups] == first
    plain = build({"rule": "muon", "lr": torch.tensor(0.5)}).param_groups[0]
    assert "initial_lr" not in plain
    plain["lr"].mul_(plain["initial_lr"])
    assert plain["initial_lr"] == 0.5
    with pytest.raises(KeyError, match="no_such_key"):
        plain["no_such_key"]


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
    ("way", "out"), [("capturable", "cuda_graph=True"), ("differentiable", "use torch's")]
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


@pytest.mark.parametrize("kind", [samestep.MuonAdamW, samestep.AdamW])
def test_a_group_may_have_a_generator(kind: type[torch.optim.Optimizer]):
    """As in torch: it is looked at more than once here."""
    model = nn.Linear(4, 4)
    opt = kind([{"rule": "adamw", "params": model.parameters()}])
    assert opt.param_groups[0]["params"] == list(model.parameters())
