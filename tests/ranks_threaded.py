"""Run a function on several ranks that are threads of this process."""

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# Private, and used nowhere else: torch has no public process group whose ranks are threads.
from torch.testing._internal.distributed.multi_threaded_pg import (
    Collective,
    ProcessLocalGroup,
    ThreadLocalWorld,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from samestep.launch.forked import RanksFailed
from tests.limits import HANG, limit

LOOK = 0.05  # seconds between questions for a limit that may change


def run_threaded(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float | Callable[[], float] = HANG,
    grace: float = limit(5.0),
) -> list[Any]:
    """Return ``[fn(rank, *args) for each rank]``, run in threads of this process.

    Takes milliseconds, and a debugger stops in any rank (give it a large ``timeout``). The
    ranks share torch's default random generator: seed a ``torch.Generator`` per rank. There
    is no send and recv.

    Args:
        world_size: The number of ranks.
        fn: Called with the rank and ``args``. Its value is handed over as it is.
        *args: Passed on to ``fn``.
        timeout: Seconds after which ranks that have not returned are given up. A rank that
            then cannot be woken stays behind as a daemon thread until its call returns. It takes
            no part in later runs: its next collective ends it. A function may give them more as
            they get on.
        grace: Seconds that ranks have to end by themselves after the first failure.

    Raises:
        RanksFailed: If any rank raised or did not return in time.
    """
    if isinstance(distributed_c10d._world, ThreadLocalWorld):
        raise RuntimeError("run_threaded cannot run inside run_threaded")
    run = _ThreadedRun(world_size, fn, args, timeout, grace)
    num_threads, except_hook = torch.get_num_threads(), sys.excepthook
    torch.set_num_threads(1)  # for the new threads: sum in the same order as forked ranks
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    try:
        run.start_and_wait()
    finally:
        try:
            run.end()
        finally:
            _uninstall_threaded_pg()
            torch._C._distributed_c10d._set_thread_isolation_mode(False)
            torch.set_num_threads(num_threads)
            sys.excepthook = except_hook  # every init_process_group wraps it once more
    if run.reports:
        raise RanksFailed(world_size, run.reports)
    return [run.values[rank] for rank in range(world_size)]


class _Meetings:
    """The collectives of one run, and the end of them all.

    torch keeps one dictionary of collectives and one event that ends them for the whole process.
    There a thread that was given up, woken in the next run, would be counted among its ranks.
    """

    def __init__(self) -> None:
        self._terminate = threading.Event()  # the name that torch's Collective asks for
        self._running: dict[str, Collective] = {}
        self._lock = threading.Lock()
        self._arrived = threading.Condition()

    def start(self, collective: Any, group: ProcessLocalGroup) -> Collective:
        """The collective that the group's ranks are in, or a new one."""
        with self._lock:
            name = group.pg_name
            if name not in self._running:
                self._running[name] = Collective(group.size(), collective, self)
            return self._running[name]

    def finish(self, collective: Collective, group: ProcessLocalGroup) -> None:
        """Called by every rank of the group; the first one counts."""
        with self._lock:
            if self._running.get(group.pg_name) is collective:
                del self._running[group.pg_name]

    def wait_for_all(self, store: dist.Store, world_size: int) -> None:
        """Until so many ranks have come with this store."""
        with self._arrived:
            store.add("arrived", 1)
            self._arrived.notify_all()
            all_are_here = lambda: store.add("arrived", 0) >= world_size  # noqa: E731
            self._arrived.wait_for(lambda: all_are_here() or self._terminate.is_set())
            if not all_are_here():
                sys.exit("the run has ended")

    def end(self) -> None:
        """Wake all ranks that wait, for ever: whoever comes later leaves at once."""
        self._terminate.set()
        with self._arrived:
            self._arrived.notify_all()
        with self._lock:
            running = list(self._running.values())
        for collective in running:
            for condition in (collective._start_cond, collective._done_cond):
                with condition:
                    condition.notify_all()


class _Group(ProcessLocalGroup):
    """torch's group of threads, whose collectives are those of its own run."""

    meetings: _Meetings


_mine = threading.local()


def _make_group(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> _Group:
    group = _Group(rank, world_size)
    group.meetings = _mine.meetings
    group.meetings.wait_for_all(store, world_size)
    return group


# torch's methods name the class, not the object that they are called on.
ProcessLocalGroup._start_coll = staticmethod(lambda coll, group: group.meetings.start(coll, group))
ProcessLocalGroup._end_coll = staticmethod(lambda coll, group: group.meetings.finish(coll, group))
# The name is torch's, since its meshes ask for it.
dist.Backend._plugins["THREADED"] = dist.Backend._BackendPlugin(_make_group, extended_api=False)


class _ThreadedRun:
    def __init__(
        self,
        world_size: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float | Callable[[], float],
        grace: float,
    ) -> None:
        self.world_size, self.fn, self.args = world_size, fn, args
        self.timeout, self.grace = timeout, grace
        self.store = dist.HashStore()
        self.meetings = _Meetings()
        self.others = set(os.listdir("/proc/self/task"))
        self.values: dict[int, Any] = {}
        self.reports: dict[int, str] = {}
        self.threads = [
            threading.Thread(target=self.run_rank, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(world_size)
        ]
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.closing = threading.Lock()
        self.abandoned = False

    def start_and_wait(self) -> None:
        """Return when all ranks have ended, or one has failed, or the time is up."""
        start, seconds = time.monotonic(), 0.0
        for thread in self.threads:
            thread.start()
        while self.running() and not self.reports:
            seconds = self.timeout() if callable(self.timeout) else self.timeout
            left = start + seconds - time.monotonic()
            if left < 0:
                break
            self.wait(min(left, LOOK))
        if not self.reports:
            self.report_running(f"had not finished after {seconds:g} s; it was here:\n")

    def run_rank(self, rank: int) -> None:
        _mine.meetings = self.meetings
        try:
            dist.init_process_group(
                "threaded",
                store=self.store,
                rank=rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=HANG),  # nothing heeds it
            )
            self.values[rank] = self.fn(rank, *self.args)
        except BaseException as error:
            woken = isinstance(error, SystemExit) and self.meetings._terminate.is_set()
            what = "was waiting for a rank that failed" if woken else "raised"
            self.reports.setdefault(rank, f"{what}:\n{traceback.format_exc()}")
        finally:
            with self.closing:
                # An abandoned thread sees another run's world, or the process's own.
                if not self.abandoned and dist.is_initialized():
                    with suppress(AttributeError):  # torch 2.11's threaded world lacks a field
                        dist.destroy_process_group()
            self.ended.put(rank)

    def running(self) -> dict[int, threading.Thread]:
        return {rank: thread for rank, thread in enumerate(self.threads) if thread.is_alive()}

    def wait(self, seconds: float) -> None:
        """Wait until one more rank has ended, or the time is up."""
        with suppress(queue.Empty):
            self.threads[self.ended.get(timeout=max(seconds, 0.0))].join()

    def report_running(self, what: str) -> None:
        frames = sys._current_frames()
        for rank, thread in self.running().items():
            if thread.ident in frames:
                stack = "".join(traceback.format_stack(frames[thread.ident]))
                self.reports.setdefault(rank, what + stack)

    def end(self) -> None:
        """Wake the ranks that wait in a collective, and abandon those that stay."""
        self.meetings.end()
        patience = time.monotonic() + self.grace
        while self.running() and time.monotonic() < patience:
            self.wait(patience - time.monotonic())
        if self.running():
            self.report_running(
                f"was still running {self.grace:g} s after the first failure, here:\n"
            )
            with self.closing:
                self.abandoned = True
        # Threads are joined before they have ended for the system, and OpenMP's workers for them
        # end later still. In a rank that is forked in between, a matrix product can spin for ever.
        patience = time.monotonic() + self.grace
        while self.ending() and time.monotonic() < patience:
            time.sleep(0.0005)

    def ending(self) -> set[str]:
        """The threads that have come with this run and are no longer known to Python."""
        known = {str(thread.native_id) for thread in threading.enumerate()}
        return set(os.listdir("/proc/self/task")) - self.others - known
