"""Ranks that torchrun has started; those that are forked here are tested in test_ranks.py."""

import os
import signal
import time

import pytest

from samestep.launch import RanksFailed, forked, torchrun_rank
from samestep.launch.forked import run_forked
from tests.limits import HANG, TEST


@pytest.fixture
def environment(monkeypatch):
    def set_to(**values: str) -> None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_to


def test_place_under_torchrun(environment):
    environment(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")
    assert torchrun_rank() == (5, 8, 1, 4)
    environment(RANK="1", WORLD_SIZE="2")  # set by hand: one machine
    assert torchrun_rank() == (1, 2, 1, 2)


@pytest.mark.parametrize("values", [{}, {"RANK": "0"}, {"WORLD_SIZE": "2"}])
def test_no_torchrun(environment, values):
    environment(**values)
    assert torchrun_rank() is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK='first' in the environment"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1' in the environment"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE='' in the environment"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 .* not below WORLD_SIZE=2"),
    ],
)
def test_an_environment_that_makes_no_sense(environment, values, message):
    environment(**values)
    with pytest.raises(ValueError, match=message):
        torchrun_rank()


def test_forking_is_refused_where_ranks_could_outlive_their_parent(monkeypatch):
    monkeypatch.setattr(forked, "_libc", None)  # as on other systems than Linux
    with pytest.raises(RuntimeError, match="only on Linux: start them with torchrun") as caught:
        run_forked(2, lambda rank: rank)
    assert not isinstance(caught.value, RanksFailed)


def test_ranks_do_not_preempt_each_other_for_every_message():
    assert run_forked(2, lambda rank: os.sched_getscheduler(0)) == [os.SCHED_BATCH] * 2


def test_ranks_that_get_on_are_given_more_time():
    answers = [HANG] * 5

    def limit():
        return answers.pop() if answers else 0.1

    with pytest.raises(RanksFailed, match=r"had not finished after 0\.1 s"):
        run_forked(1, lambda rank: time.sleep(2 * TEST), timeout=limit)
    assert not answers


def test_handlers_of_the_parent_are_not_those_of_ranks():
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with pytest.raises(RanksFailed) as caught:
            run_forked(2, lambda rank: os.kill(os.getpid(), signal.SIGTERM) if rank else None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.reports[1].startswith("died of SIGTERM")
