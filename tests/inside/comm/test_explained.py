"""Collectives of others: who is missing when they fail, and errors that are nobody else's."""

import pytest
import torch
import torch.distributed as dist

from samestep.comm.collectives import CollectiveError
from samestep.comm.diagnosis.flight import explained
from samestep.comm.groups import registry
from tests.limits import limit
from tests.ranks import run_forked, run_threaded


def test_what_it_gives_comes_back():
    assert run_threaded(2, lambda rank: explained("it", registry.of(), lambda: rank)) == [0, 1]


@pytest.mark.parametrize(
    "mine", [RuntimeError("shapes do not fit"), CollectiveError("gloo, explained"), ValueError("x")]
)
def test_what_needs_no_explanation_comes_through(mine):
    def job(rank):
        def fail():
            raise mine

        with pytest.raises(type(mine)) as caught:
            explained("a step", registry.of(), fail)
        return caught.value is mine

    assert run_threaded(2, job) == [True, True]


def test_who_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("samestep.comm.diagnosis.roll_call.ANSWER_S", 0.1)

    def job(rank):
        dist.all_reduce(torch.ones(1))
        if rank == 2:
            return None
        with pytest.raises(CollectiveError) as caught:
            explained("a step", registry.of(), lambda: dist.all_reduce(torch.ones(4)))
        return str(caught.value)

    *others, _ = run_forked(3, job, collective_timeout=limit(2.0))
    for message in others:
        assert message.startswith("a step failed: rank 2 did not answer within")
