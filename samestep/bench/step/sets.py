"""Parameters with gradients, for a measurement."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.bench.gpu.accuracy import power_law
from samestep.models.parameter_sets import Shape, Shapes

GRADIENT = 1e-2  # size of an element


class Parameters(NamedTuple):
    """Parameters with gradients that stay the same in every step."""

    matrices: list[Parameter]
    others: list[Parameter]
    probes: list[Parameter]  # two square matrices: Gaussian gradient, and 1, 1/2, 1/3, ...

    @property
    def all(self) -> list[Parameter]:
        """Every parameter."""
        return [*self.matrices, *self.others]


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
