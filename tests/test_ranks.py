import atexit
import gc
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from samestep.launch import forked
from tests.limits import HANG, TEST, eventually, limit
from tests.ranks import RanksFailed, run_cases, run_forked, run_threaded

FOREVER = 2 * TEST  # seconds: whoever waits for it is ended as a test that hangs

both_ways = pytest.mark.parametrize("run", [run_forked, run_threaded])
world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 5])

# The new name since torch 2.13, where the old one warns.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def open_files() -> list[str]:
    with os.scandir("/proc/self/fd") as entries:
        names = [os.readlink(entry.path) for entry in entries if os.path.lexists(entry.path)]
    # A first matrix product makes oneDNN open a perf map in this process.
    return sorted(name for name in names if "/perf-" not in name)


def rank_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """Fail a test that leaves a file, an open file descriptor, or a setting of this process."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    open_before = open_files()
    num_threads, except_hook = torch.get_num_threads(), sys.excepthook
    yield
    assert multiprocessing.active_children() == []
    assert rank_threads() == []
    assert list(tmp_path.iterdir()) == []
    assert open_files() == open_before
    assert not dist.is_initialized()
    assert sys.excepthook is except_hook
    assert torch.get_num_threads() == num_threads


def all_reduced(value: float) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.fixture
def marks(tmp_path_factory):
    return tmp_path_factory.mktemp("marks")


def once(count: int, folder: Path, seconds: float = 0.0) -> Callable[[], float]:
    """A limit that passes so many seconds after so many ranks have left their marks in a folder."""
    start, marked = time.monotonic(), None

    def left() -> float:
        nonlocal marked
        if marked is None and all((folder / str(rank)).exists() for rank in range(count)):
            marked = time.monotonic() - start
        return HANG if marked is None else marked + seconds

    return left


def failure(run, world_size, fn, **timeouts) -> RanksFailed:
    """Return the error, and check that it left things in order."""
    with pytest.raises(RanksFailed) as info:
        run(world_size, fn, **timeouts)
    assert run_threaded(2, lambda rank: all_reduced(rank + 1.0)) == [3.0, 3.0]  # still works
    return info.value


# What works


@both_ways
@world_sizes
def test_values_come_back_by_rank(run, world_size):
    def fn(rank, a, b):
        assert torch.get_num_threads() == 1
        time.sleep(0.01 * (world_size - rank))  # the last rank is the first to return
        return rank, dist.get_rank(), dist.get_world_size(), a + b, os.getpid()

    values = run(world_size, fn, 40, 2)
    assert [value[:4] for value in values] == [(r, r, world_size, 42) for r in range(world_size)]
    pids = {value[4] for value in values}
    if run is run_forked:
        assert len(pids) == world_size
        assert os.getpid() not in pids
    else:
        assert pids == {os.getpid()}


@both_ways
@world_sizes
def test_collectives(run, world_size):
    def fn(rank):
        summed = torch.arange(4.0) + 10 * rank
        dist.all_reduce(summed)

        part = torch.empty(3)
        reduce_scatter(part, torch.arange(3.0 * world_size) * (rank + 1))

        gathered = [torch.empty(2) for _ in range(world_size)]
        dist.all_gather(gathered, torch.tensor([rank, -rank], dtype=torch.float32))

        # Rank r sends r + 2 d elements to rank d, all equal to 100 r + d.
        sent = [torch.full((rank + 2 * d,), 100.0 * rank + d) for d in range(world_size)]
        sizes = [source + 2 * rank for source in range(world_size)]
        received = torch.empty(sum(sizes))
        dist.all_to_all_single(received, torch.cat(sent), sizes, [len(piece) for piece in sent])
        return summed, part, torch.stack(gathered), received

    ranks = range(world_size)
    total = sum(ranks)
    for rank, (summed, part, gathered, received) in enumerate(run(world_size, fn)):
        assert summed.tolist() == [world_size * i + 10 * total for i in range(4)]
        assert part.tolist() == [(3 * rank + i) * (total + world_size) for i in range(3)]
        assert gathered.tolist() == [[r, -r] for r in ranks]
        pieces = [[100.0 * source + rank] * (source + 2 * rank) for source in ranks]
        assert received.tolist() == list(chain(*pieces))


@both_ways
def test_subgroups(run):
    def fn(rank):
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        tensor = torch.tensor([10.0**rank])
        dist.all_reduce(tensor, group=groups[rank % 2])
        return tensor.item()

    assert run(4, fn) == [101.0, 1010.0, 101.0, 1010.0]


@both_ways
def test_tensors_come_back_bit_exact(run):
    def tensors(rank):
        generator = torch.Generator().manual_seed(rank)
        bits = torch.randint(-(2**31), 2**31, (300, 100), generator=generator).to(torch.int32)
        return {
            "any bits, NaNs too": bits.view(torch.float32),
            "bfloat16": bits.clone().view(torch.bfloat16),
            "transposed": bits.view(torch.float32).t(),
            "signed zero": torch.tensor(-0.0),
            "empty": torch.empty(0, 3),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "many": [torch.tensor(rank + i) for i in range(500)],
        }

    def same(one, other):
        assert type(one) is type(other)
        if isinstance(one, list):
            return len(one) == len(other) and all(map(same, one, other))
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        one, other = (tensor.detach().contiguous().view(-1) for tensor in (one, other))
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))

    for rank, value in enumerate(run(2, tensors)):
        expected = tensors(rank)
        assert value.keys() == expected.keys()
        assert all(same(value[name], expected[name]) for name in expected)


@both_ways
def test_ranks_that_return_early_do_not_disturb_the_others(run):
    for _ in range(3):
        assert run(4, lambda rank: rank) == [0, 1, 2, 3]


def test_a_hundred_threaded_runs():
    for i in range(100):
        assert run_threaded(3, lambda rank, i=i: all_reduced(rank + i)) == [3.0 + 3 * i] * 3


def test_threaded_forked_threaded():
    """With products that are large enough for worker threads, which a fork does not copy."""

    def fn(rank):
        weight = torch.full((200, 200), rank + 1.0, requires_grad=True)
        (weight @ weight).sum().backward()
        dist.all_reduce(weight.grad)
        return weight.grad

    torch.ones(200, 200) @ torch.ones(200, 200)
    for run in (run_threaded, run_forked, run_threaded):
        assert all(torch.equal(grad, torch.full((200, 200), 1200.0)) for grad in run(2, fn))


def test_forked_output_appears_once_and_exit_handlers_do_not_run(capfd, tmp_path):
    marker = tmp_path / "exit handler ran"
    atexit.register(marker.touch)

    def fn(rank):
        sys.stdout = os.fdopen(os.dup(1), "w")  # buffered, as it is when pytest does not capture
        sys.stdout.write(f"<{rank}>")
        if rank == 1:
            raise ValueError

    try:
        sys.stdout.write("parent")
        failure(run_forked, 2, fn)
    finally:
        atexit.unregister(marker.touch)
    out = capfd.readouterr().out
    assert sorted(out.removeprefix("parent")) == sorted("<0><1>")
    assert not marker.exists()


# What fails


@both_ways
def test_an_exception_while_the_others_wait(run):
    def fn(rank):
        if rank == 1:
            raise ValueError(f"no {'luck'}")
        return all_reduced(rank)

    error = failure(run, 3, fn)
    assert sorted(error.reports) == [0, 1, 2]
    assert error.reports[1].startswith("raised:\n")
    for text in ("--- rank 1 raised:", "raise ValueError(f\"no {'luck'}\")", "no luck", "in fn"):
        assert text in str(error)
    for waiting in (0, 2):
        assert "in all_reduced" in error.reports[waiting]
        assert ("Connection" if run is run_forked else "was waiting") in error.reports[waiting]
        assert "no luck" not in error.reports[waiting]


@both_ways
def test_only_the_ranks_that_failed_are_reported(run):
    def fn(rank):
        if rank in (1, 3):
            time.sleep(0.3)  # the others have long returned
            raise KeyError(f"key {rank}")

    error = failure(run, 4, fn)
    assert sorted(error.reports) == [1, 3]
    assert str(error).startswith("2 of 4 ranks failed; ranks that finished: [0, 2]\n")
    assert "key 1" in error.reports[1]
    assert "key 3" in error.reports[3]


@both_ways
def test_exceptions_that_are_not_errors_fail_too(run):
    error = failure(run, 2, lambda rank: pytest.skip("rank 1 skips") if rank else None)
    assert list(error.reports) == [1]
    assert "rank 1 skips" in error.reports[1]
    error = failure(run, 2, lambda rank: exit(0) if rank else None)
    assert list(error.reports) == [1]
    assert error.reports[1].startswith("raised:\n")
    assert "SystemExit" in error.reports[1]


@both_ways
def test_a_rank_that_never_arrives_is_named_with_its_stack(run, marks):
    awake = threading.Event()

    def sleep_instead(rank):
        (marks / str(rank)).touch()
        awake.wait(FOREVER)

    def wait_for_it(rank):
        (marks / str(rank)).touch()
        all_reduced(rank)

    def fn(rank):
        return sleep_instead(rank) if rank == 1 else wait_for_it(rank)

    # Threads are waited for as long, and a process only until its stack is there.
    grace = 0.1 if run is run_threaded else HANG
    error = failure(run, 3, fn, timeout=once(3, marks), grace=grace)
    awake.set()
    assert sorted(error.reports) == [0, 1, 2]
    for rank, report in error.reports.items():
        assert report.startswith("had not finished after ")
        assert "in fn" in report
        assert ("in sleep_instead" in report) == (rank == 1)
        assert ("in wait_for_it" in report) == (rank != 1)
        assert "multiprocessing" not in report  # nothing below fn
    eventually(lambda: rank_threads() == [])


def test_the_limit_counts_from_when_all_ranks_have_begun(marks, monkeypatch):
    asked = []
    was_asked = marks / "was asked"

    def begin_late():
        time.sleep(0.3)
        (marks / str(os.getpid())).touch()

    def timeout():
        asked.append(len(list(marks.iterdir())))
        was_asked.touch()
        return HANG

    def stay_until_it_was_asked(rank):
        eventually(was_asked.exists)  # else ranks may be done before the parent looks again
        return all_reduced(rank)

    monkeypatch.setattr(gc, "freeze", begin_late)  # which a rank calls first
    assert run_forked(3, stay_until_it_was_asked, timeout=timeout) == [3.0] * 3
    assert asked[0] == 3


@pytest.mark.parametrize("collective", [all_reduced, lambda rank: dist.new_group([0, 1])])
def test_a_thread_that_was_given_up_takes_no_part_in_the_next_run(collective):
    """It wakes in the middle of it, and comes to a collective of its own run: which ends it."""
    asleep, awake = threading.Event(), threading.Event()

    def late(rank):
        if rank == 0:
            asleep.wait(HANG)
            raise ValueError("rank 1 is given up")
        asleep.set()
        awake.wait(FOREVER)
        collective(100.0)

    def next_run(rank):
        first = all_reduced(rank)
        if rank == 0:
            awake.set()
            given_up.join(HANG)
            assert not given_up.is_alive()
        return first, all_reduced(rank + 1.0)

    with pytest.raises(RanksFailed):
        run_threaded(2, late, grace=0.0)
    (given_up,) = (thread for thread in threading.enumerate() if thread.name == "rank 1")
    assert run_threaded(2, next_run) == [(1.0, 3.0)] * 2


@both_ways
def test_a_skipped_collective_ends_with_the_timeout(run, marks):
    def wait_for_it(rank):
        (marks / str(rank)).touch()
        all_reduced(rank)

    def fn(rank):
        return (marks / "1").touch() if rank == 1 else wait_for_it(rank)

    # A rank that has left its mark may still have to hand over that it has returned.
    error = failure(run, 3, fn, timeout=once(3, marks, seconds=limit(4.0)))
    assert sorted(error.reports) == [0, 2]
    assert "ranks that finished: [1]" in str(error)
    assert "in wait_for_it" in error.reports[0]


def test_a_forked_collective_ends_with_its_own_timeout():
    def fn(rank):
        return None if rank == 1 else all_reduced(rank)

    error = failure(run_forked, 3, fn, collective_timeout=limit(1.5))
    assert sorted(error.reports) == [0, 2]
    said = f"Timed out waiting {1000 * limit(1.5):.0f}ms"
    assert any(said in report for report in error.reports.values())


def test_a_killed_rank_is_named_and_the_others_ended():
    def fn(rank):
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            time.sleep(FOREVER)  # would not notice by itself
        dist.recv(torch.empty(1), src=2)

    error = failure(run_forked, 3, fn, grace=limit(1.0))
    assert error.reports[2] == "died of SIGKILL\n"
    assert "in recv" in error.reports[0]
    assert "by peer" in error.reports[0]  # connection closed or reset
    assert error.reports[1].startswith(f"was still running {limit(1.0):g} s after the first")
    assert "in fn" in error.reports[1]


def test_a_rank_that_is_stuck_is_told_from_one_that_had_no_core(tmp_path):
    core = min(os.sched_getaffinity(0))
    begun = [tmp_path / f"begun_{rank}" for rank in range(4)]

    def fn(rank):
        begun[rank].touch()
        if rank == 0:
            time.sleep(FOREVER)
        os.sched_setaffinity(0, {core})  # three for one core, so each waits about twice as it runs
        while True:
            pass

    def until_all_have_begun():
        if not all(path.exists() for path in begun):
            return HANG
        time.sleep(1.0)  # for each to wait for the others
        return 0.0

    error = failure(run_forked, 4, fn, timeout=until_all_have_begun)
    for path in begun:
        path.unlink()
    now = [report.endswith(" was ready to run.") for _, report in sorted(error.reports.items())]
    assert now == [False, True, True, True]
    times = [re.findall(r"([\d.]+) s", error.reports[rank].splitlines()[-1]) for rank in range(4)]
    _, *starved = [[float(seconds) for seconds in of_rank] for of_rank in times]
    assert all(waited > 0 for _, waited in starved), times


def test_a_crash_shows_where_it_happened():
    def crash_here():
        os.abort()

    error = failure(run_forked, 1, lambda rank: crash_here())
    assert error.reports[0].startswith("died of SIGABRT\n")
    assert "in crash_here" in error.reports[0]
    assert "Extension modules" not in error.reports[0]


@pytest.mark.parametrize("status", [0, 7])
def test_a_rank_that_exits_has_not_returned(status):
    error = failure(run_forked, 2, lambda rank: os._exit(status) if rank else None)
    assert error.reports == {1: f"exited with status {status} before it returned"}


class FailsToLoad:
    def __reduce__(self):
        return int, ("not a number",)


def test_values_that_cannot_be_pickled_are_named():
    error = failure(run_forked, 2, lambda rank: (lambda: 0) if rank == 1 else 0)
    assert list(error.reports) == [1]
    assert error.reports[1].startswith("returned a value (function) that cannot be pickled:")
    assert "Can't pickle" in error.reports[1]

    error = failure(run_forked, 2, lambda rank: FailsToLoad() if rank == 1 else 0)
    assert list(error.reports) == [1]
    assert error.reports[1].startswith("returned a value that cannot be unpickled:")
    assert "not a number" in error.reports[1]


@pytest.fixture
def own_group(monkeypatch):
    """Give this process a process group of its own."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    except_hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    sys.excepthook = except_hook


