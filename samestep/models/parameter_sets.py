"""The shapes of the parameters of models, without the models."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]


class Shapes(NamedTuple):
    """Shapes of the parameters that Muon updates (3-D: stacks of experts), and of the others."""

    matrices: tuple[Shape, ...]
    others: tuple[Shape, ...]


def gpt(width: int, layers: int, vocabulary: int) -> Shapes:
    """Return the shapes of a GPT: blocks with separate projections; embedding and head."""
    layer = ((width, width),) * 4 + ((4 * width, width), (width, 4 * width))
    return Shapes(layer * layers, ((vocabulary, width),) * 2)


def _llama_8b(layers: int) -> Shapes:
    """Return the shapes of layers with 32 query and 8 key-value heads, gated MLP; an embedding."""
    attention = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096))
    layer = (*attention, (14336, 4096), (14336, 4096), (4096, 14336))
    return Shapes(layer * layers, ((32768, 4096),))


def _mixture(layers: int, experts: int, width: int, hidden: int) -> Shapes:
    """Return the shapes of layers with stacks of small gated experts; an embedding."""
    stacks = ((experts, hidden, width), (experts, hidden, width), (experts, width, hidden))
    layer = ((width, width),) * 4 + stacks
    return Shapes(layer * layers, ((32768, width),))


def _adapters(layers: int, rank: int) -> Shapes:
    """Return the shapes of low-rank adapters of all matrices in Llama-70B's layers; a norm."""
    width, key, hidden = 8192, 1024, 28672
    sides = (
        (width, width), (key, width), (key, width), (width, width),
        (hidden, width), (hidden, width), (width, hidden),
    )  # fmt: skip
    layer = tuple(shape for out, into in sides for shape in ((rank, into), (out, rank)))
    return Shapes(layer * layers, ((width,),))


def _vision(width: int, layers: int) -> Shapes:
    """Return the shapes of a ViT: fused projections, 16 x 16 patches, positions, 1000 classes."""
    layer = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    return Shapes(layer * layers, ((width, 768), (197, width), (1000, width)))


SETS = {
    "gpt-1280": gpt(1280, 20, 32768),
    "gpt-2048": gpt(2048, 24, 32768),
    "gpt-768": gpt(768, 12, 32768),
    "llama-8b-slice": _llama_8b(4),
    "moe-64": _mixture(4, 64, 1024, 512),
    "lora-16": _adapters(80, 16),
    "vit-l": _vision(1024, 24),
    "tiny": Shapes((*gpt(16, 1, 8).matrices, (2, 8, 16)), ((8, 16), (16,))),
}


def count(shapes: Sequence[Shape]) -> int:
    return sum(map(prod, shapes))
