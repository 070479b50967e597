"""A compact decoder-only transformer: RMSNorm, rotary positions, grouped-query attention.

Shapes in the docstrings: B sequences, T tokens, C channels (``width``), H query heads,
G key/value heads, D channels of one head, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu, rms_norm, scaled_dot_product_attention


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. The defaults make a small byte-level one."""

    vocab_size: int = 256
    context: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    mlp_ratio: int = 4
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be built, before any weight is made."""
        for name in ("vocab_size", "context", "width", "layers", "heads", "kv_heads", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width must be a multiple of 2 * heads = {2 * self.heads} "
                f"(rotary positions turn channels in pairs), got {self.width}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.width // self.heads

    @property
    def qkv_split_sizes(self) -> tuple[int, int, int]:
        """Rows of the fused ``qkv`` weight that belong to queries, keys and values."""
        kv_rows = self.kv_heads * self.head_dim
        return self.width, kv_rows, kv_rows


def rotary_table(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of every position's angles, each (context, D / 2)."""
    pairs = config.head_dim // 2
    frequencies = config.rope_base ** (-torch.arange(pairs, dtype=torch.float32) / pairs)
    angles = torch.outer(torch.arange(config.context, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each channel pair of ``x`` (B, heads, T, D) by its position's angle (T, D / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention, (B, T, C) to (B, T, C), with one fused projection for Q, K and V."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.split_sizes = config.qkv_split_sizes
        self.grouped = config.kv_heads != config.heads
        self.qkv = nn.Linear(config.width, sum(self.split_sizes), bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix (B, T, C) over time; ``cos`` and ``sin`` are (T, D / 2)."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H or G, T, D)
            for part in self.qkv(x).split(self.split_sizes, dim=-1)
        )
        # Normalised queries and keys bound the attention logits, whatever the weights do.
        q = rotate(rms_norm(q, (self.head_dim,)), cos, sin)
        k = rotate(rms_norm(k, (self.head_dim,)), cos, sin)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two matrices with a squared ReLU between them, (B, T, C) to (B, T, C)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_ratio * config.width, bias=False)
        self.down = nn.Linear(config.mlp_ratio * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of (B, T, C) on its own."""
        return self.down(relu(self.up(x)).square())


class Block(nn.Module):
    """One pre-norm layer, (B, T, C) to (B, T, C)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add attention, then the MLP, to the residual stream."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Token ids (B, T) to next-token logits (B, T, V); T may be anything up to ``context``."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        cos, sin = rotary_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every matrix anew from torch's global generator; norms start at one."""
        nn.init.normal_(self.embedding.weight)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = module.in_features**-0.5
                # 2 * layers branches are summed, so each starts that much smaller.
                if name.endswith(("attention.out", "mlp.down")):
                    std /= math.sqrt(2 * self.config.layers)
                # A small head starts near a uniform guess: loss about ln(vocab_size).
                if name == "head":
                    std *= 0.1
                nn.init.normal_(module.weight, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the token after each one in ``tokens`` (B, T)."""
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(f"{length} tokens do not fit a context of {self.config.context}")
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of ``targets`` (B, T), a scalar."""
        return cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