def test_threaded_runs_do_not_nest():
    def fn(rank):
        with pytest.raises(RuntimeError, match="inside run_threaded"):
            run_threaded(1, all_reduced)
        return all_reduced(1.0)

    assert run_threaded(2, fn) == [2.0, 2.0]


# What is left when the parent is interrupted or a rank has children


@both_ways
def test_keyboard_interrupt(run):
    parent = os.getpid()

    def fn(rank):
        if rank == 0:
            os.kill(parent, signal.SIGINT)
        if rank == 1 and run is run_forked:
            time.sleep(FOREVER)
        while True:
            all_reduced(rank)

    with pytest.raises(KeyboardInterrupt):
        run(3, fn)
    assert run(2, all_reduced) == [1.0, 1.0]


def test_keyboard_interrupt_while_forking(monkeypatch):
    def fork_slowly(processes):
        processes[0].start()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        processes[1].start()

    monkeypatch.setattr(forked, "_fork_all", fork_slowly)
    with pytest.raises(KeyboardInterrupt):
        run_forked(2, all_reduced)


@pytest.mark.parametrize("dies", [False, True])
def test_children_of_a_rank_are_ended(dies):
    def fn(rank):
        sleeper = subprocess.Popen(["sleep", str(FOREVER)])
        os.write(pipe_write, sleeper.pid.to_bytes(4, "little"))
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        sleeper.returncode = 0  # no warning about leaving it

    pipe_read, pipe_write = os.pipe()
    if dies:
        failure(run_forked, 1, fn)
    else:
        run_forked(1, fn)
    pid = int.from_bytes(os.read(pipe_read, 4), "little")
    os.close(pipe_read)
    os.close(pipe_write)
    eventually(lambda: not is_running(pid))


