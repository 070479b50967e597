"""The one configuration in which the promises about flat buffers are shown.

Layers with a tied embedding and head, fused QKV, an expert stack, recomputed activations in two of
them (of twelve in a long run, else of eight), and one that is left out on some ranks in some steps.
Every rank has data of its own, and training is a closed loop: one wrong bit anywhere, and
everything after it differs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import samestep
from tests.soak import SOAK
from tests.test_overlap import mean, values

LAYERS, WIDTH, TOKENS = 12 if SOAK else 8, 8, 19
SKIPPED = 5  # the layer that is left out at times
OPTIONS = {
    "lr": 1e-2,
    "momentum": 0.9,
    "variance_beta2": 0.9,
    "ns_steps": 2,
    "waves": 2,
    "reduction": "ordered",
    "crossover": 20,
}


class Layer(nn.Module):
    """Attention without attention, with fused QKV."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        width = x.shape[-1]
        fused = self.qkv(self.norm(x))
        return x + self.out(fused[..., :width] * fused[..., width:].sum(-1, keepdim=True).tanh())


class GPT(nn.Module):
    """Layer 4 has experts beside it; the head is the embedding."""

    def __init__(
        self, width: int = WIDTH, layers: int = LAYERS, tokens: int = TOKENS, tied: bool = True
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.experts = nn.Parameter(torch.empty(3, width // 2, width))
        self.scale = nn.Parameter(torch.empty(()))
        self.head = nn.Linear(width, tokens, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(std=0.3 * min(1.0, 16 / width) ** 0.5, generator=generator)

    def forward(self, tokens, skip=()):
        """`skip`: layers that are left out."""
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            if number in skip:
                continue
            x = checkpoint(layer, x, use_reentrant=False) if number % 6 == 1 else layer(x)
            if number == 4:
                x = x + (x @ self.experts.transpose(1, 2) @ self.experts).mean(0)
        return self.head(x * self.scale)


def build(model, width=WIDTH, **options):
    own = {
        "*.qkv.weight": {"split_sizes": (width, width // 2, width // 2)},
        "experts": {"rule": "muon"},
    }
    return samestep.MuonAdamW(model, **{**OPTIONS, **options}, overrides=own)


def loss_of(model, rank, step):
    """Data and skipped layers of a rank; in every seventh step no rank has the layer."""
    generator = torch.Generator().manual_seed(101 * step + rank)
    tokens = torch.randint(TOKENS, (5,), generator=generator)
    skip = (SKIPPED,) if step % 7 == 6 or (rank + step) % 3 == 0 else ()
    return nn.functional.cross_entropy(model(tokens, skip), tokens.roll(-1))


class Trained(NamedTuple):
    """Both by name."""

    params: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]


def train(rank, steps, **options):
    """One rank's training."""
    model = GPT()
    opt = build(model, **options)
    for step in range(steps):
        loss_of(model, rank, step).backward()
        opt.step()
        opt.zero_grad()
    return trained(model, opt)


def train_alone(world, steps):
    """The same in one process, which is given the mean of all ranks' gradients."""
    model = GPT()
    opt = build(model)
    for step in range(steps):
        of_ranks = [gradients(model, rank, step) for rank in range(world)]
        for param, *grads in zip(model.parameters(), *of_ranks, strict=True):
            param.grad = mean(param, [grads])
        opt.step()
    return trained(model, opt)


def gradients(model, rank, step):
    model.zero_grad()
    loss_of(model, rank, step).backward()
    return [param.grad for param in model.parameters()]


def trained(model, opt):
    state = {
        f"{name}.{key}": tensor
        for name, own in opt.whole_state().items()  # waits for parameters too
        for key, tensor in own.items()
    }
    return Trained(values(model), state)
