"""torchtitan's trainer, on 1 and 2 ranks with FSDP2, and as a pipeline with two parts on a rank."""

from __future__ import annotations

import importlib
import sys
import warnings

import pytest
import torch
from torch import nn

import samestep
from tests.integrations.ranks import assert_same, values
from tests.integrations.titan import run_trainers, trained, trainer


def weights(made):
    """Parameters of all model parts of this rank by name, whole."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): value
        for part in made.model_parts
        for name, value in values(part).items()
    }


def state(made):
    return {
        key: getattr(value, "full_tensor", value.clone)()
        for key, value in made.optimizers.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_is_the_run_without_a_break(world, tmp_path):
    def job(rank):
        straight = trainer(tmp_path)
        before = weights(straight)
        straight.train()
        again = trained(
            tmp_path, checkpoint__load_step=3, checkpoint__load_only=True, debug__seed=1
        )
        assert again.step == 6
        assert_same(weights(again), weights(straight))
        assert_same(state(again), state(straight))
        assert again.lr_schedulers.get_metrics() == straight.lr_schedulers.get_metrics()
        after = weights(straight)
        assert all(not torch.equal(before[name], value) for name, value in after.items())
        return after

    results = run_trainers(world, job)
    for found in results:
        assert_same(found, results[0])
    assert len(results[0]) == 45


def test_two_ranks_go_on_as_one_does(tmp_path):
    """From a file of one rank. Gradients are averaged once, and clipped once, by the joint norm."""
    (expected,) = run_trainers(1, lambda _: weights(trained(tmp_path)))

    def go_on(**changes):
        return weights(
            trained(tmp_path, checkpoint__load_step=3, checkpoint__load_only=True, **changes)
        )

    for found in run_trainers(2, lambda _: go_on()):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=0, atol=2e-5), name
    # It would not be seen if data or clipping did not matter.
    for changes in {"rows": 1}, {"training__max_norm": 1e9}:
        (other,) = run_trainers(1, lambda _, changes=changes: go_on(**changes))
        assert not torch.allclose(other["lm_head.weight"], expected["lm_head.weight"], atol=1e-3)


PIPELINE = {
    "parallelism__pipeline_parallel_degree": 2,
    "parallelism__num_pp_microbatches": 2,
}


def test_a_pipeline_with_two_parts_on_each_rank(tmp_path):
    """It goes on with what one rank has saved, resumes, and trains what one rank trains."""
    (expected,) = run_trainers(1, lambda _: weights(trained(tmp_path)))

    def job(rank):
        straight = trained(tmp_path, checkpoint__load_step=3, checkpoint__interval=1, **PIPELINE)
        assert len(straight.model_parts) == len(straight.optimizers) == 2
        assert all(opt.ranks is None for opt in straight.optimizers)
        again = trained(
            tmp_path,
            checkpoint__load_step=4,
            checkpoint__load_only=True,
            debug__seed=1,
            **PIPELINE,
        )
        assert_same(weights(again), weights(straight))
        assert_same(state(again), state(straight))
        return weights(straight)

    here, there = run_trainers(2, job)
    assert not here.keys() & there.keys()
    found = here | there
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=2e-5), name


def test_overrides_in_a_pipeline(tmp_path):
    """A part has some of what they are about; what no part of any rank has is a typo."""

    def job(rank):
        own = {"lm_head.*": {"lr": 0.5}, "layers.0.*": {"weight_decay": 0.0}}
        made = trainer(tmp_path, {"overrides": own}, **PIPELINE)
        found = {
            name: (group["lr"], group["weight_decay"])
            for opt in made.optimizers
            for group in opt.param_groups
            for name in group["param_names"]
        }
        with pytest.raises(ValueError, match=r"'lm_heat\.\*' matches no .* part on any rank"):
            trainer(tmp_path, {"overrides": {**own, "lm_heat.*": {"lr": 0.5}}}, **PIPELINE)
        return found

    here, there = run_trainers(2, job)
    rates = {name for name, (rate, _) in (here | there).items() if rate > 0.02}  # in warmup
    assert rates == {"lm_head.weight"}
    kept = {name for name, (_, decay) in (here | there).items() if decay == 0}
    assert len(kept) == 7
    assert all(name.startswith("layers.0.") for name in kept)


def built(config, *parts):
    return config.build(model_parts=list(parts))


def model_of(family, flavor="debugmodel"):
    return importlib.import_module(f"torchtitan.models.{family}").model_registry(flavor).model


def test_fused_weights_step_as_separate_ones():
    """By torchtitan's own way to tell queries, keys and values apart."""
    config = model_of("qwen3").layers[0].attention.qkv_linear
    fused = config.build()
    with torch.no_grad():
        fused.wqkv.weight.normal_()
    apart = fused.state_dict()
    assert [tuple(value.shape) for value in apart.values()] == [
        (2048, 256),
        (1024, 256),
        (1024, 256),
    ]
    alone = {name: nn.Parameter(value.clone()) for name, value in apart.items()}
    optimizers = built(samestep.torchtitan.optimizers(lr=1e-2), fused)
    opt = samestep.MuonAdamW(list(alone.items()), lr=1e-2)
    for step in range(2):
        grads = type(fused)(config)
        with torch.no_grad():
            grads.wqkv.weight.normal_(generator=torch.Generator().manual_seed(step))
        fused.wqkv.weight.grad = grads.wqkv.weight.detach().clone()
        for name, value in grads.state_dict().items():
            alone[name].grad = value.clone()
        optimizers.step()
        opt.step()
    assert_same(dict(fused.state_dict()), {name: p.detach() for name, p in alone.items()})


