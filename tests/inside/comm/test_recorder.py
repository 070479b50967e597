"""The flight recorder: the same on all ranks, true to what was sent, and there when one hangs."""

from __future__ import annotations

import gc
import json
import logging
import pickle
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist

from samestep.comm.collectives import (
    CollectiveError,
    _launch,
    exchange_segments,
    from_first,
    gather_segments,
    maximum,
    reduce_segments,
    total,
)
from samestep.comm.diagnosis import recorder as module
from samestep.comm.diagnosis.flight import Flight
from samestep.comm.diagnosis.recorder import FlightRecorder
from samestep.comm.groups import RankGroup, registry
from samestep.plan.transfers import Traffic, Transfer, of_segments
from tests.counting_group import counted
from tests.gpu import needs_gpu
from tests.limits import HANG, eventually, limit
from tests.ranks import run_forked
from tests.soak import SOAK, twin
from tests.test_overlap import Net, build, make_case, train


class Handle:
    """A process group that is nowhere."""

    def get_group_store(self):
        return None


class Work:
    def __init__(self, done=True):
        self.done = done

    def is_completed(self):
        return self.done

    def wait(self, *_):
        assert self.done


def group_of(*ranks, place=0):
    return RankGroup(Handle(), place, len(ranks), ranks)


PAIR = group_of(4, 7, place=1)
CPU = torch.device("cpu")


