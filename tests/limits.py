"""How long a test waits before it calls something a hang.

Nothing is asserted about time, so a limit costs nothing until something hangs, and may be large. It
grows with a machine that is slow, or busy with other work: both are measured once per session, and
workers of xdist and all other children get the answer from the environment.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.soak import SOAK

NAME = "SAMESTEP_TEST_SLOWNESS"
WORK_S = 0.015  # that `_work` takes on the core of a usual machine
MOST = 10.0


def _work() -> float:
    """Seconds on a core for a small fixed piece of work, of Python and of torch."""
    start = time.process_time()
    matrix = torch.ones(32, 32) / 32
    for _ in range(300):
        matrix = matrix @ matrix
        sum(range(1000))
    return time.process_time() - start


def _ready_to_run() -> int:
    """The number of threads of this machine that run or wait for a core; this one is among them."""
    return int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])


def measured() -> float:
    """How many times longer than usual things take here: 1 or more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        work, ready = zip(*((_work(), _ready_to_run()) for _ in range(20)), strict=True)
    finally:
        torch.set_num_threads(threads)
    slow = min(work) / WORK_S
    busy = sum(ready) / len(ready) / len(os.sched_getaffinity(0))
    return min(max(1.0, slow) * max(1.0, busy), MOST)


SLOWNESS = float(os.environ.get(NAME) or f"{measured():.2f}")
os.environ[NAME] = str(SLOWNESS)


def limit(seconds: float) -> float:
    """So many seconds on a usual machine, and more on one that was measured slow."""
    return round(seconds * SLOWNESS, 3)


HANG = limit(7000.0 if SOAK else 240.0)  # seconds for whatever a test starts and waits for
TEST = limit(7200.0 if SOAK else 600.0)  # for a test; longer, so that what hangs is reported first
# For a process that runs many tests, each with the limit of one: the one that hangs is named first.
BATTERY = 4 * TEST


def eventually(condition: Callable[[], object], seconds: float = HANG) -> None:
    """Wait until it holds; an AssertionError if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)
