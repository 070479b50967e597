"""A decoder as a plan sees it: its shape, known ones by name, and modules on the meta device."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from samestep.models.gpt import GPTConfig


@dataclass(frozen=True)
class Shape:
    """A decoder: attention and an MLP, or experts, per layer.

    q_rank, kv_rank: ranks of latent attention (0: none), where a head has `head` channels without
        and `rope` channels with positions, and values of `head` channels.
    dense_layers: number of first layers that have an MLP although there are experts.
    fused: whether queries, keys and values (with latent attention keys and values) are one matrix,
        which Muon splits as the recipe of the model does.
    """

    name: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    hidden: int
    gated: bool = True
    tied: bool = False
    biases: bool = False
    positions: int = 0  # of a learned table
    experts: int = 0
    expert_hidden: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    active_experts: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope: int = 0
    qk_norms: bool = False
    qkv_biases: bool = False
    fused: bool = False
    capacity: float = 0.0  # room of an expert, in even shares; 0: for all that come
    source: str = ""


def _gpt(name: str, width: int, layers: int, heads: int, positions: int, source: str) -> Shape:
    return Shape(
        name, 50257, width, layers, heads, heads, width // heads, 4 * width,
        gated=False, tied=True, biases=True, positions=positions, source=source,
    )  # fmt: skip


def _llama(name: str, width: int, layers: int, heads: int, kv_heads: int, hidden: int) -> Shape:
    source = "Llama and Llama 2 reports (arXiv 2302.13971, 2307.09288)"
    return Shape(name, 32000, width, layers, heads, kv_heads, width // heads, hidden, source=source)


_DEEPSEEK = Shape(
    "deepseek-v3", 129280, 7168, 61, 128, 128, 128, 18432,
    experts=256, expert_hidden=2048, shared_experts=1, dense_layers=3, active_experts=8,
    q_rank=1536, kv_rank=512, rope=64,
    source="DeepSeek-V3 report (arXiv 2412.19437), without its module for a second token",
)  # fmt: skip
_SHAPES = (
    _gpt("gpt2-xl", 1600, 48, 25, 1024, "GPT-2 report"),
    _llama("llama-7b", 4096, 32, 32, 32, 11008),
    _llama("llama-13b", 5120, 40, 40, 40, 13824),
    _llama("llama-70b", 8192, 80, 64, 8, 28672),
    _gpt("gpt-175b", 12288, 96, 96, 2048, "GPT-3 report (arXiv 2005.14165)"),
    _DEEPSEEK,
    replace(_DEEPSEEK, name="deepseek-v3-dense", experts=0, dense_layers=61,
            source="the dense layers of DeepSeek-V3, 61 of them, and no experts"),
    Shape("nanochat-d20", 65536, 1280, 20, 10, 10, 128, 5120, gated=False,
          source="nanochat, depth 20: width 64 x 20, four times that in the MLP"),
    Shape("parallel-muon-10b", 219520, 4096, 36, 32, 16, 128, 16384, tied=True,
          source="inferred: no shape is told for Parallel Muon's 10B model; of round shapes with "
                 "10B parameters this one has its 847.45 TFLOP"),
)  # fmt: skip
SHAPES = {shape.name: shape for shape in _SHAPES}


class Experts(nn.Module):
    """Stacks of gated MLPs: (experts, hidden, width) twice, (experts, width, hidden)."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.up_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden))


class Fused(nn.Linear):
    """A linear layer of matrices stacked along rows; `split_sizes` has the rows of each."""

    def __init__(self, width: int, split_sizes: list[int], bias: bool = False) -> None:
        super().__init__(width, sum(split_sizes), bias=bias)
        self.split_sizes = split_sizes


class Router(nn.Linear):
    """The linear layer that scores experts; every recipe leaves its weight to AdamW."""


