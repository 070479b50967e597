"""LoRA against one process: the math, FSDP2 before and after, tensor parallel, adapters."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import samestep
from samestep.mesh import build
from samestep.models.gpt import gpt_plan
from samestep.parallel import tensor
from samestep.parallel.lora import (
    LoRAError,
    adapters,
    add_lora,
    combine_after_backward,
    lora_layers,
    lora_parameters,
    merge_lora,
)
from samestep.parallel.replicas import check_replicas
from tests.parallel.pipelines import CONFIG, OPTIONS, batch, gpt, mean_loss
from tests.ranks import run_forked
from tests.soak import SOAK, twin, twin_cases

PATTERNS = ["*.attention.[qv]", "*.attention.out", "*.mlp.*"]
SHAPE = replace(CONFIG, layers=2, kv_heads=2)
LIMIT = 0.03
STEPS = 3 if SOAK else 2  # that are compared with one process; later ones amplify rounding
LONG = 100 if SOAK else 3  # after which copies have the same bits
RULES = {"adamw": {}, "muon": {"*.lora_*": {"rule": "muon"}}}


def fill(opt):
    """B begins as zeros, and A would have no gradient: everything random, by name."""
    for name in sorted(n for group in opt.param_groups for n in group["param_names"]):
        if name.endswith("lora_B"):
            whole = opt.full_parameter(name)
            generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
            opt.set_full_parameter(name, torch.randn(whole.shape, generator=generator) * 0.1)


def optimizer(model, rule="adamw", **options):
    options = {"max_grad_norm": LIMIT} | options
    opt = samestep.MuonAdamW(model, **OPTIONS | options, overrides=RULES[rule])
    fill(opt)
    return opt


def backward(model, step, dp_ranks):
    """The mean loss over the batches of these data-parallel ranks."""
    batches = [batch(step, rank) for rank in dp_ranks]
    logits = model(torch.cat([inputs for inputs, _ in batches]))
    loss = mean_loss(logits, torch.cat([targets for _, targets in batches]))
    loss.backward()
    return loss.item()


def alone(dp, rule="adamw", steps=STEPS):
    """Gradients of the first step, and factors and norms of all."""
    model = gpt(SHAPE)
    add_lora(model, PATTERNS, rank=4)
    opt = optimizer(model, rule)
    grads, norms = None, []
    for step in range(steps):
        backward(model, step, range(dp))
        grads = grads or {name: p.grad.clone() for name, p in adapters(model).named_parameters()}
        opt.step()
        opt.zero_grad()
        norms.append(opt.metrics()["grad_norm"].item())
    return grads, norms, {name: p.detach() for name, p in adapters(model).named_parameters()}


# --- one process -------------------------------------------------------------------------------


def test_only_factors_are_trained_and_merging_keeps_the_model():
    model, before = gpt(SHAPE), gpt(SHAPE)
    names = add_lora(model, PATTERNS, rank=4, alpha=6.0)
    assert "blocks.0.attention.q" in names
    assert "blocks.1.mlp.down" in names
    assert len(names) == 2 * 5
    inputs, _ = batch(0)
    torch.testing.assert_close(model(inputs), before(inputs), rtol=0, atol=0)  # B is zero
    opt = optimizer(model)
    trained = [name for group in opt.param_groups for name in group["param_names"]]
    assert sorted(trained) == sorted(
        f"{n}.{factor}" for n in names for factor in ("lora_A", "lora_B")
    )
    assert {group["role"] for group in opt.param_groups} == {"lora"}
    for step in range(3):
        backward(model, step, [0])
        opt.step()
        opt.zero_grad()
    layer, base = model.blocks[1].mlp.up, before.blocks[1].mlp.up
    assert torch.equal(layer.weight, base.weight)
    merged = base.weight + 6.0 / 4 * layer.lora_B @ layer.lora_A
    outputs = model(inputs)
    assert (outputs - before(inputs)).abs().max() > 1e-2
    merge_lora(model)
    assert type(model.blocks[1].mlp.up) is nn.Linear
    torch.testing.assert_close(model.blocks[1].mlp.up.weight, merged, rtol=0, atol=1e-6)
    torch.testing.assert_close(model(inputs), outputs, rtol=0, atol=1e-5)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in before.named_parameters()]


def test_gradients_are_those_of_the_sum():
    """Against autograd through W + scale B A, written out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5))
    reference = copy.deepcopy(model[0])
    add_lora(model, ["0"], rank=2, alpha=3.0)
    with torch.no_grad():
        model[0].lora_B.normal_()
    x = torch.randn(7, 6)
    a, b = (p.detach().clone().requires_grad_() for p in (model[0].lora_A, model[0].lora_B))
    wanted = nn.functional.linear(x, reference.weight + 1.5 * b @ a, reference.bias)
    torch.testing.assert_close(model(x), wanted, rtol=0, atol=1e-6)
    wanted.square().sum().backward()
    model(x).square().sum().backward()
    for found, own in ((model[0].lora_A.grad, a.grad), (model[0].lora_B.grad, b.grad)):
        torch.testing.assert_close(found, own, rtol=0, atol=1e-4)
    assert model[0].weight.grad is None


