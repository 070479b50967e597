"""Waiting for a collective, and what is said when it fails."""

from __future__ import annotations

import time

import pytest
import torch

from samestep.comm.collectives import CollectiveError, exchange_segments, total
from samestep.comm.diagnosis.flight import SLICE, Flight
from samestep.comm.diagnosis.roll_call import RollCall
from samestep.comm.groups import registry
from tests.limits import eventually, limit
from tests.ranks import run_forked, run_threaded


def test_a_rank_that_is_late_is_waited_for():
    def job(rank):
        for late in range(2):
            if rank == late:
                time.sleep(3.5 * SLICE.total_seconds())
            result = total("t", torch.ones(3), registry.of()).wait()
        return result.tolist()

    assert run_forked(2, job) == [[2.0] * 3] * 2


def test_those_who_wait_for_a_rank_that_failed_by_itself_learn_why():
    """Rank 1 cannot even launch; without a word the others would wait for the timeout."""

    def bad(group):
        exchange_segments("bad", torch.zeros(4), [1, 1, 1], group).wait()

    def good(group):
        total("good", torch.ones(3), group).wait()

    def job(rank):
        group = registry.of()
        with pytest.raises(CollectiveError) as caught:
            (bad if rank == 1 else good)(group)
        return str(caught.value)

    first, second, third = run_forked(3, job)
    where = "different operations: rank 0 in good; rank 1 in bad; rank 2 in good. "
    assert first == third
    assert first.startswith("good failed: all ranks answered, so none is missing")
    assert second.startswith("bad failed: all ranks answered, so none is missing")
    assert f"{where}Another rank reported: " in first
    assert where in second
    assert "Another" not in second


def test_a_group_fails_once(monkeypatch, tmp_path):
    """The second error needs no second roll call."""
    monkeypatch.setattr("samestep.comm.diagnosis.roll_call.ANSWER_S", 0.1)
    asked = []
    ask = RollCall._ask
    monkeypatch.setattr(RollCall, "_ask", lambda *args: asked.append(None) or ask(*args))

    def job(rank):
        if rank == 1:
            eventually((tmp_path / "done").exists)
            return
        for _ in range(2):
            with pytest.raises(CollectiveError, match=r"t failed: rank 1 did not answer within \d"):
                total("t", torch.ones(3), registry.of()).wait()
            assert len(asked) == 1
        (tmp_path / "done").touch()

    run_forked(2, job, collective_timeout=limit(2.0))


def test_without_a_store_the_error_is_the_backends_own():
    def raising():
        raise RuntimeError("line one\nline two")

    def job(rank):
        with pytest.raises(CollectiveError) as caught:
            Flight("an operation", registry.of(), raising, on_host=True)
        return str(caught.value)

    assert run_threaded(2, job) == ["an operation failed: line one\nline two"] * 2


class ImpatientWork:
    """Cannot wait for a limited time, like a work that wraps a future."""

    def __init__(self, error=None):
        self.error = error
        self.waited = 0

    def is_completed(self):
        return False

    def wait(self, timeout=None):
        if timeout is not None:
            raise RuntimeError("not implemented")
        self.waited += 1
        if self.error:
            raise RuntimeError(self.error)


def test_a_backend_without_limited_waits_is_waited_for_as_long_as_it_takes():
    def job(rank):
        work = ImpatientWork()
        Flight("f", registry.of(), lambda: work, on_host=True).wait()
        assert work.waited == 1
        Flight("f", registry.of(), lambda: None, on_host=True).wait()
        with pytest.raises(CollectiveError, match=r"f failed: all ranks answered.*\. own error"):
            Flight("f", registry.of(), lambda: ImpatientWork("own error"), on_host=True).wait()

    run_forked(2, job)


def test_a_device_is_waited_for_by_its_stream():
    """A limited wait would block the host."""

    class Work:
        def is_completed(self):
            raise AssertionError("asked by the host")

        def wait(self, *args):
            assert not args

    def job(rank):
        Flight("f", registry.of(), Work, on_host=False).wait()

    run_forked(1, job)
