"""The recipes, by `model_type` of Hugging Face's configurations.

Names and layouts are those of transformers' modeling files (tried with 5.23), which cut activations
as the recipes cut weights. Llama and its like have nothing fused: all of their recipe is that
nothing else is to be known.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

QKV = "queries, keys, values"
GATE_UP = "gate, up"
ROUTER = "*.mlp.gate.weight"


class Line(NamedTuple):
    """A line of a recipe: facts of the parameters that a pattern matches.

    pattern: of names inside the model that has the configuration, as in a shell.
    reason: what they are, for `table()`.
    options: group keys: "rule", "split_sizes", "transposed"; and "role".
    """

    pattern: str
    reason: str
    options: Mapping[str, Any]


Recipe = Callable[[Any], list[Line]]  # of a configuration


def fused(pattern: str, reason: str, split: tuple[int, ...] | str, **options: Any) -> Line:
    """Several matrices in one weight."""
    return Line(pattern, reason, {"split_sizes": split, **options})


def stack(
    pattern: str, reason: str, split: tuple[int, ...] | str | None = None, **options: Any
) -> Line:
    """A matrix, or several, of every expert: 3-D."""
    cut = {} if split is None else {"split_sizes": split}
    return Line(pattern, reason, {"rule": "muon", "role": "matrix", **cut, **options})


def gate(pattern: str, reason: str) -> Line:
    """A weight that chooses or weighs, and is no hidden matrix."""
    return Line(pattern, reason, {"rule": "adamw", "role": "gate"})


def head(pattern: str, reason: str) -> Line:
    """An output head by another name."""
    return Line(pattern, reason, {"rule": "adamw", "role": "unembedding"})


def head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _plain(config: Any) -> list[Line]:
    """Every matrix is a parameter of its own."""
    return []


def _experts(*routers: str) -> list[Line]:
    """Stacks (experts, out, in): rows of gate, then of up. Lists of experts are plain matrices."""
    return [
        stack("*.experts.gate_up_proj", f"experts: {GATE_UP}", "halves"),
        stack("*.experts.down_proj", "experts"),
        *(gate(router, "a router") for router in routers),
    ]


def _qwen3_next(config: Any) -> list[Line]:
    heads, of_values = config.linear_num_key_heads, config.linear_num_value_heads
    keys, values = config.linear_key_head_dim, config.linear_value_head_dim * of_values // heads
    return [
        *_experts(ROUTER),
        fused(
            "*.linear_attn.in_proj_qkvz.weight",
            f"{QKV}, gate, of each head",
            f"interleaved:{keys}+{keys}+{values}+{values}x{heads}",
        ),
        gate("*.linear_attn.in_proj_ba.weight", "rates of every head"),
        fused(
            "*.self_attn.q_proj.weight",
            "query, gate of each head",
            f"interleaved:2x{config.num_attention_heads}",
        ),
    ]


def _deepseek(config: Any) -> list[Line]:
    """Latent attention: what goes up from a latent is cut by heads (Muon Split of GLM-5)."""
    heads = config.num_attention_heads
    return [
        *_experts(ROUTER),
        fused("*.self_attn.q_b_proj.weight", "queries of each head", f"heads:{heads}"),
        fused(
            "*.self_attn.kv_b_proj.weight",
            "keys, values of each head",
            (config.qk_nope_head_dim, config.v_head_dim) * heads,
        ),
        fused(
            "*.self_attn.kv_a_proj_with_mqa.weight",
            "latent, rotary key",
            (config.kv_lora_rank, config.qk_rope_head_dim),
        ),
    ]


def _gpt_oss(config: Any) -> list[Line]:
    return [
        stack(
            "*.experts.gate_up_proj",
            "experts: gate, up, in turn",
            f"interleaved:2x{config.intermediate_size}",
            transposed=True,
        ),
        stack("*.experts.down_proj", "experts", transposed=True),
        gate("*.mlp.router.weight", "a router"),
    ]


def _llama4(config: Any) -> list[Line]:
    return [
        stack("*.experts.gate_up_proj", f"experts: {GATE_UP}", "halves", transposed=True),
        stack("*.experts.down_proj", "experts", transposed=True),
        gate("*.feed_forward.router.weight", "a router"),
    ]


def _gpt2(config: Any) -> list[Line]:
    """Conv1D, stored as (in, out), which routing sees by itself."""
    width = config.n_embd
    return [
        fused("*.attn.c_attn.weight", QKV, (width, width, width), transposed=True),
        fused("*.crossattention.c_attn.weight", "keys, values", (width, width), transposed=True),
    ]


def _by_head(config: Any) -> list[Line]:
    heads = config.num_attention_heads
    return [fused("*.query_key_value.weight", f"{QKV} of each head", f"interleaved:3x{heads}")]


def _falcon(config: Any) -> list[Line]:
    heads, size = config.num_attention_heads, head_dim(config)
    if config.new_decoder_architecture:
        groups = config.num_kv_heads
        split = f"interleaved:{heads // groups * size}+{size}+{size}x{groups}"
        return [fused("*.query_key_value.weight", f"{QKV} of each group", split)]
    if config.multi_query:
        return [fused("*.query_key_value.weight", QKV, (heads * size, size, size))]
    return _by_head(config)


def _gate_up(config: Any) -> list[Line]:
    return [fused("*.mlp.gate_up_proj.weight", GATE_UP, "halves")]


def _phi3(config: Any) -> list[Line]:
    size = head_dim(config)
    keys = config.num_key_value_heads * size
    rows = (config.num_attention_heads * size, keys, keys)
    return [fused("*.self_attn.qkv_proj.weight", QKV, rows), *_gate_up(config)]


def _modernbert(config: Any) -> list[Line]:
    width = config.hidden_size
    return [
        fused("*.attn.Wqkv.weight", QKV, (width, width, width)),
        fused("*.mlp.Wi.weight", "up, gate", "halves"),
    ]


def _mamba(config: Any) -> list[Line]:
    states = config.state_size
    return [
        fused("*.mixer.in_proj.weight", "input, gate", "halves"),
        fused("*.mixer.x_proj.weight", "time step, B, C", (config.time_step_rank, states, states)),
    ]


def _mamba2(config: Any) -> list[Line]:
    inner, groups = int(config.expand * config.hidden_size), config.n_groups * config.state_size
    rows = (inner, inner, groups, groups, config.num_heads)
    return [fused("*.mixer.in_proj.weight", "gate, input, B, C, time steps", rows)]


PLAIN = (
    "gemma", "gemma2", "gemma3_text", "llama", "mistral", "olmo2", "phi", "qwen2", "qwen3", "t5",
    "vit", "whisper",
)  # fmt: skip
_ALL: dict[str, Recipe] = {
    **dict.fromkeys(PLAIN, _plain),
    "bert": lambda _: [head("*cls.seq_relationship.weight", "a head")],
    "bloom": _by_head,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "falcon": _falcon,
    "glm4": _gate_up,
    "gpt2": _gpt2,
    "gpt_neox": _by_head,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "mixtral": lambda _: _experts(ROUTER, "*.block_sparse_moe.gate.weight"),
    "modernbert": _modernbert,
    "phi3": _phi3,
    "qwen2_moe": lambda _: _experts(ROUTER),
    "qwen3_moe": lambda _: _experts(ROUTER),
    "qwen3_next": _qwen3_next,
}
RECIPES = dict(sorted(_ALL.items()))
