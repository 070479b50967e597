"""Run a function on several ranks that are forked processes."""

import ctypes
import faulthandler
import gc
import math
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from samestep.launch import RanksFailed

POLL = 0.002
START = 300.0  # seconds that ranks have to begin: a hang's limit, which a busy machine may need
LOOK = 0.05  # for ranks whose own children hide that they have ended
GRACE = 1.0  # seconds for the other ranks to end by themselves after the first failure

# Loaded before forking, since loading takes locks.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class _Job:
    """The job of a forked rank; each rank leaves its value, error or stack in a file."""

    world_size: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    collective_timeout: float
    backend: str
    grace: float
    directory: Path
    parent: int
    returned_read: int
    returned_write: int
    release_read: int
    release_write: int

    def file(self, kind: str, rank: int) -> Path:
        return self.directory / f"{kind}_{rank}"

    def text(self, kind: str, rank: int) -> str:
        path = self.file(kind, rank)
        return path.read_text(errors="replace") if path.exists() else ""


def run_forked(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float | Callable[[], float] = 30.0,
    collective_timeout: float = 10.0,
    backend: str = "gloo",
    grace: float = GRACE,
) -> list[Any]:
    """Return ``[fn(rank, *args) for each rank]``, run in forked processes of one process group.

    No thread that has multiplied matrices may be ending or computing meanwhile: with MKL a product
    in a rank can then spin for ever.

    Args:
        world_size: The number of ranks.
        fn: Called with the rank and ``args``; may be a closure. Its value must be picklable.
        *args: Passed on to ``fn``.
        timeout: Seconds, from when all ranks have begun, after which those that have not returned
            are ended; a function may return more as they make progress.
        collective_timeout: The timeout of the default process group, in seconds.
        backend: Backend of the default process group. NCCL works as long as this process itself
            has not used CUDA.
        grace: Seconds that the other ranks have to end by themselves after the first failure.

    Raises:
        RanksFailed: If any rank raised, died, or did not return in time.
    """
    if _libc is None:
        raise RuntimeError("ranks can be forked only on Linux: start them with torchrun")
    fork = multiprocessing.get_context("fork")
    # OpenMP keeps a pool of workers per thread, and a fork does not copy the workers: the child
    # of a thread that has used OpenMP can hang in a matrix product, even with one thread. So a
    # new thread forks. It outlives the ranks, since its end would count as the parent's death.
    with tempfile.TemporaryDirectory(prefix="ranks_") as directory, ThreadPoolExecutor(1) as forker:
        pipes = *os.pipe(), *os.pipe()
        limits = collective_timeout, backend, grace
        job = _Job(world_size, fn, args, *limits, Path(directory), os.getpid(), *pipes)
        processes = [fork.Process(target=_run_rank, args=(job, r)) for r in range(world_size)]
        forking = forker.submit(_fork_all, processes)
        try:
            forking.result()
            reports = _watch(job, processes, timeout)
            if not reports:
                return _load_values(job)
        finally:
            wait([forking])
            for end in pipes:  # ranks that have returned now exit
                os.close(end)
            _end_processes(job, processes)
        raise RanksFailed(world_size, reports)


def _fork_all(processes: Sequence[BaseProcess]) -> None:
    with warnings.catch_warnings():
        # From Python 3.12 on forking warns about the parent's threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        for process in processes:
            process.start()


def _run_rank(job: _Job, rank: int) -> None:
    """Run as one rank; never return, and run no exit handlers of the parent."""
    error = "raised:\n"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch may warn that it leaks the parent's pool
            torch.set_num_threads(1)  # first, before anything can compute
        gc.freeze()  # what the parent had is not looked through again by every collection
        gc.set_threshold(20_000)  # small steps took 5% longer with Python's 700
        # Else each message that wakes a thread of gloo takes the core from whoever computes:
        # steps of a few milliseconds take a quarter longer.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent may have a handler
        end_with(job.parent)
        os.close(job.release_write)
        stack_file = job.file("stack", rank).open("w")
        faulthandler.enable(stack_file)
        faulthandler.register(signal.SIGUSR1, stack_file)
        # The host's own name may not resolve to an address that gloo can use.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # On aarch64 oneDNN otherwise leaves a perf map of each process behind.
        os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")
        store = dist.FileStore(str(job.directory / "store"), job.world_size)
        # No rank's wait counts before all are there: on a busy machine the last may begin seconds
        # after the first.
        _meet(store, "begun", rank, job.world_size, timedelta(seconds=START))
        job.file("begun", rank).touch()
        timeout = timedelta(seconds=job.collective_timeout)
        dist.init_process_group(
            job.backend, store=store, rank=rank, world_size=job.world_size, timeout=timeout
        )
        # A rank that fails at once must not break the connections that others still set up.
        _meet(store, "connected", rank, job.world_size, timeout)
        value = job.fn(rank, *job.args)
        error = f"returned a value ({type(value).__name__}) that cannot be pickled:\n"
        # In a file, since a queue would pass tensors as shared-memory file descriptors.
        torch.save(value, job.file("partial", rank))
        _flush()
        job.file("partial", rank).rename(job.file("value", rank))
        os.write(job.returned_write, b"r")
        # Exiting now would close connections that other ranks may still be setting up or using.
        os.read(job.release_read, 1)
        os._exit(0)
    except BaseException:
        job.file("error", rank).write_text(error + traceback.format_exc())
    finally:
        _flush()
        os._exit(1)


def end_with(parent: int) -> None:
    """Make this process lead a group of its own, and end when the process `parent` ends."""
    os.setpgid(0, 0)
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise RuntimeError("the parent has died")


