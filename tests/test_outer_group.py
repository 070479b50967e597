"""Several groups of ranks that share state inside, and average with each other outside."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import samestep
from samestep.comm.presence import RankProblemError
from tests.ranks import run_forked
from tests.soak import SOAK, some, twin
from tests.test_full_values import Net, backward, states_equal

LAYOUTS = {
    "zero2": {"sharding": "zero2"},
    "zero1 overlap": {"sharding": "zero1", "overlap_grad_reduce": True},
    "flat": {"buffers": "flat", "overlap_grad_reduce": True, "overlap_param_gather": True},
}
OPTIONS = {
    "lr": 1e-2,
    "reduction": "ordered",
    "crossover": 20,
    "bucket_size": 200,
    "variance_beta2": 0.9,
    "max_grad_norm": 0.7,
    "overrides": {"qkv.weight": {"split_sizes": (8, 12, 4)}},
}
STEPS = 5 if SOAK else 3  # every rank is left out once


def groups(world, inner):
    """Neighbours are inside; made on all ranks in the same order."""
    insides = [dist.new_group(list(range(i, i + inner))) for i in range(0, world, inner)]
    outsides = [dist.new_group(list(range(i, world, inner))) for i in range(inner)]
    rank = dist.get_rank()
    return insides[rank // inner], outsides[rank % inner]


def takes_part(rank, step):
    return (rank + step) % 3 != 0


def train(model, opt, rank):
    for step in range(STEPS):
        if takes_part(rank, step):
            backward(model, rank, step)
        opt.step()
        opt.zero_grad()
    opt.wait_for_parameters()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, opt.whole_state()


def alone(world, inner):
    """One process that adds gradients as the ranks do: inside in rank order, then outside."""
    model = Net()
    opt = samestep.MuonAdamW(model, **OPTIONS)
    for step in range(STEPS):
        sums = []
        for first in range(0, world, inner):
            of_group = None
            for rank in range(first, first + inner):
                model.zero_grad()
                if takes_part(rank, step):
                    backward(model, rank, step)
                grads = [p.grad for p in model.parameters()]
                if of_group is None:
                    of_group = [None if g is None else g.clone() for g in grads]
                else:
                    of_group = [
                        b if a is None else a if b is None else a + b
                        for a, b in zip(of_group, grads, strict=True)
                    ]
            sums.append(of_group)
        for param, parts in zip(model.parameters(), zip(*sums, strict=True), strict=True):
            there = [part for part in parts if part is not None]
            param.grad = sum(there[1:], there[0]) / world if there else None
        opt.step()
        opt.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, opt.whole_state()


WORLDS = [(4, 2), (6, 2), (6, 3)]  # of ranks, of which so many are in an inner group
CASES = [(layout, *WORLDS[place % 3]) for place, layout in enumerate(LAYOUTS)]
if SOAK:
    CASES = [(layout, *world) for layout in LAYOUTS for world in WORLDS]


@pytest.mark.parametrize(("layout", "world", "inner"), some(CASES))
def test_as_one_process(layout, world, inner):
    expected, expected_state = alone(world, inner)

    def job(rank):
        model = Net()
        inside, outside = groups(world, inner)
        opt = samestep.MuonAdamW(
            model, process_group=inside, outer_group=outside, **OPTIONS, **LAYOUTS[layout]
        )
        return train(model, opt, rank)

    for values, state in run_forked(world, job):
        for name, value in values.items():
            assert torch.equal(value, expected[name]), name
        assert states_equal(state, expected_state)


@twin
def test_fast_sums_are_near_and_state_is_shared_inside():
    expected, _ = alone(4, 2)

    def job(rank):
        model = Net()
        inside, outside = groups(4, 2)
        options = {**OPTIONS, "reduction": "fast"}
        opt = samestep.MuonAdamW(model, process_group=inside, outer_group=outside, **options)
        kept = sum(t.numel() for state in opt.state.values() for t in state.values())
        values, _ = train(model, opt, rank)
        return values, kept

    results = run_forked(4, job)
    whole = sum(
        t.numel() for s in samestep.MuonAdamW(Net(), **OPTIONS).state.values() for t in s.values()
    )
    for values, kept in results:
        assert kept < 0.7 * whole
        for name, value in values.items():
            assert torch.equal(value, results[0][0][name])
            assert (value - expected[name]).abs().max() < 3e-4


def test_gradients_replicas_and_problems_reach_every_rank():
    def job(rank):
        model = Net()
        if rank == 3:
            with torch.no_grad():
                model.head.weight += 1
        inside, outside = groups(4, 2)
        options = {**OPTIONS, "process_group": inside, "outer_group": outside}
        if rank % 2:
            with pytest.warns(UserWarning, match="set to the values of rank 1: head.weight"):
                opt = samestep.MuonAdamW(model, **options)
        else:
            opt = samestep.MuonAdamW(model, **options)
        assert torch.equal(model.head.weight, Net().head.weight)
        if rank == 2:
            backward(model, 0, 0)
            local = model.head.weight.grad.clone()
        mean = opt.full_gradient("head.weight")
        if rank == 2:
            assert torch.equal(mean, local / 4)
        opt.set_full_gradient("head.weight", torch.full_like(mean, 3.0))
        assert opt.full_gradient("head.weight").eq(3).all()
        opt.step()
        assert opt.metrics()["present"].sum() == len(list(model.parameters())) - 2
        if rank == 1:
            model.head.weight.grad = torch.zeros(13, 24).to_sparse()
        with pytest.raises(RuntimeError if rank == 1 else RankProblemError, match=r"rank 1|sparse"):
            opt.step()

    run_forked(4, job)


@twin
def test_plans_are_compared_over_all_ranks():
    def job(rank):
        inside, outside = groups(4, 2)
        with pytest.raises(RuntimeError, match="bucket_size = 2"):
            samestep.MuonAdamW(
                Net(),
                process_group=inside,
                outer_group=outside,
                **{**OPTIONS, "bucket_size": 200 + 50 * (rank > 1)},
            )

    run_forked(4, job)


def test_refused():
    with pytest.raises(TypeError, match=r"outer_group must be a torch\.distributed\.ProcessGroup"):
        samestep.MuonAdamW(Net(), outer_group=object())

    def job(rank):
        inside, outside = groups(2, 1)
        with pytest.raises(ValueError, match="give process_group= too"):
            samestep.MuonAdamW(Net(), outer_group=outside)
        with pytest.raises(ValueError, match="process_group has one rank"):
            samestep.MuonAdamW(Net(), process_group=inside, outer_group=outside, **OPTIONS)
        model = Net()
        both = dist.group.WORLD
        groups_given = [{"params": list(model.parameters()), "rule": "adamw", "divisor": 3}]
        with pytest.raises(ValueError, match="cannot be combined with outer_group"):
            samestep.MuonAdamW(groups_given, process_group=both, outer_group=inside)

    run_forked(2, job)