def launch(
    name="t", traffic=Traffic.ALL_REDUCE, group=PAIR, elements=3, dtype=torch.float32, **options
):
    work = options.pop("work", None) or Work()
    transfer = Transfer(traffic, name, dtype, elements, options.pop("sizes", None))
    return _launch(transfer, group, CPU, options.pop("call", lambda: work))


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """The recorder's time; the watchdog looks as often as ever."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


class Listener(logging.Handler):
    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


@contextmanager
def heard():
    """What the logger says in this process."""
    listener = Listener()
    logging.getLogger("samestep").addHandler(listener)
    try:
        yield listener.said
    finally:
        logging.getLogger("samestep").removeHandler(listener)


@pytest.fixture
def messages():
    with heard() as said:
        yield said


# --- all ranks alike --------------------------------------------------------------------------


@twin
def test_digests_are_equal_on_ranks_that_lack_different_gradients():
    """Also the numbers of elements, and the names; whatever layout, reduction and overlap."""
    layouts = list(product(["none", "zero1", "zero2"], ["fast", "ordered"], [False, True]))
    if not SOAK:  # every two options together, in either value
        layouts = [layouts[place] for place in (0, 3, 5, 6, 8, 11)]

    def follow(rank, sharding, reduction, overlap):
        model = Net()
        with FlightRecorder(last=10_000) as recorder:
            opt = build(
                model,
                sharding=sharding,
                reduction=reduction,
                overlap_grad_reduce=overlap,
                max_grad_norm=1.0,
                update_rms=True,
            )
            for step in range(4):
                mode = "synchronize" if step % 2 else "no_sync"
                train(model, opt, [make_case(rank, step, batch) for batch in range(2)], mode)
        assert recorder.count == len(recorder.records) > 30
        lines = [(r.kind, r.name, r.ranks, r.elements, r.dtype) for r in recorder.records]
        return recorder.digest, lines

    def job(rank):
        return [follow(rank, *layout) for layout in layouts]

    for layout, ranks in zip(layouts, zip(*run_forked(3, job), strict=True), strict=True):
        digests, lines = zip(*ranks, strict=True)
        assert lines[0] == lines[1] == lines[2], layout
        assert len(set(digests)) == 1, layout


def test_ranks_of_another_group_and_another_name_have_another_digest():
    def job(rank):
        whole = registry.of()
        pair = [registry.of_ranks([0, 1]), registry.of_ranks([2, 3])][rank // 2]
        digests = []
        for group, name in ((whole, "t"), (pair, "t"), (whole, f"t of {rank % 2}")):
            with FlightRecorder() as recorder:
                total(name, torch.ones(3), group).wait()
            digests.append(recorder.digest)
        return digests

    whole, pair, named = zip(*run_forked(4, job), strict=True)
    assert len(set(whole)) == 1
    assert pair[0] == pair[1] != pair[2] == pair[3]
    assert named[0] == named[2] != named[1] == named[3]


def digest_of(*calls):
    with FlightRecorder(last=1) as recorder:  # of all, not of those that are kept
        for call in calls:
            launch(**call).wait()
    return recorder.digest


@pytest.mark.parametrize(
    "other",
    [
        [{"name": "u"}, {}],
        [{"traffic": Traffic.BROADCAST}, {}],
        [{"group": group_of(4, 8, place=1)}, {}],
        [{"elements": 4}, {}],
        [{"dtype": torch.float16}, {}],
        [{}],
        [{}, {}, {}],
    ],
)
def test_the_digest_covers(other):
    assert digest_of({}, {}) == digest_of({}, {})
    assert digest_of(*other) != digest_of({}, {})


def test_the_digest_covers_the_order():
    assert digest_of({"name": "a"}, {"name": "b"}) != digest_of({"name": "b"}, {"name": "a"})


def test_the_digest_leaves_out_what_is_per_rank():
    here = {"sizes": [2, 1, 5], "elements": 8, "traffic": Traffic.EXCHANGE}
    digests = {digest_of({"group": group_of(4, 7, 9, place=place), **here}) for place in range(3)}
    assert len(digests) == 1


# --- what was sent ----------------------------------------------------------------------------


def test_bytes_are_those_that_a_process_group_counts():
    sizes = [5, 0, 2]

    def one_of_each(rank, group):
        exchange_segments("e", torch.ones(7), sizes, group).wait()
        reduce_segments("r", torch.ones(7, dtype=torch.float64), sizes, group).wait()
        gather_segments("g", torch.ones(sizes[rank]), sizes, group).wait()
        maximum("m", torch.ones(4, dtype=torch.int64), group).wait()
        total("t", torch.ones(1), group).wait()  # 2 * 4 * 2 / 3 bytes: no whole number
        from_first("f", torch.ones(4, dtype=torch.bfloat16), group).wait()
        segment, whole = torch.ones(2), torch.empty(6)  # as a GPU's gather of equal segments
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        call = lambda: gather(whole, segment, group=group.handle, async_op=True)  # noqa: E731
        transfer = of_segments(Traffic.ALL_GATHER, "a", segment.dtype, [2, 2, 2])
        _launch(transfer, group, CPU, call).wait()

    def job(rank):
        with counted() as log, FlightRecorder() as recorder:
            one_of_each(rank, registry.of())
            model = Net()
            opt = build(model, max_grad_norm=1.0)
            for step in range(2):
                train(model, opt, [make_case(rank, step, 0)], "no_sync")
        assert recorder.count == len(log) > 7
        for record, call in zip(recorder.records, log, strict=True):
            assert record.kind == call.op
            assert record.sent == round(call.sent), record
            assert record.dtype == str(call.dtype).removeprefix("torch.")
            assert record.ranks == (0, 1, 2)
        for kind, totals in recorder.totals.items():
            of_kind = [record for record in recorder.records if record.kind == kind]
            assert totals.calls == len(of_kind) == len(log.of(kind))
            assert totals.sent == sum(record.sent for record in of_kind)
            assert totals.elements == sum(record.elements for record in of_kind)
            assert totals.waited == pytest.approx(sum(record.waited for record in of_kind))
            seconds = sum(record.finished - record.launched for record in of_kind)
            assert totals.in_flight == pytest.approx(seconds)
        assert len(recorder.totals) == 5
        return [record.elements for record in recorder.records]

    first, second, third = run_forked(3, job)
    assert first == second == third
    assert first[:7] == [7, 7, 7, 4, 1, 4, 6]


def test_the_time_that_the_host_waits_is_told_from_the_time_in_flight(clock):
    class Slow(Work):
        def wait(self, *_):
            clock.now += 0.5

    with FlightRecorder() as recorder:
        flights = [launch("a", work=Slow()), launch("b", work=Slow())]
        clock.now += 2.0
        for flight in flights:
            flight.wait()
    first, second = recorder.records
    assert (first.waited, first.finished - first.launched) == (0.5, 2.5)
    assert (second.waited, second.finished - second.launched) == (0.5, 3.0)
    totals = recorder.totals["all_reduce"]
    assert (totals.waited, totals.in_flight) == (1.0, 5.5)


# --- the ring ---------------------------------------------------------------------------------


def test_the_last_ones_are_kept_and_those_in_flight():
    with FlightRecorder(last=3) as recorder:
        early = launch("early")
        for number in range(1, 5):
            launch(f"t{number}").wait()
        assert [record.number for record in recorder.records] == [2, 3, 4]
        assert [record.name for record in recorder.records] == ["t2", "t3", "t4"]
        assert [record.name for record in recorder.in_flight] == ["early"]
        assert recorder.in_flight[0].finished is None
        assert recorder.count == 5
        early.wait()
    assert recorder.in_flight == ()
    assert all(record.finished >= record.launched for record in recorder.records)


def test_when_off_nothing_is_recorded():
    recorder = FlightRecorder()
    assert type(launch("before")) is Flight
    with recorder:
        flight = launch("inside")
        assert [record.name for record in recorder.records] == ["inside"]
    assert type(launch("after")) is Flight
    flight.wait()  # may come later
    assert recorder.records[0].finished is not None
    assert [record.name for record in recorder.records] == ["inside"]
    assert recorder.count == 1
    with recorder:
        launch("again").wait()
    assert [record.number for record in recorder.records] == [0, 1]


def test_what_nobody_waits_for_any_more_is_not_in_flight():
    """A step's metrics that nobody reads, say: they must not gather here."""
    with FlightRecorder() as recorder:
        launch("dropped")
        gc.collect()
        assert recorder.in_flight == ()
        assert recorder.records[0].finished is None


