"""Ranks that use different modules and parameters of an FSDP2 model, against plain parameters."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import samestep
from samestep.comm.integrity.agreement import RanksDisagreeError
from samestep.fsdp import skip, take_part, use_ordered_reduction
from samestep.fsdp.participation import participation_of
from tests.ranks import run_cases, run_forked
from tests.soak import SOAK, some, twin
from tests.test_fsdp_ordered import assert_same_bits, differing, mesh_of, ranks_in

OPTIONS = {"lr": 1e-2, "max_grad_norm": 0.7, "bucket_size": 200, "waves": 1}
STEPS = 5


class Layer(nn.Module):
    """`gate` is used at times; `extra` is never used by any rank."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5, bias=False)
        self.gate = nn.Parameter(torch.ones(7))
        self.extra = nn.Linear(5, 3, bias=False)

    def forward(self, x, gated):
        hidden = self.up(x).tanh()
        return x + self.down(hidden * self.gate if gated else hidden)


class Net(nn.Module):
    """`leave_out` says what a rank does in place of a module that it does not use."""

    def __init__(self, leave_out=lambda module, x: x, save_memory=False):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(13, 5)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.second = nn.Linear(5, 13, bias=False)
        self.scale = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(5, 13, bias=False)
        self.leave_out = leave_out
        self.save_memory = save_memory
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(std=0.3, generator=generator)

    def forward(self, tokens, used):
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            if number not in used:
                x = self.leave_out(layer, x)
            elif self.save_memory:
                x = checkpoint(layer, x, "gate" in used, use_reentrant=False)
            else:
                x = layer(x, "gate" in used)
        target = tokens.roll(-1)
        losses = []
        if "second" in used:
            losses.append(nn.functional.cross_entropy(self.second(x), target))
        else:
            x = self.leave_out(self.second, x)
        if "scale" in used:
            x = x * self.scale
        losses.append(nn.functional.cross_entropy(self.head(x), target))
        return torch.stack(losses).sum()


def used_by(rank, step):
    """What a rank uses; None: it has no loss. In step 3 nobody uses layer 1, nor `gate` in 4."""
    if step % 4 == 3 and rank == 1:
        return None
    used = {number for number in range(3) if (step + 2 * number + rank) % 3}
    used -= {1} if step == 3 else set()
    used |= {"gate"} if step != 4 and (step + rank) % 2 else set()
    used |= {"second"} if step % 3 == 1 and rank == 0 else set()
    return used | ({"scale"} if step % 2 == 0 and rank == step // 2 % 2 else set())


def loss_of(model, rank, step):
    used = used_by(rank, step)
    if used is None:
        return None
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randint(13, (6,), generator=generator), used)


def snapshot(model, opt):
    names = [name for name, _ in model.named_parameters()]
    values = {(name,): opt.full_parameter(name) for name in names}
    for name, entries in opt.whole_state().items():
        values |= {(name, key): value for key, value in entries.items()}
    return values


def train(model, opt, rank, *, steps=STEPS, micro_batches=1):
    """All values and state; ranks without a loss take part where there is something to skip."""
    sharded = hasattr(model, "set_requires_gradient_sync")
    for step in range(steps):
        for batch in range(micro_batches):
            last = batch == micro_batches - 1
            if sharded:
                model.set_requires_gradient_sync(last)
            with nullcontext() if sharded or last else opt.no_sync():
                loss = loss_of(model, rank, micro_batches * step + batch)
                if loss is None and sharded:
                    loss = skip(model, torch.zeros(()))
                if loss is not None:
                    loss.backward()
        opt.step()
        opt.zero_grad()
    return snapshot(model, opt)


@cache
def alone(world, steps=STEPS):
    """One process: absent is what no rank has used, and the mean is over all ranks."""
    model = Net()
    opt = samestep.MuonAdamW(model, **OPTIONS)
    for step in range(steps):
        for rank in range(world):
            loss = loss_of(model, rank, step)
            if loss is not None:
                (loss / world).backward()
        opt.step()
        opt.zero_grad()
    return snapshot(model, opt)


