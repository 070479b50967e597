"""Experts that are chosen too often become less likely, by what all ranks have counted."""

import re

import torch
import torch.distributed as dist
from torch import nn

from samestep.models.gpt import MixtureOfExperts

LAYER = re.compile(r"blocks\.(\d+)\.")


def balance_experts(model: nn.Module, layers: int, copies: int = 1) -> None:
    """Move the biases of a GPT's experts; collective, where there are ranks.

    Args:
        model: All of it, or one rank's stages: blocks have their names in the whole.
        layers: Of the whole model.
        copies: How many ranks have counted the same tokens.
    """
    found = {
        int(match[1]): module
        for name, module in model.named_modules()
        if isinstance(module, MixtureOfExperts) and (match := LAYER.match(name))
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