def test_it_sees_other_threads():
    with FlightRecorder() as recorder:
        thread = threading.Thread(target=lambda: launch("from a thread").wait())
        thread.start()
        thread.join()
    assert recorder.records[0].name == "from a thread"


def test_on_launch_is_called_with_what_has_just_been_launched():
    order = []
    with FlightRecorder() as recorder:
        recorder.on_launch.append(lambda record: order.append((record, recorder.in_flight)))
        launch("t", call=lambda: order.append("launched") or Work()).wait()
    assert order == ["launched", (recorder.records[0], recorder.records)]


def test_one_may_be_on():
    with FlightRecorder() as recorder:
        with pytest.raises(RuntimeError, match="another FlightRecorder is already running"):
            FlightRecorder(watchdog=1.0).start()
        with pytest.raises(RuntimeError, match="this FlightRecorder is already running"):
            recorder.start()
        FlightRecorder().stop()  # not this one
        assert module.current is recorder
    recorder.stop()
    assert module.current is None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"last": 0}, "FlightRecorder: last must be a whole number above 0, got 0"),
        ({"last": 2.0}, "FlightRecorder: last must be a whole number above 0, got 2.0"),
        ({"watchdog": 0.0}, "watchdog must be a number of seconds above 0, got 0.0"),
        ({"watchdog": float("nan")}, "watchdog must be a number of seconds above 0, got nan"),
        ({"folder": "flights"}, "folder= is where the watchdog writes"),
    ],
)
def test_refuses(options, problem):
    with pytest.raises(ValueError, match=problem):
        FlightRecorder(**options)


def test_a_dump_is_json_with_ages(clock):
    with FlightRecorder() as recorder:
        assert recorder.dump()["rank"] is None
        first = launch("a")
        clock.now += 0.25
        first.wait()
        clock.now += 0.5
        flight = launch("b")
        clock.now += 1.0
        dump = json.loads(json.dumps(recorder.dump()))
    assert dump["rank"] == 7
    assert dump["count"] == 2
    assert dump["digest"] == recorder.digest
    first, second = dump["records"]
    assert dump["in_flight"] == [second]
    assert second["finished_ago"] is None
    ages = [second["launched_ago"], first["finished_ago"], first["launched_ago"]]
    assert ages == [1.0, 1.5, 1.75]
    assert (second["name"], second["ranks"], second["failed"]) == ("b", [4, 7], False)
    assert "launched" not in first
    assert dump["totals"]["all_reduce"]["calls"] == 2
    flight.wait()


# --- failures ---------------------------------------------------------------------------------


def test_after_a_hang_the_operation_is_still_in_flight(monkeypatch, tmp_path):
    monkeypatch.setattr("samestep.comm.diagnosis.roll_call.ANSWER_S", 0.1)

    def job(rank):
        with FlightRecorder() as recorder:
            total("fine", torch.ones(3), registry.of()).wait()
            if rank == 1:
                eventually((tmp_path / "done").exists)
                return None
            with pytest.raises(CollectiveError) as caught:
                total("hanging", torch.ones(3), registry.of()).wait()
            operation, positions = caught.value.operation, caught.value.positions
            del caught
            gc.collect()
            (record,) = recorder.in_flight
            assert record is recorder.records[-1]
            assert record.failed
            assert record.waited > 0.0
            assert recorder.overdue(0.0) == []  # its error has been told
            (entry,) = recorder.dump()["in_flight"]
            assert (entry["name"], entry["failed"], entry["finished_ago"]) == (
                "hanging",
                True,
                None,
            )
            (tmp_path / "done").touch()
            return operation, positions

    assert run_forked(2, job, collective_timeout=limit(2.0))[0] == ("hanging", {0: "hanging"})


