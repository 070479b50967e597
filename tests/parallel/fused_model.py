"""A model with fused matrices and biases, and the same with a matrix for each projection."""

import torch
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention, silu

from samestep.parallel.fused import own_sizes
from samestep.parallel.plan import FusedPart, Plan

WIDTH, HEADS, HEAD, HIDDEN, TOKENS = 16, 4, 4, 12, 6


def qkv_sizes(kv_heads):
    return HEADS * HEAD, kv_heads * HEAD, kv_heads * HEAD


class Attention(nn.Module):
    def __init__(self, kv_heads):
        super().__init__()
        self.sizes = qkv_sizes(kv_heads)
        self.qkv = nn.Linear(WIDTH, sum(self.sizes))
        self.out = nn.Linear(WIDTH, WIDTH)

    def projected(self, x):
        return self.qkv(x).split(own_sizes(self.qkv, self.sizes), dim=-1)

    def forward(self, x):
        q, k, v = (p.unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in self.projected(x))
        # Softmax does not see a bias of keys: AdamW would make full steps of what is rounding.
        k = k.tanh()
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def projected(self, x):
        return self.gate_up(x).chunk(2, dim=-1)

    def forward(self, x):
        gate, up = self.projected(x)
        return self.down(silu(gate) * up)


class SeparateAttention(Attention):
    def __init__(self, fused):
        nn.Module.__init__(self)
        self.out = fused.out
        self.q, self.k, self.v = apart(fused.qkv, fused.sizes)

    def projected(self, x):
        return self.q(x), self.k(x), self.v(x)


class SeparateMLP(MLP):
    def __init__(self, fused):
        nn.Module.__init__(self)
        self.down = fused.down
        self.gate, self.up = apart(fused.gate_up, (HIDDEN, HIDDEN))

    def projected(self, x):
        return self.gate(x), self.up(x)


def apart(fused, sizes):
    """A layer for each part, with its values."""
    for weight, bias in zip(fused.weight.split(sizes), fused.bias.split(sizes), strict=True):
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.weight = nn.Parameter(weight.detach().clone())
        layer.bias = nn.Parameter(bias.detach().clone())
        yield layer


class Layer(nn.Module):
    def __init__(self, kv_heads):
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(WIDTH), Attention(kv_heads)
        self.norm_2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    def __init__(self, kv_heads):
        super().__init__()
        self.layers = nn.ModuleList(Layer(kv_heads) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def new_model(kv_heads, seed=0):
    torch.manual_seed(seed)
    model = Model(kv_heads)
    for param in model.parameters():  # also biases, which start small
        nn.init.normal_(param, std=0.3)
    return model


def separate(model):
    """The same values in a matrix for each projection."""
    for layer in model.layers:
        layer.attention = SeparateAttention(layer.attention)
        layer.mlp = SeparateMLP(layer.mlp)
    return model


def fused_plan(kv_heads):
    sizes, heads = qkv_sizes(kv_heads), (HEADS, kv_heads, kv_heads)
    return Plan(
        blocks=("layers.*",),
        branches=("layers.*.attention", "layers.*.mlp"),
        fused={
            "layers.*.attention.qkv": tuple(map(FusedPart, sizes, heads)),
            "layers.*.mlp.gate_up": (FusedPart(HIDDEN), FusedPart(HIDDEN)),
        },
        row=("layers.*.attention.out", "layers.*.mlp.down"),
        on_stream=("layers.*.norm_[12]",),
    )


def split_sizes(kv_heads):
    return {"*.qkv.weight": qkv_sizes(kv_heads), "*.gate_up.weight": (HIDDEN, HIDDEN)}


def batch(step, rows=slice(None)):
    generator = torch.Generator().manual_seed(100 + step)
    x, target = torch.randn(2, 4, TOKENS, WIDTH, generator=generator)
    return x[rows], target[rows]


def rows_of(stack):
    """This rank's part of a batch."""
    count = 4 // stack.mesh.degrees.batch_ranks
    return slice(stack.batch_place * count, (stack.batch_place + 1) * count)


def train(model, opt, steps):
    """In one process."""
    for step in steps:
        x, target = batch(step)
        mse_loss(model(x), target).backward()
        opt.step()
        opt.zero_grad()


def train_stack(stack, opt, steps):
    for step in steps:
        stack.backward(*batch(step, rows_of(stack)))
        opt.step()
        opt.zero_grad()