@cache
def plain(world, micro_batches=1):
    """The same ranks with plain parameters."""

    def job(rank):
        model = Net()
        opt = samestep.MuonAdamW(model, sharding="zero2", reduction="ordered", **OPTIONS)
        return train(model, opt, rank, micro_batches=micro_batches)

    return run_forked(world, job)[0]


def sharded(model, mesh, **options):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model.second, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train_sharded(shape, rank, options):
    """`options`: of the training, the model and `fully_shard`."""
    options = dict(options)
    micro_batches = options.pop("micro_batches", 1)
    check, ordered = options.pop("check", False), options.pop("ordered", True)
    model = sharded(Net(skip, options.pop("save_memory", False)), mesh_of(shape), **options)
    if ordered:
        use_ordered_reduction(model)
    take_part(model, check=check)
    opt = samestep.MuonAdamW(model, **OPTIONS)
    return train(model, opt, rank, micro_batches=micro_batches)


def assert_near(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        limit = 3e-4 if len(key) == 1 and value.dim() == 2 else 2e-5
        assert (found[key] - value).abs().max() <= limit, key


WAYS = {
    (3,): [{"reshard_after_forward": False}, {"save_memory": True}, *([{}] if SOAK else [])],
    (2, 2): [{"check": True}, *([{}, {"save_memory": True}] if SOAK else [])],
    **({(2,): [{"reshard_after_forward": False}, {}], (4,): [{}]} if SOAK else {}),
}


@pytest.mark.parametrize("shape", some(list(WAYS)[::-1]))
def test_ranks_may_use_different_modules(shape):
    """Also with parameters that stay whole, with recomputed activations, and checked."""
    world = ranks_in(shape)
    expected = plain(world)
    assert_near(expected, alone(world))
    for options, results in run_cases(world, WAYS[shape], partial(train_sharded, shape)):
        for found in results:
            assert differing(found, expected) == [], options


@twin
def test_micro_batches_and_sums_of_the_backend():
    ways = [{"micro_batches": 2}, {"ordered": False}]
    (_, accumulated), (_, unordered) = run_cases(3, ways, partial(train_sharded, (3,)))
    for found in accumulated:
        assert_same_bits(found, plain(3, micro_batches=2))
    for found in unordered:
        assert_near(found, alone(3))


# --- trees of modules -----------------------------------------------------------------------------


class Tree(nn.Module):
    """Some of its branches are units, some inside of others; some give what a branch gave."""

    def __init__(self, depth, draw):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=draw.random() < 0.5)
        self.gate = nn.Parameter(torch.ones(4))
        self.branches = nn.ModuleList(
            Tree(depth - 1, draw) for _ in range(draw.randint(1, 3) if depth else 0)
        )
        self.apart, self.saves_memory = draw.random() < 0.7, draw.random() < 0.3

    def forward(self, x, draw):
        """Every rank draws for itself what it uses."""
        if draw.random() < 0.8:
            x = x + self.linear(x).tanh()
        if draw.random() < 0.5:
            x = x * self.gate
        for branch in self.branches:
            x = branch.used_or_not(x, draw)
        return x

    def used_or_not(self, x, draw):
        used, seed = draw.random() < 0.65, draw.random()
        if not used:
            return self.left_out(x)
        units = [m for m in self.modules() if m is not self and isinstance(m, FSDPModule)]
        if self.saves_memory and not units:
            call = partial(lambda seed, x: self(x, Random(seed)), seed)
            return checkpoint(call, x, use_reentrant=False)
        return self(x, Random(seed))

    def left_out(self, x):
        if isinstance(self, FSDPModule):
            return skip(self, x)
        for branch in self.branches:
            x = branch.left_out(x)
        return x


