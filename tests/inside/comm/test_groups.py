"""The registry of groups: one per process group, one per set of ranks, none of the past."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from samestep.comm.collectives import CollectiveError, total
from samestep.comm.groups import rank_group, registry
from tests.limits import limit
from tests.ranks import run_forked, run_threaded


@pytest.mark.parametrize("run", [run_threaded, run_forked])
def test_a_process_group_has_one_rank_group(run):
    def job(rank):
        pair = dist.new_group([1, 2])
        whole = registry.of(dist.group.WORLD)
        assert whole is registry.of()
        assert whole is rank_group()
        assert whole[1:4] == (rank, 3, (0, 1, 2))
        if rank == 0:
            with pytest.raises(ValueError, match="rank 0 is not a member"):
                registry.of(pair)
            return
        assert registry.of(pair) is registry.of(pair)
        assert registry.of(pair)[1:4] == (rank - 1, 2, (1, 2))

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
            assert alone[1:4] == (0, 1, (1,))
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
            timeout = timedelta(seconds=limit(60.0))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timeout)
            dist.barrier()
        return [a is not b or a is None for a, b in zip(found[:3], found[3:], strict=True)]

    assert run_forked(3, job) == [[True] * 3] * 3


def test_a_new_group_has_the_timeout_that_was_asked_for(monkeypatch):
    monkeypatch.setattr("samestep.comm.diagnosis.roll_call.ANSWER_S", 0.1)
    seconds = limit(1.0)

    def job(rank):
        group = registry.of_ranks([0, 1], timedelta(seconds=seconds))
        if rank == 0:
            with pytest.raises(RuntimeError, match=f"Timed out waiting {1000 * seconds:.0f}ms"):
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
            with pytest.raises(ValueError, match="a process group of ranks"):
                registry.of_ranks(ranks)

    run_threaded(2, job)


def test_without_a_default_group_there_is_none():
    for ask in (registry.of, lambda: registry.of_ranks([0])):
        with pytest.raises(RuntimeError, match="init_process_group"):
            ask()


def test_a_group_that_only_its_members_know_can_be_told_to_everyone():
    """Else ranks that do not know it would make it once more, alone and waiting."""

    def job(rank):
        mine = [0, 1] if rank < 2 else [2, 3]
        pair = registry.of_members(mine)
        known = [registry.known_among_members(ranks) for ranks in ([0, 1], [2, 3])]
        for ranks in ([0, 1], [2, 3]):
            registry.tell_everyone(ranks)
        found = [registry.of_ranks(ranks) for ranks in ([0, 1], [2, 3])]
        assert found[rank // 2] is pair
        assert found[1 - rank // 2] is None
        assert not registry.known_among_members(mine)
        assert registry.of_members(mine) is pair
        return known, [str(creation) for creation in registry.creations]

    first, _, _, last = run_forked(4, job)
    assert first == ([True, False], [f"group of ranks 0, 1, timeout {limit(120.0):g} s"])
    assert last == ([False, True], [f"group of ranks 2, 3, timeout {limit(120.0):g} s"])


def test_a_group_that_everyone_has_made_is_not_made_again_by_its_members():
    def job(rank):
        pairs = [registry.of_ranks(ranks) for ranks in ([0, 1], [2, 3])]
        assert registry.of_members([0, 1] if rank < 2 else [2, 3]) is pairs[rank // 2]
        return [(c.members, c.timeout, c.everyone, c.mine) for c in registry.creations]

    for rank, made in enumerate(run_forked(4, job)):
        assert made == [
            ((0, 1), limit(120.0), True, rank < 2),
            ((2, 3), limit(120.0), True, rank >= 2),
        ]


def test_a_new_group_has_the_timeout_of_the_default_group():
    def job(rank):
        groups = [registry.of_members([0, 1] if rank < 2 else [2]), registry.of_ranks([0, 2])]
        backends = [g.handle._get_backend(torch.device("cpu")) for g in groups if g is not None]
        return [backend.options._timeout.total_seconds() for backend in backends]

    assert run_forked(3, job, collective_timeout=limit(77.0)) == [
        [limit(77.0)] * n for n in (2, 1, 2)
    ]


def test_the_creation_of_a_group_is_logged_before_and_after(caplog):
    def job(rank):
        registry.of_ranks([0])
        registry.of_ranks(range(20))

    with caplog.at_level("INFO", logger="samestep"):
        run_threaded(21, job)
    begun = "rank 20 makes group 2: group of 20 ranks from 0 to 19, the backend's timeout"
    assert begun in caplog.messages
    assert any(message.startswith("rank 20 made group 2 in 0.") for message in caplog.messages)
