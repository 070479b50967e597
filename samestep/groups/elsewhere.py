"""Modules that ranks of another pipeline stage have."""

from typing import Any

import torch
from torch import Tensor, nn


class Elsewhere(nn.Module):
    """Stands where a module of another stage was.

    It has no parameters, but remembers what there were: which rule a parameter follows is decided
    by the whole model, and a pattern may mean what is not here.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # Not as parameters: nobody here trains, moves or saves them.
        self.named = [
            (name, torch.empty_like(param, device="meta"))
            for name, param in module.named_parameters()
            if param.requires_grad
        ]
        self.linear_layers = [n for n, m in module.named_modules() if isinstance(m, nn.Linear)]
        embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        self.vocabularies = frozenset(tuple(m.weight.shape) for m in embeddings)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Nobody has asked it for anything but where it is."""
        raise RuntimeError(
            "this module is in another pipeline stage: call the pipeline, not the model, and let "
            "the functions of its plan use the modules of their own stage"
        )
