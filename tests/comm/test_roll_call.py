"""A roll call, with a store of this process."""

from __future__ import annotations

import json
import time

import pytest
import torch.distributed as dist

from samestep.comm.background import Background
from samestep.comm.processes import this_process
from samestep.comm.roll_call import Answer, RollCall

MINE, THEIRS = Answer("mine", None), Answer("theirs", "error")


@pytest.fixture
def store():
    return dist.HashStore()


def ended_process():
    """The name of a process that this one has replaced, so to say."""
    machine, pid, start = this_process().rsplit(" ", 2)
    return f"{machine} {pid} {int(start) - 1}"


def hold(call, expected=(0, 1)):
    """Hold it, and say how long that took."""
    start = time.monotonic()
    return call.hold(MINE, start, expected), time.monotonic() - start


def test_a_group_in_the_store_of_a_failed_one_starts_anew(store):
    for group in range(3):
        first, second = RollCall(store, 0), RollCall(store, 1)
        assert not looked(first)
        assert not looked(second)
        held = Background(lambda call=first: call.hold(MINE, time.monotonic(), [0, 1]))
        deadline = time.monotonic() + 3
        while not second.has_begun():
            assert time.monotonic() < deadline, group
        assert second.hold(THEIRS, time.monotonic(), [0, 1]).complete
        assert held.ended(3)
        assert held.value.answers == {0: MINE, 1: THEIRS}


def looked(call):
    """What a look into the store says once it has been joined."""
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        if call.has_begun():
            return True
    return False


def test_an_answer_counts_though_its_process_has_ended_since(store):
    store.set("samestep/1/process/1", ended_process())
    store.set("samestep/1/answer/1", json.dumps(THEIRS))
    store.set("samestep/1/read/1", "")
    attendance, seconds = hold(RollCall(store, 0))
    assert attendance.answers == {0: MINE, 1: THEIRS}
    assert attendance.ended == set()
    assert attendance.complete
    assert seconds < 0.5


def test_a_process_that_has_ended_is_not_waited_for(store):
    store.set("samestep/1/process/1", ended_process())
    attendance, seconds = hold(RollCall(store, 0))
    assert attendance.answers == {0: MINE}
    assert attendance.ended == {1}
    assert seconds < 0.5


def test_whoever_has_answered_can_still_read(store):
    """The store may end with the process that returns first."""
    store.set("samestep/1/answer/1", json.dumps(THEIRS))
    held = Background(lambda: RollCall(store, 0).hold(MINE, time.monotonic(), (0, 1)))
    assert not held.ended(0.4)
    store.set("samestep/1/read/1", "")
    assert held.ended(0.4)


def test_a_silent_rank_has_its_time_from_the_launch_and_from_the_failure(store, monkeypatch):
    monkeypatch.setattr("samestep.comm.roll_call.ANSWER_S", 0.6)
    monkeypatch.setattr("samestep.comm.roll_call.LAST_CALL_S", 0.3)
    for ago, least in ((0.0, 0.6), (0.2, 0.4), (9.0, 0.3)):
        start = time.monotonic()
        attendance = RollCall(store, 0).hold(MINE, start - ago, (0, 1))
        assert least <= time.monotonic() - start < least + 0.2
        assert attendance.seconds == pytest.approx(ago + least, abs=0.05)
        assert attendance.complete


class BrokenStore:
    def add(self, key, value):
        raise RuntimeError("gone")


def test_a_store_that_is_gone_ends_it(store):
    call = RollCall(BrokenStore(), 0)
    assert not call.has_begun()
    attendance, seconds = hold(call)
    assert not attendance.complete
    assert seconds < 0.5
