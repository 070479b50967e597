"""Name ranks that are gone or out of step, also if the host never waits for a collective.

Each rank has one thread, the `Watch`, which talks to the others through the store of the default
process group, never touches the device while all is well, and answers the roll calls of others:
in which operation and at which line of Python this rank is.

Over gloo the host waits for collectives: `flight.Flight.wait` raises for ours, and torch for its
own (FSDP2's), which end a script with the backend's text: so `sys.excepthook` holds a roll call.

Over NCCL the host never waits: a kernel spins on the device until torch's own watchdog aborts the
process at the time-out, and names nobody. So there the watch ends the process itself, before
torch's watchdog acts and with a message, when

    an operation has been in flight for most of its group's time-out (`patience_of`),
    another rank has ended: at once if it was killed or raised, else when somebody waits for it,
    another rank could not take a step that this rank waits for,
    another rank launched other operations in a group, even if none of them hangs,
    another rank's watch has found any of this.

`ending.end_process` then raises a `CollectiveError` in the thread that steps, and sees to the end.
"""

import atexit
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from samestep.comm import nccl
from samestep.comm.diagnosis import ending
from samestep.comm.diagnosis.ending import NOWHERE
from samestep.comm.diagnosis.flight import (
    CollectiveError,
    has_passed,
    is_of_communication,
    recorded_event,
)
from samestep.comm.diagnosis.operations import (
    DEVICE_S,
    Launches,
    Operation,
    patience_of,
)
from samestep.comm.diagnosis.roll_call import (
    ANSWER_S,
    Answer,
    Attendance,
    Background,
    RollCall,
    has_ended,
    own_connection,
    this_process,
)
from samestep.comm.groups import default_timeout, timeout_of
from samestep.plan.transfers import Transfer

POLL_S = 0.5
RANKS_PER_POLL_S = 256  # of larger jobs each rank asks the store less often
ROLL_CALL_S = 2.0  # that other ranks have for an answer: several polls
SUSPICIOUS_S = 1.0  # in flight for longer than that: the others are asked after
BACKENDS = ("gloo", "nccl")
OFF = "SAMESTEP_WATCH"  # "0" in the environment: nothing is watched
_log = logging.getLogger("samestep")


