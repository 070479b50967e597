"""Which rule each parameter of a model follows, and what the user can say about it."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import samestep
from tests.test_table import read_table

WIDTH, VOCABULARY, CLASSES = 8, 50, 10

Optimizer = torch.optim.Optimizer


def raw(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


def linear(rows: int = WIDTH, cols: int = WIDTH, bias: bool = False) -> nn.Linear:
    """A Linear by the shape of its weight, which is what routing looks at."""
    return nn.Linear(cols, rows, bias=bias)


def embedding(rows: int = VOCABULARY, cols: int = WIDTH) -> nn.Embedding:
    return nn.Embedding(rows, cols)


def model_of(leaves: Mapping[str, nn.Module | nn.Parameter]) -> nn.Module:
    """A model with the given modules and raw parameters at the given dotted names."""
    root = nn.Module()
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        holder = root
        for name in parents:
            if name not in holder._modules:
                holder.add_module(name, nn.Module())
            holder = holder.get_submodule(name)
        if isinstance(leaf, nn.Parameter):
            holder.register_parameter(last, leaf)
        else:
            holder.add_module(last, leaf)
    return root


def keys(opt: Optimizer, key: str) -> dict[str, Any]:
    """The value of a group key for each parameter, by name."""
    return {
        name: group.get(key)
        for group in opt.param_groups
        for name in group.get("param_names", [])
    }  # fmt: skip


def rules(opt: Optimizer) -> dict[str, str]:
    return keys(opt, "rule")


def roles(opt: Optimizer) -> dict[str, str]:
    return keys(opt, "role")


def shapes_of_blocks(opt: Optimizer, name: str) -> str:
    return next(r["blocks"] for r in read_table(opt.table())[0] if r["parameter"] == name)


def gpt(layers: int = 2, tied: bool = False) -> nn.Module:
    """The parameters of a small decoder, with separate projections."""
    leaves: dict[str, nn.Module] = {"embed": embedding()}
    for layer in range(layers):
        leaves |= {
            f"blocks.{layer}.norm": nn.LayerNorm(WIDTH),
            f"blocks.{layer}.attn.q": linear(),
            f"blocks.{layer}.attn.k": linear(4),
            f"blocks.{layer}.mlp.up": linear(32, bias=True),
            f"blocks.{layer}.mlp.down": linear(WIDTH, 32, bias=True),
        }
    model = model_of({**leaves, "norm": nn.RMSNorm(WIDTH), "lm_head": linear(VOCABULARY)})
    if tied:
        model.lm_head.weight = model.embed.weight
    return model


GPT_MATRICES = {
    f"blocks.{i}.{n}.weight" for i in (0, 1) for n in ("attn.q", "attn.k", "mlp.up", "mlp.down")
}


# --- models people have -----------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder(tied):
    opt = samestep.MuonAdamW(gpt(tied=tied))
    assert {name for name, rule in rules(opt).items() if rule == "muon"} == GPT_MATRICES
    assert roles(opt)["embed.weight"] == "embedding"
    assert roles(opt).get("lm_head.weight") == (None if tied else "unembedding")
    assert {roles(opt)[n] for n in roles(opt) if "norm" in n or "bias" in n} == {"scalar"}


@pytest.mark.parametrize("head", ["lm_head", "decoder", "to_vocabulary"])
def test_a_tied_weight_is_an_embedding_also_when_the_head_was_registered_first(head):
    """It is listed under the name of the head then, but it is still the embedding."""
    model = model_of({head: linear(VOCABULARY), "blocks.0.up": linear(32), "tokens": embedding()})
    model.get_submodule(head).weight = model.tokens.weight
    assert rules(samestep.MuonAdamW(model)) == {
        f"{head}.weight": "adamw", "blocks.0.up.weight": "muon"
    }  # fmt: skip


MODELS: dict[str, dict[str, tuple[Callable[[], nn.Module | nn.Parameter], str]]] = {
    # Names as in the libraries people load models from, with the role each weight should have.
    "llama": {
        "model.embed_tokens": (embedding, "embedding"),
        "model.layers.0.self_attn.q_proj": (linear, "matrix"),
        "model.layers.0.self_attn.k_proj": (lambda: linear(4), "matrix"),
        "model.layers.0.self_attn.o_proj": (linear, "matrix"),
        "model.layers.0.mlp.gate_proj": (lambda: linear(24), "matrix"),
        "model.layers.0.mlp.down_proj": (lambda: linear(WIDTH, 24), "matrix"),
        "model.layers.0.input_layernorm": (lambda: nn.RMSNorm(WIDTH), "scalar"),
        "lm_head": (lambda: linear(VOCABULARY), "unembedding"),
    },
    "gpt-2": {
        "transformer.wte": (embedding, "embedding"),
        "transformer.wpe": (lambda: embedding(16), "embedding"),
        "transformer.h.0.attn.c_proj": (linear, "matrix"),
        "transformer.h.0.mlp.c_fc": (lambda: linear(32), "matrix"),
        "transformer.h.0.ln_1": (lambda: nn.LayerNorm(WIDTH), "scalar"),
    },
    "torchtitan": {
        "tok_embeddings": (embedding, "embedding"),
        "layers.0.attention.wq": (linear, "matrix"),
        "layers.0.feed_forward.w1": (lambda: linear(24), "matrix"),
        "output": (lambda: linear(VOCABULARY), "unembedding"),
    },
    "bert": {
        "bert.embeddings.word_embeddings": (embedding, "embedding"),
        "bert.embeddings.position_embeddings": (lambda: embedding(16), "embedding"),
        "bert.embeddings.token_type_embeddings": (lambda: embedding(2), "embedding"),
        "bert.encoder.layer.0.attention.self.query": (linear, "matrix"),
        "bert.encoder.layer.0.attention.output.dense": (linear, "matrix"),
        "bert.encoder.layer.0.output.dense": (lambda: linear(WIDTH, 32), "matrix"),
        "bert.pooler.dense": (linear, "matrix"),
        "classifier": (lambda: linear(3), "unembedding"),
    },
    "t5": {
        "shared": (embedding, "embedding"),
        "encoder.block.0.layer.0.SelfAttention.q": (linear, "matrix"),
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias": (
            lambda: embedding(4, 2), "embedding",
        ),
        "decoder.block.0.layer.2.DenseReluDense.wi_0": (lambda: linear(24), "matrix"),
    },
    "vit": {
        "cls_token": (lambda: raw(1, 1, WIDTH), "embedding"),
        "pos_embed": (lambda: raw(1, 17, WIDTH), "embedding"),
        "patch_embed.proj": (lambda: nn.Conv2d(3, WIDTH, 4), "conv"),
        "blocks.0.attn.proj": (linear, "matrix"),
        "blocks.0.mlp.fc1": (lambda: linear(32), "matrix"),
        "blocks.0.ls1.gamma": (lambda: raw(WIDTH), "scalar"),
        "head": (lambda: linear(CLASSES), "unembedding"),
    },
    "resnet": {
        "conv1": (lambda: nn.Conv2d(3, 8, 7), "conv"),
        "layer1.0.conv1": (lambda: nn.Conv2d(8, 8, 3), "conv"),
        "layer1.0.bn1": (lambda: nn.BatchNorm2d(8), "scalar"),
        "layer1.0.downsample.0": (lambda: nn.Conv2d(8, 8, 1), "conv"),
        "head": (lambda: linear(CLASSES), "unembedding"),
    },
    "mamba": {
        "backbone.embeddings": (embedding, "embedding"),
        "backbone.layers.0.mixer.conv1d": (lambda: nn.Conv1d(16, 16, 4, groups=16), "conv"),
        "backbone.layers.0.mixer.D": (lambda: raw(16), "scalar"),
        "backbone.layers.0.mixer.out_proj": (lambda: linear(WIDTH, 16), "matrix"),
    },
    "mixture of experts": {
        "model.embed_tokens": (embedding, "embedding"),
        "model.layers.0.mlp.experts.0.up_proj": (lambda: linear(24), "matrix"),
        "model.layers.0.mlp.experts.1.down_proj": (lambda: linear(WIDTH, 24), "matrix"),
        "model.layers.0.mlp.shared_expert.up_proj": (lambda: linear(24), "matrix"),
    },
    "lora": {
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer": (linear, "matrix"),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default": (
            lambda: linear(2, WIDTH), "lora",
        ),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default": (
            lambda: linear(WIDTH, 2), "lora",
        ),
        "base_model.model.model.embed_tokens.lora_embedding_A.default": (
            lambda: raw(2, VOCABULARY), "lora",
        ),
    },
    "separable convolutions": {
        "stem": (lambda: nn.Conv1d(3, 8, 5), "conv"),
        "up": (lambda: nn.ConvTranspose2d(8, 4, 2), "conv"),
        "volume": (lambda: nn.Conv3d(1, 4, 3), "conv"),
    },
    "tables": {
        "words": (embedding, "embedding"),
        "bag": (lambda: nn.EmbeddingBag(20, WIDTH), "embedding"),
        "pos_emb": (lambda: raw(16, WIDTH), "embedding"),
        "encoder.position_embeddings": (lambda: raw(16, WIDTH), "embedding"),
        "blocks.0.time_embed": (lambda: raw(4, WIDTH), "embedding"),
        "logit_scale": (lambda: raw(), "scalar"),
        "temperature": (lambda: raw(1), "scalar"),
        "gate": (lambda: raw(WIDTH, WIDTH), "matrix"),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_with_the_names_of_known_libraries(name):
    expected = {}
    leaves = {path: make() for path, (make, _) in MODELS[name].items()}
    for path, leaf in leaves.items():
        own = (
            [""]
            if isinstance(leaf, nn.Parameter)
            else [f".{n}" for n, _ in leaf.named_parameters()]
        )
        for suffix in own:
            expected[path + suffix] = "scalar" if suffix == ".bias" else MODELS[name][path][1]
    opt = samestep.MuonAdamW(model_of(leaves))
    assert roles(opt) == expected
    assert rules(opt) == {n: "muon" if r == "matrix" else "adamw" for n, r in expected.items()}


class Conv1D(nn.Module):
    """As in transformers.pytorch_utils: stored as (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = raw(nx, nf), raw(nf)


def test_a_conv1d_is_stored_as_in_by_out():
    opt = samestep.MuonAdamW(model_of({"h.0.mlp.c_fc": Conv1D(32, 8)}), adjust_lr="original")
    assert keys(opt, "transposed")["h.0.mlp.c_fc.weight"] is True
    (row,) = [row for row in read_table(opt.table())[0] if row["rule"] == "muon"]
    assert (row["blocks"], row["lr factor"]) == ("32 x 8", "2")
    kept = samestep.MuonAdamW(
        model_of({"h.0.mlp.c_fc": Conv1D(32, 8)}), overrides={"*": {"transposed": False}}
    )
    assert shapes_of_blocks(kept, "h.0.mlp.c_fc.weight") == "8 x 32"


@pytest.mark.parametrize(
    ("path", "leaf", "role"),
    [
        # heads of BART, DETR and ViT-MAE
        ("classification_head.dense", linear(), "unembedding"),
        ("classification_head.out_proj", linear(CLASSES), "unembedding"),
        ("class_labels_classifier", linear(CLASSES), "unembedding"),
        ("bbox_predictor.layers.0", linear(), "unembedding"),
        ("decoder.decoder_pred", linear(48), "unembedding"),
        # factors of adapters
        ("layers.0.q.hada_w1_a.default", raw(8, 2), "lora"),
        ("layers.0.q.lokr_w1.default", raw(4, 4), "lora"),
        ("layers.0.q.oft_R.default.weight", raw(3, 6), "lora"),
        ("layers.0.q.vblora_logits_A.default", raw(2, 4, 9), "lora"),
        ("vblora_vector_bank.default", raw(9, 4), "lora"),
        # as large as a table of positions
        ("transform.dense", linear(), "matrix"),
        ("other", linear(VOCABULARY), "unembedding"),
    ],
)
def test_heads_adapters_and_weights_of_the_shape_of_a_table(path, leaf, role):
    model = model_of(
        {"words": embedding(), "position_embeddings": embedding(WIDTH, WIDTH), path: leaf}
    )
    found = {name: r for name, r in roles(samestep.MuonAdamW(model)).items() if path in name}
    assert set(found.values()) == {role}


@pytest.mark.parametrize(
    "leaves",
    [
        {"layers.0.mixer.in_proj": linear(32)},
        {"layers.0.mixer.x_proj": linear(6, 16)},
        {"layers.0.mlp.Wi": linear(32)},
        {"layers.0.self_attn.kv_a_proj_with_mqa": linear(6)},
        {"layers.0.mlp.gate_up_proj": linear(6)},
    ],
    ids=lambda leaves: next(iter(leaves)).rpartition(".")[2],
)
def test_weights_that_are_fused_in_known_libraries_warn(leaves):
    with pytest.warns(UserWarning, match=r"looks like a fused weight.*halves.*interleaved"):
        samestep.MuonAdamW(model_of(leaves))


def test_fused_experts_warn_whatever_their_shape():
    """Of (experts, 2 small, width) nobody can see that gate and up are in it."""
    model = model_of({"layers.0.mlp.experts.gate_up_proj": raw(3, 4, 8)})
    with pytest.warns(UserWarning, match="looks like a fused weight"):
        samestep.MuonAdamW(model, overrides={"*": {"rule": "muon"}})


class Owner(nn.Module):
    """Holds raw parameters, as a class that tells how it stores them."""

    def __init__(self, leaves: Mapping[str, nn.Parameter], **told: bool) -> None:
        super().__init__()
        for name, leaf in leaves.items():
            self.register_parameter(name, leaf)
        for name, value in told.items():
            setattr(self, name, value)


UP, GATE_UP, DOWN = (3, 6, 8), (3, 12, 8), (3, 8, 6)  # 3 experts of 6 channels, width 8
# Modules as people write them; of each parameter the matrices (out x in), or a role of AdamW's.
EXPERTS = {
    "olmoe": (
        {
            "layers.0.mlp.gate": linear(3),
            "layers.0.mlp.experts": Owner({"gate_up_proj": raw(*GATE_UP), "down_proj": raw(*DOWN)}),
        },
        {"gate.weight": "gate", "gate_up_proj": "6 of 6 x 8", "down_proj": "3 of 8 x 6"},
    ),
    "jamba": (
        {
            "layers.0.feed_forward.router": linear(3),
            "layers.0.feed_forward.experts.gate_up_proj": raw(*GATE_UP),
            "layers.0.feed_forward.experts.down_proj": raw(*DOWN),
            "layers.1.feed_forward.gate_proj": linear(6),
        },
        {
            "router.weight": "gate", "gate_up_proj": "6 of 6 x 8", "down_proj": "3 of 8 x 6",
            "1.feed_forward.gate_proj.weight": "6 x 8",
        },
    ),
    "granitemoe of old, whose experts are beside the router": (
        {
            "layers.0.block_sparse_moe.input_linear.weight": raw(*GATE_UP),
            "layers.0.block_sparse_moe.output_linear.weight": raw(*DOWN),
            "layers.0.block_sparse_moe.router.layer": linear(3),
        },
        {"input_linear": "6 of 6 x 8", "output_linear": "3 of 8 x 6", "router": "gate"},
    ),
    "stored as (in, out), as the width tells": (
        {
            "layers.0.mlp.router": linear(3),
            "layers.0.mlp.experts.gate_up_proj": raw(3, 8, 12),
            "layers.0.mlp.experts.down_proj": raw(3, 6, 8),
        },
        {"router": "gate", "gate_up_proj": "6 of 6 x 8", "down_proj": "3 of 8 x 6"},
    ),
    "stored as (in, out), as the way back tells": (
        {
            "layers.0.mlp.router": linear(3),
            "layers.0.mlp.experts.gate_up_proj": raw(3, 8, 8),
            "layers.0.mlp.experts.down_proj": raw(3, 4, 8),
        },
        {"router": "gate", "gate_up_proj": "6 of 4 x 8", "down_proj": "3 of 8 x 4"},
    ),
    "stored as (in, out) and in turn, as the class tells": (
        {
            "layers.0.mlp.router": linear(3),
            "layers.0.mlp.experts": Owner(
                {"gate_up_proj": raw(3, 8, 16), "down_proj": raw(3, 8, 8)},
                is_transposed=True,
                is_concatenated=False,
            ),
        },
        {"router": "gate", "gate_up_proj": "6 of 8 x 8", "down_proj": "3 of 8 x 8"},
    ),
    "three stacks without names of their own": (
        {
            "blocks.0.moe.gate": linear(3),
            "blocks.0.moe.experts.w1": raw(*UP),
            "blocks.0.moe.experts.w2": raw(*DOWN),
            "blocks.0.moe.experts.w3": raw(*UP),
        },
        {"gate": "gate", "w1": "3 of 6 x 8", "w2": "3 of 8 x 6", "w3": "3 of 6 x 8"},
    ),
    "biases and scales of every expert": (
        {
            "blocks.0.moe.router": raw(3, 8),
            "blocks.0.moe.experts.w1": raw(*UP),
            "blocks.0.moe.experts.w2": raw(*DOWN),
            "blocks.0.moe.experts.b1": raw(3, 6),
        },
        {"router": "gate", "w1": "3 of 6 x 8", "w2": "3 of 8 x 6", "b1": "scalar"},
    ),
    "dbrx, whose experts lie below each other": (
        {
            "blocks.0.ffn.router.layer": linear(3),
            "blocks.0.ffn.experts.mlp.w1": raw(18, 8),
            "blocks.0.ffn.experts.mlp.w2": raw(18, 8),
        },
        {"router": "gate", "w1": "3 of 6 x 8", "w2": "3 of 6 x 8"},
    ),
    "a rank's part of the experts": (
        {
            "layers.0.mlp.gate": linear(6),
            "layers.0.mlp.experts.gate_up_proj": raw(*GATE_UP),
            "layers.0.mlp.experts.down_proj": raw(*DOWN),
        },
        {"gate.weight": "gate", "gate_up_proj": "6 of 6 x 8", "down_proj": "3 of 8 x 6"},
    ),
    "a list of experts, with gates of their own, and a shared one": (
        {
            "layers.0.mlp.gate": linear(3),
            "layers.0.mlp.experts.0.gate": linear(6),
            "layers.0.mlp.experts.0.up": linear(6),
            "layers.0.mlp.experts.0.down": linear(8, 6),
            "layers.0.mlp.shared_experts.gate": linear(6),
            "layers.0.mlp.shared_experts.up": linear(6),
        },
        {
            "mlp.gate": "gate", "experts.0.gate": "6 x 8", "experts.0.up": "6 x 8",
            "experts.0.down": "8 x 6", "shared_experts.gate": "6 x 8", "shared_experts.up": "6 x 8",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "named"),
    [(kind, False) for kind in EXPERTS]
    + [(kind, True) for kind in EXPERTS if "the class tells" not in kind],
)
def test_experts_that_no_recipe_knows(kind, named):
    """Stacks are Muon's, matrix by matrix, routers AdamW's: one warning, and lines of the table."""
    leaves, expected = EXPERTS[kind]
    model = model_of(leaves)
    params = list(model.named_parameters()) if named else model
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        opt = samestep.MuonAdamW(params, adjust_lr="original")
    rows, _ = read_table(opt.table())
    for part, what in expected.items():
        (row,) = [row for row in rows if part in row["parameter"]]
        seen = row["blocks"] if row["rule"] == "muon" else row["role"]
        assert seen == what, row
        if row["rule"] == "muon":
            assert row["role"] == "matrix"
            assert row["shape"].count("x") == 1 or row["reason"].startswith("guessed: experts")
        else:
            assert row["reason"].startswith("guessed: a ")
    assert len(rows) == len(expected)
    texts = [str(each.message) for each in found]
    if not any(re.match("guessed: (experts|a vector)", row["reason"]) for row in rows):
        assert not texts  # a router alone is known by its name
        return
    (text,) = texts
    assert "no recipe knows the experts of this model, so their rules are guessed from" in text
    # What the warning proposes says the same, without a warning.
    overrides = eval(text.partition("overrides=")[2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = samestep.MuonAdamW(params, adjust_lr="original", overrides=overrides)
    for key in ("role", "rule", "split_sizes", "transposed"):
        assert keys(again, key) == keys(opt, key)


def test_what_looks_like_experts_and_is_none():
    """A gate of an MLP, a router's name in a vector, stacks far from any router."""
    model = model_of(
        {
            "layers.0.mlp.gate": linear(6), "layers.0.mlp.up": linear(6),
            "layers.0.mlp.router_norm": raw(8),
            "layers.0.attn.q": raw(8, 2, 4), "layers.0.output_gate": linear(8),
        }
    )  # fmt: skip
    with pytest.warns(UserWarning, match="more than two dims") as found:
        opt = samestep.MuonAdamW(model)
    assert [str(each.message).partition(":")[0] for each in found] == ["layers.0.attn.q (8, 2, 4)"]
    rules = keys(opt, "rule")
    assert rules["layers.0.mlp.gate.weight"] == rules["layers.0.output_gate.weight"] == "muon"
    assert rules["layers.0.attn.q"] == "adamw"


def test_an_override_decides_over_a_guess():
    leaves, _ = EXPERTS["olmoe"]
    own = {"*.experts.*": {"rule": "adamw"}, "*.gate.weight": {"rule": "muon"}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = samestep.MuonAdamW(model_of(leaves), overrides=own)
    assert set(keys(opt, "rule").items()) == {
        ("layers.0.mlp.gate.weight", "muon"),
        ("layers.0.mlp.experts.gate_up_proj", "adamw"),
        ("layers.0.mlp.experts.down_proj", "adamw"),
    }


def test_the_wi_of_t5_is_one_matrix():
    samestep.MuonAdamW(model_of({"block.0.DenseReluDense.wi": linear(32)}))


def test_multihead_attention_is_cut_into_its_three_projections():
    opt = samestep.MuonAdamW(nn.MultiheadAttention(WIDTH, 2))
    assert rules(opt) == {
        "in_proj_weight": "muon", "in_proj_bias": "adamw",
        "out_proj.weight": "muon", "out_proj.bias": "adamw",
    }  # fmt: skip
    assert shapes_of_blocks(opt, "in_proj_weight") == "3 of 8 x 8"
    assert shapes_of_blocks(opt, "out_proj.weight") == "8 x 8"


def test_multihead_attention_with_other_widths_has_separate_projections():
    opt = samestep.MuonAdamW(nn.MultiheadAttention(WIDTH, 2, kdim=6, vdim=4, add_bias_kv=True))
    assert {n: shapes_of_blocks(opt, n) for n, rule in rules(opt).items() if rule == "muon"} == {
        "q_proj_weight": "8 x 8", "k_proj_weight": "8 x 6", "v_proj_weight": "8 x 4",
        "out_proj.weight": "8 x 8",
    }  # fmt: skip
    assert rules(opt)["bias_k"] == rules(opt)["bias_v"] == "adamw"


def test_a_transformer_encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
    opt = samestep.MuonAdamW(nn.TransformerEncoder(layer, 2))
    assert {n for n, rule in rules(opt).items() if rule == "muon"} == {
        f"layers.{i}.{name}"
        for i in (0, 1)
        for name in (
            "self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight",
            "linear2.weight",
        )
    }  # fmt: skip
    for i in (0, 1):
        assert shapes_of_blocks(opt, f"layers.{i}.self_attn.in_proj_weight") == "3 of 8 x 8"


@pytest.mark.parametrize("shape", [(4, 4), (2, 3, 4)])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_over_several_dims_is_no_matrix(kind, shape):
    """Its weight has two dims, but it scales elements and multiplies no vector."""
    opt = samestep.MuonAdamW(nn.Sequential(linear(), kind(shape)))
    assert {name: rule for name, rule in rules(opt).items() if rule == "muon"} == {
        "0.weight": "muon"
    }


def test_a_linear_layer_with_norm_in_its_name_is_a_matrix():
    class NormalizedLinear(nn.Linear):
        """Keeps its rows at norm one, as in nGPT; still multiplies."""

    model = model_of({"blocks.0.up": NormalizedLinear(WIDTH, 32)})
    assert rules(samestep.MuonAdamW(model))["blocks.0.up.weight"] == "muon"


@pytest.mark.parametrize(
    "name",
    [
        "experts.bias",
        "experts.gate_up_proj_bias",
        "blocks.0.pos_bias",
        "experts.mlp1_bias_EG",
        "experts.bias_up",
        "experts.up_biases",
    ],
)
def test_a_bias_with_two_dims_is_no_matrix(name):
    """One bias per expert, added to activations: a stack of vectors."""
    opt = samestep.MuonAdamW(model_of({"blocks.0.up": linear(), name: raw(4, 16)}))
    assert rules(opt) == {"blocks.0.up.weight": "muon", name: "adamw"}


# --- heads ------------------------------------------------------------------------------------

HEADS = ["lm_head", "head", "output", "unembed", "embed_out", "classifier", "score"]


@pytest.mark.parametrize("name", [*HEADS, "model.lm_head", "decoder.output", "module.heads.head"])
def test_a_head_by_its_name(name):
    opt = samestep.MuonAdamW(model_of({"blocks.0.up": linear(), name: linear(CLASSES, bias=True)}))
    assert roles(opt) == {
        "blocks.0.up.weight": "matrix", f"{name}.weight": "unembedding", f"{name}.bias": "scalar"
    }  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_a_raw_parameter_may_be_a_head(name):
    opt = samestep.MuonAdamW(model_of({"blocks.0.up": linear(), name: raw(CLASSES, WIDTH)}))
    assert roles(opt)[name] == "unembedding"


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    "place", ["blocks.0.{}", "layers.11.attention.{}", "encoder.layer.3.{}.dense"]
)
def test_a_hidden_layer_with_the_name_of_a_head_is_a_matrix(name, place):
    path = place.format(name)
    assert roles(samestep.MuonAdamW(model_of({path: linear()}))) == {f"{path}.weight": "matrix"}


@pytest.mark.parametrize("name", ["overhead", "output_norm_proj", "attention_head", "scores"])
def test_a_name_that_only_contains_that_of_a_head_is_no_head(name):
    assert roles(samestep.MuonAdamW(model_of({name: linear()}))) == {f"{name}.weight": "matrix"}


@pytest.mark.parametrize("name", ["decoder", "to_logits", "cls.predictions.decoder"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_a_head_by_the_shape_of_the_vocabulary(name, frozen):
    """Whatever its name: (vocabulary, width) like the embedding, be that trained or not."""
    model = model_of({"tokens": embedding(), "up": linear(32), name: linear(VOCABULARY)})
    model.tokens.requires_grad_(not frozen)
    found = roles(samestep.MuonAdamW(model))
    assert found[f"{name}.weight"] == "unembedding"
    assert found["up.weight"] == "matrix"


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        # As many positions as the hidden layer is wide, and a byte vocabulary on a small model.
        ("transformer.wpe", 32),
        ("model.embed_tokens", 32),
        ("model.embed_tokens", WIDTH),
    ],
)
def test_a_hidden_matrix_is_not_mistaken_for_a_head_by_its_shape(table, rows):
    """Else the same layer would be trained by another rule when the context length changes."""
    hidden = {
        "layers.0.attn.q": linear(), "layers.0.attn.out": linear(),
        "layers.0.mlp.up": linear(32), "layers.0.mlp.down": linear(WIDTH, 32),
    }  # fmt: skip
    opt = samestep.MuonAdamW(model_of({table: embedding(rows), **hidden, "lm_head": linear(99)}))
    assert {n for n, rule in rules(opt).items() if rule == "muon"} == {
        f"{n}.weight" for n in hidden
    }


# --- raw parameters, stacks, LoRA, frozen ones ---------------------------------------------------


def experts() -> nn.Module:
    return model_of(
        {"layers.0.experts.up": raw(4, 16, WIDTH), "layers.0.experts.down": raw(4, 8, 16)}
    )


def test_stacks_of_experts_go_to_muon_with_one_warning():
    with pytest.warns(UserWarning, match="guessed from names and shapes") as caught:
        opt = samestep.MuonAdamW(experts())
    assert set(rules(opt).values()) == {"muon"}
    (message,) = [str(warning.message) for warning in caught]
    assert "layers.*.experts.up (4, 16, 8)" in message
    assert "layers.*.experts.down (4, 8, 16)" in message
    assert caught[0].filename == __file__, "it should point at the line of the user"


def test_a_stack_of_anything_else_goes_to_adamw_with_one_warning():
    with pytest.warns(UserWarning, match="left to AdamW") as caught:
        opt = samestep.MuonAdamW(model_of({"layers.0.up": raw(4, 16, 8)}))
    assert set(rules(opt).values()) == {"adamw"}
    (message,) = [str(warning.message) for warning in caught]
    assert "layers.0.up (4, 16, 8)" in message
    assert 'overrides={"<pattern>": {"rule": "muon"}}' in message
    assert caught[0].filename == __file__, "it should point at the line of the user"


@pytest.mark.parametrize(("rule", "cut"), [("muon", "4 of 16 x 8"), ("adamw", "-")])
def test_an_override_for_a_stack_of_experts_silences_the_warning(rule, cut):
    opt = samestep.MuonAdamW(experts(), overrides={"*.experts.*": {"rule": rule}})
    assert set(rules(opt).values()) == {rule}
    assert shapes_of_blocks(opt, "layers.0.experts.up") == cut


def test_an_override_for_one_stack_leaves_the_warning_for_the_other():
    with pytest.warns(UserWarning, match="guessed from names and shapes") as caught:
        samestep.MuonAdamW(experts(), overrides={"*.up": {"rule": "muon"}})
    assert "experts.down" in str(caught[0].message)
    assert "experts.up" not in str(caught[0].message)


def test_many_stacks_are_counted_not_listed():
    model = model_of({f"layers.{i}.stack": raw(2, 3, 3) for i in range(40)})
    with pytest.warns(UserWarning, match=r"layers\.0\.stack .* and 34 more") as caught:
        samestep.MuonAdamW(model)
    assert len(caught) == 1


def test_an_expert_stack_with_gate_and_up_in_each_matrix():
    opt = samestep.MuonAdamW(
        model_of({"experts": raw(3, 16, WIDTH)}),
        overrides={"experts": {"rule": "muon", "split_sizes": (8, 8)}},
    )
    assert shapes_of_blocks(opt, "experts") == "6 of 8 x 8"


def lora() -> nn.Module:
    return model_of({f"layers.0.q.{name}": linear(*shape) for name, shape in {
        "base_layer": (WIDTH, WIDTH), "lora_A.default": (2, WIDTH), "lora_B.default": (WIDTH, 2),
    }.items()})  # fmt: skip


def test_lora_factors_go_to_adamw_and_to_muon_when_asked():
    model = lora()
    model.get_submodule("layers.0.q.base_layer").requires_grad_(False)
    factors = {"layers.0.q.lora_A.default.weight", "layers.0.q.lora_B.default.weight"}
    assert rules(samestep.MuonAdamW(model)) == dict.fromkeys(factors, "adamw")
    by_muon = samestep.MuonAdamW(model, overrides={"*lora_*": {"rule": "muon"}})
    assert rules(by_muon) == dict.fromkeys(factors, "muon")


def test_convolutions_go_to_muon_when_asked_and_flattened():
    model = model_of({"stem": nn.Conv2d(3, 8, 2), "body": nn.Conv2d(8, 8, 2)})
    opt = samestep.MuonAdamW(model, overrides={"body.weight": {"rule": "muon", "flatten": True}})
    assert rules(opt)["stem.weight"] == "adamw"
    assert shapes_of_blocks(opt, "body.weight") == "8 x 32"


@pytest.mark.parametrize("name", ["embed.weight", "blocks.0.attn.q.weight", "norm.weight"])
def test_a_frozen_parameter_is_in_no_group(name):
    model = gpt()
    model.get_parameter(name).requires_grad_(False)
    opt = samestep.MuonAdamW(model)
    assert name not in rules(opt)
    assert len(rules(opt)) == len(list(model.parameters())) - 1
    assert model.get_parameter(name) not in opt.state


@pytest.mark.parametrize("kind", [samestep.Muon, samestep.AdamW])
def test_one_rule_for_a_model_leaves_out_frozen_parameters_too(kind):
    model = nn.Sequential(linear(), linear())
    model[0].requires_grad_(False)
    assert keys(kind(model), "rule") == {"1.weight": kind.__name__.lower()}


# --- wrapped models and named parameters ---------------------------------------------------------


@pytest.fixture
def process_group(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module) -> nn.Module:
    """Only wrapped: nothing is compiled before the first call, and no compiler is imported."""
    return torch.compile(model, backend="eager")


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "wrap",
    [
        DistributedDataParallel,
        compiled,
        lambda model: compiled(DistributedDataParallel(model)),
        lambda model: DistributedDataParallel(compiled(model)),
    ],
    ids=["DDP", "compile", "compile of DDP", "DDP of compile"],
)
def test_a_wrapped_model_has_the_names_and_roles_of_the_bare_one(wrap):
    """Names go into patterns and checkpoints, which should not depend on how a run is wrapped."""
    model = gpt()
    expected = samestep.MuonAdamW(model)
    wrapped = samestep.MuonAdamW(wrap(model), overrides={"blocks.*.mlp.*": {"lr": 1.0}})
    assert rules(wrapped) == rules(expected)
    assert roles(wrapped) == roles(expected)
    assert wrapped.param_groups[0]["params"][0] is model.embed.weight


@pytest.mark.parametrize("name", ["head", "classifier"])
def test_a_compiled_head_is_still_a_head(name):
    """Parts of a model are often compiled one by one, which adds a name in the middle."""
    opt = samestep.MuonAdamW(model_of({"up": linear(), name: compiled(linear(CLASSES))}))
    assert [role for path, role in roles(opt).items() if name in path] == ["unembedding"]


@pytest.mark.parametrize("tied", [False, True])
def test_named_parameters_without_a_model_are_routed_by_name_and_shape(tied):
    model = gpt(tied=tied)
    opt = samestep.MuonAdamW(model.named_parameters())  # a generator, used up once
    assert rules(opt) == rules(samestep.MuonAdamW(model))
    assert roles(opt) == roles(samestep.MuonAdamW(model))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("model.embed_tokens.weight", "adamw"),
        ("tok_embeddings.weight", "adamw"),
        ("transformer.wte.weight", "adamw"),
        ("transformer.wpe.weight", "adamw"),
        ("pos_emb", "adamw"),
        ("lm_head.weight", "adamw"),
        ("layers.0.q.lora_A.weight", "adamw"),
        ("model.layers.0.self_attn.q_proj.weight", "muon"),
        ("blocks.0.output.weight", "muon"),
        # Contains the letters of an embedding's name, but not as a word of it.
        ("layers.0.member.weight", "muon"),
    ],
)
def test_a_matrix_known_by_name_only(name, rule):
    assert rules(samestep.MuonAdamW([(name, raw(6, 4))])) == {name: rule}


# --- keywords, learning rates and presets ---------------------------------------------------------


def test_defaults():
    opt = samestep.MuonAdamW(gpt())
    for group in opt.param_groups:
        assert group["lr"] == 1e-3
        assert group["weight_decay"] == 0.1
        assert group["maximize"] is False
    adamw = next(group for group in opt.param_groups if group["rule"] == "adamw")
    assert (adamw["betas"], adamw["eps"], adamw["amsgrad"]) == ((0.9, 0.95), 1e-8, False)
    muon = next(group for group in opt.param_groups if group["rule"] == "muon")
    assert (muon["momentum"], muon["adjust_lr"]) == (0.95, "match_rms_adamw")


def test_a_group_has_the_keys_of_its_rule_only():
    """So that a scheduler of momentum, say, cannot change a number that is never read."""
    for group in samestep.MuonAdamW(gpt(), lr=0.5, momentum=0.5, betas=(0.5, 0.5)).param_groups:
        assert ("momentum" in group) == (group["rule"] == "muon")
        assert ("betas" in group) == (group["rule"] == "adamw")


def test_keywords_reach_the_rule_they_are_for():
    opt = samestep.MuonAdamW(
        gpt(), lr=0.5, weight_decay=0.25, maximize=True, eps=1e-5, momentum=0.75, ns_steps=3
    )
    for group in opt.param_groups:
        assert (group["lr"], group["weight_decay"], group["maximize"]) == (0.5, 0.25, True)
        if group["rule"] == "muon":
            assert (group["momentum"], group["ns_steps"], group["eps"]) == (0.75, 3, 1e-7)
        else:
            assert group["eps"] == 1e-5


RATES = {"matrix_lr": 0.1, "embedding_lr": 0.2, "unembedding_lr": 0.3, "scalar_lr": 0.4}


@pytest.mark.parametrize(
    "given_rates", [RATES, {"embedding_lr": 0.2}, {"matrix_lr": 0.1}, {}], ids=len
)
@pytest.mark.parametrize("tensors", [False, True], ids=["float", "tensor"])
def test_learning_rates_per_role(given_rates, tensors):
    given_rates = {k: torch.tensor(v) if tensors else v for k, v in given_rates.items()}
    opt = samestep.MuonAdamW(gpt(), lr=0.5, **given_rates)
    for name, role in roles(opt).items():
        assert keys(opt, "lr")[name] == given_rates.get(f"{role}_lr", 0.5)


DECAYS = {"matrix_decay": 0.1, "embedding_decay": 0.2, "unembedding_decay": 0.3, "scalar_decay": 0}


@pytest.mark.parametrize("given_decays", [DECAYS, {"scalar_decay": 0.0}, {}], ids=len)
@pytest.mark.parametrize("preset", [None, "moonlight"])
def test_weight_decay_per_role(given_decays, preset):
    overrides = {"blocks.1.*": {"weight_decay": 0.75}}
    opt = samestep.MuonAdamW(
        gpt(), weight_decay=0.5, preset=preset, overrides=overrides, **given_decays
    )
    shown = {row["parameter"]: row["decay"] for row in read_table(opt.table())[0]}
    for name, role in roles(opt).items():
        wanted = given_decays.get(f"{role}_decay", 0.5)
        wanted = 0.75 if name.startswith("blocks.1.") else wanted
        assert keys(opt, "weight_decay")[name] == wanted
        assert float(shown[name]) == wanted


NO_DECAY = ("scalar", "embedding")


@pytest.mark.parametrize("preset", [None, "moonlight"])
@pytest.mark.parametrize("by", ["roles", "groups", "adamw"])
def test_roles_without_decay(preset, by):
    """Norms, biases and embeddings, in a model that is routed, in groups, with AdamW alone."""
    model = gpt()
    expected = roles(samestep.MuonAdamW(model))
    if by == "adamw":
        opt = samestep.AdamW(model, weight_decay=0.5, no_decay=NO_DECAY)
    else:
        groups = [
            {"params": "blocks.*", "rule": "adamw", "lr": torch.tensor(0.1)},
            {"params": lambda name, _: not name.startswith("blocks."), "rule": "adamw"},
        ]
        own = {"groups": groups} if by == "groups" else {"matrix_lr": 0.1}
        opt = samestep.MuonAdamW(model, weight_decay=0.5, preset=preset, no_decay=NO_DECAY, **own)
    shown = {row["parameter"]: row["decay"] for row in read_table(opt.table())[0]}
    assert set(expected.values()) == {"matrix", "embedding", "unembedding", "scalar"}
    assert shown.keys() == expected.keys()
    for name, role in expected.items():
        assert keys(opt, "weight_decay")[name] == (0.0 if role in NO_DECAY else 0.5)
        assert float(shown[name]) == (0.0 if role in NO_DECAY else 0.5)
    if by == "groups":  # schedules write into tensors, group by group
        rates = [g["lr"] for g in opt.param_groups if isinstance(g["lr"], torch.Tensor)]
        assert len({id(rate) for rate in rates}) == len(rates) == 2
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    before = {name: param.clone() for name, param in model.named_parameters()}
    opt.step()
    for name, param in model.named_parameters():
        if name in expected:
            assert torch.equal(param, before[name]) == (expected[name] in NO_DECAY), name


def test_what_no_decay_takes():
    for wrong in (("norm",), "bias", (3,)):
        with pytest.raises(ValueError, match=r"which is no role.*norms, biases and other vectors"):
            samestep.MuonAdamW(gpt(), no_decay=wrong)
    for wrong in (True, 0, None, {"scalar": 0}):
        for kind in (samestep.MuonAdamW, samestep.AdamW):
            with pytest.raises(TypeError, match="no_decay must be a role or several"):
                kind(gpt(), no_decay=wrong)
    with pytest.raises(ValueError, match=r"no_decay has 'scalar', and scalar_decay is 0\.1"):
        samestep.MuonAdamW(gpt(), no_decay="scalar", scalar_decay=0.1)
    for kind in (samestep.MuonAdamW, samestep.AdamW):
        with pytest.raises(ValueError, match="no_decay need"):
            kind([{"params": [raw(4)], "rule": "adamw"}], no_decay="scalar")
    with pytest.raises(ValueError, match="'no_decay' concerns the whole optimizer"):
        samestep.MuonAdamW([{"params": [raw(4)], "rule": "adamw", "no_decay": ()}])
    overrides = {"*norm*": {"weight_decay": 0.3}}
    opt = samestep.MuonAdamW(gpt(), no_decay="scalar", overrides=overrides)
    assert {v for n, v in keys(opt, "weight_decay").items() if "norm" in n} == {0.3}


def test_decays_per_role_need_roles():
    with pytest.raises(ValueError, match="per-role learning rates and decays need a model"):
        samestep.MuonAdamW([{"params": [raw(4)], "rule": "adamw"}], scalar_decay=0.0)
    with pytest.raises(ValueError, match="cannot be combined with overrides="):
        samestep.MuonAdamW(gpt(), groups=[{"params": "*", "rule": "adamw"}], scalar_decay=0.0)
    with pytest.raises(ValueError, match=r"Invalid scalar_decay value: -1\.0"):
        samestep.MuonAdamW(gpt(), scalar_decay=-1.0)


@pytest.mark.parametrize(
    "options",
    [
        lambda lr: {"lr": lr},
        # Each of these makes several groups that were given one learning rate.
        lambda lr: {"matrix_lr": lr, "overrides": {"blocks.1.*": {"weight_decay": 0.0}}},
        lambda lr: {"overrides": {"blocks.1.*": {"lr": lr}}},
    ],
    ids=["lr", "matrix_lr", "override"],
)
def test_no_two_groups_share_a_learning_rate_tensor(options):
    """Schedulers write into it, group by group, and may mean different numbers."""
    opt = samestep.MuonAdamW(gpt(), **options(torch.tensor(0.5)))
    tensors = [group["lr"] for group in opt.param_groups if isinstance(group["lr"], torch.Tensor)]
    assert len(tensors) > 1
    tensors[0].fill_(0.25)
    assert tensors[0] == 0.25
    assert all(tensor == 0.5 for tensor in tensors[1:])


def test_an_override_wins_over_the_learning_rate_of_the_role():
    opt = samestep.MuonAdamW(gpt(), **RATES, overrides={"blocks.1.*": {"lr": 0.9}})
    rates = keys(opt, "lr")
    assert {lr for name, lr in rates.items() if name.startswith("blocks.1.")} == {0.9}
    assert rates["blocks.0.attn.q.weight"] == 0.1
    assert rates["blocks.0.norm.weight"] == 0.4


@pytest.mark.parametrize("preset", ["torch", "keller", "moonlight", "nanochat"])
def test_a_preset_for_a_whole_model(preset):
    opt = samestep.MuonAdamW(gpt(), preset=preset)
    assert {group["rule"] for group in opt.param_groups} == {"muon", "adamw"}
    for group in opt.param_groups:
        expected = getattr(samestep.presets, preset)(group["rule"])
        assert {key: group[key] for key in expected} == expected


def test_what_is_given_wins_over_the_preset():
    opt = samestep.MuonAdamW(
        gpt(), lr=0.5, matrix_lr=0.6, embedding_lr=0.8, preset="keller", betas=(0.5, 0.6),
        momentum=0.7, overrides={"blocks.0.*": {"weight_decay": 0.25}},
    )  # fmt: skip
    embedding_group, *_ = opt.param_groups
    assert (embedding_group["lr"], embedding_group["betas"]) == (0.8, (0.5, 0.6))
    assert keys(opt, "lr")["lm_head.weight"] == 0.5
    assert keys(opt, "lr")["blocks.0.attn.q.weight"] == 0.6
    assert keys(opt, "momentum")["blocks.0.attn.q.weight"] == 0.7
    assert keys(opt, "orthogonalize")["blocks.0.attn.q.weight"] == "newton-schulz"
    decays = keys(opt, "weight_decay")
    assert {d for n, d in decays.items() if n.startswith("blocks.0.")} == {0.25}
    assert {d for n, d in decays.items() if not n.startswith("blocks.0.")} == {0.0}


@pytest.mark.parametrize("preset", ["keller", "nanochat"])
def test_one_learning_rate_for_a_recipe_with_two_is_refused(preset):
    with pytest.raises(ValueError, match=f"'{preset}' has two learning rates, 0.02 for"):
        samestep.MuonAdamW(gpt(), lr=0.02, preset=preset)
    rates = keys(samestep.MuonAdamW(gpt(), matrix_lr=0.01, preset=preset), "lr")
    assert rates["blocks.0.attn.q.weight"] == 0.01
    assert rates["lm_head.weight"] == getattr(samestep.presets, preset)("adamw")["lr"]


def test_one_learning_rate_for_a_recipe_with_one():
    rates = keys(samestep.MuonAdamW(gpt(), lr=0.02, preset="moonlight"), "lr")
    assert set(rates.values()) == {0.02}


# --- overrides and explicit groups ---------------------------------------------------------------


@pytest.mark.parametrize(
    "matcher",
    ["blocks.0.attn.?.weight", lambda name, param: "blocks.0.attn" in name and param.ndim == 2],
    ids=["pattern", "predicate"],
)
@pytest.mark.parametrize(
    ("key", "value"), [("rule", "adamw"), ("lr", 0.5), ("weight_decay", 0.0), ("maximize", True)]
)
def test_an_override_changes_what_it_matches_and_nothing_else(matcher, key, value):
    plain = keys(samestep.MuonAdamW(gpt()), key)
    changed = keys(samestep.MuonAdamW(gpt(), overrides={matcher: {key: value}}), key)
    names = {"blocks.0.attn.q.weight", "blocks.0.attn.k.weight"}
    assert changed == {**plain, **dict.fromkeys(names, value)}


def test_overrides_add_up():
    opt = samestep.MuonAdamW(
        gpt(),
        overrides={
            "blocks.0.*": {"lr": 0.5},
            "*.mlp.up.weight": {"weight_decay": 0.0, "split_sizes": (16, 16)},
            "blocks.0.mlp.up.*": {"lr": 0.5},  # the same value once more is no conflict
        },
    )
    both = next(g for g in opt.param_groups if "blocks.0.mlp.up.weight" in g["param_names"])
    assert (both["lr"], both["weight_decay"]) == (0.5, 0.0)
    for layer in (0, 1):
        assert shapes_of_blocks(opt, f"blocks.{layer}.mlp.up.weight") == "2 of 16 x 8"
        assert shapes_of_blocks(opt, f"blocks.{layer}.mlp.down.weight") == "8 x 32"


def test_patterns_are_case_sensitive_and_match_the_whole_name():
    model = model_of({"Up": linear(), "up": linear(), "up2": linear()})
    opt = samestep.MuonAdamW(model, overrides={"up.*": {"lr": 0.5}})
    assert [name for name, lr in keys(opt, "lr").items() if lr == 0.5] == ["up.weight"]


def test_an_override_may_give_a_parameter_to_muon():
    opt = samestep.MuonAdamW(gpt(), overrides={"lm_head.weight": {"rule": "muon", "lr": 0.5}})
    group = next(g for g in opt.param_groups if g["param_names"] == ["lm_head.weight"])
    assert (group["rule"], group["role"], group["lr"]) == ("muon", "unembedding", 0.5)


def test_two_tensor_learning_rates_stay_apart():
    """They print alike, and may be changed in place later."""
    rates = [torch.tensor(0.123451), torch.tensor(0.123459)]
    model = nn.Sequential(linear(), linear())
    opt = samestep.MuonAdamW(model, overrides={f"{i}.*": {"lr": r} for i, r in enumerate(rates)})
    assert keys(opt, "lr") == {"0.weight": rates[0], "1.weight": rates[1]}


def test_explicit_groups():
    model = gpt()
    opt = samestep.MuonAdamW(
        model,
        lr=0.5,
        groups=[
            {"params": "blocks.*.attn.?.weight", "rule": "muon", "momentum": 0.8},
            {"params": lambda name, param: param.ndim < 2, "rule": "adamw", "weight_decay": 0.0},
            {
                "params": ["embed.*", "lm_head.*", lambda name, _: re.search("mlp.*weight", name)],
                "rule": "adamw", "lr": 0.25,
            },
        ],
    )  # fmt: skip
    matrices, vectors, tables = opt.param_groups
    assert matrices["param_names"] == [
        f"blocks.{i}.attn.{name}.weight" for i in (0, 1) for name in "qk"
    ]
    assert (matrices["lr"], matrices["momentum"], matrices["weight_decay"]) == (0.5, 0.8, 0.1)
    assert all(param.ndim == 1 for param in vectors["params"])
    assert (vectors["lr"], vectors["weight_decay"]) == (0.5, 0.0)
    assert tables["param_names"][:2] == ["embed.weight", "lm_head.weight"]
    assert len(tables["param_names"]) == 2 + 4
    assert tables["lr"] == 0.25
    assert sum(len(g["params"]) for g in opt.param_groups) == len(list(model.parameters()))


def test_explicit_groups_take_presets():
    recipe = samestep.presets.nanochat
    opt = samestep.MuonAdamW(
        nn.Linear(4, 4),
        groups=[
            {**recipe(), "params": "weight", "lr": 0.5},
            {**recipe("adamw"), "params": "bias"},
        ],
    )
    for group, expected in zip(
        opt.param_groups, [{**recipe(), "lr": 0.5}, recipe("adamw")], strict=True
    ):
        assert {key: group[key] for key in expected} == expected


# --- fused query-key-value weights ----------------------------------------------------------------

FUSED = [
    "transformer.h.{}.attn.c_attn",  # nanoGPT
    "blocks.{}.attn.qkv",  # timm
    "model.layers.{}.self_attn.qkv_proj",  # Phi-3
    "transformer.h.{}.self_attention.query_key_value",  # Falcon
    "transformer.blocks.{}.attn.Wqkv",  # MPT
    "layers.{}.0.to_qkv",  # lucidrains
]


def fused(name: str, layers: int = 3) -> nn.Module:
    return model_of({name.format(i): linear(3 * WIDTH, bias=True) for i in range(layers)})


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_weight_warns_once_for_all_layers(name):
    with pytest.warns(UserWarning, match="fused weight") as caught:
        opt = samestep.MuonAdamW(fused(name))
    assert len(caught) == 1
    for layer in range(3):
        path = name.format(layer)
        assert f"{path}.weight (24, 8)" in str(caught[0].message)
        assert shapes_of_blocks(opt, f"{path}.weight") == "24 x 8", "a warning, not a guess"
    assert "split_sizes" in str(caught[0].message)
    assert caught[0].filename == __file__, "it should point at the line of the user"


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(
    ("split", "cut"),
    [((8, 8, 8), "3 of 8 x 8"), ((16, 4, 4), "16 x 8, 2 of 4 x 8"), ((24,), "24 x 8")],
)
def test_split_sizes_silence_the_warning(name, split, cut):
    overrides = {name.format("*") + ".weight": {"split_sizes": split}}
    opt = samestep.MuonAdamW(fused(name), overrides=overrides)
    for layer in range(3):
        assert shapes_of_blocks(opt, f"{name.format(layer)}.weight") == cut


def test_split_sizes_for_some_layers_leave_the_warning_for_the_others():
    overrides = {"blocks.[01].*": {"split_sizes": (8, 8, 8)}}
    with pytest.warns(UserWarning, match="fused weight") as caught:
        samestep.MuonAdamW(fused("blocks.{}.qkv"), overrides=overrides)
    assert "blocks.2.qkv.weight" in str(caught[0].message)
    assert "blocks.1.qkv.weight" not in str(caught[0].message)


@pytest.mark.parametrize(
    "leaves",
    [
        {"blocks.0.qkv": linear()},  # not taller than wide: three square parts do not fit
        {"blocks.0.qkv_norm": nn.LayerNorm(WIDTH)},
        {"blocks.0.qkvish": linear(24)},
        {"blocks.0.up": linear(24)},
    ],
    ids=lambda leaves: next(iter(leaves)),
)
def test_nothing_else_warns(leaves):
    samestep.MuonAdamW(model_of(leaves))


def named(model, split=None):
    """Muon's groups of all matrices of a model, and one of the rest."""
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
    vectors = [(name, p) for name, p in model.named_parameters() if p.ndim == 1]
    own = {} if split is None else {"split_sizes": split}
    return [
        {"params": matrices, "rule": "muon", **own},
        {"params": vectors, "rule": "adamw"},
    ]


UNROUTED = {
    "group dicts": lambda model, **own: samestep.MuonAdamW(named(model, **own)),
    "groups=": lambda model, split=None: samestep.MuonAdamW(
        model,
        groups=[
            {"params": "*.weight", "rule": "muon"}
            | ({} if split is None else {"split_sizes": split}),
            {"params": "*.bias", "rule": "adamw"},
        ],
    ),
    "Muon(named)": lambda model, split=None: samestep.Muon(
        named(model)[0]["params"], **({} if split is None else {"split_sizes": split})
    ),
    "add_param_group": lambda model, **own: _added(named(model, **own)),
}


def _added(groups):
    opt = samestep.MuonAdamW(groups[1:])
    opt.add_param_group(groups[0])
    return opt


@pytest.mark.parametrize("way", UNROUTED)
def test_a_fused_weight_in_groups_that_nobody_routes_warns_once_too(way):
    with pytest.warns(UserWarning, match="fused weight") as caught:
        UNROUTED[way](fused("blocks.{}.qkv"))
    assert len(caught) == 1
    said = str(caught[0].message)
    for layer in range(3):
        assert f"blocks.{layer}.qkv.weight (24, 8)" in said
    assert 'Give its group "split_sizes": (q_rows, k_rows, v_rows)' in said
    assert caught[0].filename == __file__


@pytest.mark.parametrize("way", UNROUTED)
@pytest.mark.parametrize("split", [(8, 8, 8), (24,), {"*.qkv.weight": (8, 8, 8)}], ids=str)
def test_whoever_says_how_it_is_cut_hears_nothing(way, split):
    UNROUTED[way](fused("blocks.{}.qkv"), split=split)


@pytest.mark.parametrize("way", UNROUTED)
def test_sizes_of_one_fused_weight_leave_the_warning_for_the_others(way):
    with pytest.warns(UserWarning, match="fused weight") as caught:
        UNROUTED[way](fused("blocks.{}.qkv"), split={"blocks.1.qkv.weight": (8, 8, 8)})
    assert "blocks.0." in str(caught[0].message)
    assert "blocks.1." not in str(caught[0].message)


def test_a_fused_weight_under_adamw_does_not_warn():
    samestep.MuonAdamW(fused("blocks.{}.qkv"), overrides={"*": {"rule": "adamw"}})


@pytest.mark.parametrize(
    "split", [{"*.qkv.weight": (8, 8, 8)}, (8, 8, 8)], ids=["mapping", "sizes"]
)
def test_split_sizes_as_a_keyword_silence_the_warning_too(split):
    opt = samestep.MuonAdamW(fused("blocks.{}.qkv"), split_sizes=split)
    assert shapes_of_blocks(opt, "blocks.0.qkv.weight") == "3 of 8 x 8"


def test_split_sizes_as_a_keyword_reach_a_group_that_has_known_splits():
    """torch's attention module is cut by itself; that is no reason to forget the others."""
    model = model_of({"attn": nn.MultiheadAttention(WIDTH, 1), "up": linear(32)})
    opt = samestep.MuonAdamW(model, split_sizes={"up.weight": (16, 16)})
    assert shapes_of_blocks(opt, "attn.in_proj_weight") == "3 of 8 x 8"
    assert shapes_of_blocks(opt, "up.weight") == "2 of 16 x 8"


def test_split_sizes_as_a_keyword_need_not_match_in_every_group():
    """An override makes a second Muon group, which is not what the user sees or asked for."""
    model = model_of({"blocks.0.up": linear(32), "blocks.0.down": linear(WIDTH, 32)})
    opt = samestep.MuonAdamW(
        model, split_sizes={"*.up.weight": (16, 16)}, overrides={"*.down.weight": {"lr": 0.5}}
    )
    assert shapes_of_blocks(opt, "blocks.0.up.weight") == "2 of 16 x 8"


def test_split_sizes_as_a_keyword_survive_an_override_of_something_else():
    """Also one with the same pattern, which is the natural way to write it."""
    opt = samestep.MuonAdamW(
        fused("blocks.{}.qkv"),
        split_sizes={"*.qkv.weight": (8, 8, 8)},
        overrides={"*.qkv.weight": {"lr": 0.5}},
    )
    assert set(keys(opt, "lr").values()) == {0.5, 1e-3}
    assert shapes_of_blocks(opt, "blocks.0.qkv.weight") == "3 of 8 x 8"


@pytest.mark.parametrize("split", [{"*.weight": (8, 8, 8)}, (8, 8, 8)], ids=["mapping", "sizes"])
@pytest.mark.parametrize("pattern", ["blocks.1.qkv.weight", "blocks.1.*"])
def test_split_sizes_of_an_override_win_over_the_keyword(split, pattern):
    """As for every other option."""
    opt = samestep.MuonAdamW(
        fused("blocks.{}.qkv"), split_sizes=split, overrides={pattern: {"split_sizes": (16, 4, 4)}}
    )
    assert shapes_of_blocks(opt, "blocks.0.qkv.weight") == "3 of 8 x 8"
    assert shapes_of_blocks(opt, "blocks.1.qkv.weight") == "16 x 8, 2 of 4 x 8"


def test_the_split_of_a_parameter_is_found_whatever_its_name():
    """Names may hold characters that mean something in patterns."""
    model = model_of({"heads": nn.ModuleDict({"[q]": nn.MultiheadAttention(WIDTH, 1)})})
    opt = samestep.MuonAdamW(model)
    assert shapes_of_blocks(opt, "heads.[q].in_proj_weight") == "3 of 8 x 8"


# --- any model -----------------------------------------------------------------------------------

sizes = st.integers(1, 4)
dims = st.lists(st.integers(0, 3), max_size=4).map(tuple)
LEAVES = {
    "linear": lambda a, b: linear(a, b, bias=True),
    "linear without bias": linear,
    "embedding": embedding,
    "bag": nn.EmbeddingBag,
    "norm": lambda a, b: nn.LayerNorm(a),
    "norm of two dims": lambda a, b: nn.LayerNorm((a, b)),
    "conv": lambda a, b: nn.Conv2d(a, b, 1),
    "attention": lambda a, b: nn.MultiheadAttention(a, 1),
    "nothing": lambda a, b: nn.Identity(),
}
NAMES = ["a", "b", "0", "1", "head", "output", "lm_head", "qkv", "embed", "wte", "lora_A"]


@st.composite
def modules(draw, depth: int = 0) -> nn.Module:
    """A tree of modules and raw parameters, some of them tied, shared or frozen."""
    root = nn.Module()
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=True)):
        kind = draw(st.sampled_from([*LEAVES, "raw", "tree"]))
        if kind == "raw":
            root.register_parameter(name, raw(*draw(dims)))
        elif kind == "tree":
            root.add_module(name, draw(modules(depth + 1)) if depth < 2 else nn.Identity())
        else:
            root.add_module(name, LEAVES[kind](draw(sizes), draw(sizes)))
    if depth == 0:
        _tie_share_and_freeze(draw, root)
    return root


