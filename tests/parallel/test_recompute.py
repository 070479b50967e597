"""Blocks that run again in backward: the same bits, and nothing counted twice."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.mesh import build
from samestep.models import gpt
from samestep.models.gpt import GPT, GPTConfig, gpt_plan, mean_loss
from samestep.parallel import experts
from samestep.parallel.recompute import once, recompute, what_of
from samestep.parallel.stack import Stack
from tests.memory import peak_bytes
from tests.ranks import run_forked
from tests.soak import SOAK, twin

SHAPE = {"vocab_size": 32, "context": 8, "width": 16, "layers": 2, "heads": 4, "kv_heads": 2}
# Two of six experts are null, there is not room for all tokens, and something is random.
EXPERTS = GPTConfig(
    **SHAPE, experts=4, expert_size=8, active_experts=3, shared_experts=1, null_experts=2,
    capacity=1.0, balance_loss=0.1, z_loss=0.1, dropout=0.1,
)  # fmt: skip
SP = {"tp": 2, "sequence_parallel": True}


def batch(seed=0, rows=4):
    torch.manual_seed(seed)
    tokens = torch.randint(32, (rows, 9))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def one_step(model):
    """The loss, all gradients and all buffers after forward and backward."""
    inputs, targets = batch()
    torch.manual_seed(5)
    loss = mean_loss(model(inputs), targets)
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {"loss": loss.detach(), **grads, **dict(model.named_buffers())}


def both(change=lambda model: None, what="full"):
    torch.manual_seed(0)
    model = GPT(EXPERTS)
    again = copy.deepcopy(model)
    for block in again.blocks:
        recompute(block, what=what)
    change(again)
    return one_step(model), one_step(again)


def differing(plain, again):
    assert plain.keys() == again.keys()
    return [name for name, value in plain.items() if not torch.equal(value, again[name])]


@pytest.mark.parametrize("what", ["full", "selective"])
def test_the_same_bits_and_counts(what):
    runs = []
    watch = gpt.MixtureOfExperts.forward

    def counted(self, x):
        runs.append(self)
        return watch(self, x)

    gpt.MixtureOfExperts.forward = counted
    try:
        plain, again = both(what=what)
    finally:
        gpt.MixtureOfExperts.forward = watch
    assert len(runs) == 2 + 4  # two layers, and both of them twice
    assert differing(plain, again) == []
    assert plain["blocks.0.mlp.load"].sum() == 4 * 8 * 3
    assert plain["blocks.0.mlp.dispatch.overflow"] > 0
    assert (plain["blocks.0.mlp.losses.added"] > 0).all()


@pytest.mark.parametrize(("module", "counted"), [(gpt, "mlp.load"), (experts, "overflow")])
def test_counting_twice_is_seen(monkeypatch, module, counted):
    monkeypatch.setattr(module, "once", lambda compute: compute())
    wrong = differing(*both())
    assert [name for name in wrong if counted in name] == [
        f"blocks.{layer}.mlp.{'load' if module is gpt else 'dispatch.overflow'}" for layer in (0, 1)
    ]


def disturb(model):
    """Move the biases between forward and backward: they would choose other experts."""

    def move(*_):
        for block in model.blocks:
            block.mlp.bias.copy_(10 * torch.arange(6.0))

    model.register_forward_hook(move)


def test_tokens_stay_with_their_experts():
    wrong = differing(*both(disturb))
    assert wrong == ["blocks.0.mlp.bias", "blocks.1.mlp.bias"]


def test_another_choice_in_the_recomputation_is_seen(monkeypatch):
    monkeypatch.setattr(gpt, "once", lambda compute: compute())
    wrong = differing(*both(disturb))
    assert "blocks.0.mlp.experts.up" in wrong


def test_less_is_kept():
    """Of four blocks, only one at a time has what backward needs."""
    torch.manual_seed(0)
    peaks, products = [], []
    for what in (None, "selective", "full"):
        model = GPT(GPTConfig(**{**SHAPE, "layers": 4, "width": 64}))
        for block in model.blocks if what else ():
            recompute(block, what=what)
        inputs, targets = batch(rows=32)
        with peak_bytes() as peak, Products() as counted:
            mean_loss(model(inputs), targets).backward()
        products.append(counted.calls)
        peaks.append(peak.value - sum(4 * param.numel() for param in model.parameters()))
    assert peaks[2] < peaks[1] < peaks[0]
    assert peaks[2] < peaks[0] / 2
    # Of a layer queries, keys, values, output and up; nobody needs what down gives.
    assert products == [products[0], products[0], products[0] + 4 * 5]


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_without_gradients_a_block_runs_once_as_ever():
    torch.manual_seed(0)
    model = GPT(EXPERTS).eval()
    inputs, _ = batch()
    expected = model(inputs)
    for block in model.blocks:
        recompute(block)
    with torch.no_grad():
        assert torch.equal(model(inputs), expected)
    assert model.blocks[0].mlp.load.sum() == 0


def test_backward_twice_where_products_are_kept():
    block = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    recompute(block, what="selective")
    loss = block(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='use "full" with retain_graph=True'):
        loss.backward()


def test_backward_twice():
    plain, again = nn.Linear(3, 3), nn.Linear(3, 3)
    again.load_state_dict(plain.state_dict())
    calls = []

    def forward(x):
        kept = once(lambda: calls.append(0) or torch.tensor(len(calls)))
        return kept * torch.tanh(nn.functional.linear(x, again.weight, again.bias))

    again.forward = forward
    recompute(again)
    x = torch.randn(2, 3)
    loss = again(x).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
    (2 * torch.tanh(plain(x)).sum()).backward()
    assert calls == [0]
    assert torch.equal(again.weight.grad, plain.weight.grad)


def test_mistakes():
    block = nn.Linear(2, 2)
    recompute(block)
    with pytest.raises(ValueError, match="wrapped for recomputation already"):
        recompute(block)
    with pytest.raises(ValueError, match='use "full", or leave compile out'):
        recompute(nn.Linear(2, 2), "eager", "selective")
    for nonsense in ("some", 1, None):
        with pytest.raises(ValueError, match='recompute must be True, False, "full" or "selective'):
            what_of(nonsense)
    wayward, times = nn.Module(), [1, 2]

    def forward(x):
        for _ in range(times.pop(0)):
            once(lambda: None)
        return x.sin().sin()

    wayward.forward = forward
    recompute(wayward)
    out = wayward(torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match="more often in its recomputation"):
        out.sum().backward()


# --- on ranks -------------------------------------------------------------------------------------

TWO_RANKS = {
    "ep": {"ep": 2},
    "tp sp": SP,
    "pp": {"pp": 2},
    "fsdp": {},
}
FOUR_RANKS = {"tp sp ep": {**SP, "ep": 2}, "tp sp pp": {**SP, "pp": 2}}


def train(rank, meshes):
    """Losses, parameters and counts of each mesh, without and with recomputation."""
    torch.set_num_threads(1)
    ways = (False, True, "selective")
    return {name: [_train(mesh, again) for again in ways] for name, mesh in meshes.items()}


def _train(axes, again):
    torch.manual_seed(0)
    # Whole sizes follow the data in some layouts, and are fixed in others.
    config = GPTConfig(**{**vars(EXPERTS), "capacity": 1.0 if "ep" in axes else 0.0, "dropout": 0})
    model = GPT(config)
    stack = Stack(
        model, gpt_plan(config), build(**axes), loss=mean_loss, ordered=True, recompute=again
    )
    rules = {"*.experts.*": {"rule": "muon"}}
    optimizer = stack.optimizer(lr=0.01, overrides=rules, reduction="ordered")
    loss = stack.backward(*batch(stack.batch_place))
    optimizer.step()
    held = {
        name: (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in (*model.named_parameters(), *model.named_buffers())
    }
    return {"loss": loss, **held}


# Of two axes at once: test_router_losses.py has "ep pp, recomputed".
@twin
@pytest.mark.parametrize(
    ("ranks", "meshes"), [(2, TWO_RANKS), *([(4, FOUR_RANKS)] if SOAK else [])]
)
def test_meshes_end_with_the_same_bits(ranks, meshes):
    for of_rank in run_forked(ranks, train, meshes):
        for name, (plain, again, selective) in of_rank.items():
            assert differing(plain, again) == [], name
            assert differing(plain, selective) == [], name
            loads = [value for key, value in again.items() if key.endswith("mlp.load")]
            assert loads
            assert all(load.sum() > 0 for load in loads)