def test_ranks_die_with_their_parent(tmp_path):
    def fn(rank):
        os.write(pipe_write, os.getpid().to_bytes(4, "little"))
        time.sleep(FOREVER)

    pipe_read, pipe_write = os.pipe()
    parent = multiprocessing.get_context("fork").Process(target=run_forked, args=(2, fn))
    parent.start()
    pids = [int.from_bytes(os.read(pipe_read, 4), "little") for _ in range(2)]
    os.close(pipe_read)
    os.close(pipe_write)
    assert all(is_running(pid) for pid in pids)
    parent.kill()
    parent.join()
    parent.close()
    eventually(lambda: not any(is_running(pid) for pid in pids))
    shutil.rmtree(next(tmp_path.iterdir()))  # what a killed parent cannot clean up


def test_cases_on_ranks_that_are_started_once():
    def job(rank, case):
        return os.getpid(), rank, case

    results = run_cases(2, ["a", {"b": 1}], job)
    assert [case for case, _ in results] == ["a", {"b": 1}]
    assert [[found[1:] for found in values] for _, values in results] == [
        [(0, "a"), (1, "a")],
        [(0, {"b": 1}), (1, {"b": 1})],
    ]
    first, second = ([found[0] for found in values] for _, values in results)
    assert first == second
    assert len(set(first)) == 2


def test_an_error_tells_of_which_case_it_is():
    def job(rank, case):
        assert case != "the second"

    with pytest.raises(RanksFailed, match="in case the second"):
        run_cases(2, ["the first", "the second", "the third"], job)
