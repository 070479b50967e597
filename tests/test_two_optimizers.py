"""Two optimizers that reduce gradients inside backward: one order of launches where they meet."""

import gc
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import samestep
from samestep.shards.replicated.reduced_gradient import ReducedGradient
from tests.ranks import run_forked
from tests.soak import some, twin

OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 300, "crossover": 1}


class Net(nn.Module):
    """Two matrices and two vectors; the last ones of both may be left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Parameter(torch.randn(20, 20)) for _ in range(2))
        self.scale, self.shift = (nn.Parameter(torch.randn(400)) for _ in range(2))

    def matrices(self):
        return [("first", self.first), ("second", self.second)]

    def vectors(self):
        return [("scale", self.scale), ("shift", self.shift)]


def loss_of(model: Net, rank: int, step: int, *, whole: bool = True) -> torch.Tensor:
    x = torch.randn(20, generator=torch.Generator().manual_seed(10 * step + rank))
    loss = (model.first @ x).tanh().sum() * model.scale.mean()
    return loss + (model.second @ x).tanh().sum() * model.shift.mean() if whole else loss


def train(model, optimizers, rank, steps, lacks=1):
    """Rank `lacks` has no gradient of the last two in every other step."""
    for number in steps:
        loss_of(model, rank, number, whole=rank != lacks or number % 2 == 1).backward()
        step(*optimizers)
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def step(*optimizers):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def collectives():
    """The names of all that are launched."""
    called = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_to_all_single", "reduce_scatter_tensor", "all_gather"):
            plain = getattr(torch.distributed, name)

            def noted(*args, name=name, plain=plain, **options):
                called.append(name)
                return plain(*args, **options)

            patch.setattr(torch.distributed, name, noted)
        yield called


def same(found, expected) -> bool:
    return all(torch.equal(found[name], value) for name, value in expected.items())


ORDERED = {"reduction": "ordered", "lr": 0.1, "weight_decay": 0.1}
RULES = [
    {"params": ["first", "second"], "rule": "muon"},
    {"params": ["scale", "shift"], "rule": "adamw", "betas": (0.9, 0.999)},
]


def by_one(rank, steps):
    """What one optimizer for all parameters does."""
    model = Net()
    one = samestep.MuonAdamW(model, groups=RULES, **ORDERED, **OVERLAP)
    return train(model, [one], rank, steps)


@twin
@pytest.mark.parametrize(("world", "first"), some([(2, "Muon"), (4, "AdamW")]))
def test_both_in_one_backward_launch_in_their_steps(world, first):
    """In one order on all ranks, whatever gradients are missing; told once, on every rank."""

    def job(rank):
        model = Net()
        other = {**OVERLAP, "sharding": "zero1", "buffers": "flat"}
        both = [
            samestep.Muon(model.matrices(), **ORDERED, **OVERLAP),
            samestep.AdamW(model.vectors(), **ORDERED, **other),
        ]
        both.sort(key=lambda opt: type(opt).__name__ != first)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            loss_of(model, rank, 0, whole=rank != 1).backward()
            with collectives() as called:
                step(*both)
            train(model, both, rank, range(1, 5))
        launched = []
        with collectives() as inside:
            loss_of(model, rank, 9).backward()
        launched += inside
        model.zero_grad()
        found = {name: param.detach().clone() for name, param in model.named_parameters()}
        return same(found, by_one(rank, range(5))), [str(t.message) for t in told], launched, called

    for agree, told, launched, called in run_forked(world, job):
        assert agree
        assert launched == []
        assert called
        (text,) = [t for t in told if "two optimizers" in t]
        assert "Muon (2 parameters from 'first' on)" in text
        assert "AdamW (2 parameters from 'scale' on)" in text
        assert "one MuonAdamW for all parameters" in text


def test_one_that_comes_later_is_waited_for():
    def job(rank):
        model = Net()
        muon = samestep.Muon(model.matrices(), **ORDERED, **OVERLAP)
        train(model, [muon], rank, range(2), lacks=None)
        adamw = samestep.AdamW(model.vectors(), **ORDERED, **OVERLAP)
        model.zero_grad()
        with collectives() as called:
            loss_of(model, rank, 0, whole=rank != 1).backward()
        assert called == []
        with pytest.warns(UserWarning, match="two optimizers have"):
            step(muon, adamw)
        return train(model, [muon, adamw], rank, range(1, 4))

    first, second = run_forked(2, job)
    assert same(first, second)


@twin
def test_a_rank_without_gradients_of_one_of_them_holds_back_too():
    def job(rank):
        model = Net()
        both = [
            samestep.AdamW(model.matrices(), **OVERLAP),
            samestep.AdamW(model.vectors(), **OVERLAP),
        ]
        (loss_of(model, rank, 0) if rank == 0 else model.first.sum()).backward()
        with pytest.warns(UserWarning, match="two optimizers have gradients of the same"):
            step(*both)
        with collectives() as called:
            loss_of(model, rank, 1).backward()
        assert called == []
        step(*both)
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    first, second = run_forked(2, job)
    assert same(first, second)


def test_two_that_meet_when_they_launch_already_are_refused():
    """After steps with a backward each; on every rank, before anything was written."""

    def job(rank):
        model = Net()
        both = [
            samestep.AdamW(model.matrices(), **OVERLAP),
            samestep.AdamW(model.vectors(), **OVERLAP),
        ]
        for step in range(2):
            for part, optimizer in zip(("first", "scale"), both, strict=True):
                (getattr(model, part).sum() * (rank + step + 1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        loss_of(model, rank, 0).backward()
        with pytest.raises(RuntimeError) as caught:
            both[0].step()
        return str(caught.value)

    for text in run_forked(2, job):
        assert "two optimizers reduce gradients inside the same backward" in text
        assert "did not do in their first steps" in text
        assert "one MuonAdamW for all parameters" in text


def test_the_ways_out_are_silent_and_give_the_same_bits():
    """One optimizer for both, or overlap in the one that steps first; missing gradients too."""

    def job(rank):
        found = [by_one(rank, range(4))]
        model = Net()
        one = samestep.MuonAdamW(model, groups=RULES, **ORDERED)
        found.append(train(model, [one], rank, range(4)))
        model = Net()
        muon = samestep.Muon(model.matrices(), **ORDERED, **OVERLAP)
        adamw = samestep.AdamW(model.vectors(), **ORDERED)
        found.append(train(model, [muon, adamw], rank, range(4)))
        return found

    for one, late, two in run_forked(2, job):
        assert same(one, late)
        assert same(two, late)


@twin
def test_one_that_replaces_another_takes_over_its_parameters():
    """Also while the old one is still there, and in the middle of a round."""

    def job(rank):
        expected, model = Net(), Net()
        wanted = train(expected, [samestep.AdamW(expected, **OVERLAP)], rank, range(3))
        old = samestep.AdamW(model, **OVERLAP)
        loss_of(model, rank, 9).backward()
        new = samestep.AdamW(model, **OVERLAP)
        model.zero_grad()
        found = train(model, [new], rank, range(3))
        assert old is not None
        return same(found, wanted)

    assert run_forked(2, job) == [True, True]


@twin
def test_two_models_may_have_one_each():
    """A discriminator and a generator; and one that was dropped in the middle of a round."""

    def job(rank):
        one, two = Net(), Net()
        opts = [samestep.AdamW(one, **OVERLAP), samestep.AdamW(two, **OVERLAP)]
        for step in range(3):
            train(one, opts[:1], rank, [step])
            train(two, opts[1:], rank, [step])
        loss_of(one, rank, 0).backward()
        del opts[0]
        gc.collect()
        return train(two, opts, rank, [3])

    first, second = run_forked(2, job)
    assert same(first, second)


def test_launches_are_held_back_until_a_step_has_shown_that_there_is_one():
    """Then they are inside backward again: a gradient that zero2 has reduced is gone."""

    def job(rank):
        one, two = Net(), Net()
        opts = [samestep.AdamW(one, **OVERLAP), samestep.AdamW(two, **OVERLAP)]
        freed = []
        for step in range(2):
            loss_of(one, rank, step).backward()
            freed.append([type(param.grad) is ReducedGradient for param in one.parameters()])
            opts[0].step()
        return freed

    for first, second in run_forked(2, job):
        assert not any(first)
        assert all(second)
