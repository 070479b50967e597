"""A Llama written out: where transformers is not installed, its twin of the same shapes and names.

B sequences, T tokens, C channels, H query heads, G key/value heads, D channels of one head.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from samestep.models.gpt import rotate

STD = 0.02  # of all initial weights


@dataclass(frozen=True)
class LlamaShape:
    """The shape of a model; names are those of transformers' config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.hidden_size // self.num_attention_heads


class Attention(nn.Module):
    """Causal, with fewer key and value heads than query heads, (B, T, C) to (B, T, C)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        width, head = shape.hidden_size, shape.head_dim
        self.head_dim = head
        self.grouped = shape.num_key_value_heads != shape.num_attention_heads
        self.q_proj = nn.Linear(width, shape.num_attention_heads * head, bias=False)
        self.k_proj = nn.Linear(width, shape.num_key_value_heads * head, bias=False)
        self.v_proj = nn.Linear(width, shape.num_key_value_heads * head, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * head, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix over time; `cos` and `sin` are (T, D / 2)."""
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H or G, T, D)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """SwiGLU, (B, T, C) to (B, T, C)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        width, hidden = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position on its own."""
        out: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One layer, (B, T, C) to (B, T, C)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """Tokens (B, T) to logits (B, T, vocabulary)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the token after each one."""
        x = self.embed_tokens(tokens)
        cos, sin = (table.to(x.dtype) for table in self._rotary(tokens.shape[1], x.device))
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

    def _rotary(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position's angles, (T, D / 2), in fp32."""
        pairs = self.shape.head_dim // 2
        exponents = -torch.arange(pairs, dtype=torch.float32, device=device) / pairs
        positions = torch.arange(length, dtype=torch.float32, device=device)
        angles = torch.outer(positions, self.shape.rope_theta**exponents)
        return angles.cos(), angles.sin()


def from_transformers(shape: LlamaShape, positions: int, dtype: torch.dtype) -> nn.Module:
    """The same model of transformers, weights drawn in `dtype`; ImportError where it is missing."""
    # Not a package of ours: without its types here, and not there everywhere.
    transformers: Any = import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        max_position_embeddings=positions,
        rms_norm_eps=shape.rms_norm_eps,
        initializer_range=STD,
        tie_word_embeddings=False,
        use_cache=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # and not `.to`, which would round its angles too
    try:
        model: nn.Module = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model