def test_the_draw_depends_on_name_and_seed_alone():
    first, second, third = gpt(SHAPE), gpt(SHAPE), gpt(SHAPE)
    add_lora(first, PATTERNS)
    torch.manual_seed(9)
    add_lora(second, ["*.mlp.up"])
    add_lora(third, ["*.mlp.up"], seed=1)
    found = [model.blocks[1].mlp.up.lora_A for model in (first, second, third)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[0], first.blocks[0].mlp.up.lora_A)
    assert 0.8 / 4 < found[0].abs().max() < 1 / 4  # 1 / sqrt(16)


class Special(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("patterns", "options", "text"),
    [
        (["*.mlp.upp"], {}, r"'\*.mlp.upp' matches no linear layer"),
        (["embedding"], {}, "'embedding' matches no linear layer"),
        (["head"], {"rank": 0}, "rank must be at least 1, got 0"),
        (["odd"], {}, "'odd' is a Special, and LoRA factors can only be added to nn.Linear"),
        (["norm_and_more"], {}, "matches no linear layer"),
    ],
)
def test_what_cannot_have_factors_is_refused(patterns, options, text):
    model = gpt(SHAPE)
    model.odd = Special(3, 3)
    with pytest.raises(LoRAError, match=text):
        add_lora(model, patterns, **options)
    assert all(param.requires_grad for param in model.parameters())
    add_lora(model, ["head"])
    with pytest.raises(LoRAError, match="'head' has LoRA factors already"):
        add_lora(model, ["head"])


# --- on ranks ----------------------------------------------------------------------------------


def laid_out(tp, sequence_parallel, when):
    """The GPT on tp x data ranks, with factors given before FSDP2 or after it."""
    mesh = build(tp=tp, sequence_parallel=sequence_parallel)
    model, plan = gpt(SHAPE), gpt_plan(SHAPE)
    tensor.parallelize(model, plan, mesh)
    ignored = None
    if when == "before":
        add_lora(model, PATTERNS, rank=4, mesh=mesh)
        ignored = set(lora_parameters(model))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh.dense, ignored_params=ignored)
    if when == "after":
        add_lora(model, PATTERNS, rank=4)
    return model, mesh


def train(rank, tp, sequence_parallel, when, rule, path=None, steps=STEPS):
    model, mesh = laid_out(tp, sequence_parallel, when)
    opt = optimizer(model, rule)
    dp_rank = mesh.coordinates["data"]
    grads, norms = None, []
    names = [name for name, _ in adapters(model).named_parameters()]
    for step in range(steps):
        backward(model, step, [dp_rank])
        if grads is None:
            grads = {name: opt.full_gradient(name) for name in names}
        opt.step()
        opt.zero_grad()
        norms.append(opt.metrics()["grad_norm"].item())
    params = {name: opt.full_parameter(name) for name in names}
    if path is not None:
        samestep.save(path, adapters(model), opt)
    for step in range(steps, LONG):
        backward(model, step, [dp_rank])
        opt.step()
        opt.zero_grad()
    copies = check_replicas(adapters(model))
    placements = {
        name: {str(place) for place in p.placements}
        for name, p in adapters(model).named_parameters()
    }
    if when == "after":
        merge_spread(model)
    return grads, norms, params, placements, copies


@twin_cases("1-False-after-adamw")
@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "when", "rule"),
    [
        (1, False, "before", "muon"),
        (1, False, "after", "adamw"),
        # test_lora_stack has tensor parallel, with sequence parallel and stages.
        *([(2, False, "before", "adamw"), (2, True, "after", "muon")] * SOAK),
    ],
)
def test_factors_are_trained_as_in_one_process(tp, sequence_parallel, when, rule, tmp_path):
    wanted, norms, after = alone(2, rule)
    assert min(norms) > 1.2 * LIMIT
    found = run_forked(2 * tp, train, tp, sequence_parallel, when, rule, tmp_path / "a")
    for grads, own_norms, params, placements, copies in found:
        assert own_norms == pytest.approx(norms, rel=1e-3)
        assert copies == len(params) * (1 if tp == 1 else 1.5)  # half of the factors are cut in two
        for name in wanted:
            assert grads[name].abs().max() > 1e-5, name
            torch.testing.assert_close(grads[name], wanted[name], rtol=0, atol=1e-6, msg=name)
            atol = 2e-5 if rule == "adamw" else 3e-4
            torch.testing.assert_close(params[name], after[name], rtol=0, atol=atol, msg=name)
        if tp == 2:
            assert placements["blocks.0.mlp.up.lora_B"] == {"R", "S(0)"}
            assert placements["blocks.0.mlp.up.lora_A"] == {"R"}
            assert placements["blocks.0.mlp.down.lora_A"] == {"R", "S(1)"}
            assert placements["blocks.0.mlp.down.lora_B"] == {"R"}
    # The adapters alone, into one process, over a base that they do not touch.
    model = gpt(SHAPE)
    add_lora(model, PATTERNS, rank=4)
    samestep.load(tmp_path / "a", adapters(model), samestep.MuonAdamW(model, overrides=RULES[rule]))
    for name, param in adapters(model).named_parameters():
        torch.testing.assert_close(param.detach(), found[0][2][name], rtol=0, atol=0)


