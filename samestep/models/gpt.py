"""A compact decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, experts.

Shapes in the docstrings: B sequences, T tokens, C channels (``width``), H query heads,
G key/value heads, D channels of one head, V vocabulary, E experts, Z null experts, K choices of a
token among the E + Z.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, relu, scaled_dot_product_attention

from samestep.parallel.experts import TokenDispatch, load_of, local
from samestep.parallel.fused import own_sizes
from samestep.parallel.grouped import Products, grouped_linear
from samestep.parallel.plan import FusedPart, Plan
from samestep.parallel.recompute import once
from samestep.parallel.router_losses import RouterLosses

LEAST = dict.fromkeys(
    ("vocab_size", "context", "width", "layers", "heads", "kv_heads", "mlp_ratio"), 1
) | dict.fromkeys(
    ("expert_size", "shared_experts", "null_experts", "capacity", "balance_loss", "z_loss"), 0
)


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
    experts: int = 0  # 0: one MLP per layer
    active_experts: int = 2
    expert_size: int = 0  # channels inside an expert; 0: as many per token as one MLP has
    capacity: float = 0.0  # room per expert, as a multiple of an even share; 0: for all that come
    shared_experts: int = 0  # that every token passes, beside those it chooses
    overlap_shared: bool = True  # they compute while rows travel to the others
    null_experts: int = 0  # that a token may choose, and that add nothing
    balance_loss: float = 0.0  # coefficients, per layer: see parallel/router_losses.py
    z_loss: float = 0.0
    expert_products: Products = "auto"  # see parallel/grouped.py
    dropout: float = 0.0
    fused_qkv: bool = False  # queries, keys and values in one weight

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width must be a multiple of 2 * heads = {2 * self.heads} "
                f"(rotary positions turn channels in pairs), got {self.width}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )
        self._check_experts()
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be from 0 to below 1, got {self.dropout}")

    def _check_experts(self) -> None:
        if self.expert_products not in get_args(Products):
            choices = ", ".join(get_args(Products))
            raise ValueError(
                f"expert_products must be one of {choices}, got {self.expert_products!r}"
            )
        if self.experts:
            if not 1 <= self.active_experts <= self.choices:
                also = f" + null_experts = {self.choices}" if self.null_experts else ""
                raise ValueError(
                    f"active_experts must be from 1 to experts = {self.experts}{also}, "
                    f"got {self.active_experts}"
                )
            return
        for name in ("shared_experts", "null_experts", "balance_loss", "z_loss"):
            if getattr(self, name):
                raise ValueError(
                    f"{name} is {getattr(self, name)}, and the model has no experts: set "
                    "experts= above 0 too"
                )

    @property
    def choices(self) -> int:
        """Return the number of choices that a token has: E experts, then Z null experts."""
        return self.experts + self.null_experts

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        return (self.width, *(self.kv_heads * self.head_dim,) * 2)

    @property
    def expert_hidden(self) -> int:
        return self.expert_size or max(1, self.mlp_ratio * self.width // self.active_experts)


def rotary_table(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of every position's angles, each (context, D / 2)."""
    pairs = config.head_dim // 2
    frequencies = config.rope_base ** (-torch.arange(pairs, dtype=torch.float32) / pairs)
    angles = torch.outer(torch.arange(config.context, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each channel pair of ``x`` (B, heads, T, D) by its position's angle (T, D / 2)."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention, (B, T, C) to (B, T, C).

    Queries, keys and values have a weight each, or one fused weight. A rank may hold only some of
    the heads.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.kv_heads != config.heads
        self.sizes = config.qkv_sizes
        self.fused = config.fused_qkv
        if config.fused_qkv:
            self.qkv = nn.Linear(config.width, sum(self.sizes), bias=False)
        else:
            self.q, self.k, self.v = (
                nn.Linear(config.width, size, bias=False) for size in self.sizes
            )
        self.q_norm = nn.RMSNorm(config.head_dim)
        self.k_norm = nn.RMSNorm(config.head_dim)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix (B, T, C) over time; ``cos`` and ``sin`` are (T, D / 2)."""
        if self.fused:
            parts = self.qkv(x).split(own_sizes(self.qkv, self.sizes), dim=-1)
        else:
            parts = self.q(x), self.k(x), self.v(x)
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H or G, T, D)
            for part in parts
        )
        # Normalised queries and keys bound the attention logits, whatever the weights do.
        q = rotate(self.q_norm(q.to(self.q_norm.weight.dtype)), cos, sin)
        k = rotate(self.k_norm(k.to(self.k_norm.weight.dtype)), cos, sin)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """Two matrices with a squared ReLU between them, (B, T, C) to (B, T, C)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of (B, T, C) on its own."""
        out: Tensor = self.down(relu(self.up(x)).square())
        return out


class Experts(nn.Module):
    """The stacked weights of E small MLPs; each expert transforms the rows sent to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(config.experts, config.expert_hidden, config.width))
        self.down = nn.Parameter(torch.empty(config.experts, config.width, config.expert_hidden))
        self.products: Products = config.expert_products

    def forward(self, rows: Tensor, counts: Sequence[int] | Tensor | None = None) -> Tensor:
        """Transform (n, C), ``counts`` rows for each expert in turn; without it (E, slots, C)."""
        ups, downs = local(self.up), local(self.down)
        if counts is None:
            return relu(rows @ ups.mT).square() @ downs.mT
        inside = relu(grouped_linear(rows, ups, counts, self.products)).square()
        return grouped_linear(inside, downs, counts, self.products)


class MixtureOfExperts(nn.Module):
    """Each token uses the K experts that its router scores highest, (B, T, C) to (B, T, C).

    A bias, added to the scores only for the choice, makes busy experts less likely; `balance`
    moves the bias by the counts of tokens. Counts are integers, so the bias does not depend on how
    a batch was divided among ranks. The losses of the router are added if the config sets their
    coefficients.

    Null experts add nothing, and the weights of the others are made to sum to one without them
    (AdaMoE, arXiv 2406.13233). Shared experts (DeepSeekMoE, arXiv 2401.06066) are one MLP for all
    tokens, whose result is added.
    """

    bias: Tensor
    load: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.active = config.active_experts
        self.null = config.null_experts
        self.router = nn.Linear(config.width, config.choices, bias=False)
        self.losses = RouterLosses(config.balance_loss, config.z_loss)
        self.experts = Experts(config)
        self.dispatch = TokenDispatch(
            config.experts,
            config.capacity,
            config.null_experts,
            device_counts=config.expert_products != "loop",
            overlap=config.overlap_shared,
        )
        shared = config.shared_experts * config.expert_hidden
        self.shared_experts = MLP(config.width, shared) if shared else None
        self.register_buffer("bias", torch.zeros(config.choices))
        counts = torch.zeros(config.choices, dtype=torch.int64)
        self.register_buffer("load", counts, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of (B, T, C) on its own."""
        tokens = x.flatten(0, 1)  # (B T, C)
        logits = self.router(tokens).float()  # (B T, E + Z)
        scores = logits.sigmoid()
        chosen = once(lambda: self._choose(scores))  # (B T, K)
        weights = scores.gather(1, chosen)
        if self.null:
            weights = weights.masked_fill(chosen >= self.dispatch.experts, 0.0)
            # A token may have chosen nothing else.
            weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-20)
        else:
            weights = weights / weights.sum(dim=1, keepdim=True)
        weights = self.losses(weights, logits, scores, chosen)
        mixed: Tensor = self.dispatch(tokens, chosen, weights, self.experts, self.shared_experts)
        return mixed.to(x.dtype).view_as(x)

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the choices of each token, (B T, K); count them in training."""
        chosen = (scores + self.bias).topk(self.active).indices
        if self.training:
            self.load += load_of(chosen, len(self.load))
        return chosen

    @torch.no_grad()
    def balance(self, load: Tensor, rate: float = 1e-3) -> None:
        """Make experts whose ``load`` (E + Z,), over all ranks, is above the mean less likely."""
        self.bias += rate * (load.float().mean() - load).sign()
        self.load.zero_()


class Block(nn.Module):
    """One pre-norm layer, (B, T, C) to (B, T, C)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp: nn.Module = (
            MixtureOfExperts(config)
            if config.experts
            else MLP(config.width, config.mlp_ratio * config.width)
        )
        self.dropout = config.dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add attention, then the MLP, to the residual stream."""
        x = x + self._drop(self.attention(self.attention_norm(x), cos, sin))
        return x + self._drop(self.mlp(self.mlp_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(nn.Module):
    """A GPT from token ids (B, T) to next-token logits (B, T, V); T is at most ``context``."""

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
        if self.embedding.weight.is_meta:
            return  # no values to draw, which takes torch milliseconds each all the same
        nn.init.normal_(self.embedding.weight)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = module.in_features**-0.5
                # 2 * layers branches are summed, so each starts that much smaller.
                if name.endswith(("attention.out", "mlp.down", "shared_experts.down")):
                    std /= math.sqrt(2 * self.config.layers)
                # A small head starts near a uniform guess: loss about ln(vocab_size).
                if name == "head":
                    std *= 0.1
                nn.init.normal_(module.weight, std=std)
            elif isinstance(module, Experts):
                nn.init.normal_(module.up, std=module.up.shape[-1] ** -0.5)
                std = module.down.shape[-1] ** -0.5 / math.sqrt(2 * self.config.layers)
                nn.init.normal_(module.down, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the token after each one in ``tokens`` (B, T)."""
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(
                f"{length} tokens are more than the model's context of {self.config.context}"
            )
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of ``targets`` (B, T), a scalar."""
        return cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (B, T, V) against targets (B, T), in nats."""
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def balance_experts(model: nn.Module, layers: int, copies: int = 1) -> None:
    """Make experts that are chosen too often less likely, by counts summed over all ranks.

    Collective if the default process group is initialized and the model has experts.

    Args:
        model: The whole model, or one rank's stages, whose blocks keep their names in the whole.
        layers: Number of layers of the whole model.
        copies: Number of ranks that have counted the same tokens.
    """
    found = {
        int(match[1]): module
        for name, module in model.named_modules()
        if isinstance(module, MixtureOfExperts) and (match := re.match(r"blocks\.(\d+)\.", name))
    }
    if not found:
        return
    some = next(iter(found.values())).load
    loads = torch.zeros(layers, len(some), dtype=some.dtype, device=some.device)
    for layer, module in found.items():
        loads[layer] = module.load
    if dist.is_initialized():
        dist.all_reduce(loads)
    for layer, module in found.items():
        module.balance(loads[layer] // copies)


def gpt_plan(config: GPTConfig) -> Plan:
    """Return the plan that cuts the model over a mesh."""
    experts = bool(config.experts)
    mlp = () if experts else ("blocks.*.mlp",)
    heads = (config.heads, config.kv_heads, config.kv_heads)
    qkv = tuple(map(FusedPart, config.qkv_sizes, heads))
    whole = ["router"] if experts else []
    if config.shared_experts:
        whole += ["shared_experts.up", "shared_experts.down"]
    return Plan(
        blocks=("blocks.*",),
        embedding=("embedding",),
        head=("head",),
        branches=("blocks.*.attention", *mlp),
        column=(
            *(() if config.fused_qkv else ("blocks.*.attention.[qkv]",)),
            *(f"{each}.up" for each in mlp),
        ),
        fused={"blocks.*.attention.qkv": qkv} if config.fused_qkv else {},
        row=("blocks.*.attention.out", *(f"{each}.down" for each in mlp)),
        on_stream=(
            "norm",
            "blocks.*.attention_norm",
            "blocks.*.mlp_norm",
            *(f"blocks.*.mlp.{name}" for name in whole),
        ),
        on_heads=("blocks.*.attention.[qk]_norm",),
        experts={"blocks.*.mlp.experts.up": 1, "blocks.*.mlp.experts.down": 2} if experts else {},
    )
