"""Batches of blocks beside each other: who runs where, and who waits for whom."""

from contextlib import contextmanager

import pytest
import torch

from samestep.update import lanes
from samestep.update.lanes import FILLED, dealt, side_by_side


def test_work_is_divided_evenly():
    assert dealt([4.0, 1.0, 2.0, 1.5]) == [[0], [2, 3, 1]]
    assert dealt([1.0, 5.0, 4.0]) == [[1], [2, 0]]


@pytest.mark.parametrize("flops", [[], [1e12], [0.6 * FILLED, 0.6 * FILLED]])
def test_what_fills_a_gpu_by_itself_runs_in_order(flops):
    assert dealt(flops) == [list(range(len(flops)))]


def test_without_streams_everything_runs():
    found = side_by_side([[2], [0, 1]], lambda number: number * 10, torch.device("cpu"))
    assert found == [0, 10, 20]


class _Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


def test_a_lane_begins_after_what_was_there_and_is_waited_for(monkeypatch):
    log = []
    current = [_Stream("own", log)]

    @contextmanager
    def inside(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(lanes, "_stream", lambda device, number: _Stream(f"lane {number}", log))

    def run(number):
        log.append(f"{number} on {current[-1].name}")
        return number

    assert side_by_side([[2, 0], [1]], run, torch.device("cuda", 0)) == [0, 1, 2]
    # Had the first lane begun before, the other one would wait for it.
    assert log == [
        "lane 1 waits for own", "1 on lane 1", "2 on own", "0 on own", "own waits for lane 1",
    ]  # fmt: skip


def test_a_single_lane_waits_for_nobody(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextmanager(lambda: (yield))())
    assert side_by_side([[0, 1]], lambda number: number, torch.device("cuda", 0)) == [0, 1]
