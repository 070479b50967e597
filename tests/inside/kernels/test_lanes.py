"""Batches of blocks beside each other: who runs where, and who waits for whom."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch

from samestep.update import lanes
from samestep.update.lanes import Batch, dealt, side_by_side, temporary_bytes


def of(*counts):
    return [Batch(count, 64, 64) for count in counts]


def test_work_is_divided_evenly():
    assert dealt(of(40, 10, 20, 15)) == [[0], [2, 3, 1]]
    assert dealt(of(1, 5, 4)) == [[1], [2, 0]]
    assert dealt([Batch(4, 64, 64), Batch(1, 256, 256), Batch(4, 64, 64)]) == [[1], [0, 2]]


@pytest.mark.parametrize("batches", [[], of(3), of(0, 0), of(200_000, 200_000)])
def test_batches_run_in_order_where_nothing_is_won(batches):
    """None, one, AdamW's, and such as need too much memory: these would fill a GPU."""
    assert dealt(batches) == [list(range(len(batches)))]


def test_who_has_little_memory_runs_one_batch_at_a_time():
    assert dealt(of(4, 4), sparing=True) == [[0, 1]]


def test_each_lane_has_memory_of_its_own():
    batches = of(5, 4, 3)
    sizes = [batch.temporary_bytes for batch in batches]
    assert temporary_bytes(batches, [[0], [1, 2]]) == sizes[0] + sizes[1]
    assert temporary_bytes(batches, [[0, 1, 2]]) == sizes[0]


def test_without_streams_everything_runs():
    found = side_by_side([[2], [0, 1]], lambda number: number * 10, torch.device("cpu"))
    assert found == [0, 10, 20]


DEVICE = torch.device("cuda", 0)


class _Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch):
    """What streams were told; runs are told by `current`."""
    found = []
    current = [_Stream("own", found)]

    @contextmanager
    def inside(stream):
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(lanes, "_stream", lambda device, number: _Stream(f"lane {number}", found))
    return found


def _run(log, number):
    log.append(f"{number} on {torch.cuda.current_stream(DEVICE).name}")
    return number


def test_a_lane_begins_after_what_was_there_and_is_waited_for(log):
    assert side_by_side([[2, 0], [1]], partial(_run, log), DEVICE) == [0, 1, 2]
    # Had the first lane begun before, the other one would wait for it.
    assert log == [
        "lane 1 waits for own", "1 on lane 1", "2 on own", "0 on own", "own waits for lane 1",
    ]  # fmt: skip


def test_a_lane_is_waited_for_after_an_error_too(log):
    def run(number):
        if number == 2:
            raise torch.OutOfMemoryError
        return _run(log, number)

    with pytest.raises(torch.OutOfMemoryError):
        side_by_side([[2, 0], [1]], run, DEVICE)
    assert log == ["lane 1 waits for own", "1 on lane 1", "own waits for lane 1"]


def test_a_single_lane_waits_for_nobody(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextmanager(lambda: (yield))())
    assert side_by_side([[0, 1]], lambda number: number, DEVICE) == [0, 1]