class Attention(nn.Module):
    """The parameters of attention: projections, full or low-rank, and norms of heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, biases = shape.width, shape.biases or shape.qkv_biases
        of_head = shape.head + shape.rope
        queries, keys = shape.heads * of_head, shape.kv_heads * shape.head
        if shape.q_rank:
            self.q_a_proj = nn.Linear(width, shape.q_rank, bias=False)
            self.q_a_norm = nn.RMSNorm(shape.q_rank)
            by_head = [of_head] * shape.heads if shape.fused else [queries]
            self.q_b_proj = Fused(shape.q_rank, by_head)
        elif shape.kv_rank or not shape.fused:
            self.q_proj = nn.Linear(width, queries, bias=biases)
        if shape.kv_rank:
            latents = [shape.kv_rank, shape.rope]
            self.kv_a_proj = Fused(width, latents if shape.fused else [sum(latents)])
            self.kv_a_norm = nn.RMSNorm(shape.kv_rank)
            if shape.fused:
                self.kv_b_proj = Fused(shape.kv_rank, [shape.head] * 2 * shape.heads)
            else:
                self.k_b_proj = nn.Linear(shape.kv_rank, shape.heads * shape.head, bias=False)
                self.v_b_proj = nn.Linear(shape.kv_rank, shape.heads * shape.head, bias=False)
        elif shape.fused:
            self.qkv_proj = Fused(width, [queries, keys, keys], biases)
        else:
            self.k_proj = nn.Linear(width, keys, bias=biases)
            self.v_proj = nn.Linear(width, keys, bias=biases)
        if shape.qk_norms:
            self.q_norm, self.k_norm = nn.RMSNorm(shape.head), nn.RMSNorm(shape.head)
        self.o_proj = nn.Linear(shape.heads * shape.head, width, bias=shape.biases)


class MLP(nn.Module):
    """The parameters of an MLP: two matrices, or three with a gate."""

    def __init__(self, width: int, hidden: int, gated: bool, biases: bool) -> None:
        super().__init__()
        if gated:
            self.gate_proj = nn.Linear(width, hidden, bias=biases)
        self.up_proj = nn.Linear(width, hidden, bias=biases)
        self.down_proj = nn.Linear(hidden, width, bias=biases)


class Layer(nn.Module):
    """A transformer layer: norms, attention, and an MLP or experts."""

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        norm = nn.LayerNorm if shape.biases else nn.RMSNorm
        self.attention_norm = norm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = norm(shape.width)
        if shape.experts and number >= shape.dense_layers:
            self.router = Router(shape.width, shape.experts, bias=False)
            self.experts = Experts(shape.experts, shape.width, shape.expert_hidden)
            if shape.shared_experts:
                hidden = shape.shared_experts * shape.expert_hidden
                self.shared_expert = MLP(shape.width, hidden, True, False)
        else:
            self.mlp = MLP(shape.width, shape.hidden, shape.gated, shape.biases)


class Decoder(nn.Module):
    """The parameters of a decoder in the order in which forward uses them, without a forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        if shape.positions:
            self.position_embedding = nn.Embedding(shape.positions, shape.width)
        self.layers = nn.ModuleList(Layer(shape, number) for number in range(shape.layers))
        self.norm = (nn.LayerNorm if shape.biases else nn.RMSNorm)(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.lm_head.weight = self.embedding.weight


def build(shape: Shape, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        return Decoder(shape).to(dtype)


def gpt_shape(config: "GPTConfig") -> Shape:
    """Return the shape of the example GPT, `samestep.models.gpt`."""
    return Shape(
        name="gpt",
        vocabulary=config.vocab_size,
        width=config.width,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head=config.head_dim,
        hidden=config.mlp_ratio * config.width,
        gated=False,
        experts=config.experts,
        expert_hidden=config.expert_hidden if config.experts else 0,
        active_experts=config.active_experts if config.experts else 0,
        qk_norms=True,
        capacity=config.capacity,
        source="samestep.models.gpt",
    )
