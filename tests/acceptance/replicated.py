"""The one configuration in which the promises about replicated parameters are shown.

Ranks have different random gradients of full rank, and lack different ones: in a third of the
steps nobody has a gradient for some parameter, in others one rank has zeros. Reductions run
inside backward, in an order of its own on every rank. Buckets hold at most a sixteenth of the
model.
"""

from __future__ import annotations

import torch
from torch import nn

import samestep

ADAMW_TOLERANCE, MUON_TOLERANCE = 2e-5, 3e-4


class Layer(nn.Module):
    """Grouped-query attention with fused QKV, an MLP, experts, norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, width + 2 * (width // 4), bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        width = x.shape[-1]
        fused = self.qkv(self.norm(x))
        x = x + self.out(fused[..., :width] * fused[..., width:].sum(-1, keepdim=True).tanh())
        return x + self.down(self.up(x).relu())


class Experts(nn.Module):
    """Every expert sees every token."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width // 2, width))

    def forward(self, x):
        return x + (x @ self.weight.transpose(1, 2) @ self.weight).mean(0)


class GPT(nn.Module):
    """A GPT without attention: tied head, an odd vocabulary, 3-D experts, a frozen matrix."""

    def __init__(self, width: int, layers: int, experts: int = 3, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8 * width + 5, width)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.moe = Experts(experts, width)
        self.odd = nn.Linear(width - 1, width // 2 + 3)
        self.scale = nn.Parameter(torch.empty(()))
        self.head = nn.Linear(width, 8 * width + 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(std=0.3 * min(1.0, 16 / width) ** 0.5, generator=generator)

    def forward(self, tokens, headless=False):
        """`headless`: the head, which comes first in backward, gets no gradient."""
        x = self.frozen(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x)
        x = self.moe(x)
        x = x * self.scale + self.odd(x[..., 1:]).sum(-1, keepdim=True)
        return x if headless else self.head(x)


def trainable(model):
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def build(model, width, **options):
    """The optimizer of the configuration; P/16 elements per bucket."""
    size = sum(param.numel() for param in trainable(model).values())
    group = {
        "lr": 1e-2,
        "variance_beta2": 0.9,
        "overrides": {
            "*.qkv.weight": {"split_sizes": (width, width // 4, width // 4)},
            "moe.weight": {"rule": "muon"},
        },
        "crossover": min(1024, 2 * width),
        "bucket_size": size // 16,
        "overlap_grad_reduce": True,
    }
    return samestep.MuonAdamW(model, **{**group, **options})


def gradient(param, place, rank, step, everything=False):
    """Full rank and different on every rank; None or zeros where the pattern says so."""
    if not everything:
        phase = (place + step) % 7
        if phase == 6:
            return None  # on every rank
        if phase == 5:
            return torch.zeros_like(param) if rank == 0 else None
        if (3 * place + step + 5 * rank) % 4 == 0:
            return None
    generator = torch.Generator().manual_seed(10007 * place + 101 * step + rank)
    return torch.randn(param.shape, generator=generator)


def backward(model, rank, step, everything=False):
    """Give every parameter its gradient through autograd, in an order that ranks do not share.

    The loss is the sum of parameter times gradient.
    """
    pairs = []
    for place, param in enumerate(trainable(model).values()):
        grad = gradient(param, place, rank, step, everything)
        if grad is not None:
            pairs.append((param, grad))
    turn = (7 * rank + step) % max(len(pairs), 1)
    for param, grad in pairs[turn:] + pairs[:turn]:
        (param * grad).sum().backward()


def mean_in_rank_order(param, grads):
    """What one process is fed: None counts as zeros unless nobody has a gradient."""
    if all(grad is None for grad in grads):
        return None
    total = torch.zeros_like(param)
    for grad in grads:
        total = total + (torch.zeros_like(param) if grad is None else grad)
    return total / len(grads)


def single_process(width, layers, world, steps):
    """The same run without other ranks: parameters at the end, and the rule of each."""
    model = GPT(width, layers)
    opt = build(model, width)
    for step in range(steps):
        for place, param in enumerate(trainable(model).values()):
            param.grad = mean_in_rank_order(
                param, [gradient(param, place, rank, step) for rank in range(world)]
            )
        opt.step()
    rules = {p: group["rule"] for group in opt.param_groups for p in group["params"]}
    return values(model), {name: rules[param] for name, param in trainable(model).items()}


def values(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}