class Watch:
    """The watching thread of one process, with the methods by which a step reports to it.

    Args:
        store: Of the default process group; a connection of this thread alone.
        rank: This process's rank in it.
        size: The number of its ranks.
        on_device: Whether collectives run on the device alone, so that nothing raises on the host.
        end: Ends the process with a message; tests put in their own.
        torch_operations: Returns torch's collectives, as FSDP2's, in flight for given seconds.
        patience: Seconds that those of torch may be in flight; None: they are not checked.
        is_over: Whether the group was destroyed, so that nothing is left to watch.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        on_device: bool,
        end: "Callable[[CollectiveError, int], None] | None" = None,
        torch_operations: Callable[[float], Sequence[str]] = nccl.operations_in_flight,
        patience: float | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._is_over = is_over
        self._rank, self._size = rank, size
        self._on_device = on_device
        self._pause = max(POLL_S, size / RANKS_PER_POLL_S)  # seconds
        self._calls = RollCall(dist.PrefixStore("samestep_watch", store), rank)
        self._end = ending.end_process if end is None else end
        self._torch_operations = torch_operations
        self._patience = patience  # for collectives of torch
        self._thread_of_steps = threading.main_thread().ident
        self._count = 0
        self._step = 0
        self._in_flight: deque[Operation] = deque()
        self._passed: deque[tuple[torch.cuda.Event, int]] = deque()  # at the end of a step
        self._launches = Launches()
        self._told_problem = False
        self._heard = time.monotonic()  # when the thread that steps last did anything here
        self._stopping = threading.Event()
        self._processes: dict[int, str] = {}
        self._ended_seen = 0
        self._attendance: Attendance | None = None
        self.failed: CollectiveError | None = None
        self._hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._goodbye)
        self._thread = threading.Thread(target=self._run, name="samestep watch", daemon=True)
        self._thread.start()

    # --- told by the thread that steps: no call of the device but one event a step ---------------

    def launching(
        self, transfer: Transfer, ranks: tuple[int, ...], patience: float, group: str = ""
    ) -> Operation:
        """Record a collective before its launch; costs the host about two microseconds.

        group: The name of the process group, the same on all its ranks. Groups of the same ranks
            are told apart: threads may launch on several of them in any order.
        """
        self._count += 1
        now = self._heard = time.monotonic()
        operation = Operation(
            self._count, self._step, transfer.name, transfer.elements, ranks, now, patience
        )
        self._in_flight.append(operation)
        self._launches.add(f"{group} {' '.join(map(str, ranks))}", transfer)
        return operation

    def step_begun(self) -> None:
        """Record the start of a step, in the calling thread: errors are raised in that thread."""
        if self.failed is not None:
            raise self.failed
        self._step += 1
        self._thread_of_steps = threading.get_ident()
        self._heard = time.monotonic()
        while self._passed and has_passed(self._passed[0][0]):
            _, last = self._passed.popleft()
            while self._in_flight and self._in_flight[0].number <= last:
                self._in_flight.popleft()
        if self._told_problem:  # every rank has gone on, so every rank had it
            self._told_problem = False
            Background(lambda: self._store.delete_key(self._key("problem")))

    def step_ended(self, device: torch.device) -> None:
        """Record the end of a step: collectives waited for so far end before this device point."""
        event = recorded_event(device)
        if event is not None:
            self._passed.append((event, self._last_waited_for()))

    def problem(self, error: BaseException) -> None:
        """Tell other ranks that this rank cannot take the step; ranks that wait for it end."""
        self._told_problem = True
        text = f"{type(error).__name__}: {str(error).strip()}"
        where = f"rank {self._rank} could not take step {self._step}: {text}"
        key = self._key("problem")
        Background(lambda: self._store.set(key, where)).ended(1.0)

    def wait_for_comparison(self) -> None:
        """Wait until the watches have compared launches of ranks; raise if launches differ.

        A rank calls this when votes of ranks differ: NCCL compares no sizes, so the received
        votes may mix two operations, and be those of no rank. The wait takes a few seconds where
        ranks launched the same, and no time where the host waits for collectives.
        """
        last = time.monotonic() + 3 * self._pause + ROLL_CALL_S
        while self._on_device and self.failed is None and time.monotonic() < last:
            time.sleep(POLL_S / 10)
        if self.failed is not None:
            raise self.failed

    def stop(self) -> None:
        """Stop the thread, and remove the hooks of this watch."""
        self._stopping.set()
        self._thread.join(2 * POLL_S)
        atexit.unregister(self._goodbye)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._hook

    def _last_waited_for(self) -> int:
        """Return the number of the last operation up to which all were waited for."""
        last = 0
        for operation in self._in_flight:
            if not operation.waited:
                break
            last = operation.number
        return last

    # --- the thread ------------------------------------------------------------------------------

    def _key(self, what: str, rank: int | None = None) -> str:
        return f"samestep/watch/{what}/{self._rank if rank is None else rank}"

    def _run(self) -> None:
        pause = self._pause
        try:
            name = this_process()
            if name is not None:
                self._store.set(self._key("process"), name)
            while not self._stopping.wait(pause):
                if self._is_over():
                    self._goodbye()
                    return
                found = self._look() if self._on_device else None
                if self._stopping.is_set():
                    return
                if found is not None or self._calls.has_begun():
                    if self._on_device:
                        self._fail(found)
                    else:
                        self._held(None)
                    return
        except Exception:
            # The store is gone, and with it, unless torchrun hosts it, rank 0.
            while self._on_device and not self._stopping.wait(pause) and not self._is_over():
                stuck = self._stuck()
                if stuck is not None or self._oldest_age() > SUSPICIOUS_S:
                    self._fail(stuck)
                    return

    def _look(self) -> str | None:
        """Return a reason to end this process, if there is one."""
        stuck = self._stuck()
        if stuck is not None:
            return stuck
        gone = self._gone(may_wait=self._oldest_age() > SUSPICIOUS_S)
        if gone is not None:
            return gone
        self._store.set(self._key("launched"), json.dumps(self._launches.digests()))
        return self._out_of_order()

    def _oldest_age(self) -> float:
        with suppress(IndexError):  # the other thread may take it away meanwhile
            return time.monotonic() - self._in_flight[0].begun
        return 0.0

    def _stuck(self) -> str | None:
        """Return a text on an operation, samestep's or torch's, in flight for too long, or None."""
        now = time.monotonic()
        for operation in list(self._in_flight):
            if now - operation.begun < operation.patience:
                break
            if operation.has_arrived():
                with suppress(ValueError):
                    self._in_flight.remove(operation)
                continue
            return f"{operation.name} has been in flight for {now - operation.begun:.0f} s"
        if self._patience is not None and now - self._heard > self._patience:
            found = Background(lambda: self._torch_operations(self._patience or 0.0))
            if found.ended(DEVICE_S) and found.value:
                return f"torch's {found.value[0]} has been in flight for too long"
        return None

    def _waits(self) -> bool:
        """Whether the device waits for other ranks in a collective, samestep's or torch's.

        Called only when another rank has ended or has a problem. Operations of the last step stay
        in the list until the next step, however long ago they have finished.
        """
        of_torch = Background(lambda: self._torch_operations(SUSPICIOUS_S))
        waits = self._oldest() is not None or (of_torch.ended(DEVICE_S) and bool(of_torch.value))
        # Asked last. While groups are destroyed nobody takes note any more of what has arrived.
        return waits and not self._is_over() and not self._leaves()

    def _leaves(self) -> bool:
        """Whether the thread that steps is inside `destroy_process_group`."""
        frame = sys._current_frames().get(self._thread_of_steps or 0)
        while frame is not None and frame.f_code.co_name != "destroy_process_group":
            frame = frame.f_back
        return frame is not None

    def _gone(self, *, may_wait: bool) -> str | None:
        """Return a text on a rank that was killed or raised, or that this rank waits for."""
        for rank, name in self._known_processes():
            if has_ended(name) and not self._store.check([self._key("ended", rank)]):
                return f"rank {rank} is gone: its process was killed"
        ended = self._store.add("samestep/watch/ended", 0)
        waiting: bool | None = None  # not known
        if ended > self._ended_seen or (may_wait and ended):
            for rank in range(self._size):
                if rank != self._rank and self._store.check([self._key("ended", rank)]):
                    text = self._store.get(self._key("ended", rank)).decode()
                    if text:
                        return f"rank {rank} has ended by {text}"
                    waiting = may_wait and self._waits() if waiting is None else waiting
                    if waiting:
                        return f"rank {rank} has ended without an error"
            self._ended_seen = ended
        if may_wait:
            for rank in range(self._size):
                told = rank != self._rank and self._store.check([self._key("problem", rank)])
                if told and (waiting or self._waits()):
                    return self._store.get(self._key("problem", rank)).decode()
        return None

    def _known_processes(self) -> Iterator[tuple[int, str]]:
        """Yield rank and process name of the other ranks that have stored one."""
        if len(self._processes) < self._size - 1:
            for rank in range(self._size):
                key = self._key("process", rank)
                if rank != self._rank and rank not in self._processes and self._store.check([key]):
                    self._processes[rank] = self._store.get(key).decode()
        yield from self._processes.items()

    def _out_of_order(self) -> str | None:
        """Return a text on the first operation that the next rank launched otherwise, or None."""
        other = (self._rank + 1) % self._size
        key = self._key("launched", other)
        if other == self._rank or not self._store.check([key]):
            return None
        mine = self._launches.difference(json.loads(self._store.get(key)))
        if mine is None:
            return None
        return (
            f"ranks {self._rank} and {other} launched different operations: number "
            f"{mine.number} of their group is {mine.name} ({mine.elements} elements) "
            f"on rank {self._rank}, and another, or of another size, on rank {other}"
        )

    # --- the end ---------------------------------------------------------------------------------

    def _fail(self, reason: str | None) -> None:
        """Hold the roll call, then end this process."""
        self.failed = self._held(reason)
        self._stopping.set()
        self._end(self.failed, self._thread_of_steps or 0)

    def _held(self, reason: str | None, trace: TracebackType | None = None) -> CollectiveError:
        """Hold a roll call; `reason`: why this rank calls, None if it only answers."""
        inside, line = ending.line_of(self._thread_of_steps, trace)
        operation = self._oldest()
        waits = inside or reason is not None or operation is not None
        position = f"{operation or NOWHERE}, step {self._step}, at {line}"
        answer = Answer(position, reason, None if waits else line)
        known = Background(self._ended_by)
        ended = (known.value or {}) if known.ended(1.0) else {}
        expected = [rank for rank in range(self._size) if rank not in ended]
        since = time.monotonic() - ANSWER_S + ROLL_CALL_S
        attendance = self._attendance = self._calls.hold(answer, since, expected)
        answers = dict(attendance.answers)  # a copy: the roll call may still be at it
        text = ending.verdict(attendance, answers, ended, range(self._size), self._rank)
        positions = {rank: answers[rank].operation for rank in sorted(answers)}
        head = operation or NOWHERE
        return CollectiveError(f"rank {self._rank} ends, in {head}: {text}", head, positions)

    def elsewhere(self, silent: set[int], answered: set[int]) -> list[str]:
        """Return sentences on ranks that are alive, but not in the operation that failed.

        answered, silent: its members that answered the roll call, and those that did not. Ranks
        outside it count if they wait in a collective that is not samestep's: where sizes differ,
        gloo aborts a process, not always that of the rank at fault.
        """
        self._held(None)
        assert self._attendance is not None
        found = ending.positions_elsewhere(self._attendance, silent, answered)
        ended = Background(lambda: ending.ended_after(self._ended_by(), self._steps, self._step))
        return found + ((ended.value or []) if ended.ended(1.0) else [])

    def _steps(self, rank: int) -> int:
        return int(self._store.get(self._key("steps", rank)))

    def _ended_by(self) -> dict[int, str]:
        """Return the other ranks that said that they end, with their error, "" if none."""
        keys = {rank: self._key("ended", rank) for rank in range(self._size) if rank != self._rank}
        return {
            rank: self._store.get(key).decode()
            for rank, key in keys.items()
            if self._store.check([key])
        }

    def _oldest(self) -> str | None:
        """Return the oldest operation in flight, as text, or None."""
        for operation in list(self._in_flight):
            if not operation.has_arrived():
                return str(operation)
        return None

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Tell other ranks that this process ends, then call the previous `sys.excepthook`."""
        told = f"{kind.__name__}: {str(error).strip().partition(chr(10))[0]}"
        if is_of_communication(error):
            # Not alone: the others wait as well, and who ends first looks like the one at fault.
            _log.critical("%s", self._held(told, trace))
        self._say_ended(told)
        self._hook(kind, error, trace)

    def _goodbye(self) -> None:
        self._say_ended("")

    def _say_ended(self, text: str) -> None:
        if self._stopping.is_set():
            return
        self._stopping.set()

        def tell() -> None:
            self._store.set(self._key("steps"), str(self._step))
            self._store.set(self._key("ended"), text)
            self._store.add("samestep/watch/ended", 1)

        Background(tell).ended(1.0)


