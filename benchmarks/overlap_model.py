"""A GPT with a tied weight, recomputed activations, and a layer that may be left out."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples.gpt import GPT, GPTConfig


class RecomputedGPT(GPT):
    """Embedding and head are one weight; every layer runs again inside backward."""

    skipped: int | None = None  # the layer that the next forward leaves out

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        nn.init.normal_(self.embedding.weight, std=0.1 * config.width**-0.5)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the token after each one in ``tokens`` (B, T)."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number != self.skipped:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(width: int, layers: int, vocabulary: int, tokens: int) -> RecomputedGPT:
    """The same weights on every call."""
    torch.manual_seed(0)
    heads = max(1, width // 64)
    shape = {"width": width, "layers": layers, "heads": heads, "kv_heads": heads}
    return RecomputedGPT(GPTConfig(vocab_size=vocabulary, context=tokens, **shape))
