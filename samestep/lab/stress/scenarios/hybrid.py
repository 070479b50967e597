"""Training that every axis of a mesh takes part in: a GPT with experts, in a closed loop.

And mistakes that have to be refused on every rank: `stress.sharded_training` makes them first.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from samestep.lab.stress.layouts import LAYOUTS_ON_REQUEST
from samestep.lab.stress.scenario import RATES, Loop, Scenario, on_device_of, seeded
from samestep.lab.stress.scenarios.patterns import FourPatternsRandom
from samestep.mesh import Mesh
from samestep.mesh.replicate_list import ReplicateListError
from samestep.models.gpt import GPT, GPTConfig, gpt_plan, rotate
from samestep.parallel.lora import add_lora
from samestep.parallel.plan import Plan


def gpt_without_ones(config: GPTConfig, kind: type[GPT] = GPT) -> GPT:
    """No vector is all ones, as norms are at their start."""
    model = kind(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(0.1 * torch.randn_like(param))
    return model


def noisy_tokens(config: GPTConfig, sequences: int, seed: int) -> Tensor:
    """(sequences, context + 1): a rule with some noise, to be learnt."""
    random = torch.Generator().manual_seed(seed)
    shape = (sequences, config.context + 1)
    noise = torch.randint(3, shape, generator=random)
    tokens = torch.randint(config.vocab_size, shape, generator=random)
    for place in range(1, shape[1]):
        tokens[:, place] = (3 * tokens[:, place - 1] + noise[:, place]) % config.vocab_size
    return tokens


class HybridGPT(Scenario):
    """Every rank has sequences of its own; where ranks share a batch, they have those of all."""

    name = "hybrid_gpt"
    story = "a GPT with experts over tensor, sequence, expert, pipeline and data parallel"
    loop: ClassVar[Loop] = "closed"
    has_plan = True
    layouts = (
        "one_process",
        *(name for name, own in LAYOUTS_ON_REQUEST.items() if own.parameters == "hybrid"),
    )
    config: ClassVar[GPTConfig] = GPTConfig(
        vocab_size=16, context=8, width=16, layers=2, heads=4, kv_heads=2, experts=4, expert_size=8
    )
    sequences: ClassVar[int] = 2  # of a rank
    rules: ClassVar[dict[str, dict[str, Any]]] = {
        "*.experts.*": {"rule": "muon"},
        "*.router.weight": {"rule": "adamw"},
    }

    def own_model(self) -> nn.Module:
        model = self._plain_model()
        self.adapt(model)
        return model

    def model_to_cut(self) -> nn.Module:
        """The model before `adapt`."""
        return seeded(self._plain_model, self.seed)

    def adapt(self, model: nn.Module, mesh: Mesh | None = None) -> None:
        """Changes to the model after it was cut over a mesh."""

    def _plain_model(self) -> nn.Module:
        return gpt_without_ones(self.config)

    def plans(self) -> Sequence[Plan]:
        """The plans by which the model is cut; those before the last have to be refused."""
        return (gpt_plan(self.config),)

    def options(self) -> dict[str, Any]:
        """Every step is clipped, so that norms count."""
        return {**RATES, "max_grad_norm": 0.25, "overrides": self.rules}

    def before_forward(self, model: nn.Module, step: int, rank: int) -> None:
        """Change what changes from step to step, as the first rank that shares a batch has it."""

    def tokens(self, step: int, rank: int) -> Tensor:
        """The tokens that a rank reads, (sequences, context + 1)."""
        return noisy_tokens(self.config, self.sequences, self.seed + 104729 * step + rank)

    def loss(self, model: nn.Module, step: int, rank: int, micro: int) -> Tensor | None:
        assert isinstance(model, GPT)
        tokens = on_device_of(model, self.tokens(step, rank))
        return model.loss(tokens[:, :-1], tokens[:, 1:])


T = TypeVar("T")


def by_first_plan(scenario: HybridGPT, cut: Callable[[Plan], T]) -> T:
    """The result of cutting by the first plan that is not refused: the last one has to be right."""
    *refused, right = scenario.plans()
    for plan in refused:
        with suppress(ReplicateListError):
            return cut(plan)
    return cut(right)


class HybridConditional(HybridGPT):
    """Four ranks at a time leave layers out, so that those who exchange tokens do the same."""

    name = "hybrid_conditional"
    story = "the same, and layers that some ranks leave out, or all: nothing moves those"
    ranks_differ = True
    layouts = (
        "one_process", "hybrid_tp", "hybrid_ep", "hybrid_tp_sp", "hybrid_tp_sp_ep",
        "hybrid_hsdp_tp_sp",
    )  # fmt: skip

    def _plain_model(self) -> nn.Module:
        return gpt_without_ones(self.config, ConditionalGPT)

    def before_forward(self, model: nn.Module, step: int, rank: int) -> None:
        """In turns: all have a layer; the first four ranks, others, and all do not."""
        assert isinstance(model, ConditionalGPT)
        four = rank // 4 % 2
        turns = [(step // 2 + layer) % 4 for layer in range(self.config.layers)]
        model.left_out = {
            layer for layer, turn in enumerate(turns) if turn == 3 or turn == 1 + four
        }

    def loss(self, model: nn.Module, step: int, rank: int, micro: int) -> Tensor | None:
        self.before_forward(model, step, rank)
        return super().loss(model, step, rank, micro)


class ConditionalGPT(GPT):
    """Layers can be left out: their part of the residual stream is nothing."""

    left_out: AbstractSet[int] = frozenset()
    leave_out: Callable[[nn.Module, Tensor], Tensor] = staticmethod(lambda layer, x: x)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, V)."""
        length = tokens.shape[1]
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number in self.left_out:
                x = self.leave_out(block, x)
            else:
                x = block(x, self.cos[:length], self.sin[:length])
        logits: Tensor = self.head(self.norm(x))
        return logits


