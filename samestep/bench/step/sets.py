"""The parameters of models, without the models."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.bench.gpu.accuracy import power_law

Shape = tuple[int, ...]


class Shapes(NamedTuple):
    """Shapes of what Muon updates (3-D: stacks of experts), and of the rest."""

    matrices: tuple[Shape, ...]
    others: tuple[Shape, ...]


def _gpt(width: int, layers: int, vocabulary: int) -> Shapes:
    """Blocks with separate projections; embedding and head."""
    layer = ((width, width),) * 4 + ((4 * width, width), (width, 4 * width))
    return Shapes(layer * layers, ((vocabulary, width),) * 2)


def _llama_8b(layers: int) -> Shapes:
    """32 query heads and 8 key-value heads, gated MLP; an embedding."""
    attention = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096))
    layer = (*attention, (14336, 4096), (14336, 4096), (4096, 14336))
    return Shapes(layer * layers, ((32768, 4096),))


def _mixture(layers: int, experts: int, width: int, hidden: int) -> Shapes:
    """Stacks of small gated experts; an embedding."""
    stacks = ((experts, hidden, width), (experts, hidden, width), (experts, width, hidden))
    layer = ((width, width),) * 4 + stacks
    return Shapes(layer * layers, ((32768, width),))


GRADIENT = 1e-2  # size of an element
SETS = {
    "gpt-1280": _gpt(1280, 20, 32768),
    "gpt-2048": _gpt(2048, 24, 32768),
    "llama-8b-slice": _llama_8b(4),
    "moe-64": _mixture(4, 64, 1024, 512),
    "tiny": Shapes((*_gpt(16, 1, 8).matrices, (2, 8, 16)), ((8, 16), (16,))),
}


class Parameters(NamedTuple):
    """Parameters with gradients that stay the same in every step."""

    matrices: list[Parameter]
    others: list[Parameter]
    probes: list[Parameter]  # two square matrices: Gaussian gradient, and 1, 1/2, 1/3, ...

    @property
    def all(self) -> list[Parameter]:
        """Every parameter."""
        return [*self.matrices, *self.others]


def count(shapes: Sequence[Shape]) -> int:
    """Elements of all."""
    return sum(map(prod, shapes))


def make_parameters(shapes: Shapes, device: torch.device, seed: int = 0) -> Parameters:
    """Random parameters and gradients in fp32, the same for every contestant."""
    torch.manual_seed(seed)
    matrices = [_parameter(shape, device) for shape in shapes.matrices]
    others = [_parameter(shape, device) for shape in shapes.others]
    probes = [p for p in matrices if p.ndim == 2 and p.shape[0] == p.shape[1]][:2]
    falling = probes[1].grad
    assert falling is not None
    falling.copy_(power_law(len(falling), len(falling), device).mul_(GRADIENT))
    return Parameters(matrices, others, probes)


def _parameter(shape: Shape, device: torch.device) -> Parameter:
    parameter = Parameter(torch.randn(shape, device=device).mul_(0.02))
    parameter.grad = torch.randn(shape, device=device).mul_(GRADIENT)
    return parameter


def as_matrices(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Stacks as views of their matrices, for optimizers that know only those."""
    found: list[Parameter] = []
    for parameter in parameters:
        if parameter.ndim == 2:
            found.append(parameter)
            continue
        assert parameter.grad is not None
        for values, grad in zip(_each(parameter.data), _each(parameter.grad), strict=True):
            view = Parameter(values)
            view.grad = grad
            found.append(view)
    return found


def _each(stack: Tensor) -> tuple[Tensor, ...]:
    return stack.flatten(end_dim=-3).unbind()
