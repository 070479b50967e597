"""Several tests at a time, in processes that are forked when all tests have been collected.

    python -m pytest --lanes 3

Workers of pytest-xdist import everything and collect all tests once more each, which is 10 s of a
core for every one of them. A lane is forked from the process that has done so. Lanes begin with
parts of the list that lie one after the other, so that tests of a file share what takes time to set
up; who is through takes half of what is left to the one that has most.

Private names of pytest: what is captured and the folder of temporary files have to be a lane's own.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread

import pytest

from samestep.launch.forked import end_with

Begin = Callable[[], Callable[[], None]]  # run in a lane; what it gives is run when it ends


class Lane:
    """A process that runs tests; the one under way and the next are settled."""

    def __init__(self, tests: deque[int]) -> None:
        self.left = tests
        self.settled: deque[int] = deque()
        self.pipe: Connection
        self.pid = 0


class Lanes:
    """The tests of a session, in so many lanes; what they report is reported here."""

    def __init__(self, session: pytest.Session, count: int, begin: Begin) -> None:
        self._session, self._begin = session, begin
        self._items = session.items
        size = -(-len(self._items) // count)
        starts = range(0, len(self._items), max(size, 1))
        every = range(len(self._items))
        self._lanes = [Lane(deque(every[start : start + size])) for start in starts]
        # The child of a thread that has used OpenMP can hang in a matrix product; lanes end with
        # the thread that has forked them. No executor: its threads join each other when a process
        # ends, and in a lane this one is the main thread.
        self._forks: SimpleQueue[tuple[Connection, Connection] | None] = SimpleQueue()
        self._forked: SimpleQueue[int] = SimpleQueue()
        self._forker = Thread(target=self._fork_all)

    def run(self) -> None:
        """Run everything; lanes are gone afterwards."""
        running = {}
        # Made here, once: who makes it takes away what was there.
        self._folder = self._session.config._tmp_path_factory.getbasetemp()
        self._forker.start()
        try:
            for lane in self._lanes:
                self._start(lane)
                running[lane.pipe] = lane
            while running:
                for pipe in wait(list(running)):
                    lane = running[pipe]
                    try:
                        data = pipe.recv()
                    except EOFError:
                        del running[pipe]
                        self._reap(lane)
                        if lane.settled and not self._ends():  # it died in a test
                            self._died(lane)
                            self._start(lane)
                            running[lane.pipe] = lane
                        continue
                    self._heard(lane, data)
        finally:
            for lane in running.values():
                with suppress(ProcessLookupError):
                    os.killpg(lane.pid, signal.SIGKILL)
                self._reap(lane)
            self._forks.put(None)
            self._forker.join()

    def _ends(self) -> bool:
        return bool(self._session.shouldfail or self._session.shouldstop)

    def _take(self, lane: Lane) -> None:
        """Settle what a lane runs next, if there is anything left."""
        if self._ends():
            return
        if not lane.left:
            most = max(self._lanes, key=lambda other: len(other.left))
            half = [most.left.pop() for _ in range(-(-len(most.left) // 2))]
            lane.left.extend(reversed(half))
        if lane.left:
            lane.settled.append(lane.left.popleft())

    def _give(self, lane: Lane) -> None:
        """Tell a lane its test, and the one after it, for which set-ups may stay."""
        with suppress(BrokenPipeError):  # it has died, which is heard of
            lane.pipe.send(tuple(lane.settled))

    def _start(self, lane: Lane) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        lane.pipe, theirs = Pipe()
        self._forks.put((lane.pipe, theirs))
        lane.pid = self._forked.get()
        theirs.close()
        for _ in range(2 - len(lane.settled)):
            self._take(lane)
        self._give(lane)

    def _reap(self, lane: Lane) -> None:
        lane.pipe.close()
        os.waitpid(lane.pid, 0)

    def _heard(self, lane: Lane, data: dict | None) -> None:
        """Of a report, or of the end of a test."""
        hook, config = self._session.ihook, self._session.config
        if data is not None:
            report = hook.pytest_report_from_serializable(config=config, data=data)
            hook.pytest_runtest_logreport(report=report)
            return
        done = self._items[lane.settled.popleft()]
        hook.pytest_runtest_logfinish(nodeid=done.nodeid, location=done.location)
        if self._ends():
            lane.settled.clear()
        else:
            self._take(lane)
        self._give(lane)

    def _died(self, lane: Lane) -> None:
        item = self._items[lane.settled.popleft()]
        why = "the process that ran it died"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        self._session.ihook.pytest_runtest_logreport(report=report)

    # --- in a lane -------------------------------------------------------------------------------

    def _fork_all(self) -> None:
        while pipes := self._forks.get():
            self._forked.put(self._fork(*pipes))

    def _fork(self, ours: Connection, theirs: Connection) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            ours.close()
            for lane in self._lanes:
                if lane.pid:
                    lane.pipe.close()
            end_with(parent)
            self._serve(theirs)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def _serve(self, pipe: Connection) -> None:
        """Run one test after the other, as told."""
        config = self._session.config
        config.pluginmanager.unregister(name="terminalreporter")
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
        folder = self._folder / f"lane_{os.getpid()}"
        folder.mkdir(mode=0o700)
        config._tmp_path_factory._basetemp = folder
        config.pluginmanager.register(_Telling(config, pipe))
        end = self._begin()
        while given := pipe.recv():
            item, *after = [self._items[place] for place in given]
            following = after[0] if after else None
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            pipe.send(None)
        end()


class _Telling:
    """Sends what a lane reports."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._pipe.send(hook.pytest_report_to_serializable(config=self._config, report=report))
