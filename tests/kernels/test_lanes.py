"""Batches of blocks beside each other: who runs where, and who waits for whom."""

from contextlib import contextmanager

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
