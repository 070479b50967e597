"""Reductions inside backward: the same bits, whatever backward leaves out or reorders."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import samestep
from samestep.comm.presence import RankProblemError
from samestep.shards.replicated.reduced_gradient import ReducedGradient
from tests.ranks import run_cases, run_forked, run_threaded
from tests.soak import SOAK, twin

LAYERS = ("first", "second", "third", "tied")
OPTIONS = {"lr": 1e-2, "reduction": "ordered", "crossover": 20, "bucket_size": 200}


class Net(nn.Module):
    """Runs the layers it is told to, in the order it is told: graphs differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8, bias=False)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.experts = nn.Parameter(torch.zeros(3, 8, 8))
        self.head = nn.Linear(8, 13, bias=False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(std=0.3, generator=generator)

    def forward(self, tokens, layers, expert):
        x = self.embedding(tokens)
        for name in layers:
            x = x + getattr(self, name)(x).tanh()
        if expert is not None:
            x = x + x @ self.experts[expert]
        return self.head(x)


def loss_of(model, case):
    tokens, layers, expert = case
    logits = model(tokens, layers, expert)
    return nn.functional.cross_entropy(logits, tokens.roll(-1))


def make_case(rank, step, batch):
    """Tokens, the layers in some order, and an expert or none; sometimes no backward at all."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + batch)
    tokens = torch.randint(13, (6,), generator=generator)
    order = torch.randperm(len(LAYERS), generator=generator).tolist()
    count = (rank + step + batch) % 4
    expert = (rank + step) % 4
    layers = [LAYERS[i] for i in order[:count]]
    return None if (rank + 2 * step + batch) % 5 == 4 else (tokens, layers, expert % 3 or None)


def build(model, **options):
    return samestep.MuonAdamW(
        model, **{**OPTIONS, **options}, overrides={"experts": {"rule": "muon"}}
    )


def train(model, opt, cases, mode):
    """One step over micro-batches, in one of the modes of accumulation."""
    for number, case in enumerate(cases):
        last = number == len(cases) - 1
        if mode == "no_sync" and not last:
            with opt.no_sync():
                if case is not None:
                    loss_of(model, case).backward()
            continue
        if case is not None:
            loss_of(model, case).backward()
        if mode == "synchronize" and not last:
            opt.synchronize()
    opt.step()
    opt.zero_grad()


def grads_of(model, cases):
    """Gradients of one rank's micro-batches, accumulated by autograd; None where there are none."""
    model.zero_grad()
    for case in cases:
        if case is not None:
            loss_of(model, case).backward()
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def mean(param, per_round):
    """Rank sums in rank order, added round by round, divided at the end."""
    ranks = len(per_round[0])
    if all(grad is None for grads in per_round for grad in grads):
        return None
    total = None
    for grads in per_round:
        grads = [torch.zeros_like(param) if grad is None else grad for grad in grads]
        ordered = grads[0].clone()
        for grad in grads[1:]:
            ordered += grad
        total = ordered if total is None else total + ordered
    return total / ranks


def single_process(all_cases, mode):
    """The same run in one process; `all_cases[step][rank]` are the micro-batches of a rank."""
    model = Net()
    opt = build(model)
    for cases in all_cases:
        rounds = zip(*cases, strict=True) if mode == "synchronize" else [cases]
        per_round = [
            [grads_of(model, [c] if mode == "synchronize" else c) for c in of_ranks]
            for of_ranks in rounds
        ]
        for place, param in enumerate(model.parameters()):
            param.grad = mean(param, [[grads[place] for grads in r] for r in per_round])
        opt.step()
        opt.zero_grad()
    return values(model)


def values(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


@twin
@pytest.mark.parametrize("world", [2, 3, 5] if SOAK else [3])
def test_overlap_gives_the_bits_of_one_process(world):
    steps, batches = (6, 3) if SOAK else (4, 2)
    all_cases = [
        [[make_case(rank, step, batch) for batch in range(batches)] for rank in range(world)]
        for step in range(steps)
    ]

    def job(rank, mode):
        found = {}
        for sharding in ("none", "zero1", "zero2"):
            for overlap in (False, True):
                model = Net()
                opt = build(model, sharding=sharding, overlap_grad_reduce=overlap)
                for cases in all_cases:
                    train(model, opt, cases[rank], mode)
                found[sharding, overlap] = values(model)
        return found

    for mode, results in run_cases(world, ["no_sync", "synchronize"], job):
        expected = single_process(all_cases, mode)
        assert not same(expected, values(Net()))
        for found in results:
            for key, result in found.items():
                assert same(result, expected), (mode, key)


@st.composite
def runs(draw):
    """[step][rank][micro-batch] -> None, or (layers in some order, expert)."""
    world, steps, batches = (
        draw(st.integers(2, 4)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    case = st.none() | st.tuples(
        st.lists(st.sampled_from(LAYERS), unique=True), st.sampled_from([None, 0, 2])
    )
    pattern = st.lists(
        st.lists(
            st.lists(case, min_size=batches, max_size=batches), min_size=world, max_size=world
        ),
        min_size=steps,
        max_size=steps,
    )
    return world, draw(pattern)


@twin
@given(
    runs(),
    st.sampled_from(["no_sync", "synchronize"]),
    st.sampled_from(["none", "zero1", "zero2"]),
    st.sampled_from([1, 70, 1000]),
)
@settings(max_examples=100 if SOAK else 3)
def test_any_graphs_give_the_bits_of_one_process(run, mode, sharding, bucket_size):
    world, pattern = run
    tokens = torch.arange(6)
    all_cases = [
        [[None if c is None else (tokens + r, *c) for c in cases] for r, cases in enumerate(ranks)]
        for ranks in pattern
    ]

    def job(rank):
        model = Net()
        opt = build(model, sharding=sharding, overlap_grad_reduce=True, bucket_size=bucket_size)
        for cases in all_cases:
            train(model, opt, cases[rank], mode)
        return values(model)

    expected = single_process(all_cases, mode)
    for result in run_threaded(world, job):
        assert same(result, expected)


def test_zero2_frees_gradients_inside_backward_and_zero1_keeps_them():
    def job(rank):
        found = []
        for sharding in ("zero2", "zero1"):
            model = Net()
            opt = build(model, sharding=sharding, overlap_grad_reduce=True)
            loss_of(model, (torch.arange(6), LAYERS, 1)).backward()
            found.append(
                [
                    name
                    for name, p in model.named_parameters()
                    if type(p.grad) is not ReducedGradient
                ]
            )
            opt.step()
        return found

    everything = [name for name, _ in Net().named_parameters()]
    for freed, kept in run_forked(2, job):
        assert freed == []
        assert kept == everything


def test_a_second_backward_without_no_sync_is_an_error_that_says_what_to_do():
    def job(rank):
        model = Net()
        build(model, overlap_grad_reduce=True).step()
        opt = build(model, overlap_grad_reduce=True)
        case = (torch.arange(6), LAYERS, 1)
        loss_of(model, case).backward()
        with pytest.raises(RuntimeError, match=r"rank . after its bucket was reduced.*no_sync\(\)"):
            loss_of(model, case).backward()
        return opt is not None

    assert run_forked(2, job) == [True, True]


def test_a_gradient_edited_after_its_reduction_is_an_error_on_every_rank():
    flat = {"sharding": "zero1", "buffers": "flat"}
    cases = [
        ({"sharding": "zero1"}, lambda p: p.grad.mul_(2), "changed"),
        ({"sharding": "zero2"}, lambda p: setattr(p, "grad", torch.ones_like(p)), "dropped"),
        ({"sharding": "none"}, lambda p: setattr(p, "grad", None), "dropped"),
        (flat, lambda p: setattr(p, "grad", None), "dropped"),
    ]

    def job(rank):
        found = []
        for options, edit, _ in cases:
            model = Net()
            opt = build(model, overlap_grad_reduce=True, **options)
            case = (torch.arange(6), LAYERS, 1)
            before = values(model)
            loss_of(model, case).backward()
            if rank == 1:
                edit(model.second.weight)
            try:
                opt.step()
            except RuntimeError as error:
                found.append((type(error), str(error)))
            assert same(values(model), before)
            opt.zero_grad()
            train(model, opt, [case], "no_sync")  # and it goes on
            assert not same(values(model), before)
            found.append(values(model))
            del model, opt  # the next one would hold its launches back beside it
            gc.collect()
        return found

    results = run_forked(3, job)
    for rank, found in enumerate(results):
        raised, trained = found[::2], found[1::2]
        assert all(map(same, trained, results[0][1::2]))
        for (kind, text), (_, _, done) in zip(raised, cases, strict=True):
            assert "second.weight" in text
            assert "rank 1" in text
            if done == "dropped":
                assert kind is RankProblemError
                assert re.search("was dropped on rank 1 .* after it was reduced, and not on", text)
            else:
                assert (kind is RankProblemError) == (rank != 1)
                assert rank != 1 or "was changed on rank 1 after it was reduced" in text


def test_a_dropped_optimizer_does_not_go_on_reducing():
    def job(rank):
        model = Net()
        build(model, overlap_grad_reduce=True)
        gc.collect()
        opt = build(model, overlap_grad_reduce=True)
        train(model, opt, [(torch.arange(6), LAYERS, 1)], "no_sync")
        loss_of(model, (torch.arange(6), LAYERS, 1)).backward()
        opt.step()
        return values(model)

    results = run_forked(2, job)
    assert same(results[0], results[1])


@twin
def test_frozen_then_unfrozen_parameters_are_reduced_in_time():
    def job(rank):
        results = []
        for overlap in (True, False):
            model = Net()
            opt = build(model, overlap_grad_reduce=overlap)
            for step in range(4):
                model.second.requires_grad_(step % 2 == 1)
                train(model, opt, [make_case(rank, step, 0) or make_case(0, 0, 0)], "no_sync")
            results.append(values(model))
        return results

    for overlapped, plain in run_forked(3, job):
        assert same(overlapped, plain)


def test_accumulation_is_free_of_effect_without_other_ranks():
    model = Net()
    opt = build(model, overlap_grad_reduce=True)
    with opt.no_sync():
        loss_of(model, (torch.arange(6), LAYERS, 1)).backward()
    opt.synchronize()
    assert model.first.weight.grad is not None
    opt.step()


def test_overlap_of_gradients_that_were_already_reduced_is_refused():
    with pytest.raises(ValueError, match="averaged before"):
        samestep.MuonAdamW(Net(), grads="reduced", overlap_grad_reduce=True)


@pytest.mark.parametrize("overlap", [True, False])
def test_synchronize_with_a_group_that_was_added_later(overlap):
    """Two plans share one order of launches: no round begins before all have ended."""

    def job(rank):
        torch.manual_seed(0)
        first, second = (torch.nn.Parameter(torch.randn(12, 12)) for _ in range(2))
        opt = samestep.MuonAdamW(
            [("first", first)],
            lr=0.1,
            reduction="ordered",
            crossover=1,
            overlap_grad_reduce=overlap,
        )
        opt.add_param_group({"params": [("second", second)], "rule": "muon"})
        for step in range(3):
            for micro in range(2):
                for place, param in enumerate((first, second)):
                    grad = torch.full_like(param, rank + micro + step + place + 1.0)
                    (param * grad).sum().backward()
                if micro == 0:
                    opt.synchronize()
            opt.step()
            opt.zero_grad()
        state = opt.whole_state()
        return [state[name]["momentum_buffer"] for name in ("first", "second")]

    expected = []
    for place in range(2):
        momentum = 0.0
        for step in range(3):
            mean = sum(r + m + step + place + 1.0 for r in range(2) for m in range(2)) / 2
            momentum += 0.05 * (mean - momentum)
        expected.append(momentum)
    for found in run_forked(2, job):
        for momentum, number in zip(found, expected, strict=True):
            torch.testing.assert_close(momentum, torch.full((12, 12), number))
