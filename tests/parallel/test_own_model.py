"""A model that is not ours, laid out by a plan that its user writes."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss, silu

from samestep.mesh import build
from samestep.parallel.experts import TokenDispatch, local
from samestep.parallel.plan import Plan
from samestep.parallel.replicas import check_replicas
from samestep.parallel.stack import Stack
from samestep.shards.dtensor.gradients import combine_gradients
from tests.ranks import run_forked

WIDTH, HIDDEN, EXPERTS = 8, 12, 4


class SwiGLU(nn.Module):
    """With biases, unlike the example."""

    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN)
        self.up_proj = nn.Linear(WIDTH, HIDDEN)
        self.down_proj = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Stacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))

    def forward(self, rows, counts):
        parts = zip(rows.split(counts), local(self.w1), local(self.w2), strict=True)
        return torch.cat([silu(part @ w1.T) @ w2.T for part, w1, w2 in parts])


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.stacks = Stacks()
        self.dispatch = TokenDispatch(EXPERTS)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(1)
        return self.dispatch(tokens, chosen, weights, self.stacks).view_as(x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ffn = nn.LayerNorm(WIDTH), SwiGLU()
        self.ln_2, self.moe = nn.LayerNorm(WIDTH), Mixture()

    def forward(self, x):
        x = x + self.ffn(self.ln_1(x))
        return x + self.moe(self.ln_2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.ln_f(x))


PLAN = Plan(
    blocks=("layers.*",),
    embedding=("wte",),
    head=("lm_head",),
    branches=("layers.*.ffn",),
    column=("layers.*.ffn.gate_proj", "layers.*.ffn.up_proj"),
    row=("layers.*.ffn.down_proj",),
    on_stream=("layers.*.ln_[12]", "ln_f", "layers.*.moe.router"),
    experts={"layers.*.moe.stacks.w1": 1, "layers.*.moe.stacks.w2": 2},
)


def differences(rank, meshes):
    """Per mesh the parameter whose gradient is farthest from one process, and how far."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start = Model()
    tokens = torch.randint(16, (4, 6))
    target = torch.randn(4, 6, 16)
    alone = copy.deepcopy(start)
    mse_loss(alone(tokens), target).backward()
    expected = {name: param.grad for name, param in alone.named_parameters()}
    found = []
    for degrees in meshes:
        model = copy.deepcopy(start)
        stack = Stack(model, PLAN, build(**degrees), loss=mse_loss)
        rows = 4 // stack.mesh.degrees.batch_ranks
        mine = slice(stack.batch_place * rows, (stack.batch_place + 1) * rows)
        rules = {"*.stacks.*": {"rule": "muon"}, "*.router.weight": {"rule": "adamw"}}
        opt = stack.optimizer(overrides=rules, max_grad_norm=0.01)
        stack.backward(tokens[mine], target[mine])
        combine_gradients(model.parameters())
        distances = {}
        for name, param in model.named_parameters():
            grad = param.grad.full_tensor() if isinstance(param, DTensor) else param.grad
            distances[name] = float((grad - expected[name]).abs().max())
        opt.step()
        copies = check_replicas(model)
        worst = max(distances, key=distances.__getitem__)
        found.append((worst, distances[worst], copies))
    return found


MESHES = [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"ep": 2}]


@pytest.fixture(scope="module")
def outcomes():
    first, _ = run_forked(2, differences, MESHES)
    return dict(zip(map(str, MESHES), first, strict=True))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gradients_are_those_of_one_process(outcomes, mesh):
    name, distance, copies = outcomes[str(mesh)]
    assert distance < 1e-6, name
    assert bool(copies) == ("tp" in mesh)
