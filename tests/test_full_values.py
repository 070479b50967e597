"""Whole parameters, gradients and state on every rank, and their setters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import samestep
from tests.ranks import run_forked
from tests.soak import SOAK, some, twin_cases

LAYOUTS = {
    "none": {"sharding": "none"},
    "zero2": {"sharding": "zero2"},
    "zero2 overlap": {"sharding": "zero2", "overlap_grad_reduce": True},
    "flat zero1": {"buffers": "flat", "sharding": "zero1"},
    "flat zero2 overlap": {
        "buffers": "flat",
        "sharding": "zero2",
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
}
layouts = pytest.mark.parametrize("layout", some(list(LAYOUTS)))
WITH_WORLDS = [
    (layout, world)
    for place, layout in enumerate(LAYOUTS)
    for world in (2, 3)
    if (place + world) % 2 or SOAK
]
layouts_and_worlds = pytest.mark.parametrize(("layout", "world"), some(WITH_WORLDS))


class Net(nn.Module):
    """A fused matrix, an embedding to slice, a small bias, and a layer that nobody may use."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(13, 8)
        self.qkv = nn.Linear(8, 24)
        self.unused = nn.Linear(24, 8)
        self.head = nn.Linear(24, 13)
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(std=0.3, generator=generator)
        self.to(dtype)

    def forward(self, tokens):
        return self.head(self.qkv(self.embedding(tokens)))


def build(model, **options):
    return samestep.MuonAdamW(
        model,
        lr=1e-2,
        reduction="ordered",
        crossover=20,
        bucket_size=200,
        variance_beta2=0.9,
        overrides={"qkv.weight": {"split_sizes": (8, 12, 4)}},
        **options,
    )