def _tie_share_and_freeze(draw, root: nn.Module) -> None:
    everything = list(root.named_parameters())
    if not everything:
        return
    some = st.lists(st.sampled_from(everything), max_size=3)
    for name, param in draw(some):  # the first parameter of that shape takes this one's place
        path, _, own = name.rpartition(".")
        twin = next(p for _, p in everything if p.shape == param.shape)
        root.get_submodule(path).register_parameter(own, twin)
    if draw(st.booleans()):
        root.add_module("shared", draw(st.sampled_from([*root.children()] or [nn.Identity()])))
    for _, param in draw(some):
        param.requires_grad_(False)


def quietly(model: nn.Module, **options: Any) -> samestep.MuonAdamW:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return samestep.MuonAdamW(model, **options)


@given(modules())
def test_any_model_is_routed_completely(model):
    trainable = {id(p): p for p in model.parameters() if p.requires_grad}
    if not trainable:
        with pytest.raises(ValueError, match="no trainable parameters"):
            quietly(model)
        return
    opt = quietly(model)
    grouped = Counter(id(p) for group in opt.param_groups for p in group["params"])
    assert grouped == Counter(trainable.keys()), "each trainable once, frozen ones never"
    for group in opt.param_groups:
        assert group["rule"] in ("muon", "adamw")
        for name, param in zip(group["param_names"], group["params"], strict=True):
            assert model.get_parameter(name) is param
            assert param.ndim >= 2 or group["rule"] == "adamw"

    rows, totals = read_table(opt.table())
    names = [name for group in opt.param_groups for name in group["param_names"]]
    assert [row["parameter"] for row in rows] == names
    assert sum(total.count for total in totals.values()) == len(trainable)
    assert sum(total.elements for total in totals.values()) == sum(
        p.numel() for p in trainable.values()
    )
    for rule, total in totals.items():
        assert total.count == sum(row["rule"] == rule for row in rows)


