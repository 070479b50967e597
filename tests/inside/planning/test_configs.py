"""Models of a config.json beside transformers' own classes, on the meta device."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from samestep.lab.estimate import configs
from samestep.lab.estimate.cluster import Job
from samestep.lab.estimate.command import settings_of
from samestep.lab.estimate.hardware import PRESETS
from samestep.lab.estimate.memory import rank_memory
from samestep.lab.estimate.model import load_model
from samestep.lab.estimate.options import Options
from samestep.mesh.degrees import Degrees
from samestep.tooling.request import BadRequestError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

DECODERS = sorted(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
# Of these the class's own defaults make no model.
BROKEN = {
    "cohere_compass_text", "dbrx", "dots1", "gemma3n", "gemma4_assistant",
    "gemma4_unified_assistant", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2_moe", "ministral",
    "musicgen", "musicgen_melody", "nemotron", "qwen4_exp", "qwen4_exp_text", "reformer",
}  # fmt: skip
NAMED = (
    "qwen3_next", "starcoder2", "phi", "qwen2_moe", "llama4_text", "jamba", "falcon", "bloom",
    "olmoe", "glm4_moe", "granitemoe", *configs.KNOWN,
)  # fmt: skip


def elements(module: torch.nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def built(config) -> torch.nn.Module:
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_config(config)


def test_decoders_are_counted_as_transformers_builds_them(tmp_path, monkeypatch):
    """Every type by its default configuration; without transformers as many, or it is refused."""
    assert set(NAMED) <= set(DECODERS)
    path = tmp_path / "config.json"
    counted, alone = set(), set()
    for kind in DECODERS:
        if kind in BROKEN:
            continue
        config = transformers.CONFIG_MAPPING[kind]()
        expected = elements(built(config))
        path.write_text(json.dumps({**config.to_diff_dict(), "model_type": kind}, default=str))
        assert load_model(str(path), torch.bfloat16).parameters == expected, kind
        counted.add(kind)
        with monkeypatch.context() as patch:
            patch.setattr(configs, "find_spec", lambda name: None)
            if kind in configs.KNOWN:
                assert load_model(str(path), torch.bfloat16).parameters == expected, kind
                alone.add(kind)
            else:
                with pytest.raises(BadRequestError, match=r"^not one of the known types"):
                    load_model(str(path), torch.bfloat16)
    assert set(NAMED) <= counted
    assert len(counted) > 40
    assert alone == set(configs.KNOWN)


@pytest.mark.parametrize(
    ("kind", "changed", "refused"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, True),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 64}, False),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1]}, True),
        ("gpt2", {"add_cross_attention": True}, True),
        ("gpt2", {"n_inner": 512, "n_layer": 3}, False),
        ("gpt_neox", {"attention_bias": False}, True),
        ("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": False}, True),
        ("opt", {"ffn_dim": 100}, False),
        ("deepseek_v2", {"q_lora_rank": None, "first_k_dense_replace": 2}, False),
        ("deepseek_v3", {"qk_nope_head_dim": 64}, True),
    ],
)
def test_options_count_as_in_transformers(kind, changed, refused, tmp_path, monkeypatch):
    config = transformers.CONFIG_MAPPING[kind](**changed)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config.to_diff_dict(), "model_type": kind}, default=str))
    expected = elements(built(config))
    assert load_model(str(path), torch.bfloat16).parameters == expected
    monkeypatch.setattr(configs, "find_spec", lambda name: None)
    if refused:
        with pytest.raises(configs.NotCountedError, match="and without transformers"):
            load_model(str(path), torch.bfloat16)
    else:
        assert load_model(str(path), torch.bfloat16).parameters == expected


def test_the_class_that_a_file_names_is_counted(tmp_path):
    config = transformers.LlamaConfig(num_hidden_layers=1)
    path = tmp_path / "config.json"
    told = {**config.to_diff_dict(), "model_type": "llama"}
    path.write_text(json.dumps({**told, "architectures": ["LlamaForSequenceClassification"]}))
    with torch.device("meta"):
        expected = elements(transformers.LlamaForSequenceClassification(config))
    model = load_model(str(path), torch.bfloat16)
    assert (model.parameters, model.shape) == (expected, None)
    path.write_text(json.dumps({"model_type": "somebody's own"}))
    with pytest.raises(BadRequestError, match=r"not one of the known types.*transformers 5"):
        load_model(str(path), torch.bfloat16)
    path.write_text(json.dumps({"model_type": "nemotron", "head_dim": None, "hidden_size": "x"}))
    with pytest.raises(BadRequestError, match="cannot build a 'nemotron'"):
        load_model(str(path), torch.bfloat16)


def test_rules_are_those_of_the_optimizer_that_trains_it(tmp_path):
    """The state of OLMoE's experts is Muon's, and of its router AdamW's."""
    config = transformers.OlmoeConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_experts=4, vocab_size=128,
        num_attention_heads=4,
    )  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config.to_diff_dict(), "model_type": "olmoe"}))
    model = load_model(str(path), torch.float32)
    of_muon = [
        p
        for name, p in model.module.named_parameters()
        if "experts" in name or ("self_attn" in name and "proj" in name)
    ]
    plan = Job(model, Degrees(1), settings_of(Options(sharding="none")), PRESETS["h200x8"])
    state = rank_memory(plan.grid_plan(0), 0).state
    muon = sum(p.numel() for p in of_muon)
    others = sum(1 for _ in model.module.parameters()) - len(of_muon)
    assert state == 4 * muon + 8 * (model.parameters - muon) + 4 * others  # which count steps
