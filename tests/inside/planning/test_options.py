"""Options of `samestep plan` and models that it reads, without the command."""

import json
from itertools import product
from typing import get_args

import pytest
import torch
from torch import nn

import samestep
from samestep import cli
from samestep.groups.distribution import Offload
from samestep.groups.state_flags import OffloadWord, StateWord, state_dtypes_of
from samestep.lab.estimate import scaling
from samestep.lab.estimate.cluster import Job
from samestep.lab.estimate.command import settings_of
from samestep.lab.estimate.hardware import PRESETS
from samestep.lab.estimate.memory import rank_memory
from samestep.lab.estimate.model import load_model
from samestep.lab.estimate.options import Options, questions, read_mesh
from samestep.mesh.degrees import Degrees
from samestep.rules.checks import OF_MOMENTS
from samestep.rules.state import MASTERS
from samestep.tooling.request import BadRequestError
from tests.planning.test_command import FACTORY, LIKE_LLAMA, LLAMA, alone, refused  # noqa: F401


def test_scaling_is_of_the_settings_that_were_asked_for(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(FACTORY)
    seen, real = [], scaling.point

    def spy(job, divided):
        sizes = job.degrees.data, job.degrees.tp, job.batch.tokens, divided.tokens
        seen.append((job.settings.overlap, job.settings.bucket_size, *sizes))
        return real(job, divided)

    monkeypatch.setattr(scaling, "point", spy)
    monkeypatch.setattr(scaling, "RANKS", (2, 4, 6, 8))
    words = ["plan", f"{tmp_path / 'mine.py'}:model", "--mesh", "dp=2,tp=4", "--scaling"]
    words += ["--no-overlap", "--bucket-size", "1000", "--tokens", "64"]
    assert cli.main([*words, "--out", str(tmp_path / "o")]) == 0
    # The other axes stay, and divide the numbers of ranks.
    assert seen == [(False, 1000, 1, 4, 64, 64), (False, 1000, 2, 4, 64, 32)]
    assert "Scaling with data parallel ranks" in capsys.readouterr().out
    content = json.loads((tmp_path / "o" / "plan.json").read_text())["scaling"]
    assert content["batch"]["tokens"] == 64
    assert [each["ranks"] for each in content["points"]] == [4, 8]
    assert (tmp_path / "o" / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "o" / "plan.html").read_text().count("data:image/png;base64,") == 3


def test_state_is_kept_in_the_words_of_the_optimizer(tmp_path):
    """Every word that `state_dtypes` has for moments is a flag, and plans the bytes it takes."""
    assert {*get_args(StateWord)} == {*OF_MOMENTS, "float32", "bfloat16"}
    assert {*get_args(OffloadWord)} == {*get_args(Offload), "none"}
    (tmp_path / "mine.py").write_text(FACTORY)
    model = load_model(f"{tmp_path / 'mine.py'}:wide", torch.bfloat16)
    found = {}
    for word, remainders in product(get_args(StateWord), (False, True)):
        options = Options(state=word, remainders=remainders, sharding="none")
        plan = Job(model, Degrees(1), settings_of(options), PRESETS["h200x8"]).grid_plan(0)
        memory = rank_memory(plan, 0)
        found[word, remainders] = (memory.state, memory.main_parameters)
        kept = samestep.MuonAdamW(
            nn.Sequential(nn.Embedding(32, 256), nn.Linear(256, 64)).bfloat16(),
            master_weights=True,
            state_dtypes=state_dtypes_of(word, remainders=remainders),
        ).state.values()
        bytes_of = [(key, tensor.nbytes) for state in kept for key, tensor in state.items()]
        main = sum(size for key, size in bytes_of if key in MASTERS)
        assert found[word, remainders] == (sum(size for _, size in bytes_of) - main, main)
    assert found["8bit/32", False][0] > found["8bit/64", False][0] > found["8bit", False][0]
    assert found["float32", True][1] * 2 == found["float32", False][1]


def test_a_config_of_hugging_face(tmp_path, capsys):
    import torch

    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    model = load_model(str(path), torch.bfloat16)
    assert model.parameters == 2 * 128 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64) + 5 * 64
    for key in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"):
        path.write_text(json.dumps({k: v for k, v in LLAMA.items() if k != key}))
        assert f"lacks {key!r}" in refused([str(path)], capsys)
    path.write_text(json.dumps({**LLAMA, "vocab_size": "many"}))
    assert "vocab_size must be a whole number above 0" in refused([str(path)], capsys)
    path.write_text("{")
    assert "is no JSON" in refused([str(path)], capsys)


LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip


# Weights as transformers has them: rows, columns, and how many matrices one is to Muon (0: it is
# AdamW's), with how many experts each; and sizes of vectors.
TABLES = [(64, 64, 0), (64, 64, 0)]  # of 64 words, and the head or 64 positions


QKVO = [(64, 64, 1), (32, 64, 1), (32, 64, 1), (64, 64, 1)]


GATED = [(128, 64, 1), (128, 64, 1), (64, 128, 1)]


ROUTER, STACKS = (4, 64, 0), [(4 * 256, 64, 4 * 2), (4 * 64, 128, 4)]


LATENT_ATTENTION = [(32, 64, 1), (96, 32, 4), (40, 64, 2), (128, 32, 8), (64, 64, 1)]


SMALL_STACKS = [(4 * 64, 64, 4 * 2), (4 * 64, 32, 4)]


SHARED = [(32, 64, 1), (32, 64, 1), (64, 32, 1)]


OF_GPT2 = [(64, 192, 3), (64, 64, 1), (64, 256, 1), (256, 64, 1)]


TRANSFORMERS = {
    "llama": (LIKE_LLAMA, [*TABLES, *2 * (QKVO + GATED)], 5 * [64]),
    "qwen2": (LIKE_LLAMA, [*TABLES, *2 * (QKVO + GATED)], [64, *2 * [64, 64, 64, 32, 32]]),
    "qwen3": (LIKE_LLAMA, [*TABLES, *2 * (QKVO + GATED)], [64, *2 * [64, 64, 16, 16]]),
    "mixtral": (
        {**LIKE_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
        [*TABLES, *2 * [*QKVO, ROUTER, *STACKS]],
        5 * [64],
    ),
    "deepseek_v3": (
        {**LIKE_LLAMA, **LATENT, "num_key_value_heads": 4},
        [*TABLES, *2 * LATENT_ATTENTION, *GATED, ROUTER, *SMALL_STACKS, *SHARED],
        [64, *2 * [64, 64, 32, 32]],
    ),
    "gpt2": (
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64},
        [*TABLES, *2 * OF_GPT2],
        [64, 64, *2 * [64, 64, 64, 64, 192, 64, 256, 64]],
    ),
    "gpt_neox": (
        {**LIKE_LLAMA, "num_key_value_heads": 4, "max_position_embeddings": 64},
        [*TABLES, *2 * [(192, 64, 3), (64, 64, 1), (128, 64, 1), (64, 128, 1)]],
        [64, 64, *2 * [64, 64, 64, 64, 192, 64, 128, 64]],
    ),
    "opt": (
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 128,
            "max_position_embeddings": 64,
            "vocab_size": 64,
            "word_embed_proj_dim": 64,
        },
        [(64, 64, 0), (66, 64, 0), *2 * [*4 * [(64, 64, 1)], (128, 64, 1), (64, 128, 1)]],
        [64, 64, *2 * [64, 64, 64, 64, 64, 64, 64, 64, 128, 64]],
    ),
}


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_configs_of_transformers_are_counted_to_the_byte(kind, tmp_path):
    """In 8 bits: a code per element, 4 bytes per block, and 4 to count the steps of a matrix."""
    config, matrices, vectors = TRANSFORMERS[kind]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "model_type": kind}))
    model = load_model(str(path), torch.bfloat16)
    state = sum(2 * 4 * size + 4 for size in vectors)
    for rows, columns, parts in matrices:
        block = next(size for size in (256, 128, 64, 32) if columns % size == 0)
        moments = 1 if parts else 2
        state += moments * (rows * columns + 4 * rows * columns // block) + 4 * max(parts, 1)
    elements = sum(rows * columns for rows, columns, _ in matrices) + sum(vectors)
    assert model.parameters == elements
    options = Options(state="8bit", remainders=True, sharding="none")
    plan = Job(model, Degrees(1), settings_of(options), PRESETS["h200x8"]).grid_plan(0)
    memory = rank_memory(plan, 0)
    assert (memory.state, memory.main_parameters) == (state, 2 * elements)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("llama", "attention_bias", True), ("llama", "mlp_bias", True),
        ("gemma", "attention_bias", True), ("qwen3_moe", "decoder_sparse_step", 2),
        ("qwen3_moe", "mlp_only_layers", [0]), ("gpt2", "add_cross_attention", True),
        ("gpt_neox", "attention_bias", False), ("opt", "word_embed_proj_dim", 32),
        ("opt", "do_layer_norm_before", False), ("deepseek_v3", "qk_nope_head_dim", 8),
    ],
)  # fmt: skip
def test_options_that_would_be_miscounted_are_refused(kind, key, value, tmp_path, capsys):
    config = TRANSFORMERS[kind][0] if kind in TRANSFORMERS else {**LIKE_LLAMA, "num_experts": 4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "model_type": kind}))
    load_model(str(path), torch.bfloat16)
    path.write_text(json.dumps({**config, "model_type": kind, key: value}))
    assert f"{key} is {value!r}, and without transformers" in refused([str(path)], capsys)


