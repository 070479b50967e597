"""What stays whole: names on the list, and models that were cut against it."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from samestep.mesh import build
from samestep.mesh.replicate_list import (
    ReplicateList,
    ReplicateListError,
    ShardRule,
    cuts,
    shapes,
)
from tests.mesh.fake import fake_world

RULES = (
    ShardRule("*.up", "model", 0),
    ShardRule("*.down", "model", 1),
    ShardRule("experts.*", "expert", 0),
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("blocks.3.attention_norm.weight", "norms and QK-norm"),
        ("blocks.0.attention.q_norm.weight", "norms and QK-norm"),
        ("transformer.h.0.ln_1.weight", "norms and QK-norm"),
        ("transformer.ln_f.bias", "norms and QK-norm"),
        ("model.layers.0.input_layernorm.weight", "norms and QK-norm"),
        ("blocks.0.mlp.router.weight", "router"),
        ("model.layers.3.mlp.gate.weight", "router"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "shared and null experts"),
        ("blocks.1.mlp.null_expert", "shared and null experts"),
        ("backbone.layers.0.mixer.A_log", "state-space internals"),
        ("backbone.layers.0.mixer.dt_bias", "state-space internals"),
        ("blocks.2.mamba.in_proj.weight", "state-space internals"),
        ("engram.table.weight", "Engram"),
        ("blocks.2.mHC.mix", "mHC"),
        ("ngram_hash.proj.weight", "n-gram hash projections"),
        ("blocks.0.attention.q.lora_A.weight", "LoRA"),
        ("blocks.0.attention.qkv.weight", "fused projections"),
        ("transformer.h.0.attn.c_attn.weight", "fused projections"),
        ("gpt_neox.layers.0.attention.query_key_value.weight", "fused projections"),
        ("layers.0.attention.in_proj_weight", "fused projections"),
        ("model.layers.0.mlp.experts.gate_up_proj", "fused projections"),
        ("blocks.0.attention.qkv.lora_A.weight", "LoRA"),
        ("blocks.0.attention.q.weight", None),
        ("blocks.0.mlp.up.weight", None),
        ("model.layers.0.mlp.gate_proj.weight", None),
        ("blocks.0.mlp.experts.down", None),
        ("embedding.weight", None),
        ("head.weight", None),
    ],
)
def test_names_on_the_list(name, kind):
    assert ReplicateList().kind(name) == kind


def model_on(mesh, **placements):
    """Parameters by name, each (8, 8), cut over the model axis as said."""
    model = nn.Module()
    for name, dim in placements.items():
        module, key = model, name
        if "__" in name:
            owner, key = name.split("__")
            module = getattr(model, owner, None)
            if module is None:
                module = nn.Module()
                model.add_module(owner, module)
        value = torch.zeros(8, 8)
        if dim is not None:
            placement = Replicate() if dim == "whole" else Shard(dim)
            value = distribute_tensor(value, mesh, [placement], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(value))
    return model


def test_what_rules_allow_may_be_cut():
    with fake_world(0, 4):
        mesh = build(tp=2)
        model = model_on(
            mesh.axis("model"), mlp__up=0, mlp__down=1, norm__weight="whole", router=None
        )
        whole = shapes(model)
        fully_shard(model, mesh=mesh.dense)  # over data, which does not count
        ReplicateList(RULES).check(model, whole)
        assert [list(cuts(param)) for param in model.parameters()] == [
            [], [("model", 0)], [("model", 1)], [],
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        (
            {"router__weight": 0},
            "'router.weight' is Shard(0) over model, and is on the replicate list (router): keep "
            "it whole, or give a ShardRule that says `although` what makes it right",
        ),
        ({"other": 1}, "'other' is Shard(1) over model, and no ShardRule allows it"),
        (
            {"mlp__up": 1},
            "'mlp.up' is Shard(1) over model, and the rule is '*.up': Shard(0) over model",
        ),
        (
            {"mlp__up": 1, "norm": 0},
            "'norm' is Shard(0) over model, and is on the replicate list (norms and QK-norm)",
        ),
    ],
)
def test_what_nothing_allows_is_named_with_placement_and_rule(placements, message):
    with fake_world(0, 2):
        model = model_on(build(tp=2).axis("model"), **placements)
        with pytest.raises(ReplicateListError) as caught:
            ReplicateList(RULES).check(model)
    assert message in str(caught.value)
    assert str(caught.value).count("is Shard(") == len(placements)


def test_a_rule_without_reason_does_not_take_something_off_the_list():
    plain = ShardRule("*lora_b", "model", 0)
    with fake_world(0, 2):
        model = model_on(build(tp=2).axis("model"), q__lora_b=0)
        with pytest.raises(ReplicateListError, match="LoRA"):
            ReplicateList((plain,)).check(model)
        ReplicateList((plain._replace(although="cut with its layer"),)).check(model)


def test_rows_of_several_projections_are_not_cut():
    """Columns are all of theirs; a reason says that rows lie head by head."""
    rows, columns = ShardRule("*qkv", "model", 0), ShardRule("*qkv", "model", 1)
    with fake_world(0, 2):
        axis = build(tp=2).axis("model")
        model = model_on(axis, attention__qkv=0)
        with pytest.raises(ReplicateListError, match=r"'attention\.qkv' is Shard\(0\) .*queries"):
            ReplicateList((rows,)).check(model)
        ReplicateList((rows._replace(although="head by head"),)).check(model)
        ReplicateList((columns,)).check(model_on(axis, attention__qkv=1))


def test_the_expert_axis_counts():
    with fake_world(0, 4):
        mesh = build(ep=2, tp=2)
        model = model_on(mesh.axis("expert"), experts__up=0, router__weight=0)
        with pytest.raises(ReplicateListError) as caught:
            ReplicateList(RULES).check(model)
    assert str(caught.value).startswith("'router.weight' is Shard(0) over expert, and is on the")


def test_what_is_cut_and_no_dtensor_is_found_by_its_shape():
    model = nn.Linear(8, 8)
    whole = shapes(model)
    model.weight = nn.Parameter(torch.zeros(4, 8))
    ReplicateList().check(model)
    with pytest.raises(ReplicateListError, match=r"'weight' was \(8, 8\) and is \(4, 8\)"):
        ReplicateList().check(model, whole)


def test_own_patterns_replace_the_defaults():
    own = ReplicateList(patterns={"mine": ("special.*",)})
    assert own.kind("special.weight") == "mine"
    assert own.kind("norm.weight") is None
