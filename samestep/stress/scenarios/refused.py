"""Mistakes that have to be refused on every rank: `stress.refused_training` makes them first."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from samestep.models.gpt import GPTConfig, rotate
from samestep.models.gpt_plan import gpt_plan
from samestep.parallel.plan import Plan
from samestep.stress.scenario import RATES
from samestep.stress.scenarios.hybrid import HybridGPT
from samestep.stress.scenarios.patterns import FourPatternsRandom


class TensorParallelWithoutFSDP(FourPatternsRandom):
    """The copies of each pair of ranks drift apart, if nobody refuses."""

    name = "tensor_parallel_alone"
    story = "tensor parallel beside data parallel without FSDP2: refused, then done right"
    layouts = ("one_process", "tp_alone")


class TwoOptimizersInOneBackward(FourPatternsRandom):
    """Their reductions meet in another order on each rank, if nobody refuses."""

    name = "two_optimizers"
    story = "two optimizers that reduce inside one backward: refused, then one for both"
    layouts = ("one_process", "two_optimizers")


class FusedQKVCut(HybridGPT):
    """Each rank takes queries for keys and values, if nobody refuses."""

    name = "fused_qkv_cut"
    story = "one weight for queries, keys and values, cut by rows: refused, then left whole"
    layouts = ("one_process", "hybrid_tp")
    config: ClassVar[GPTConfig] = replace(HybridGPT.config, experts=0, kv_heads=4)

    def _plain_model(self) -> nn.Module:
        model = super()._plain_model()
        for block in model.get_submodule("blocks").children():
            block.attention = FusedAttention(block.get_submodule("attention"))
        return model

    def plans(self) -> Sequence[Plan]:
        """Cut as three weights would be; and whole, with all heads on every rank."""
        right = gpt_plan(self.config)
        names = ("qkv", "out", "q_norm", "k_norm")
        whole = tuple(f"blocks.*.attention.{name}" for name in names)
        cut = replace(right, column=("blocks.*.attention.qkv", "blocks.*.mlp.up"))
        return cut, replace(
            right,
            branches=("blocks.*.mlp",),
            column=("blocks.*.mlp.up",),
            row=("blocks.*.mlp.down",),
            on_stream=(*right.on_stream, *whole),
            on_heads=(),
        )

    def options(self) -> dict[str, Any]:
        """Every step is clipped, so that norms count."""
        rows = (self.config.width,) * 3
        return {
            **RATES,
            "max_grad_norm": 0.25,
            "overrides": {"*.qkv.weight": {"split_sizes": rows}},
        }


class FusedAttention(nn.Module):
    """The attention of the example GPT with queries, keys and values in one weight."""

    def __init__(self, separate: Any) -> None:
        super().__init__()
        self.head_dim: int = separate.head_dim
        weight = torch.cat([part.weight.detach() for part in (separate.q, separate.k, separate.v)])
        self.qkv = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.qkv.weight = nn.Parameter(weight)
        self.q_norm, self.k_norm, self.out = separate.q_norm, separate.k_norm, separate.out

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As people write it: what the layer gives is cut into three."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H, T, D)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out