@pytest.mark.usefixtures("alone")
def test_what_a_file_lacks_is_as_in_the_class(tmp_path):
    """A head of gemma has 256 channels and ties its embedding, of qwen3 128, unless told."""
    small = {key: LIKE_LLAMA[key] for key in LIKE_LLAMA if key != "head_dim"}
    path = tmp_path / "config.json"
    for kind, head, tables, extra in (("gemma", 256, 1, 0), ("qwen3", 128, 2, 4 * 128)):
        path.write_text(json.dumps({**small, "model_type": kind}))
        found = load_model(str(path), torch.bfloat16).parameters
        layer = (4 + 2 + 2 + 4) * head * 64 + 3 * 128 * 64 + 2 * 64
        assert found == tables * 64 * 64 + 2 * layer + 64 + extra


def test_the_template_for_deepseek_on_2048_is_questioned():
    with pytest.raises(BadRequestError) as caught:
        read_mesh("tp=8,pp=16,ep=32,dp=8", 2048)
    text = str(caught.value)
    assert "tp 8 x pp 16 x ep 32 x dp 8 = 32,768 ranks, and there are 2,048" in text
    assert "as in Megatron) they are 1,024" in text
    assert "then dp 16 makes 2,048" in text
    assert "no dp does: 2,048 / 4,096 = 0.5" in text
    assert read_mesh("pp=16,ep=64,dp=2", 2048) == Degrees(2048, pp=16, ep=64)
    assert read_mesh("tp=8", 64) == Degrees(64, tp=8)


def test_what_fits_may_still_be_questioned():
    import torch

    model = load_model("deepseek-v3", torch.bfloat16)
    found = questions(model, Degrees(2048, pp=16, ep=64))
    assert len(found) == 1
    assert found[0].startswith("layers 61 % pp 16 = 13: take layers 48 or 64")
    llama = load_model("llama-70b", torch.bfloat16)
    found = questions(llama, Degrees(48, tp=3))
    assert any(line.startswith("key and value heads 8 % tp 3 = 2") for line in found)
    assert "tp=16 spans hosts of 8 ranks" in questions(llama, Degrees(16, tp=16))
    assert "no experts" in questions(llama, Degrees(16, ep=2))[0]
