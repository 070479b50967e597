"""The queries and keys of known architectures, by `model_type` of Hugging Face.

Names are those of transformers' modeling files, as in `architectures.py`.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from samestep.groups.routing import unwrapped
from samestep.layout.attention_heads import QKHeads
from samestep.layout.fused_rows import without_wrappers
from samestep.recipes.architectures import head_dim
from samestep.recipes.matching import configured

Attention = Callable[[Any], tuple[str, QKHeads]]  # of a configuration: modules, and their heads


def _separate(config: Any) -> tuple[str, QKHeads]:
    kv_heads = getattr(config, "num_key_value_heads", None)
    return "*.self_attn", QKHeads.separate(config.num_attention_heads, head_dim(config), kv_heads)


def _phi3(config: Any) -> tuple[str, QKHeads]:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return "*.self_attn", QKHeads.fused("qkv_proj.weight", heads, head_dim(config), kv_heads)


def _gpt2(config: Any) -> tuple[str, QKHeads]:
    size = config.n_embd // config.n_head
    return "*.attn", QKHeads.fused("c_attn.weight", config.n_head, size, transposed=True)


def _gpt_neox(config: Any) -> tuple[str, QKHeads]:
    heads = config.num_attention_heads
    split = f"interleaved:3x{heads}"
    fused = QKHeads.fused("query_key_value.weight", heads, head_dim(config), split_sizes=split)
    return "*.attention", fused


def _latent(config: Any) -> tuple[str, QKHeads]:
    q = "q_proj.weight" if config.q_lora_rank is None else "q_b_proj.weight"
    return "*.self_attn", QKHeads.latent(
        config.num_attention_heads,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        value=config.v_head_dim,
        q=q,
    )


ATTENTION: dict[str, Attention] = {
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
    "gemma": _separate,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _separate,
    "mistral": _separate,
    "mixtral": _separate,
    "phi3": _phi3,
    "qwen2": _separate,
    "qwen2_moe": _separate,
}
NORMALIZED = {"gemma3_text", "llama4_text", "olmo2", "qwen3", "qwen3_moe", "qwen3_next"}


def attention_layers(model: nn.Module) -> dict[str, QKHeads]:
    """The attention layers of a model by name, found from its `config`; raises if it is unknown."""
    found: dict[str, QKHeads] = {}
    kinds: list[str] = []
    names = [without_wrappers(name) for name, _ in unwrapped(model).named_modules()]
    for path, kind, config in configured(model):
        kinds.append(kind)
        if kind in NORMALIZED:
            raise ValueError(
                f"{kind!r} normalizes queries and keys, so that scaling their weights "
                "changes no logit: QK-clip is not needed, its norms bound the logits"
            )
        if kind in ATTENTION:
            pattern, heads = ATTENTION[kind](config)
            for name in names:
                # A leading dot: patterns begin with one for whole parts of a name.
                if name.startswith(path) and fnmatchcase(f".{name[len(path) :]}", pattern):
                    found[name] = heads
    if not found:
        told = " or ".join(map(repr, dict.fromkeys(kinds)))
        of = f"of model type {told}" if kinds else "without a `config`"
        raise ValueError(
            f"the layout of queries and keys in a model {of} is unknown: pass layers=, "
            f'as in layers={{"*.self_attn": samestep.QKHeads.separate(32, 128, '
            f"kv_heads=8)}}; known are {', '.join(sorted(ATTENTION))}"
        )
    return found
