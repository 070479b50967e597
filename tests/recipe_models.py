"""Tiny models of transformers' own classes, and by hand what every kind of parameter shall be.

Every expected line is written down, not computed: `M` matrices of Muon as `table()` shows them
(out x in), `A` AdamW with its role. Layers are alike, so their numbers are `N`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

BASE = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
MHA = {**BASE, "num_key_value_heads": 4}
OLD = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
MLA = {
    "q_lora_rank": 10, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
    "v_head_dim": 3, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 6, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
MOE = {"moe_intermediate_size": 6, "num_experts": 3, "num_experts_per_tok": 2}
EMBED, HEAD, GATE, CONV = "A embedding", "A unembedding", "A gate", "A conv"


class Case(NamedTuple):
    """A class, its configuration with values, and what is expected of its weights.

    expected: of all parameters but vectors, which are all `A scalar`.
    """

    model: str
    config: str
    values: dict[str, Any]
    expected: dict[str, str]
    inputs: Callable[[], dict[str, torch.Tensor]] = lambda: {"input_ids": _words()}

    def make(self) -> nn.Module:
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.values)
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"  # others want sizes of 16 bytes
        return getattr(transformers, self.model)(config)


def _words(rows: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randint(3, 50, (rows, length), generator=torch.Generator().manual_seed(1))


def kind(name: str) -> str:
    """A name without the numbers of layers."""
    return re.sub(r"\.\d+\.", ".N.", re.sub(r"\.\d+\.", ".N.", name))


ATTENTION = {
    "model.layers.N.self_attn.q_proj.weight": "M 16 x 16",
    "model.layers.N.self_attn.k_proj.weight": "M 8 x 16",
    "model.layers.N.self_attn.v_proj.weight": "M 8 x 16",
    "model.layers.N.self_attn.o_proj.weight": "M 16 x 16",
}
ENDS = {"model.embed_tokens.weight": EMBED, "lm_head.weight": HEAD}
MLP = {
    "model.layers.N.mlp.gate_proj.weight": "M 24 x 16",
    "model.layers.N.mlp.up_proj.weight": "M 24 x 16",
    "model.layers.N.mlp.down_proj.weight": "M 16 x 24",
}
LLAMA = {**ENDS, **ATTENTION, **MLP}
TIED = {name: found for name, found in LLAMA.items() if name != "lm_head.weight"}
SMALL_EXPERTS = {
    "model.layers.N.mlp.gate.weight": GATE,
    "model.layers.N.mlp.experts.gate_up_proj": "M 6 of 6 x 16",
    "model.layers.N.mlp.experts.down_proj": "M 3 of 16 x 6",
}
SHARED = {
    "model.layers.N.mlp.shared_expert.gate_proj.weight": "M 12 x 16",
    "model.layers.N.mlp.shared_expert.up_proj.weight": "M 12 x 16",
    "model.layers.N.mlp.shared_expert.down_proj.weight": "M 16 x 12",
}
DEEPSEEK = {
    **ENDS,
    **MLP,
    "model.layers.N.self_attn.q_a_proj.weight": "M 10 x 16",
    "model.layers.N.self_attn.q_b_proj.weight": "M 4 of 6 x 10",
    "model.layers.N.self_attn.kv_a_proj_with_mqa.weight": "M 8 x 16, 2 x 16",
    "model.layers.N.self_attn.kv_b_proj.weight": "M 4 of 4 x 8, 4 of 3 x 8",
    "model.layers.N.self_attn.o_proj.weight": "M 16 x 12",
    "model.layers.N.mlp.gate.weight": GATE,
    "model.layers.N.mlp.experts.gate_up_proj": "M 8 of 6 x 16",
    "model.layers.N.mlp.experts.down_proj": "M 4 of 16 x 6",
    "model.layers.N.mlp.shared_experts.gate_proj.weight": "M 6 x 16",
    "model.layers.N.mlp.shared_experts.up_proj.weight": "M 6 x 16",
    "model.layers.N.mlp.shared_experts.down_proj.weight": "M 16 x 6",
}
FALCON = {
    "transformer.word_embeddings.weight": EMBED,
    "transformer.h.N.self_attention.dense.weight": "M 16 x 16",
    "transformer.h.N.mlp.dense_h_to_4h.weight": "M 64 x 16",
    "transformer.h.N.mlp.dense_4h_to_h.weight": "M 16 x 64",
}
FALCON_QKV = "transformer.h.N.self_attention.query_key_value.weight"
VIT_LAYER = {
    f"vit.layers.N.attention.{which}_proj.weight": "M 16 x 16" for which in ("q", "k", "v", "o")
}
WHISPER_LAYER = {
    "self_attn.k_proj.weight": "M 16 x 16",
    "self_attn.v_proj.weight": "M 16 x 16",
    "self_attn.q_proj.weight": "M 16 x 16",
    "self_attn.out_proj.weight": "M 16 x 16",
    "fc1.weight": "M 24 x 16",
    "fc2.weight": "M 16 x 24",
}
CROSS = {
    name.replace("self_attn", "encoder_attn"): found
    for name, found in WHISPER_LAYER.items()
    if "attn" in name
}
T5_LAYER = {
    "SelfAttention.q.weight": "M 16 x 16",
    "SelfAttention.k.weight": "M 16 x 16",
    "SelfAttention.v.weight": "M 16 x 16",
    "SelfAttention.o.weight": "M 16 x 16",
    "SelfAttention.relative_attention_bias.weight": EMBED,
    "DenseReluDense.wi.weight": "M 24 x 16",
    "DenseReluDense.wo.weight": "M 16 x 24",
}

CASES = {
    "llama": Case("LlamaForCausalLM", "LlamaConfig", BASE, LLAMA),
    "mistral": Case("MistralForCausalLM", "MistralConfig", BASE, LLAMA),
    "qwen2": Case("Qwen2ForCausalLM", "Qwen2Config", BASE, LLAMA),
    "qwen3": Case("Qwen3ForCausalLM", "Qwen3Config", {**BASE, "head_dim": 4}, LLAMA),
    "olmo2": Case("Olmo2ForCausalLM", "Olmo2Config", BASE, LLAMA),
    "gemma": Case("GemmaForCausalLM", "GemmaConfig", {**BASE, "head_dim": 4}, TIED),
    "gemma2": Case("Gemma2ForCausalLM", "Gemma2Config", {**BASE, "head_dim": 4}, TIED),
    "gemma3": Case("Gemma3ForCausalLM", "Gemma3TextConfig", {**BASE, "head_dim": 4}, TIED),
    "phi": Case(
        "PhiForCausalLM",
        "PhiConfig",
        BASE,
        {
            **ENDS,
            "model.layers.N.self_attn.q_proj.weight": "M 16 x 16",
            "model.layers.N.self_attn.k_proj.weight": "M 8 x 16",
            "model.layers.N.self_attn.v_proj.weight": "M 8 x 16",
            "model.layers.N.self_attn.dense.weight": "M 16 x 16",
            "model.layers.N.mlp.fc1.weight": "M 24 x 16",
            "model.layers.N.mlp.fc2.weight": "M 16 x 24",
        },
    ),
    "phi3": Case(
        "Phi3ForCausalLM",
        "Phi3Config",
        BASE,
        {
            **ENDS,
            "model.layers.N.self_attn.qkv_proj.weight": "M 16 x 16, 2 of 8 x 16",
            "model.layers.N.self_attn.o_proj.weight": "M 16 x 16",
            "model.layers.N.mlp.gate_up_proj.weight": "M 2 of 24 x 16",
            "model.layers.N.mlp.down_proj.weight": "M 16 x 24",
        },
    ),
    "glm4": Case(
        "Glm4ForCausalLM",
        "Glm4Config",
        {**BASE, "head_dim": 4},
        {
            **ENDS,
            **ATTENTION,
            "model.layers.N.mlp.gate_up_proj.weight": "M 2 of 24 x 16",
            "model.layers.N.mlp.down_proj.weight": "M 16 x 24",
        },
    ),
    "mixtral": Case(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**BASE, "num_local_experts": 3},
        {
            **ENDS,
            **ATTENTION,
            "model.layers.N.mlp.gate.weight": GATE,
            "model.layers.N.mlp.experts.gate_up_proj": "M 6 of 24 x 16",
            "model.layers.N.mlp.experts.down_proj": "M 3 of 16 x 24",
        },
    ),
    "qwen2_moe": Case(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**BASE, **MOE, "shared_expert_intermediate_size": 12},
        {**ENDS, **ATTENTION, **SMALL_EXPERTS, **SHARED},
    ),
    "qwen3_moe": Case(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**BASE, **MOE, "head_dim": 4},
        {**ENDS, **ATTENTION, **SMALL_EXPERTS},
    ),
    "qwen3_next": Case(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **BASE, **MOE, "head_dim": 4, "shared_expert_intermediate_size": 12,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 3,
            "linear_value_head_dim": 5, "layer_types": ["linear_attention", "full_attention"],
        },
        {
            **ENDS,
            **ATTENTION,
            **SMALL_EXPERTS,
            **SHARED,
            "model.layers.N.self_attn.q_proj.weight": "M 2 of 16 x 16",
            "model.layers.N.linear_attn.conv1d.weight": CONV,
            "model.layers.N.linear_attn.in_proj_qkvz.weight": "M 2 of 6 x 16, 2 of 20 x 16",
            "model.layers.N.linear_attn.in_proj_ba.weight": GATE,
            "model.layers.N.linear_attn.out_proj.weight": "M 16 x 20",
        },
    ),
    "deepseek_v2": Case(
        "DeepseekV2ForCausalLM", "DeepseekV2Config", {**MHA, **MLA}, DEEPSEEK
    ),
    "deepseek_v3": Case(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", {**MHA, **MLA}, DEEPSEEK
    ),
    "gpt_oss": Case(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**BASE, "head_dim": 4, "num_local_experts": 3, "num_experts_per_tok": 2},
        {
            **ENDS,
            **ATTENTION,
            "model.layers.N.mlp.router.weight": GATE,
            "model.layers.N.mlp.experts.gate_up_proj": "M 6 of 24 x 16",
            "model.layers.N.mlp.experts.gate_up_proj_bias": "A scalar",
            "model.layers.N.mlp.experts.down_proj": "M 3 of 16 x 24",
            "model.layers.N.mlp.experts.down_proj_bias": "A scalar",
        },
    ),
    "llama4": Case(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **BASE, "head_dim": 4, "intermediate_size_mlp": 20, "num_local_experts": 3,
            "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
        },
        {
            **ENDS,
            **ATTENTION,
            "model.layers.N.feed_forward.gate_proj.weight": "M 20 x 16",
            "model.layers.N.feed_forward.up_proj.weight": "M 20 x 16",
            "model.layers.N.feed_forward.down_proj.weight": "M 16 x 20",
            "model.layers.N.feed_forward.router.weight": GATE,
            "model.layers.N.feed_forward.experts.gate_up_proj": "M 6 of 24 x 16",
            "model.layers.N.feed_forward.experts.down_proj": "M 3 of 16 x 24",
            "model.layers.N.feed_forward.shared_expert.gate_proj.weight": "M 24 x 16",
            "model.layers.N.feed_forward.shared_expert.up_proj.weight": "M 24 x 16",
            "model.layers.N.feed_forward.shared_expert.down_proj.weight": "M 16 x 24",
        },
    ),
    "gpt2": Case(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16,
            "bos_token_id": 1, "eos_token_id": 2,
        },
        {
            "transformer.wte.weight": EMBED,
            "transformer.wpe.weight": EMBED,
            "transformer.h.N.attn.c_attn.weight": "M 3 of 16 x 16",
            "transformer.h.N.attn.c_proj.weight": "M 16 x 16",
            "transformer.h.N.mlp.c_fc.weight": "M 64 x 16",
            "transformer.h.N.mlp.c_proj.weight": "M 16 x 64",
        },
    ),
    "gpt2, cross": Case(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16,
            "bos_token_id": 1, "eos_token_id": 2, "add_cross_attention": True,
        },
        {
            "transformer.wte.weight": EMBED,
            "transformer.wpe.weight": EMBED,
            "transformer.h.N.attn.c_attn.weight": "M 3 of 16 x 16",
            "transformer.h.N.attn.c_proj.weight": "M 16 x 16",
            "transformer.h.N.crossattention.c_attn.weight": "M 2 of 16 x 16",
            "transformer.h.N.crossattention.q_attn.weight": "M 16 x 16",
            "transformer.h.N.crossattention.c_proj.weight": "M 16 x 16",
            "transformer.h.N.mlp.c_fc.weight": "M 64 x 16",
            "transformer.h.N.mlp.c_proj.weight": "M 16 x 64",
        },
        lambda: {
            "input_ids": _words(),
            "encoder_hidden_states": torch.linspace(-1, 1, 160).view(2, 5, 16).sin(),
        },
    ),
    "gpt_neox": Case(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        OLD,
        {
            "gpt_neox.embed_in.weight": EMBED,
            "lm_head.weight": HEAD,
            "gpt_neox.layers.N.attention.query_key_value.weight": "M 3 of 16 x 16",
            "gpt_neox.layers.N.attention.dense.weight": "M 16 x 16",
            "gpt_neox.layers.N.mlp.dense_h_to_4h.weight": "M 24 x 16",
            "gpt_neox.layers.N.mlp.dense_4h_to_h.weight": "M 16 x 24",
        },
    ),
    "bloom": Case(
        "BloomForCausalLM",
        "BloomConfig",
        {
            "vocab_size": 50, "hidden_size": 16, "n_layer": 2, "n_head": 4, "bos_token_id": 1,
            "eos_token_id": 2, "pad_token_id": 0,
        },
        {**FALCON, FALCON_QKV: "M 3 of 16 x 16"},
    ),
    "falcon, groups": Case(
        "FalconForCausalLM",
        "FalconConfig",
        {**OLD, "num_kv_heads": 2, "new_decoder_architecture": True},
        {**FALCON, FALCON_QKV: "M 16 x 16, 2 of 8 x 16"},
    ),
    "falcon, one key": Case(
        "FalconForCausalLM", "FalconConfig", OLD, {**FALCON, FALCON_QKV: "M 16 x 16, 2 of 4 x 16"}
    ),
    "falcon, by head": Case(
        "FalconForCausalLM",
        "FalconConfig",
        {**OLD, "multi_query": False},
        {**FALCON, FALCON_QKV: "M 3 of 16 x 16"},
    ),
    "t5": Case(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4,
            "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
        },
        {
            "shared.weight": EMBED,
            **{f"encoder.block.N.layer.N.{n}": found for n, found in T5_LAYER.items()},
            **{f"decoder.block.N.layer.N.{n}": found for n, found in T5_LAYER.items()},
            **{
                f"decoder.block.N.layer.N.EncDecAttention.{which}.weight": "M 16 x 16"
                for which in "qkvo"
            },
        },
        lambda: {"input_ids": _words(), "labels": _words()},
    ),
    "bert": Case(
        "BertForPreTraining",
        "BertConfig",
        {**OLD, "max_position_embeddings": 16},
        {
            "bert.embeddings.word_embeddings.weight": EMBED,
            "bert.embeddings.position_embeddings.weight": EMBED,
            "bert.embeddings.token_type_embeddings.weight": EMBED,
            "bert.encoder.layer.N.attention.self.query.weight": "M 16 x 16",
            "bert.encoder.layer.N.attention.self.key.weight": "M 16 x 16",
            "bert.encoder.layer.N.attention.self.value.weight": "M 16 x 16",
            "bert.encoder.layer.N.attention.output.dense.weight": "M 16 x 16",
            "bert.encoder.layer.N.intermediate.dense.weight": "M 24 x 16",
            "bert.encoder.layer.N.output.dense.weight": "M 16 x 24",
            "bert.pooler.dense.weight": "M 16 x 16",
            "cls.predictions.transform.dense.weight": "M 16 x 16",
            "cls.seq_relationship.weight": HEAD,
        },
        lambda: {
            "input_ids": _words(), "labels": _words(),
            "next_sentence_label": torch.tensor([0, 1]),
        },
    ),
    "modernbert": Case(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        OLD,
        {
            "model.embeddings.tok_embeddings.weight": EMBED,
            "model.layers.N.attn.Wqkv.weight": "M 3 of 16 x 16",
            "model.layers.N.attn.Wo.weight": "M 16 x 16",
            "model.layers.N.mlp.Wi.weight": "M 2 of 24 x 16",
            "model.layers.N.mlp.Wo.weight": "M 16 x 24",
            "head.dense.weight": HEAD,
        },
    ),
    "vit": Case(
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "image_size": 8, "patch_size": 4, "num_labels": 3,
        },
        {
            "vit.embeddings.cls_token": EMBED,
            "vit.embeddings.position_embeddings": EMBED,
            "vit.embeddings.patch_embeddings.projection.weight": CONV,
            **VIT_LAYER,
            "vit.layers.N.mlp.fc1.weight": "M 24 x 16",
            "vit.layers.N.mlp.fc2.weight": "M 16 x 24",
            "classifier.weight": HEAD,
        },
        lambda: {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8).sin()},
    ),
    "mamba": Case(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 50, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "time_step_rank": 3},
        {
            "backbone.embeddings.weight": EMBED,
            "backbone.layers.N.mixer.A_log": "A scalar",
            "backbone.layers.N.mixer.conv1d.weight": CONV,
            "backbone.layers.N.mixer.in_proj.weight": "M 2 of 32 x 16",
            "backbone.layers.N.mixer.x_proj.weight": "M 3 x 32, 2 of 4 x 32",
            "backbone.layers.N.mixer.dt_proj.weight": "M 32 x 3",
            "backbone.layers.N.mixer.out_proj.weight": "M 16 x 32",
        },
    ),
    "mamba2": Case(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {"vocab_size": 50, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2,
         "num_heads": 4, "head_dim": 8, "n_groups": 1, "bos_token_id": 1, "eos_token_id": 2,
         "pad_token_id": 0},
        {
            "backbone.embeddings.weight": EMBED,
            "backbone.layers.N.mixer.conv1d.weight": CONV,
            "backbone.layers.N.mixer.in_proj.weight": "M 2 of 32 x 16, 3 of 4 x 16",
            "backbone.layers.N.mixer.out_proj.weight": "M 16 x 32",
            "lm_head.weight": HEAD,
        },
    ),
    "whisper": Case(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": 50, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24, "num_mel_bins": 8, "max_source_positions": 20,
            "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        {
            "model.encoder.conv1.weight": CONV,
            "model.encoder.conv2.weight": CONV,
            "model.decoder.embed_tokens.weight": EMBED,
            "model.decoder.embed_positions.weight": EMBED,
            **{f"model.encoder.layers.N.{n}": found for n, found in WHISPER_LAYER.items()},
            **{f"model.decoder.layers.N.{n}": found for n, found in WHISPER_LAYER.items()},
            **{f"model.decoder.layers.N.{n}": found for n, found in CROSS.items()},
        },
        lambda: {
            "input_features": torch.linspace(-1, 1, 2 * 8 * 40).view(2, 8, 40).sin(),
            "labels": _words(),
        },
    ),
}  # fmt: skip
