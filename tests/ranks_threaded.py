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
from torch.testing._internal.distributed import multi_threaded_pg

from samestep.launch.failed import GRACE, RanksFailed


def run_threaded(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 30.0
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
            then cannot be woken stays behind as a daemon thread until its call returns.

    Raises:
        RanksFailed: If any rank raised or did not return in time.
    """
    if isinstance(distributed_c10d._world, multi_threaded_pg.ThreadLocalWorld):
        raise RuntimeError("run_threaded cannot run inside run_threaded")
    run = _ThreadedRun(world_size, fn, args, timeout)
    num_threads, except_hook = torch.get_num_threads(), sys.excepthook
    torch.set_num_threads(1)  # for the new threads: sum in the same order as forked ranks
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    try:
        run.start_and_wait()
    finally:
        run.end()
        multi_threaded_pg.ProcessLocalGroup.reset()
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        torch.set_num_threads(num_threads)
        sys.excepthook = except_hook  # every init_process_group wraps it once more
    if run.reports:
        raise RanksFailed(world_size, run.reports)
    return [run.values[rank] for rank in range(world_size)]


class _ThreadedRun:
    def __init__(
        self, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> None:
        self.world_size, self.fn, self.args, self.timeout = world_size, fn, args, timeout
        self.store = dist.HashStore()
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
        deadline = time.monotonic() + self.timeout
        for thread in self.threads:
            thread.start()
        while self.running() and not self.reports and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())
        if not self.reports:
            self.report_running(f"had not finished after {self.timeout:g} s; it was here:\n")

    def run_rank(self, rank: int) -> None:
        try:
            dist.init_process_group(
                "threaded",
                store=self.store,
                rank=rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=self.timeout),
            )
            self.values[rank] = self.fn(rank, *self.args)
        except BaseException as error:
            woken = isinstance(error, SystemExit) and bool(self.reports)
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
        patience = time.monotonic() + GRACE
        while self.running() and time.monotonic() < patience:
            with suppress(RuntimeError):  # it walks over a dict that ranks may be changing
                multi_threaded_pg.ProcessLocalGroup.exception_handle(None)
            self.wait(0.02)
        if self.running():
            self.report_running(f"was still running {GRACE:g} s after the first failure, here:\n")
            with self.closing:
                self.abandoned = True
        # Threads are joined before they have ended for the system, and OpenMP's workers for them
        # end later still. In a rank that is forked in between, a matrix product can spin for ever.
        patience = time.monotonic() + 0.1
        while set(os.listdir("/proc/self/task")) - self.others and time.monotonic() < patience:
            time.sleep(0.0005)
