"""A model of one's own over tensor, sequence and data parallel, and in one process: equal losses.

torchrun --nproc-per-node 4 examples/hybrid_model.py
python examples/hybrid_model.py
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import samestep
from samestep.mesh.contract import ModelSizes, check
from samestep.parallel.plan import Plan
from samestep.parallel.replicas import check_replicas
from samestep.parallel.stack import Stack

VOCABULARY, WIDTH, LAYERS, HEADS, TOKENS, ROWS = 64, 32, 2, 4, 16, 8


class Attention(nn.Module):
    """Heads by the width of one: a rank of tensor parallel has some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        heads = (part(x).unflatten(-1, (-1, WIDTH // HEADS)) for part in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in heads)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.norm2 = nn.RMSNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Token ids (B, T) to logits (B, T, V)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """All layers."""
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


PLAN = Plan(
    blocks=("layers.*",),
    embedding=("tokens",),
    head=("head",),
    branches=("layers.*.attention", "layers.*.mlp"),
    column=("layers.*.attention.[qkv]", "layers.*.mlp.0"),
    row=("layers.*.attention.o", "layers.*.mlp.2"),
    on_stream=("norm", "layers.*.norm[12]"),
)
SIZES = ModelSizes(heads=HEADS, mlp_width=4 * WIDTH, sequence=TOKENS, layers=LAYERS, batch=ROWS)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, ()."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step: int) -> Tensor:
    """All rows of a step, (ROWS, TOKENS + 1): they count upwards."""
    first = torch.randint(VOCABULARY, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    return (first + torch.arange(TOKENS + 1)) % VOCABULARY


def on_ranks(model: nn.Module, steps: int) -> list[float]:
    """Train on the ranks of the default group; the losses."""
    mesh = samestep.mesh.build(tp=2, sequence_parallel=True)
    check(SIZES, mesh.degrees)
    stack = Stack(model, PLAN, mesh, loss=mean_loss)
    stack.trace()
    optimizer = stack.optimizer(lr=3e-3, max_grad_norm=1.0)
    rows = ROWS // mesh.degrees.batch_ranks
    losses = []
    for step in range(steps):
        ids = batch(step)[rows * stack.batch_place :][:rows]
        loss = stack.backward(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    check_replicas(model)
    return losses


def alone(model: nn.Module, steps: int) -> list[float]:
    """The same in this process."""
    optimizer = samestep.MuonAdamW(model, lr=3e-3, max_grad_norm=1.0)
    losses = []
    for step in range(steps):
        ids = batch(step)
        loss = mean_loss(model(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """On the ranks of torchrun, or alone."""
    torch.manual_seed(0)
    if "RANK" not in os.environ:
        found = alone(Model(), steps=5)
    else:
        dist.init_process_group("gloo")
        found = on_ranks(Model(), steps=5)
        dist.destroy_process_group()
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(f"step {step}: loss {loss:.5f}" for step, loss in enumerate(found, 1)))


if __name__ == "__main__":
    main()