def test_an_error_has_the_operation_of_each_rank():
    def bad(group):
        exchange_segments("bad", torch.zeros(4), [1, 1, 1], group).wait()

    def good(group):
        total("good", torch.ones(3), group).wait()

    def job(rank):
        group = registry.of_ranks([1, 2])
        if group is None:
            return None
        with FlightRecorder() as recorder, pytest.raises(CollectiveError) as caught:
            (bad if rank == 1 else good)(group)
        assert [(r.name, r.failed) for r in recorder.in_flight] == [(caught.value.operation, True)]
        error = pickle.loads(pickle.dumps(caught.value))
        assert str(error) == str(caught.value)
        return error.operation, error.positions

    _, first, second = run_forked(3, job)
    assert first == ("bad", {1: "bad", 2: "good"})
    assert second == ("good", {1: "bad", 2: "good"})


def raising(*_):
    raise RuntimeError("of the backend")


def test_without_a_store_a_rank_knows_its_own_operation():
    with pytest.raises(CollectiveError) as caught:
        launch("t", call=raising)
    assert (caught.value.operation, caught.value.positions) == ("t", {7: "t"})


# --- the watchdog -----------------------------------------------------------------------------


def watchdogs():
    return [thread for thread in threading.enumerate() if thread.name == "samestep watchdog"]


def test_the_watchdog_writes_and_warns_once(tmp_path, clock):
    """Time passes for rank 0 alone, once it has launched what rank 1 is late for."""
    folder = tmp_path / "new" / "flights"

    def pass_time(record):
        if record.name == "late sum" and record.ranks.index(dist.get_rank()) == 0:
            clock.now += 1.0

    def job(rank):
        with heard() as said, FlightRecorder(watchdog=0.1, folder=folder) as recorder:
            recorder.on_launch.append(pass_time)
            total("fine", torch.ones(3), registry.of()).wait()
            if rank == 1:
                eventually((folder / "rank_0.json").exists)
                time.sleep(0.2)  # it looks several times more
            total("late sum", torch.ones(3), registry.of()).wait()
            assert recorder.in_flight == ()
        assert watchdogs() == []
        return said

    said, nothing = run_forked(2, job)
    assert nothing == []
    (message,) = said
    assert message.startswith("rank 0: late sum has been in flight for ")
    where = "operation 1, all_reduce of 3 float32 among ranks 0, 1."
    assert message.endswith(f"{where} Its last operations are in {folder / 'rank_0.json'}")
    assert [path.name for path in folder.iterdir()] == ["rank_0.json"]
    dump = json.loads((folder / "rank_0.json").read_text())
    assert [record["name"] for record in dump["records"]] == ["fine", "late sum"]
    assert [record["name"] for record in dump["in_flight"]] == ["late sum"]
    assert dump["in_flight"][0]["launched_ago"] == 1.0


def test_the_oldest_is_named_with_the_number_of_those_behind(messages):
    works = [Work(done=False) for _ in range(3)]
    ranks = group_of(*range(10))
    with FlightRecorder(watchdog=0.2) as recorder:
        with recorder._lock:  # the watchdog sees all at once
            flights = [launch(f"b{i}", group=ranks, work=work) for i, work in enumerate(works)]
            for record in recorder.in_flight:
                record.launched = recorder.in_flight[0].launched
        eventually(lambda: messages)
        time.sleep(0.2)
    (message,) = messages
    assert message.startswith("rank 0: b0 has been in flight for ")
    assert message.endswith(
        " s, with 2 after it: operation 0, all_reduce of 3 float32 among 10 ranks from 0 to 9"
    )
    assert len(flights) == 3


def test_the_watchdog_is_silent_about_what_has_arrived_or_failed_or_was_dropped(messages):
    with FlightRecorder(watchdog=0.1) as recorder:
        arrived = launch("arrived")
        launch("dropped", work=Work(done=False))
        with pytest.raises(CollectiveError):
            launch("failed", call=raising)
        gc.collect()
        time.sleep(0.4)
        assert [record.name for record in recorder.in_flight] == ["arrived", "failed"]
    assert messages == []
    arrived.wait()


def test_the_watchdog_sees_a_launch_that_hangs(messages):
    """Connections are made by the first launch."""
    released = threading.Event()
    with FlightRecorder(watchdog=0.05):
        call = lambda: released.wait(HANG) and Work()  # noqa: E731
        thread = threading.Thread(target=lambda: launch("first", call=call).wait())
        thread.start()
        eventually(lambda: messages)
        released.set()
        thread.join()
    assert "rank 7: first has been in flight" in messages[0]