def backward(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(13, (6,), generator=generator)
    logits = model(tokens).float()
    nn.functional.cross_entropy(logits, tokens.roll(-1)).backward()


def mean_gradients(model, world, step):
    """Of ranks that are there one after the other, in rank order."""
    total = None
    for rank in range(world):
        model.zero_grad()
        backward(model, rank, step)
        grads = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
        if total is None:
            total = {name: grad.clone() for name, grad in grads.items()}
        else:
            for name, grad in grads.items():
                total[name] += grad
    model.zero_grad()
    return {name: grad / world for name, grad in total.items()}


def states_equal(one, other):
    return all(
        torch.equal(one[name][key], other[name][key]) for name in other for key in other[name]
    )


@twin_cases("none-3", "zero2 overlap-3")
@layouts_and_worlds
def test_what_one_process_has(layout, world):
    def job(rank):
        model, alone = Net(), Net()
        opt = build(model, **LAYOUTS[layout])
        for step in range(3):
            expected = mean_gradients(alone, world, step)
            backward(model, rank, step)
            for name in ("head.weight", "qkv.weight", "qkv.bias", "embedding.weight"):
                assert torch.equal(opt.full_gradient(name), expected[name]), name
            assert opt.full_gradient("unused.weight") is None
            opt.step()
            opt.zero_grad()
            opt.wait_for_parameters()
            alone.load_state_dict(model.state_dict())
        whole = opt.whole_state()
        for name, entries in whole.items():
            for key, value in entries.items():
                assert torch.equal(opt.full_state(name, key), value), (name, key)
        values = {name: opt.full_parameter(name) for name, _ in model.named_parameters()}
        assert all(torch.equal(values[n], p) for n, p in model.named_parameters())
        return values, whole

    results = run_forked(world, job)
    for values, whole in results[1:]:
        assert all(torch.equal(values[name], results[0][0][name]) for name in values)
        assert states_equal(whole, results[0][1])


@twin_cases("none", "flat zero2 overlap")
@layouts
def test_a_looked_at_gradient_changes_nothing(layout):
    def job(rank, look):
        model = Net()
        opt = build(model, max_grad_norm=0.5, **LAYOUTS[layout])
        for step in range(4):
            backward(model, rank, step)
            if look and step % 2:
                opt.full_gradient("qkv.weight")
            opt.step()
            opt.zero_grad()
        opt.wait_for_parameters()
        return dict(model.named_parameters()), opt.whole_state()

    (values, state), _ = run_forked(2, job, True)
    (expected, expected_state), _ = run_forked(2, job, False)
    assert all(torch.equal(value, expected[name]) for name, value in values.items())
    assert states_equal(state, expected_state)


@twin_cases("none-3", "flat zero2 overlap-3")
@layouts_and_worlds
def test_setters(layout, world):
    """Only the first rank's value counts, and every rank has it afterwards."""

    def job(rank):
        model = Net()
        opt = build(model, **LAYOUTS[layout])
        backward(model, rank, 0)
        opt.step()
        opt.zero_grad()
        mine = torch.Generator().manual_seed(7 + rank)
        found = {}
        for name in ("head.weight", "qkv.weight", "qkv.bias"):
            shape = opt.full_parameter(name).shape
            first = torch.randn(shape, generator=torch.Generator().manual_seed(7))
            own = torch.randn(shape, generator=mine)
            given = first if rank == 0 else own
            opt.set_full_parameter(name, given)
            assert torch.equal(opt.full_parameter(name), first)
            key = "momentum_buffer" if name == "qkv.weight" else "exp_avg"
            opt.set_full_state(name, key, given)
            assert torch.equal(opt.full_state(name, key), first)
            backward(model, rank, 1)
            opt.set_full_gradient(name, given)
            assert (opt.full_gradient(name) - first).abs().max() < 1e-6
            opt.step()
            opt.zero_grad()
            found[name] = opt.full_parameter(name)
        counts = opt.full_state("head.weight", "step")
        opt.set_full_state("head.weight", "step", torch.tensor(9.0))
        assert (counts, opt.full_state("head.weight", "step")) == (4, 9)
        variance = opt.full_state("qkv.weight", "variance")
        opt.set_full_state("qkv.weight", "variance", 2 * variance)
        assert torch.equal(opt.full_state("qkv.weight", "variance"), 2 * variance)
        opt.set_full_gradient("unused.weight", torch.ones(8, 24))
        before = opt.full_parameter("unused.weight")
        opt.step()
        assert not torch.equal(opt.full_parameter("unused.weight"), before)
        return found

    results = run_forked(world, job)
    for found in results[1:]:
        assert all(torch.equal(found[name], results[0][name]) for name in found)


@layouts
def test_master_weights(layout):
    def job(rank):
        model = Net(torch.bfloat16)
        opt = build(model, master_weights=True, **LAYOUTS[layout])
        for step in range(2):
            backward(model, rank, step)
            opt.step()
            opt.zero_grad()
        name, param = "head.weight", model.head.weight
        master = opt.full_parameter(name)
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), param)
        assert not torch.equal(master, param.float())
        nudged = master * (1 + 2**-20)  # less than bfloat16 can tell
        opt.set_full_parameter(name, nudged)
        assert torch.equal(opt.full_parameter(name), nudged)
        opt.refresh_master_weights()
        assert torch.equal(opt.full_parameter(name), param.float())

    run_forked(2, job)


def test_in_one_process():
    model = Net()
    opt = build(model)
    backward(model, 0, 0)
    assert torch.equal(opt.full_gradient("head.weight"), model.head.weight.grad)
    assert opt.full_gradient("unused.weight") is None
    opt.set_full_gradient("unused.weight", torch.ones(8, 24))
    opt.step()
    assert torch.equal(opt.full_parameter("unused.weight"), model.unused.weight)
    opt.set_full_state("head.weight", "exp_avg", torch.full((13, 24), 2.0))
    assert opt.state[model.head.weight]["exp_avg"].eq(2).all()
    opt.set_full_parameter("head.weight", torch.zeros(13, 24))
    assert not model.head.weight.any()
    opt.refresh_master_weights()


def test_mistakes_name_what_there_is():
    opt = build(Net())
    with pytest.raises(KeyError, match=r"no parameter 'heads'; it has .*head"):
        opt.full_parameter("heads")
    with pytest.raises(KeyError, match=r"'head.bias' has no state 'momentum'; it has \['exp_avg"):
        opt.full_state("head.bias", "momentum")
    with pytest.raises(
        ValueError, match=r"head.bias must be a tensor of shape \(13,\), got .*\(2,"
    ):
        opt.set_full_parameter("head.bias", torch.zeros(2))
    with pytest.raises(ValueError, match=r"gradient of head.bias must be .*got 3"):
        opt.set_full_gradient("head.bias", 3)
