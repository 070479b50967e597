"""The registry of groups: one per process group, one per set of ranks, none of the past."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from samestep.comm.collectives import CollectiveError, total
from samestep.comm.groups import rank_group, registry
from tests.ranks import run_forked, run_threaded


@pytest.mark.parametrize("run", [run_threaded, run_forked])
def test_a_process_group_has_one_rank_group(run):
    def job(rank):
        pair = dist.new_group([1, 2])
        whole = registry.of(dist.group.WORLD)
        assert whole is registry.of()
        assert whole is rank_group()
        assert whole[1:] == (rank, 3, (0, 1, 2))
        if rank == 0:
            with pytest.raises(ValueError, match="rank 0 is not a member"):
                registry.of(pair)
            return
        assert registry.of(pair) is registry.of(pair)
        assert registry.of(pair)[1:] == (rank - 1, 2, (1, 2))

    run(3, job)


@pytest.mark.parametrize("run", [run_threaded, run_forked])
def test_ranks_have_one_group_in_any_order(run):
    def job(rank):
        made = []
        new_group = dist.new_group
        dist.new_group = lambda *args, **kwargs: made.append(args) or new_group(*args, **kwargs)
        try:
            pair, again, alone = (registry.of_ranks(ranks) for ranks in ([2, 0], (0, 2, 2), [1]))
        finally:
            dist.new_group = new_group
        assert pair is again
        assert registry.of_ranks(range(3)) is registry.of()
        if run is run_forked:  # else all ranks replace the same function
            assert made == [([0, 2],), ([1],)]
        if rank == 1:
            assert pair is None
            assert alone[1:] == (0, 1, (1,))
            return None
        assert alone is None
        assert pair is registry.of(pair.handle)
        return total("t", torch.tensor([rank + 1.0]), pair).wait().item()

    assert run(3, job) == [4.0, None, 4.0]


def test_groups_of_an_earlier_default_group_are_forgotten():
    def job(rank):
        found = []
        for _ in range(2):
            found += [registry.of(), registry.of_ranks([0, 1]), registry.of_ranks([2])]
            store = dist.PrefixStore("next", dist.group.WORLD.get_group_store())
            dist.barrier()
            dist.destroy_process_group()
            timeout = timedelta(seconds=5)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timeout)
            dist.barrier()
        return [a is not b or a is None for a, b in zip(found[:3], found[3:], strict=True)]

    assert run_forked(3, job) == [[True] * 3] * 3


def test_a_new_group_has_the_timeout_that_was_asked_for(monkeypatch):
    monkeypatch.setattr("samestep.comm.roll_call.ANSWER_S", 1.0)

    def job(rank):
        group = registry.of_ranks([0, 1], timedelta(seconds=1))
        if rank == 0:
            with pytest.raises(RuntimeError, match="Timed out waiting 1000ms"):
                total("t", torch.ones(1), group).wait()

    run_forked(3, job)


def test_only_members_are_asked_when_a_group_cannot_be_made():
    def job(rank):
        if rank == 0:
            return None

        def new_group(*args, **kwargs):
            raise RuntimeError("no")

        dist.new_group = new_group
        with pytest.raises(CollectiveError) as caught:
            registry.of_ranks([1, 2])
        return str(caught.value)

    message = "creation of the group of ranks 1, 2 failed: all ranks answered, so none is missing"
    assert run_forked(3, job) == [None, *[f"{message}: one may have been too slow. no"] * 2]


def test_ranks_that_do_not_exist_are_refused():
    def job(rank):
        for ranks in ([0, 2], [], [-1]):
            with pytest.raises(ValueError, match="no group can be made of ranks"):
                registry.of_ranks(ranks)

    run_threaded(2, job)


def test_without_a_default_group_there_is_none():
    for ask in (registry.of, lambda: registry.of_ranks([0])):
        with pytest.raises(RuntimeError, match="init_process_group"):
            ask()
