"""Recipes on transformers' own classes: every parameter, and steps as with separate matrices."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import samestep
from samestep.recipes import RECIPES
from tests.ranks import run_cases
from tests.recipe_models import BASE, CASES, GATE, MOE, kind
from tests.test_table import read_table

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def found_in(opt: samestep.MuonAdamW) -> dict[str, str]:
    """What the table says, by kind of parameter; fails if layers that are alike differ."""
    found: dict[str, str] = {}
    for row in read_table(opt.table())[0]:
        what = f"M {row['blocks']}" if row["rule"] == "muon" else f"A {row['role']}"
        assert found.setdefault(kind(row["parameter"]), what) == what, row
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_is_what_it_was_written_down_to_be(name):
    model = CASES[name].make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = found_in(samestep.MuonAdamW(model))
    vectors = {kind(n) for n, p in model.named_parameters() if p.squeeze().ndim < 2}
    vectors -= CASES[name].expected.keys()
    assert {n: what for n, what in found.items() if n not in vectors} == CASES[name].expected
    assert {found[n] for n in vectors} <= {"A scalar"}


def test_every_recipe_is_tried():
    tried = {CASES[name].make().config.model_type for name in CASES}
    assert tried == set(RECIPES)


# Experts that no recipe knows: classes of transformers, and where their layers keep them.
GUESSED = {
    "Olmoe": ({"num_experts": 3}, "mlp", "gate", 24),
    "Glm4Moe": (
        {**MOE, "n_routed_experts": 3, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
        "mlp", "gate", 6,
    ),
    "GraniteMoe": ({"num_local_experts": 3}, "block_sparse_moe", "router", 24),
    "Jamba": (
        {"num_experts": 3, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1,
         "expert_layer_offset": 0, "use_mamba_kernels": False, "mamba_d_state": 4},
        "feed_forward", "router", 24,
    ),
    "Lfm2Moe": (
        {**MOE, "num_dense_layers": 0, "layer_types": ["conv", "full_attention"]},
        "feed_forward", "gate", 6,
    ),
    "AriaText": ({"moe_num_experts": 3}, "mlp", "router", 24),
    "Phimoe": ({"num_local_experts": 3}, "mlp", "router", 24),
    "NemotronH": (
        {"n_routed_experts": 3, "moe_intermediate_size": 6, "head_dim": 4,
         "moe_shared_expert_intermediate_size": 6, "layers_block_type": ["moe", "moe"]},
        "mixer", "gate", 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", GUESSED)
def test_experts_of_classes_without_a_recipe(kind):
    values, layer, router, hidden = GUESSED[kind]
    config = getattr(transformers, f"{kind}Config")(**{**BASE, **values})
    assert config.model_type not in RECIPES
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt = samestep.MuonAdamW(model)
    assert sum("no recipe knows the experts" in str(each.message) for each in caught) == 1
    found = found_in(opt)
    inside = f"model.layers.N.{layer}"
    assert found[f"{inside}.{router}.weight"] == GATE
    if kind == "AriaText" and f"{inside}.experts.fc1.weight" in found:  # until transformers 5.x
        assert found[f"{inside}.experts.fc1.weight"] == f"M 6 of {hidden} x 16"
        assert found[f"{inside}.experts.fc2.weight"] == f"M 3 of 16 x {hidden}"
        return
    assert found[f"{inside}.experts.down_proj"] == f"M 3 of 16 x {hidden}"
    if kind == "NemotronH":
        assert found[f"{inside}.experts.up_proj"] == f"M 3 of {hidden} x 16"
    else:
        assert found[f"{inside}.experts.gate_up_proj"] == f"M 6 of {hidden} x 16"
    assert not any(what == "A tensor" for what in found.values())


# --- the same steps as with separate matrices ---------------------------------------------------


def halves(rows):
    return [list(range(rows // 2)), list(range(rows // 2, rows))]


def by_head(sizes, heads):
    """Rows of each part, which every head has after another."""
    parts = [[] for _ in sizes]
    row = 0
    for _ in range(heads):
        for part, size in zip(parts, sizes, strict=True):
            part.extend(range(row, row + size))
            row += size
    return parts


def after_each_other(*sizes):
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return [list(range(start, start + n)) for start, n in zip(starts, sizes, strict=True)]


# By hand: rows (out) of the matrices in each fused weight, and whether it is stored as (in, out).
APART = {
    "phi3": {"qkv_proj": (after_each_other(16, 8, 8), False), "gate_up": (halves(48), False)},
    "glm4": {"gate_up": (halves(48), False)},
    "mixtral": {"experts.gate_up": (halves(48), False)},
    "qwen2_moe": {"experts.gate_up": (halves(12), False)},
    "qwen3_moe": {"experts.gate_up": (halves(12), False)},
    "qwen3_next": {
        "experts.gate_up": (halves(12), False),
        "in_proj_qkvz": (by_head((3, 3, 10, 10), 2), False),
        "q_proj": (by_head((4, 4), 4), False),
    },
    **{
        name: {
            "experts.gate_up": (halves(12), False),
            "q_b_proj": (after_each_other(6, 6, 6, 6), False),
            "kv_b_proj": (after_each_other(4, 3, 4, 3, 4, 3, 4, 3), False),
            "kv_a_proj_with_mqa": (after_each_other(8, 2), False),
        }
        for name in ("deepseek_v2", "deepseek_v3")
    },
    "gpt_oss": {
        "experts.gate_up_proj": ([list(range(0, 48, 2)), list(range(1, 48, 2))], True),
        "experts.down_proj": (after_each_other(16), True),
    },
    "llama4": {
        "experts.gate_up_proj": (halves(48), True),
        "experts.down_proj": (after_each_other(16), True),
    },
    "gpt2": {
        "c_attn": (after_each_other(16, 16, 16), True),
        "attn.c_proj": (after_each_other(16), True),
        "mlp.c_fc": (after_each_other(64), True),
        "mlp.c_proj": (after_each_other(16), True),
    },
    "gpt2, cross": {
        ".attn.c_attn": (after_each_other(16, 16, 16), True),
        "crossattention.c_attn": (after_each_other(16, 16), True),
        "crossattention.q_attn": (after_each_other(16), True),
        "attn.c_proj": (after_each_other(16), True),
        "crossattention.c_proj": (after_each_other(16), True),
        "mlp.c_fc": (after_each_other(64), True),
        "mlp.c_proj": (after_each_other(16), True),
    },
    "gpt_neox": {"query_key_value": (by_head((4, 4, 4), 4), False)},
    "bloom": {"query_key_value": (by_head((4, 4, 4), 4), False)},
    "falcon, groups": {"query_key_value": (by_head((8, 4, 4), 2), False)},
    "falcon, one key": {"query_key_value": (after_each_other(16, 4, 4), False)},
    "falcon, by head": {"query_key_value": (by_head((4, 4, 4), 4), False)},
    "modernbert": {"Wqkv": (after_each_other(16, 16, 16), False), "Wi": (halves(48), False)},
    "mamba": {"in_proj": (halves(64), False), "x_proj": (after_each_other(3, 4, 4), False)},
    "mamba2": {"in_proj": (after_each_other(32, 32, 4, 4, 4), False)},
}


def matrices(case, name, tensor):
    """A parameter as the matrices that are in it, (out, in) each; others as they are."""
    found = [own for part, own in APART.get(case, {}).items() if f"{part}" in name]
    if not found or tensor.ndim < 2 or name.endswith("bias"):
        return list(tensor) if tensor.ndim == 3 and "experts" in name else [tensor]
    (rows, transposed) = found[0]
    stack = tensor if tensor.ndim == 3 else tensor[None]
    return [(m.T if transposed else m)[own].contiguous() for m in stack for own in rows]


def gradients(model, inputs):
    """Of a real loss; zeros where a step leaves a parameter out."""
    out = model(**inputs)
    loss = out.loss if getattr(out, "loss", None) is not None else out.logits.square().mean()
    model.zero_grad()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_separate_matrices(name):
    """Rates that know tall from wide, and a variance per row: both by (out, in)."""
    options = {"lr": 0.02, "adjust_lr": "original", "variance_beta2": 0.9}
    model = CASES[name].make()
    model.eval()  # no dropout
    opt = samestep.MuonAdamW(model, **options)
    adamw = {row["parameter"] for row in read_table(opt.table())[0] if row["rule"] == "adamw"}
    apart = {
        f"{own} {number}": nn.Parameter(matrix.detach().clone())
        for own, param in model.named_parameters()
        for number, matrix in enumerate(matrices(name, own, param))
    }
    rules = {
        own: {"rule": "adamw" if own.rpartition(" ")[0] in adamw else "muon", "split_sizes": None}
        for own in apart
    }
    for own in rules:
        if rules[own]["rule"] == "adamw":
            del rules[own]["split_sizes"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names of fused weights, which these no longer are
        separate = samestep.MuonAdamW(apart.items(), overrides=rules, **options)
    moved = set()
    for _ in range(2):
        for own, grad in gradients(model, CASES[name].inputs()).items():
            moved.add(own)
            for number, matrix in enumerate(matrices(name, own, grad)):
                apart[f"{own} {number}"].grad = matrix.clone()
        opt.step()
        separate.step()
    assert len(moved) > 10
    for own, param in model.named_parameters():
        for number, matrix in enumerate(matrices(name, own, param)):
            expected = apart[f"{own} {number}"]
            assert torch.allclose(matrix, expected, rtol=0, atol=1e-6), f"{own} {number}"


# --- what the rows are to the model ---------------------------------------------------------------

# A part of a fused weight without which nothing reaches a module: its values, or its gate.
NOTHING = {
    "phi3": [("qkv_proj", 2, "o_proj"), ("gate_up", 0, "down_proj"), ("gate_up", 1, "down_proj")],
    "glm4": [("gate_up", 0, "down_proj"), ("gate_up", 1, "down_proj")],
    "mixtral": [("experts.gate_up", 0, "mlp.experts"), ("experts.gate_up", 1, "mlp.experts")],
    "qwen3_moe": [("experts.gate_up", 0, "mlp.experts"), ("experts.gate_up", 1, "mlp.experts")],
    "deepseek_v3": [("kv_b_proj", [1, 3, 5, 7], "o_proj")],
    "gpt_oss": [("experts.gate_up_proj", 0, "mlp.experts")],
    "llama4": [("experts.gate_up_proj", 0, "feed_forward.experts")],
    "gpt2": [("c_attn", 2, "attn.c_proj")],
    "gpt_neox": [("query_key_value", 2, "attention.dense")],
    "bloom": [("query_key_value", 2, "self_attention.dense")],
    "falcon, groups": [("query_key_value", 2, "self_attention.dense")],
    "falcon, one key": [("query_key_value", 2, "self_attention.dense")],
    "falcon, by head": [("query_key_value", 2, "self_attention.dense")],
    "modernbert": [("Wqkv", 2, "attn.Wo"), ("Wi", 1, "mlp.Wo")],
    "qwen3_next": [("in_proj_qkvz", 2, "linear_attn.norm")],
    "mamba": [("in_proj", 1, "mixer.out_proj")],
    "mamba2": [("in_proj", 0, "mixer.out_proj")],
}


@pytest.mark.parametrize(
    ("name", "part", "which", "module"),
    [(name, *own) for name, all_ in NOTHING.items() for own in all_],
)
def test_the_rows_written_down_are_those_that_the_model_uses(name, part, which, module):
    """Without its values attention gives nothing, and so does a gate that is shut."""
    model = CASES[name].make().eval()
    seen = []

    def look(_module, inputs, output):
        seen.append(output if module.endswith("experts") else inputs[0])

    for path, own in model.named_modules():
        if path.endswith(module):
            own.register_forward_hook(look)
    rows, transposed = APART[name][part]
    cleared = [row for n in (which if isinstance(which, list) else [which]) for row in rows[n]]
    with torch.no_grad():
        model(**CASES[name].inputs())
        assert all(float(values.abs().max()) > 0 for values in seen)
        seen.clear()
        for path, param in model.named_parameters():
            if path.endswith("bias"):
                param.zero_()
            elif part in path:
                (param.mT if transposed else param)[..., cleared, :] = 0
        model(**CASES[name].inputs())
    assert seen
    assert all(float(values.abs().max()) == 0 for values in seen)


# --- how a recipe is found ------------------------------------------------------------------------


def test_a_recipe_is_found_inside_of_another_model():
    class Task(nn.Module):
        def __init__(self):
            super().__init__()
            self.policy = CASES["gpt_neox"].make()
            self.value = CASES["gpt_oss"].make()

    found = found_in(samestep.MuonAdamW(Task()))
    expected = {f"policy.{n}": what for n, what in CASES["gpt_neox"].expected.items()}
    expected |= {f"value.{n}": what for n, what in CASES["gpt_oss"].expected.items()}
    assert {n: found[n] for n in expected} == expected


def test_a_recipe_is_asked_for_or_not():
    model = CASES["mixtral"].make()
    experts = "model.layers.N.mlp.experts.gate_up_proj"
    assert found_in(samestep.MuonAdamW(model, recipe="mixtral"))[experts] == "M 6 of 24 x 16"
    with pytest.warns(UserWarning, match="no recipe knows the experts"):
        assert found_in(samestep.MuonAdamW(model, recipe=None))[experts] == "M 6 of 24 x 16"
    model.config.model_type = "somebody's own"
    with pytest.warns(UserWarning, match="no recipe knows the experts"):
        samestep.MuonAdamW(model)
    assert found_in(samestep.MuonAdamW(model, recipe="mixtral"))[experts] == "M 6 of 24 x 16"
    with pytest.raises(ValueError, match="recipe 'mixtrals' is not known; choose one of"):
        samestep.MuonAdamW(model, recipe="mixtrals")
    with pytest.raises(ValueError, match=r"recipe 'gpt2' reads the model's config.*n_embd"):
        samestep.MuonAdamW(nn.Linear(4, 4), recipe="gpt2")


def test_overrides_win_over_a_recipe():
    model = CASES["gpt_oss"].make()
    opt = samestep.MuonAdamW(
        model,
        overrides={"*.experts.*_proj": {"rule": "adamw"}, "*.router.weight": {"rule": "muon"}},
    )
    found = found_in(opt)
    assert found["model.layers.N.mlp.experts.gate_up_proj"] == "A matrix"
    assert found["model.layers.N.mlp.router.weight"] == "M 3 x 16"
    (reason, *_) = [
        row["reason"] for row in read_table(opt.table())[0] if "router.weight" in row["parameter"]
    ]
    assert reason == "asked for"


def test_overrides_for_named_parameters_are_those_of_the_recipe():
    model = CASES["deepseek_v3"].make()
    named = [(n, p) for n, p in model.named_parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = samestep.MuonAdamW(named, overrides=samestep.recipes.overrides(model))
    whole = found_in(samestep.MuonAdamW(model))
    assert {n: w for n, w in found_in(opt).items() if w[0] == "M"} == {
        n: w for n, w in whole.items() if w[0] == "M"
    }


def test_a_model_that_was_changed_is_told():
    model = CASES["gpt_neox"].make()
    model.gpt_neox.layers[0].attention.query_key_value = nn.Linear(16, 50)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        samestep.MuonAdamW(model)
    texts = [str(each.message) for each in found]
    assert len(texts) == 2
    assert "recipe 'gpt_neox' does not fit gpt_neox.layers.0.attention.query_key_value" in texts[0]
    assert "looks like a fused weight" in texts[1]


# --- on two ranks --------------------------------------------------------------------------------


def words_of(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(3, 50, (2, 7), generator=generator)


def loss_of(model, step, rank):
    return model(input_ids=words_of(step, rank)).logits.square().mean()


def test_models_with_recipes_on_two_ranks():
    """zero2, flat and FSDP2, with other words on each rank, against one process with all."""
    options = {"lr": 0.02, "adjust_lr": "original", "variance_beta2": 0.9, "max_grad_norm": 1.0}
    names = ["gpt_oss", "falcon, groups", "gpt2"]
    layouts = {"zero2": {"crossover": 1}, "flat": {"buffers": "flat"}, "fsdp": {}}

    def job(rank, case):
        name, layout = case
        model = CASES[name].make().eval()
        if layout == "fsdp":
            fully_shard(model)
        opt = samestep.MuonAdamW(model, **options, **layouts[layout])
        for step in range(3):
            loss_of(model, step, rank).backward()
            opt.step()
            opt.zero_grad()
        return {n: opt.full_parameter(n) for g in opt.param_groups for n in g["param_names"]}

    for name in names:
        model = CASES[name].make().eval()
        opt = samestep.MuonAdamW(model, **options)
        for step in range(3):
            (sum(loss_of(model, step, rank) for rank in range(2)) / 2).backward()
            opt.step()
            opt.zero_grad()
        expected = dict(model.named_parameters())
        cases = [(name, layout) for layout in layouts]
        for case, of_ranks in run_cases(2, cases, job):
            for found in of_ranks:
                assert found.keys() <= expected.keys()
                assert len(found) > 10
                for own, value in found.items():
                    assert torch.equal(value, of_ranks[0][own]), (case, own)
                    assert (value - expected[own]).abs().max() < 2e-5, (case, own)