def merge_spread(model):
    """Weights that FSDP2 and tensor parallel have cut, and the same outputs as before."""
    before = {name: layer.weight.full_tensor() for name, layer in lora_layers(model)}
    factors = {name: p.full_tensor() for name, p in adapters(model).named_parameters()}
    scale = next(layer.scale for _, layer in lora_layers(model))
    inputs, _ = batch(2)
    with torch.no_grad():
        outputs = model(inputs)
        merge_lora(model)
        torch.testing.assert_close(model(inputs), outputs, rtol=0, atol=1e-5)
    for name, weight in before.items():
        wanted = weight + scale * factors[f"{name}.lora_B"] @ factors[f"{name}.lora_A"]
        merged = model.get_submodule(name).weight
        assert isinstance(merged, DTensor)
        torch.testing.assert_close(merged.full_tensor(), wanted, rtol=0, atol=1e-6)
    assert not list(lora_layers(model))


def hooked(rank, tp):
    """Another optimizer, and two micro-batches: gradients are combined by hooks."""
    model, mesh = laid_out(tp, tp > 1, "after")
    fill(samestep.MuonAdamW(model))
    combine_after_backward(model)
    for step in (0, 1):
        backward(model, step, [mesh.coordinates["data"]])
    found = {}
    for name, param in adapters(model).named_parameters():
        assert param.grad.placements == param.placements
        found[name] = param.grad.full_tensor() / 2
    torch.optim.SGD(lora_parameters(model), lr=1.0).step()
    check_replicas(adapters(model))
    return found


@pytest.mark.parametrize("tp", [1, 2] if SOAK else [1])
def test_hooks_combine_gradients_for_any_optimizer(tp):
    model = gpt(SHAPE)
    add_lora(model, PATTERNS, rank=4)
    fill(samestep.MuonAdamW(model))
    for step in (0, 1):
        backward(model, step, range(2))
    for found in run_forked(2 * tp, hooked, tp):
        for name, param in adapters(model).named_parameters():
            torch.testing.assert_close(found[name], param.grad / 2, rtol=0, atol=1e-6, msg=name)


def plain(rank):
    """Whole parameters on every rank: factors are as others, and the optimizer averages them."""
    model = gpt(SHAPE)
    add_lora(model, PATTERNS, rank=4)
    opt = optimizer(model)
    found = []
    for step in range(LONG):
        backward(model, step, [rank])
        opt.step()
        opt.zero_grad()
        if step in (STEPS - 1, LONG - 1):
            named = adapters(model).named_parameters()
            found.append({name: p.detach().clone() for name, p in named})
    return found


@twin
def test_replicas_without_a_mesh():
    _, _, wanted = alone(2)
    first, second = run_forked(2, plain)
    for name, param in first[0].items():
        torch.testing.assert_close(param, wanted[name], rtol=0, atol=2e-5, msg=name)
        assert torch.equal(first[1][name], second[1][name])


def lonely(rank):
    mesh = build(tp=2)
    tensor.parallelize(model := gpt(SHAPE), gpt_plan(SHAPE), mesh)
    with pytest.raises(
        LoRAError, match="which other ranks hold copies of it is unknown: pass mesh="
    ):
        add_lora(model, PATTERNS)
    model.blocks[0].mlp.extra = nn.Linear(4, 4)
    tensor.parallelize_module(
        model.blocks[0].mlp.extra, mesh.axis("model"), tensor.CopiedModule(own_part=False)
    )
    with pytest.raises(LoRAError, match=r"mlp.extra' is replicated over the tensor parallel ranks"):
        add_lora(model, ["*.extra"], mesh=mesh)


def test_layers_of_tensor_parallel_that_cannot_have_factors():
    run_forked(4, lonely)
