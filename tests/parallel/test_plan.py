"""Plans that do not fit, and models that a plan cannot be applied to."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from samestep.lab.stress.scenarios.hybrid import FusedQKVCut
from samestep.mesh import build
from samestep.mesh.replicate_list import ReplicateListError, ShardRule
from samestep.models.gpt import GPT, GPTConfig, gpt_plan
from samestep.parallel.apply import apply, shard_rules
from samestep.parallel.plan import Plan, PlanError, name_matches
from samestep.parallel.replicas import ReplicasDifferError
from tests.ranks import run_forked
from tests.soak import twin_cases

SHAPE = {"vocab_size": 32, "context": 8, "width": 16, "layers": 1, "heads": 4, "kv_heads": 2}
DENSE = GPTConfig(**SHAPE)
EXPERTS = GPTConfig(**SHAPE, experts=4, expert_size=8)


def test_patterns_are_matched_part_by_part():
    assert name_matches("blocks.10.mlp", "blocks.*.mlp")
    assert not name_matches("blocks.10.mlp.up", "blocks.*")
    assert name_matches("blocks.0.attention.k", "blocks.*.attention.[qkv]")


def test_a_pattern_that_matches_nothing_is_a_slip():
    plan = replace(gpt_plan(DENSE), row=("blocks.*.attention.output",))
    with pytest.raises(PlanError, match=r"row: 'blocks.\*.attention.output' matches nothing"):
        plan.check(GPT(DENSE))


def test_a_module_is_named_once():
    plan = replace(gpt_plan(DENSE), on_stream=("norm", "head"))
    with pytest.raises(
        PlanError, match=r"'head' is in both Plan\.head and Plan\.on_stream: name it in one"
    ):
        plan.check(GPT(DENSE))


def test_what_a_plan_allows_to_be_cut():
    rules = shard_rules(GPT(EXPERTS), gpt_plan(EXPERTS))
    cut = {(rule.pattern, rule.axis): rule.dim for rule in rules}
    assert cut["blocks.0.attention.q.weight", "model"] == 0
    assert cut["blocks.0.attention.out.weight", "model"] == 1
    assert cut["blocks.0.mlp.experts.up", "expert"] == 0
    assert cut["blocks.0.mlp.experts.down", "model"] == 2
    assert not any("norm" in name or "router" in name for name, _ in cut)


class WithScale(GPT):
    """A parameter that no plan knows."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(1))


def refusals(rank):
    """The error of each attempt, by name."""
    mesh = build(tp=2)
    dense, experts = gpt_plan(DENSE), gpt_plan(EXPERTS)
    hooked = GPT(DENSE)
    hooked.blocks[0].attention.register_forward_pre_hook(lambda *_: None)
    odd = same(GPT, DENSE)
    odd.blocks[0].mlp.up = nn.Linear(16, 33, bias=False)
    torch.manual_seed(rank)
    router = replace(
        experts,
        column=(*experts.column, "blocks.*.mlp.router"),
        on_stream=tuple(name for name in experts.on_stream if not name.endswith("router")),
    )
    attempts = {
        "seeds": (GPT(DENSE), dense),
        "hooks": (hooked, dense),
        "unnamed": (same(WithScale, DENSE), dense),
        "router": (same(GPT, EXPERTS), router),
        "uneven": (odd, dense),
        "nothing": (same(GPT, DENSE), Plan(blocks=("blocks.*",))),
    }
    found = {}
    for name, (model, plan) in attempts.items():
        try:
            apply(model, plan, mesh)
        except (PlanError, ReplicasDifferError, ReplicateListError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def same(kind, config):
    torch.manual_seed(0)
    return kind(config)


def test_what_cannot_be_applied():
    for found in run_forked(2, refusals):
        assert "differs between ranks 0 and 1 before they are laid out: seed" in found["seeds"]
        assert "blocks.0.attention has 1), which would run beside" in found["hooks"]
        assert "the plan does not mention parameters scale" in found["unnamed"]
        assert found["router"].startswith("ReplicateListError: 'blocks.0.mlp.router.weight' is")
        assert "dim 0 of 'blocks.0.mlp.up.weight' is 33, which 2 ranks of" in found["uneven"]
        assert "make it 32 or 34, or use a number of ranks that divides 33" in found["uneven"]
        assert "the mesh has tp=2, and the plan shards no layer" in found["nothing"]


def allowed(rank):
    plan = gpt_plan(EXPERTS)
    plan = replace(
        plan,
        on_stream=tuple(name for name in plan.on_stream if not name.endswith("router")),
        column=(*plan.column, "blocks.*.mlp.router"),
        rules=(ShardRule("blocks.0.mlp.router.weight", "model", 0, "gathered by its user"),),
    )
    apply(same(GPT, EXPERTS), plan, build(tp=2))


def test_the_replicate_list_has_exceptions_with_a_reason():
    run_forked(2, allowed)


@twin_cases("4")
@pytest.mark.parametrize("world", [2, 4])
def test_a_fused_weight_that_is_cut_by_rows_is_refused_on_every_rank(world):
    scenario = FusedQKVCut(0, world)
    cut, whole = scenario.plans()

    def job(rank):
        mesh = build(tp=2)
        with pytest.raises(ReplicateListError) as caught:
            apply(scenario.model_to_cut(), cut, mesh)
        apply(scenario.model_to_cut(), whole, mesh)
        return str(caught.value)

    for text in run_forked(world, job):
        for block in (0, 1):
            assert f"'blocks.{block}.attention.qkv.weight' is Shard(0) over model" in text
        assert "queries without their keys and values" in text
        assert "in Plan.fused, give each projection a weight of its own, keep it whole" in text
