"""Buckets that go inside hosts first, and across them then: the same bits, and each byte once."""

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

import samestep
from tests.counting_group import counted
from tests.ranks import run_cases, run_forked
from tests.soak import SOAK, some, twin
from tests.test_full_values import Net, backward, states_equal

LAYOUTS = {
    "zero2": {"sharding": "zero2"},
    "zero1 overlap": {"sharding": "zero1", "overlap_grad_reduce": True},
    "zero2 overlap": {"overlap_grad_reduce": True},
    "none": {"sharding": "none"},
    "flat": {"buffers": "flat", "overlap_grad_reduce": True, "overlap_param_gather": True},
}
OPTIONS = {
    "lr": 1e-2,
    "crossover": 20,
    "bucket_size": 200,
    "variance_beta2": 0.9,
    "max_grad_norm": 0.7,
    "overrides": {"qkv.weight": {"split_sizes": (8, 12, 4)}},
}
STEPS = 4 if SOAK else 2
FEW = LAYOUTS if SOAK else ("zero2", "zero2 overlap", "none", "flat")


def train(rank, **options):
    """Some ranks have no gradient in some steps; of a host of three mostly all have, in order."""
    model = Net()
    opt = samestep.MuonAdamW(model, **OPTIONS, **options)
    for step in range(STEPS):
        if (rank + step) % 4:
            backward(model, rank, step)
        opt.step()
        opt.zero_grad()
    opt.wait_for_parameters()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, opt.whole_state()


@pytest.mark.parametrize("ranks", [(6, 3), *([(4, 2), (6, 2), (8, 4), (8, 2)] if SOAK else [])])
def test_the_bits_of_one_level(ranks):
    world, on_host = ranks

    def job(rank, layout):
        common = {**LAYOUTS[layout], "reduction": "ordered", "ranks_per_host": on_host}
        return [train(rank, **common, two_levels=two) for two in (False, True)]

    first = None
    for layout, of_ranks in run_cases(world, FEW, job):
        for one, two in of_ranks:
            first = first or one
            for found in (one, two):  # layouts have the same bits too
                assert all(torch.equal(found[0][name], first[0][name]) for name in first[0]), layout
                assert states_equal(found[1], first[1]), layout


@twin
def test_ordered_sums_do_not_depend_on_what_torchrun_says_of_hosts():
    def job(rank):
        found = []
        for said in (None, "2", "1"):
            with pytest.MonkeyPatch.context() as patch:
                if said is not None:
                    patch.setenv("LOCAL_WORLD_SIZE", said)
                found.append(train(rank, reduction="ordered"))
        return found

    for first, *others in run_forked(4, job):
        for other in others:
            assert all(torch.equal(other[0][name], first[0][name]) for name in first[0])
            assert states_equal(other[1], first[1])


@twin
def test_the_sum_is_near_that_of_the_backend():
    """Without an order: what the backend adds up inside and across."""

    def job(rank):
        common = {"ranks_per_host": 2, "sharding": "zero2", "overlap_grad_reduce": True}
        return [train(rank, **common, two_levels=two) for two in (False, True)]

    for one, two in run_forked(4, job):
        for name, value in one[0].items():
            torch.testing.assert_close(two[0][name], value, rtol=0, atol=1e-5)


class Matrices(torch.nn.Module):
    """As many blocks of one size as eight ranks share evenly, and a table."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16, bias=False) for _ in range(16))
        self.embedding = torch.nn.Embedding(64, 16)

    def loss(self):
        x = self.embedding.weight
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@twin
@pytest.mark.parametrize("reduction", some(["ordered", "fast"]))
def test_every_byte_crosses_between_hosts_once(reduction):
    """Eight ranks on two hosts: P / 2 of gradients and of parameters, in each direction."""
    world, on_host = 8, 4

    def job(rank):
        with counted() as log:
            model = Matrices()
            opt = samestep.MuonAdamW(
                model, lr=1e-2, crossover=1, ranks_per_host=on_host, two_levels=True,
                reduction=reduction,
            )  # fmt: skip
            across = {
                call_group
                for call_group, members in _groups().items()
                if len({member // on_host for member in members}) > 1 and len(members) == 2
            }
            del log[:]
            model.loss().backward()
            opt.step()
            crossing = [call for call in log if call.group in across]
        size = sum(p.numel() * 4 for p in model.parameters())
        return size, sum((call.sent for call in crossing), Fraction(0)), len(crossing)

    found = run_forked(world, job)
    size = found[0][0]
    least = size  # half of it there and half back, from each of the two hosts
    of_host = [sum(sent for _, sent, _ in found[first : first + on_host]) for first in (0, on_host)]
    assert max(of_host) <= least * Fraction(105, 100)
    assert min(of_host) >= least * Fraction(95, 100)
    each = [sent for _, sent, _ in found]  # all ranks of a host share what leaves it
    assert max(each) <= sum(each) / world * Fraction(110, 100)


def _groups():
    """Names of process groups, and their members."""
    world = dist.distributed_c10d._world
    return {group.group_name: dist.get_process_group_ranks(group) for group in world.pg_map}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"two_levels": True}, "are on 1 hosts, 4 on each"),
        ({"two_levels": True, "ranks_per_host": 1}, "are on 4 hosts, 1 on each"),
        ({"two_levels": True, "ranks_per_host": 3}, "are on 1 hosts, 4 on each"),
    ],
)
def test_what_cannot_go_in_two_levels_is_refused(options, reason):
    def job(rank):
        with pytest.raises(ValueError, match="two_levels=True needs several hosts") as caught:
            samestep.MuonAdamW(Net(), **OPTIONS, **options)
        return str(caught.value)

    for told in run_forked(4, job):
        assert reason in told


def test_ranks_that_know_other_hosts_are_told():
    def job(rank):
        with pytest.raises(RuntimeError) as caught:
            samestep.MuonAdamW(Net(), **OPTIONS, ranks_per_host=2 if rank < 3 else 4)
        return str(caught.value)

    assert "ranks_per_host = 2" in run_forked(4, job)[0]