class Forest(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        draw = Random(seed)
        self.embedding = nn.Embedding(11, 4)
        self.trees = nn.ModuleList(Tree(draw.randint(1, 2), draw) for _ in range(2))
        self.head = nn.Linear(4, 11)
        self.options = {"reshard_after_forward": draw.random() < 0.6}
        self.apart = draw.random() < 0.5

    def forward(self, tokens, draw):
        x = self.embedding(tokens)
        for tree in self.trees:
            x = tree.used_or_not(x, draw)
        return nn.functional.cross_entropy(self.head(x), tokens.roll(-1))

    def sharded(self, mesh):
        for module in reversed(list(self.modules())):
            if isinstance(module, Tree) and module.apart:
                fully_shard(module, mesh=mesh, **self.options)
        if self.apart:
            fully_shard(self.embedding, mesh=mesh)
        return fully_shard(self, mesh=mesh)


def train_forest(model, opt, rank, seed):
    for step in range(5 if SOAK else 4):
        draw = Random(1000 * seed + 10 * step + rank)
        tokens = torch.randint(11, (5,), generator=torch.Generator().manual_seed(step + 9 * rank))
        if step == 0 or draw.random() < 0.8:
            model(tokens, draw).backward()
        elif isinstance(model, FSDPModule):
            skip(model, torch.zeros(())).backward()
        opt.step()
        opt.zero_grad()
    return snapshot(model, opt)


@pytest.mark.parametrize(("seed", "shape"), some([(38, (2, 2)), (8, (3,)), (29, (2,))], 3))
def test_trees_of_modules(seed, shape):
    def job(rank, case):
        model = Forest(seed)
        if case == "plain":
            opt = samestep.MuonAdamW(model, sharding="zero2", reduction="ordered", **OPTIONS)
            return train_forest(model, opt, rank, seed)
        model = model.sharded(mesh_of(shape))
        use_ordered_reduction(model)
        take_part(model)
        return train_forest(model, samestep.MuonAdamW(model, **OPTIONS), rank, seed)

    (_, expected), (_, results) = run_cases(ranks_in(shape), ["plain", "sharded"], job)
    for found in results:
        assert_same_bits(found, expected[0])


class Containers(nn.Module):
    """Gives a tensor in every kind of container."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, kind):
        y = self.linear(x)
        return {
            "tuple": (y, None),
            "list": [{"y": y}, 3],
            "named": Named(1, y),
            "dataclass": Holder([y], "text"),
        }[kind]


class Named(NamedTuple):
    n: int
    y: torch.Tensor


@dataclass
class Holder:
    ys: list
    text: str


def test_outputs_in_containers():
    def job(rank):
        model = fully_shard(Containers())
        take_part(model)
        x = torch.ones(2, 3)
        for kind, pick in (
            ("tuple", lambda out: out[0]),
            ("list", lambda out: out[0]["y"]),
            ("named", lambda out: out.y),
            ("dataclass", lambda out: out.ys[0]),
        ):
            output = model(x, kind)
            assert type(output) is {"named": Named, "dataclass": Holder}.get(kind, type(output))
            pick(output).sum().backward()
            assert model.linear.weight.grad.full_tensor().eq(2).all()
            model.zero_grad()

    run_forked(2, job)


def test_models_can_be_forgotten():
    def job(rank):
        model = sharded(Net(skip), mesh_of((2,)))
        take_part(model)
        model(torch.arange(6), {0, 2}).backward()
        watched = weakref.ref(participation_of(model)), weakref.ref(model)
        del model
        gc.collect()
        return [ref() is None for ref in watched]

    assert run_forked(2, job) == [[True, True]] * 2


# --- one unit, parameters of one shape ------------------------------------------------------------


class Choice(nn.Module):
    """`use` says which parameters a rank uses."""

    def __init__(self):
        super().__init__()
        for name in "abc":
            self.register_parameter(name, nn.Parameter(torch.ones(4, 3)))

    def forward(self, use):
        return torch.stack([self.get_parameter(name).sum() * n for name, n in use.items()]).sum()


def gradients(model):
    return {
        name: None if param.grad is None else param.grad.full_tensor().unique().tolist()
        for name, param in model.named_parameters()
    }


@pytest.mark.parametrize("part", [False, True])
def test_without_it_other_parameters_gradients_are_mixed_in(part):
    """Rank 0 uses a, rank 1 uses b: FSDP2 reduces one gradient of each, and takes their mean."""

    def job(rank):
        model = fully_shard(Choice())
        if part:
            take_part(model)
        model({"a": 1.0} if rank == 0 else {"b": 5.0}).backward()
        return gradients(model)

    found = run_forked(2, job)
    if part:
        assert found == [{"a": [0.5], "b": [2.5], "c": [0.0]}] * 2
    else:
        assert found == [{"a": [3.0], "b": None, "c": None}, {"a": None, "b": [3.0], "c": None}]


def moved(model, opt):
    """The parameters that a step has changed."""
    before = {name: opt.full_parameter(name) for name in "abc"}
    opt.step()
    return [name for name in "abc" if not torch.equal(opt.full_parameter(name), before[name])]


def test_marks_come_and_go_with_the_gradients():
    """Momentum moves whatever is present; the third parameter is used by nobody but at first."""

    def job(rank):
        model = fully_shard(Choice())
        opt = samestep.MuonAdamW(model, lr=1e-2, weight_decay=0.0)
        take_part(model)
        take_part(model)  # once more changes nothing
        seen = []

        def back(**use):
            model(use).backward()

        def and_step():
            seen.append("".join(moved(model, opt)))

        back(a=1.0, b=2.0, c=3.0)
        and_step()
        opt.zero_grad()
        back(**({"a": 1.0} if rank == 0 else {"b": 2.0}))
        and_step()
        and_step()  # the same gradients again
        back(a=1.0)  # added to them
        and_step()
        model.zero_grad()
        back(c=1.0)
        model.zero_grad()  # never stepped with
        back(a=1.0)
        and_step()
        opt.zero_grad()
        back(a=1.0)
        model.c.grad = torch.ones_like(model.c)  # by hand
        and_step()
        opt.zero_grad()
        back(a=1.0)
        opt.set_full_gradient("b", torch.ones(4, 3))
        assert opt.full_gradient("c") is None
        assert opt.full_gradient("a") is not None
        and_step()
        return seen

    assert run_forked(2, job) == [["abc", "ab", "ab", "ab", "a", "ac", "ab"]] * 2


def test_parameters_that_are_made_later():
    def job(rank):
        with torch.device("meta"):
            model = Choice()
        fully_shard(model)
        take_part(model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(1.0)
        opt = samestep.MuonAdamW(model, weight_decay=0.1)
        model({"a": 1.0} if rank == 0 else {"b": 2.0}).backward()
        assert gradients(model)["c"] == [0.0]
        return moved(model, opt)

    assert run_forked(2, job) == [["a", "b"]] * 2


def test_frozen_parameters_get_no_zeros():
    def job(rank):
        model = fully_shard(Choice())
        take_part(model)
        found = []
        for frozen in "bcb":
            for name, param in model.named_parameters():
                param.requires_grad_(name != frozen)
            model({"a": 1.0}).backward()
            found.append(gradients(model))
            model.zero_grad()
        return found

    without_b = {"a": [1.0], "b": None, "c": [0.0]}
    without_c = {"a": [1.0], "b": [0.0], "c": None}
    assert run_forked(2, job) == [[without_b, without_c, without_b]] * 2


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.then = (nn.Linear(3, 3, bias=False) for _ in range(2))

    def forward(self, x, first, then):
        x = self.first(x) if first else skip(self.first, x)
        return self.then(x) if then else skip(self.then, x)


def test_several_modules_in_one_unit():
    def job(rank):
        model = Pair()
        fully_shard([model.first, model.then])
        fully_shard(model)
        take_part(model)
        opt = samestep.MuonAdamW(model)
        seen = []
        for step in range(3):
            model(torch.ones(2, 3), (rank + step) % 2, step == 0).sum().backward()
            opt.step()
            seen.append(opt.metrics()["present"].tolist())
            opt.zero_grad()
        return seen

    assert run_forked(2, job) == [[[2], [1], [1]]] * 2


def test_mixed_precision_with_micro_batches():
    """Gradients that wait for their sum are fp32, those of the last micro-batch bf16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def job(rank):
        model = fully_shard(Choice(), mp_policy=policy)
        take_part(model)
        opt = samestep.MuonAdamW(model)
        model.set_requires_gradient_sync(False)
        model({"a": 1.0} if rank == 0 else {"b": 2.0}).backward()
        model.set_requires_gradient_sync(True)
        model({"b": 4.0} if rank == 0 else {"a": 8.0}).backward()
        return gradients(model), moved(model, opt)

    expected = {"a": [4.5], "b": [3.0], "c": [0.0]}
    assert run_forked(2, job) == [(expected, ["a", "b"])] * 2


def test_skipped_input_keeps_its_values_in_mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def job(rank):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        for layer in model:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        take_part(model)
        x = torch.full((2, 3), 1 + 2**-20)
        for y in (skip(model, x), skip(model, x.requires_grad_())):
            assert torch.equal(y, x)
            y.square().sum().backward()
        assert torch.equal(x.grad, 2 * x)
        with torch.no_grad():
            assert not skip(model, x).requires_grad
        return [param.grad.full_tensor().any().item() for param in model.parameters()]

    assert run_forked(2, job) == [[False] * 4] * 2


# --- what it tells --------------------------------------------------------------------------------


def disagreement(act):
    """What every rank is told where they do different things with a checked model."""

    def job(rank):
        model = sharded(Net(skip), mesh_of((3,)))
        take_part(model, check=True)
        with pytest.raises(RanksDisagreeError) as caught:
            act(model, rank)
        return str(caught.value)

    messages = run_forked(3, job)
    assert len(set(messages)) == 1
    assert "samestep.fsdp.skip(module, x)" in messages[0]
    return messages[0]


def test_a_check_names_module_and_ranks():
    def without_skip(model, rank):
        model.leave_out = lambda module, x: x
        model(torch.arange(6), {0, 1, 2, "second"} - ({1} if rank == 1 else set()))

    message = disagreement(without_skip)
    assert "ranks 0, 2: call FSDP module 'layers.1', whose input requires a gradient; " in message
    assert "rank 1: call FSDP module 'layers.2', whose input" in message


def test_a_check_before_backward():
    def two_losses(model, rank):
        loss = model(torch.arange(6), {0, 1, 2})
        if rank == 0:
            loss = loss + model(torch.arange(6), {0, 1, 2})
        loss.backward()

    message = disagreement(two_losses)
    assert "rank 0: call the outermost FSDP module, whose input does not require" in message
    assert "ranks 1, 2: go backward" in message


def test_a_check_of_gradients():
    def look_only(model, rank):
        with torch.set_grad_enabled(rank != 2):
            model(torch.arange(6), {0, 1, 2})

    assert "rank 2: call the outermost FSDP module without gradients" in disagreement(look_only)


def test_what_cannot_be_skipped():
    def job(rank):
        model = fully_shard(nn.Linear(2, 2))
        with pytest.raises(RuntimeError, match=r"a model given to take_part\(\)"):
            skip(model, torch.zeros(2))
        take_part(model)
        with pytest.raises(TypeError, match=r"needs a floating tensor, got torch\.int64"):
            skip(model, torch.zeros(2, dtype=torch.int64))
        with pytest.raises(TypeError, match="needs a floating tensor, got list"):
            skip(model, [1.0])

    run_forked(1, job)


def test_a_model_without_fsdp():
    with pytest.raises(ValueError, match=r"no FSDP2 module: call fully_shard first"):
        take_part(nn.Linear(2, 2))