@given(modules())
def test_any_model_can_be_stepped_and_frozen_parameters_stay(model):
    if not any(p.requires_grad for p in model.parameters()):
        return
    opt = quietly(model, lr=0.01)
    before = {id(p): p.detach().clone() for p in model.parameters()}
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    opt.step()
    for name, param in model.named_parameters():
        moved = not torch.equal(param, before[id(param)])
        assert moved == (param.requires_grad and param.numel() > 0), name
        assert param.isfinite().all(), name


@given(modules(), st.booleans())
def test_any_model_can_be_given_to_adamw_whole(model, explicit):
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        return
    options = {"groups": [{"params": "*", "rule": "adamw"}]}
    opt = quietly(model, **(options if explicit else {"overrides": {"*": {"rule": "adamw"}}}))
    assert {group["rule"] for group in opt.param_groups} == {"adamw"}
    assert sum(len(group["params"]) for group in opt.param_groups) == len(trainable)


def test_a_recipe_by_names():
    """What an adapter knows of modules that have no configuration; overrides win over it."""
    model = nn.Sequential(nn.Linear(4, 12, bias=False), nn.Linear(12, 4, bias=False))
    known = {
        "0.weight": {"split_sizes": (4, 4, 4), "reason": "query, key, value"},
        "1.weight": {"rule": "adamw", "role": "gate", "reason": "a router"},
    }
    opt = samestep.MuonAdamW(model, recipe=known, matrix_lr=0.5)
    assert [(g["rule"], g["role"]) for g in opt.param_groups] == [
        ("muon", "matrix"),
        ("adamw", "gate"),
    ]
    assert opt.param_groups[0]["split_sizes"] == {"0.weight": (4, 4, 4)}
    assert opt.param_groups[1]["lr"] != 0.5
    assert "a router" in str(opt.table())
    opt = samestep.MuonAdamW(model, recipe=known, overrides={"0.weight": {"split_sizes": (12,)}})
    assert opt.param_groups[0]["split_sizes"] == {"0.weight": (12,)}
    with pytest.raises(ValueError, match=r"recipe: '2\.weight' is no trainable parameter"):
        samestep.MuonAdamW(model, recipe={"2.weight": {}})