class HybridLoRA(HybridGPT):
    """Factors of attention are trained, and nothing else."""

    name = "hybrid_lora"
    story = "the same with LoRA: factors that are added when the model is cut already"
    rules: ClassVar[dict[str, dict[str, Any]]] = {
        "*.lora_A": {"rule": "muon"},
        "*.lora_B": {"rule": "adamw"},
    }

    def adapt(self, model: nn.Module, mesh: Mesh | None = None) -> None:
        """Factors in layers that are cut by rows and by columns."""
        if mesh is not None and mesh.dense.size() > 1:
            mesh = None  # FSDP2 has told the weights which ranks there are
        layers = ["*.attention.[qv]", "*.attention.out"]
        add_lora(model, layers, rank=4, seed=self.seed, mesh=mesh)


class FSDPOnHalves(FourPatternsRandom):
    """The copies of each half of the ranks drift apart, if nobody refuses."""

    name = "fsdp2_alone"
    story = "FSDP2 on halves of the ranks, and nobody averages between them: refused, then HSDP"
    layouts = ("one_process", "fsdp2_alone")


class TwoOptimizersInOneBackward(FourPatternsRandom):
    """Their reductions meet in another order on each rank, if nobody holds them back."""

    name = "two_optimizers"
    story = "two optimizers that reduce inside one backward: in one order, then one for both"
    layouts = ("one_process", "two_optimizers")


class FusedQKVCut(HybridGPT):
    """Each rank takes queries for keys and values, if nobody refuses."""

    name = "fused_qkv_cut"
    story = "one weight for queries, keys and values, cut by rows: refused, then left whole"
    layouts = ("one_process", "hybrid_tp")
    config: ClassVar[GPTConfig] = replace(HybridGPT.config, experts=0, kv_heads=4)
    rules: ClassVar[dict[str, dict[str, Any]]] = {
        "*.qkv.weight": {"split_sizes": (config.width,) * 3}
    }

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
        """Attention as people write it: the output of one layer is cut into three."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H, T, D)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out