# --- one for each process ------------------------------------------------------------------------


class _Current(NamedTuple):
    """The default group, by a weak reference, and its watch if it has one."""

    world: "weakref.ref[dist.ProcessGroup]"
    watch: Watch | None


_current: _Current | None = None


def current() -> Watch | None:
    """Return the watch of this process's default group, or None before `start`."""
    if _current is None or _current.world() is not dist.group.WORLD:
        return None
    return _current.watch


def start() -> Watch | None:
    """Return the watch of the default group; the first call for each default group makes it.

    Return None for a single rank, for ranks that are threads, or if SAMESTEP_WATCH=0 is set.
    """
    global _current
    world = dist.group.WORLD if dist.is_available() else None
    if world is None:
        return None
    if _current is not None:
        if _current.world() is world:
            return _current.watch
        if _current.watch is not None:
            _current.watch.stop()
    watch, known_world = None, weakref.ref(world)
    known = any(name in str(dist.get_backend()) for name in BACKENDS)
    if known and dist.get_world_size() > 1 and os.environ.get(OFF) != "0":
        with suppress(AttributeError, RuntimeError):  # a group made in Python may have no store
            watch = Watch(
                own_connection(world.get_group_store()),
                dist.get_rank(),
                dist.get_world_size(),
                on_device="nccl" in str(dist.get_backend()),
                patience=patience_of(default_timeout()),
                is_over=lambda: known_world() is None or known_world() is not dist.group.WORLD,
            )
    _current = _Current(known_world, watch)
    return watch


Launching = Callable[[Transfer, tuple[int, ...]], Operation]
_groups: WeakKeyDictionary[dist.ProcessGroup, Launching | None] = WeakKeyDictionary()


def of(handle: dist.ProcessGroup) -> Launching | None:
    """Return `Watch.launching` for the collectives of a group; None where the host waits."""
    if handle not in _groups:
        _groups[handle] = None
        with suppress(TypeError, ValueError):  # a group that torch does not know has no backend
            on_device = "cuda:nccl" in str(dist.get_backend_config(handle))
            found = start() if on_device else None
            if found is not None:
                limit = patience_of(timeout_of(handle))
                _groups[handle] = partial(found.launching, patience=limit, group=handle.group_name)
    return _groups[handle]


def _off_in_child() -> None:
    global _current
    _current = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_off_in_child)