BLOCKS = {  # matrices of every kind of weight in one layer, and weights that are none
    ("llama3", "debugmodel"): ({"wqkv.weight": 3, "wo.weight": 1}, {"norm.weight"}),
    ("qwen3", "debugmodel_moe"): (
        {"wqkv.weight": 3, "w1_EFD": 64, "w2_EDF": 64, "w3_EFD": 64},
        {"router.gate.weight"},
    ),
    ("deepseek_v3", "debugmodel"): (
        {"wkv_a.weight": 2, "wkv_b.weight": 32, "w1_EFD": 8, "shared_experts.w1.weight": 1},
        {"router.gate.weight"},
    ),
    ("gpt_oss", "debugmodel"): (
        {"wqkv.weight": 3, "mlp1_weight_EGD": 16, "mlp2_weight_EDF": 8},
        {"router.gate.weight", "mlp1_bias_EG", "mlp2_bias_ED", "router.gate.bias", "sinks"},
    ),
}


@pytest.mark.parametrize(("family", "flavor"), BLOCKS)
def test_what_its_modules_say(family, flavor):
    with torch.device("meta"):
        model = model_of(family, flavor).build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = samestep.MuonAdamW(
            model, lr=1e-2, recipe=samestep.torchtitan.recipe(model), deferred=True
        )
    cut, others = BLOCKS[family, flavor]
    names = {
        param: name
        for group in opt.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }
    for end, count in cut.items():
        found = {
            sum(len(block.matrices) for block in opt.plan.blocks[param])
            for param, name in names.items()
            if name.endswith(end)
        }
        assert found == {count}, end
    for end in others:
        found = {opt.plan.blocks[param] for param, name in names.items() if name.endswith(end)}
        assert found == {None}, end


def test_what_is_refused():
    titan = sys.modules["torchtitan.components.optimizer"]
    model = nn.Sequential(nn.Linear(4, 4))
    config = samestep.torchtitan.optimizers(lr=1e-2)
    config.param_groups = titan.default_adamw().param_groups
    with pytest.raises(ValueError, match=r'options=\{"overrides"'):
        built(config, model)
    config = samestep.torchtitan.optimizers(lr=1e-2)
    config.implementation = "fused_opt_states_bf16"
    with pytest.raises(ValueError, match=r'options=\{"state_dtypes"'):
        built(config, model)
    with pytest.raises(ValueError, match=r"set training\.max_norm"):
        built(samestep.torchtitan.optimizers(lr=1e-2, max_grad_norm=1.0), model)
    for name in ("fused", "foreach", "for-loop"):
        config = samestep.torchtitan.optimizers(lr=1e-2)
        config.implementation = name
        (opt,) = built(config, model)
        assert all(not group.get("fused") for group in opt.param_groups)


def test_its_command_line(tmp_path, monkeypatch):
    """A module with a configuration, and options as flags."""
    from torchtitan.config import ConfigManager

    (tmp_path / "ours.py").write_text(
        "import samestep\n"
        "from torchtitan.models.llama3.config_registry import llama3_debugmodel\n"
        "def muon():\n"
        "    config = llama3_debugmodel()\n"
        "    config.optimizer = samestep.torchtitan.optimizers(lr=3e-4)\n"
        "    return config\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = ConfigManager().parse_args(
        ["--module", "ours", "--config", "muon", "--optimizer.options.lr", "0.5"]
    )
    (opt,) = built(config.optimizer, nn.Sequential(nn.Linear(4, 4)))
    assert {group["lr"] for group in opt.param_groups} == {0.5}
