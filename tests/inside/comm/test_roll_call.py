"""A roll call, with a store of this process."""

from __future__ import annotations

import json
import time

import pytest
import torch.distributed as dist

from samestep.comm.diagnosis import roll_call
from samestep.comm.diagnosis.roll_call import Answer, Background, RollCall, this_process
from tests.limits import HANG, eventually

MINE, THEIRS = Answer("mine", None), Answer("theirs", "error")


@pytest.fixture
def store():
    return dist.HashStore()


def ended_process():
    """The name of a process that this one has replaced, so to say."""
    machine, pid, start = this_process().rsplit(" ", 2)
    return f"{machine} {pid} {int(start) - 1}"


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(roll_call, "time", clock)
    return clock


def test_a_group_in_the_store_of_a_failed_one_starts_anew(store, monkeypatch):
    monkeypatch.setattr(roll_call, "LAST_CALL_S", HANG)
    for _ in range(3):
        first, second = RollCall(store, 0), RollCall(store, 1)
        assert not looked(first)
        assert not looked(second)
        held = Background(lambda call=first: call.hold(MINE, time.monotonic(), [0, 1]))
        eventually(second.has_begun)
        assert second.hold(THEIRS, time.monotonic(), [0, 1]).complete
        assert held.ended(HANG)
        assert held.value.answers == {0: MINE, 1: THEIRS}


def looked(call):
    """What a look into the store says once it has been joined."""
    assert call._joined.ended(HANG)
    found = call.has_begun()
    if call._look is not None:  # it took longer than one look may
        assert call._look.ended(HANG)
        found = call.has_begun()
    return found


def test_an_answer_counts_though_its_process_has_ended_since(store, clock):
    store.set("samestep/1/process/1", ended_process())
    store.set("samestep/1/answer/1", json.dumps(THEIRS))
    store.set("samestep/1/read/1", "")
    attendance = RollCall(store, 0).hold(MINE, 100.0, (0, 1))
    assert attendance.answers == {0: MINE, 1: THEIRS}
    assert attendance.ended == set()
    assert attendance.complete
    assert clock.now == 100.0


def test_a_process_that_has_ended_is_not_waited_for(store, clock):
    store.set("samestep/1/process/1", ended_process())
    attendance = RollCall(store, 0).hold(MINE, 100.0, (0, 1))
    assert attendance.answers == {0: MINE}
    assert attendance.ended == {1}
    assert clock.now == 100.0


def test_whoever_has_answered_can_still_read(store, monkeypatch):
    """The store may end with the process that returns first."""
    monkeypatch.setattr(roll_call, "LAST_CALL_S", HANG)
    store.set("samestep/1/answer/1", json.dumps(THEIRS))
    held = Background(lambda: RollCall(store, 0).hold(MINE, time.monotonic(), (0, 1)))
    eventually(lambda: store.check(["samestep/1/read/0"]))  # it knows all that it asks for
    assert not held.ended(0.1)
    store.set("samestep/1/read/1", "")
    assert held.ended(HANG)


def test_a_silent_rank_has_its_time_from_the_launch_and_from_the_failure(store, clock, monkeypatch):
    monkeypatch.setattr(roll_call, "ANSWER_S", 0.6)
    monkeypatch.setattr(roll_call, "LAST_CALL_S", 0.3)
    for ago, seconds in ((0.0, 0.6), (0.2, 0.4), (9.0, 0.3)):
        start = clock.now
        attendance = RollCall(store, 0).hold(MINE, start - ago, (0, 1))
        assert seconds <= clock.now - start < seconds + 2 * roll_call.POLL_S
        assert attendance.seconds == pytest.approx(ago + seconds)
        assert attendance.complete


class BrokenStore:
    def add(self, key, value):
        raise RuntimeError("gone")


def test_a_store_that_is_gone_ends_it(clock):
    call = RollCall(BrokenStore(), 0)
    assert not call.has_begun()
    assert not call.hold(MINE, 100.0, (0, 1)).complete
    assert clock.now == 100.0
