"""Scenarios side by side: each lane is a process that has ranks of its own.

Ranks of one case wait for each other most of the time, so that two lanes on two cores are faster
than one, and sixteen cores want more.
"""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple, NoReturn

import torch

from samestep.launch.forked import ends_with
from samestep.stress.campaign import Campaign, Case, CaseResult, Presence, Progress
from samestep.tooling.signals import SIGNALS

Hearers = dict[str, Callable[..., Any]]
PATIENCE = 10.0  # seconds that a lane has to end its ranks


class LaneDiedError(RuntimeError):
    """A lane ended without saying why."""


class _Lane(NamedTuple):
    process: ForkProcess
    pipe: Connection


class Lanes:
    """Gives every free lane the next scenario, and hears of results in the order they come."""

    def __init__(self, count: int, campaign: Callable[[], Campaign]) -> None:
        self.count = count
        self._campaign = campaign
        self.interrupted: list[CaseResult] = []  # what was known of cases at Ctrl-C

    def run(
        self,
        scenarios: Sequence[Sequence[Case]],
        on_result: Callable[[CaseResult, Presence], None],
        progress: Progress,
    ) -> None:
        """Run the cases of all scenarios; Ctrl-C ends every lane and comes through."""
        left = iter(range(len(scenarios)))
        # As with ranks: the child of a thread that has used OpenMP may hang in it, so a new one
        # forks. It outlives the lanes, since its end would count as the parent's death.
        forker = ThreadPoolExecutor(1)
        count = min(self.count, len(scenarios))
        lanes = [forker.submit(self._start, scenarios).result() for _ in range(count)]
        hear: Hearers = {"result": on_result, "step": progress}
        try:
            for lane in lanes:
                lane.pipe.send(next(left, None))
            self._listen([lane.pipe for lane in lanes], hear, lambda: next(left, None))
        except BaseException as reason:
            for lane in lanes:
                lane.process.terminate()
            if isinstance(reason, KeyboardInterrupt):
                del hear["step"]
                hear["interrupted"] = self.interrupted.append
                with suppress(LaneDiedError):
                    self._listen([lane.pipe for lane in lanes], hear, lambda: None)
            raise
        finally:
            for lane in lanes:
                lane.process.join(PATIENCE)
                lane.process.kill()
                lane.process.join()
            forker.shutdown()

    @staticmethod
    def _listen(pipes: list[Connection], hear: Hearers, next_one: Callable[[], Any]) -> None:
        """Until every lane has said that it ends."""
        while pipes:
            for pipe in connection.wait(pipes):
                assert isinstance(pipe, Connection)
                try:
                    kind, content = pipe.recv()
                except EOFError:
                    why = "a lane of the harness died; is there memory left?"
                    raise LaneDiedError(why) from None
                if kind == "raised":
                    raise LaneDiedError(f"a lane of the harness failed:\n{content}")
                if kind == "ends":
                    pipes.remove(pipe)
                elif kind == "free":
                    with suppress(BrokenPipeError):  # it is being ended
                        pipe.send(next_one())
                elif kind in hear:
                    hear[kind](*content)

    def _start(self, scenarios: Sequence[Sequence[Case]]) -> _Lane:
        fork = multiprocessing.get_context("fork")
        mine, theirs = fork.Pipe()
        process = fork.Process(target=self._run_lane, args=(theirs, scenarios, os.getpid()))
        process.start()
        theirs.close()
        return _Lane(process, mine)

    def _run_lane(
        self, pipe: Connection, scenarios: Sequence[Sequence[Case]], parent: int
    ) -> NoReturn:
        """Be a lane: run what the parent names until it has no more; runs no exit handlers."""
        try:
            os.setpgid(0, 0)  # Ctrl-C is for the parent, which then ends its lanes
            if not ends_with(parent):
                os._exit(1)
            torch.set_num_threads(1)
            campaign = self._campaign()

            def on_result(result: CaseResult) -> None:
                _send(pipe, "result", result, campaign.presence.get(result.case.scenario, {}))

            try:
                while (place := pipe.recv()) is not None:
                    report = partial(_send, pipe, "step")
                    campaign.run_all(scenarios[place], on_result, report)
                    _send(pipe, "free")
            except KeyboardInterrupt:
                if campaign.interrupted is not None:
                    _send(pipe, "interrupted", campaign.interrupted)
            _send(pipe, "ends")
            os._exit(0)
        except Exception:
            pipe.send(("raised", traceback.format_exc()))
        finally:
            os._exit(1)


def _send(pipe: Connection, kind: str, *content: object) -> None:
    """Whole, even if a signal wants this process to end meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        pipe.send((kind, content))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