def _meet(store: dist.Store, where: str, rank: int, world_size: int, timeout: timedelta) -> None:
    store.set(f"{where}_{rank}", "")
    store.wait([f"{where}_{other}" for other in range(world_size)], timeout)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _pid(process: BaseProcess) -> int:
    assert process.pid is not None  # it was started
    return process.pid


def _exit_info(process: BaseProcess) -> os.waitid_result | None:
    # Without reaping, so that the pid (and group id) cannot be reused before it is killed.
    return os.waitid(os.P_PID, _pid(process), os.WEXITED | os.WNOHANG | os.WNOWAIT)


def _watch(
    job: _Job, processes: Sequence[BaseProcess], timeout: float | Callable[[], float]
) -> dict[int, str]:
    """Wait until all ranks have returned; return reports on the ranks that have not."""
    reports: dict[int, str] = {}
    running = dict(enumerate(processes))
    start, begun = time.monotonic(), False
    failure = math.inf  # when the first was noticed
    limit = START
    while running:
        if not begun and all(job.file("begun", rank).exists() for rank in range(job.world_size)):
            start, begun = time.monotonic(), True
        if begun:
            limit = timeout() if callable(timeout) else timeout
        if time.monotonic() > min(start + limit, failure + job.grace):
            break
        # Looking often would cost ranks that compute; who has ended or returned is heard of.
        ends = [process.sentinel for process in running.values()]
        if job.returned_read in connection.wait([job.returned_read, *ends], timeout=LOOK):
            os.read(job.returned_read, 1)
        for rank, process in list(running.items()):
            info = _exit_info(process)
            if info is not None:
                failure = min(failure, time.monotonic())
                reports[rank] = _describe_exit(job, rank, info)
            if info is not None or job.file("value", rank).exists():
                del running[rank]
    cores = {rank: _time_on_a_core(_pid(process)) for rank, process in running.items()}
    for process in running.values():
        os.kill(_pid(process), signal.SIGUSR1)  # dump the stack
    patience = time.monotonic() + job.grace
    while time.monotonic() < patience:
        if all(job.text("stack", r) and not _is_dumping(_pid(p)) for r, p in running.items()):
            break
        time.sleep(POLL)
    late = f"was still running {job.grace:g} s after the first failure, here:\n"
    if not reports:
        late = f"had not finished after {limit:g} s; it was here:\n"
    return reports | {rank: f"{late}{_stack(job, rank)}\n{cores[rank]}" for rank in running}


def _is_dumping(pid: int) -> bool:
    """Whether the process is inside its handler of SIGUSR1, which is blocked meanwhile."""
    bit = 1 << (signal.SIGUSR1 - 1)
    masks = []
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with suppress(OSError):  # the thread has ended
            masks += re.findall(r"^SigBlk:\s*(\w+)", status.read_text(), re.MULTILINE)
    return any(int(mask, 16) & bit for mask in masks)


def _describe_exit(job: _Job, rank: int, info: os.waitid_result) -> str:
    if info.si_code != os.CLD_EXITED:
        return f"died of {signal.Signals(info.si_status).name}\n{_stack(job, rank)}"
    return job.text("error", rank) or f"exited with status {info.si_status} before it returned"


def _stack(job: _Job, rank: int) -> str:
    """Return the dumped stack without the frames below ``_run_rank``, which are the parent's."""
    lines, inside = [], True
    for line in job.text("stack", rank).splitlines():
        inside = inside or not line.startswith("  File ")
        if inside and not line.startswith("Extension modules: "):
            lines.append(line)
        inside = inside and not line.endswith(" in _run_rank")
    return "\n".join(lines)


def _time_on_a_core(pid: int) -> str:
    """Return a sentence on a rank's CPU time and its wait for a core; empty if not known."""
    process = Path(f"/proc/{pid}")
    try:
        ran, waited, _ = map(int, (process / "schedstat").read_text().split())
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return ""
    now = "ready to run" if state == "R" else "not ready to run"
    past = f"run for {ran / 1e9:.1f} s and waited {waited / 1e9:.1f} s for a free core"
    return f"It had {past} before, and was {now}."


def _load_values(job: _Job) -> list[Any]:
    values = []
    for rank in range(job.world_size):
        try:
            values.append(torch.load(job.file("value", rank), weights_only=False))
        except Exception as error:
            report = f"returned a value that cannot be unpickled:\n{traceback.format_exc()}"
            raise RanksFailed(job.world_size, {rank: report}) from error
    return values


def _end_processes(job: _Job, processes: Sequence[BaseProcess]) -> None:
    patience = time.monotonic() + job.grace
    for rank, process in enumerate(processes):
        if process.pid is None:  # never started
            continue
        # A rank that has returned exits by itself, which lets a coverage tool save its data.
        while job.file("value", rank).exists() and time.monotonic() < patience:
            if _exit_info(process) is not None:
                break
            time.sleep(POLL)
        for kill in (os.kill, os.killpg):  # it may have died before it had its own group
            with suppress(ProcessLookupError):
                kill(process.pid, signal.SIGKILL)
    for process in processes:
        if process.pid is not None:
            process.join()
            process.close()


NCCL = "cpu:gloo,cuda:nccl"  # a backend: the host's own messages go by gloo


def nccl_devices() -> int:
    """Return the number of GPUs, one for each rank, on this machine; 0 without NCCL."""
    # Not torch.cuda.is_available(), after which CUDA does not work in forked ranks.
    return torch.cuda.device_count() if dist.is_nccl_available() else 0