def test_the_watchdog_survives_a_folder_that_is_gone(messages, tmp_path):
    folder = tmp_path / "flights"
    with FlightRecorder(watchdog=0.05, folder=folder):
        folder.rmdir()
        first = launch("one", work=Work(done=False))
        eventually(lambda: messages)
        folder.mkdir()
        second = launch("two", work=Work(done=False))
        eventually(lambda: len(messages) == 2)
    assert "Its last operations could not be written: " in messages[0]
    assert "Its last operations are in " in messages[1]
    assert first is not second


def test_a_folder_that_cannot_be_made_is_known_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        FlightRecorder(watchdog=1.0, folder=tmp_path / "file").start()
    assert module.current is None


def test_it_is_off_in_forked_children():
    """With its locks held by threads that are not there."""
    recorder = FlightRecorder(watchdog=0.05)

    def job(rank):
        assert module.current is None
        total("t", torch.ones(3), registry.of()).wait()
        assert recorder.count == 1
        recorder.stop()
        with FlightRecorder() as own:
            total("t", torch.ones(3), registry.of()).wait()
        assert len(recorder.records) == 1
        return own.count

    with recorder:
        held = launch("in the parent")
        recorder._lock.acquire()  # by a thread that is not the one that forks
        try:
            assert run_forked(2, job) == [1, 1]
        finally:
            recorder._lock.release()
        assert module.current is recorder
        assert len(watchdogs()) == 1
    assert watchdogs() == []
    held.wait()


def test_a_training_run_sees_the_warning_and_can_end():
    """Without a word about logging, and without stop()."""
    script = """
import sys, torch, samestep
from samestep.comm.collectives import total
from samestep.comm.groups import RankGroup
class Handle:
    get_group_store = lambda self: None
class Work:
    is_completed = lambda self: False
torch.distributed.all_reduce = lambda *args, **options: Work()
samestep.FlightRecorder(watchdog=0.05).start()
pending = total("stuck", torch.zeros(3), RankGroup(Handle(), 1, 2, (4, 7)))
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        first = process.stderr.readline()
        _, rest = process.communicate(timeout=HANG)  # which also ends its input
    assert (process.returncode, rest) == (0, "")
    assert "rank 7: stuck has been in flight for " in first


# --- on a GPU ---------------------------------------------------------------------------------


class Event:
    passed = False

    def query(self):
        return self.passed


def test_what_a_stream_waits_for_is_in_flight_until_it_has_passed(monkeypatch, clock):
    events = []
    monkeypatch.setattr(
        module, "recorded_event", lambda device: events.append(Event()) or events[-1]
    )
    with FlightRecorder() as recorder:
        for name in ("a", "b"):
            launch(name).wait()
        assert [record.name for record in recorder.in_flight] == ["a", "b"]
        clock.now += 0.5
        assert recorder.overdue(0.75) == []
        assert [record.name for record in recorder.overdue(0.25)] == ["a", "b"]
        events[0].passed = True
        assert [record.name for record in recorder.overdue(0.25)] == ["b"]
        assert recorder.records[0].finished is not None
        events[1].passed = True
        launch("c")
        assert recorder.records[1].finished is not None
        assert recorder.totals["all_reduce"].in_flight == 1.0


def test_a_gpu_that_has_failed_does_not_keep_what_is_known_from_being_told(monkeypatch):
    class Broken:
        def query(self):
            raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(module, "recorded_event", lambda device: Broken())
    with FlightRecorder() as recorder:
        launch("a").wait()
        launch("b").wait()
        assert [entry["name"] for entry in recorder.dump()["in_flight"]] == ["a", "b"]


@needs_gpu
def test_a_stream_that_is_stuck_is_reported():
    def job(rank):
        def on_gpu(name):
            buffer = torch.ones(3, device="cuda")
            transfer = Transfer(Traffic.ALL_REDUCE, name, buffer.dtype, buffer.numel())
            return _launch(transfer, PAIR, buffer.device, Work)

        with heard() as said, FlightRecorder(watchdog=0.2) as recorder:
            on_gpu("quick").wait()
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000_000)  # about a second
            passed = torch.cuda.Event()
            passed.record()
            on_gpu("stuck").wait()
            assert not passed.query()  # the host does not wait
            assert [record.name for record in recorder.in_flight] == ["stuck"]
            eventually(lambda: said)
            torch.cuda.synchronize()
            assert recorder.in_flight == ()
        return said

    (said,) = run_forked(1, job)
    assert len(said) == 1
    assert "rank 7: stuck has been in flight for " in said[0]
