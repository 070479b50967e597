"""Trials: two ranks over gloo, and a step on a GPU."""

from typing import Any

import torch
from torch import Tensor, nn

import samestep
from samestep.launch.forked import run_forked

ROWS, COLUMNS = 64, 48
CLOSE = 0.05  # of the size of an update: on a GPU Muon's products have 16 bits


def step_on_two_ranks(timeout: float) -> bool:
    """Whether two ranks with different gradients take the step of one process, to the bit.

    Raises what `launch.run_forked` does: RanksFailed, or RuntimeError where nothing can be forked.
    """
    cpu = torch.device("cpu")
    limits: dict[str, Any] = {"timeout": timeout, "collective_timeout": timeout}
    of_ranks = run_forked(2, lambda rank: _step(_gradients(rank), cpu), **limits)
    mean = [(first + second) / 2 for first, second in zip(*map(_gradients, (0, 1)), strict=True)]
    alone = _step(mean, cpu)
    return all(
        torch.equal(own, expected)
        for stepped in of_ranks
        for own, expected in zip(stepped, alone, strict=True)
    )


def step_on(device: torch.device) -> float:
    """The distance of a device's step from the CPU's, as a part of the largest update."""
    there = [param.cpu() for param in _step(_gradients(0), device)]
    here = _step(_gradients(0), torch.device("cpu"))
    start = _drawn(0)
    away = [
        (own - expected).abs().max() / (expected - before).abs().max()
        for own, expected, before in zip(there, here, start, strict=True)
    ]
    return float(torch.stack(away).max())


def _step(gradients: list[Tensor], device: torch.device) -> list[Tensor]:
    """A matrix of Muon's and a vector of AdamW's after a step, which ranks share, if any."""
    params = [nn.Parameter(value.to(device)) for value in _drawn(0)]
    named = list(zip(("hidden.weight", "hidden.bias"), params, strict=True))
    optimizer = samestep.MuonAdamW(named, lr=0.01, reduction="ordered", crossover=1)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.to(device)
    optimizer.step()
    return [param.detach() for param in params]


def _drawn(seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, COLUMNS, generator=draw), torch.randn(ROWS, generator=draw)]


def _gradients(rank: int) -> list[Tensor]:
    return _drawn(rank + 1)
