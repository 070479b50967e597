"""Roll calls: after a collective has failed, ranks find out by the store who is missing.

A rank that fails says so in the store and waits for the other ranks to do so; ranks that do not
are missing. Ranks that wait for a failed rank look into the store and join. `verdict` returns the
findings as text.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Background(Generic[T]):
    """A call in a daemon thread, which the caller may abandon."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._ended = threading.Event()
        self.value: T | None = None  # what the call gave; None if it raised or has not ended
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            with suppress(Exception):  # of a store whose host is gone
                self.value = self._call()
        finally:
            self._ended.set()

    def ended(self, patience: float) -> bool:
        """Whether the call ends within `patience` seconds; waits."""
        return self._ended.wait(patience)


def this_process() -> str | None:
    """Return a name of this process for `has_ended`; None where there is no /proc."""
    machine, stat = _machine(), _stat(os.getpid())
    return f"{machine} {os.getpid()} {stat[1]}" if machine and stat else None


def has_ended(process: str) -> bool:
    """Whether a process certainly has ended; False for processes of other machines."""
    machine, pid, start = process.rsplit(" ", 2)
    if machine != _machine():
        return False
    stat = _stat(int(pid))
    # A zombie has ended, and a number may have been given to a new process.
    return stat is None or stat[0] in "ZX" or stat[1] != start


def _machine() -> str | None:
    """Return a name of this boot and PID namespace; None where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _stat(pid: int) -> tuple[str, str] | None:
    """Return the state of a process and its start time; None if there is no such process."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return after_name[0], after_name[19]


ANSWER_S = 5.0  # from the launch of the operation that failed
LAST_CALL_S = 1.0  # at least, from the failure
POLL_S = 0.02


class Answer(NamedTuple):
    """The answer of a rank about itself."""

    operation: str
    error: str | None  # None: it was waiting when another rank failed
    outside: str | None = None  # the line of Python at which it is, in no collective
    elements: int | None = None  # of the operation, where that is known


@dataclass
class Attendance:
    """The findings of a roll call, filled while it runs. Ranks are by place in the group."""

    expected: Sequence[int]
    answers: dict[int, Answer]
    ended: set[int] = field(default_factory=set)  # their process is known to have ended
    complete: bool = False  # False: the store failed or did not answer in time
    seconds: float = 0.0  # that ranks had for their answer


class RollCall:
    """The roll call of one group in its store; every wait has a time limit."""

    def __init__(self, store: dist.Store, place: int) -> None:
        self._store = store
        self._place = place
        self._joined = Background(self._join)
        self._look: Background[bool] | None = None
        self._attendance: Attendance | None = None
        self._holding = threading.Lock()  # the thread of steps and the watch may both want to

    def _join(self) -> str:
        """Store this process's name and return the key prefix, with the group's number."""
        number = self._store.add(f"samestep/groups/{self._place}", 1)
        keys = f"samestep/{number}"
        process = this_process()
        if process is not None:
            self._store.set(f"{keys}/process/{self._place}", process)
        return keys

    def has_begun(self) -> bool:
        """Whether any rank is known to have failed; does not wait long for the store."""
        if self._look is None:
            keys = self._joined.value
            if keys is None:
                return False
            self._look = Background(lambda: self._store.check([f"{keys}/failed"]))
        if not self._look.ended(POLL_S):
            return False
        found = self._look.value
        if found is not None:  # else the store is gone, and is not asked again
            self._look = None
        return bool(found)

    def hold(self, answer: Answer, since: float, expected: Sequence[int]) -> Attendance:
        """Answer, and collect the answers of the `expected` places.

        Ranks have five seconds from the launch of the operation, at `since`, and at least one from
        now. The roll call ends early when every rank has answered or its process has ended.
        A group fails once: a later call returns the first findings.
        """
        with self._holding:
            if self._attendance is None:
                deadline = max(since + ANSWER_S, time.monotonic() + LAST_CALL_S)
                attendance = Attendance(expected, {self._place: answer}, seconds=deadline - since)
                asking = Background(lambda: self._ask(answer, deadline, attendance))
                asking.ended(deadline + LAST_CALL_S - time.monotonic())
                self._attendance = attendance
            return self._attendance

    def _ask(self, answer: Answer, deadline: float, attendance: Attendance) -> None:
        self._joined.ended(deadline - time.monotonic())
        keys = self._joined.value
        if keys is None:
            return
        self._store.set(f"{keys}/answer/{self._place}", json.dumps(answer))
        self._store.set(f"{keys}/failed", "")
        _until(deadline, lambda: self._settled(keys, attendance))
        attendance.complete = True
        # A process that ends may take the store along: not before the others have read.
        self._store.set(f"{keys}/read/{self._place}", "")
        all_read = [f"{keys}/read/{place}" for place in attendance.answers]
        _until(min(deadline, time.monotonic() + LAST_CALL_S), lambda: self._store.check(all_read))

    def _settled(self, keys: str, attendance: Attendance) -> bool:
        """Read new answers; return True if every expected rank has answered or ended."""
        for place in attendance.expected:
            if place in attendance.answers:
                continue
            key = f"{keys}/answer/{place}"
            # Looked at first: a rank may answer and end right after.
            ended = place in attendance.ended or self._has_ended(f"{keys}/process/{place}")
            if self._store.check([key]):
                attendance.answers[place] = Answer(*json.loads(self._store.get(key)))
                attendance.ended.discard(place)
            elif ended:
                attendance.ended.add(place)
        return len(attendance.answers) + len(attendance.ended) == len(attendance.expected)

    def _has_ended(self, key: str) -> bool:
        return self._store.check([key]) and has_ended(self._store.get(key).decode())


def _until(deadline: float, condition: Callable[[], bool]) -> None:
    while not condition() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def verdict(attendance: Attendance, mine: int, members: Sequence[int]) -> str:
    """Return a text on missing ranks and the first error. `members`: global ranks by place."""
    parts = missing(attendance, members) or [_nobody_missing(attendance, members)]
    return ". ".join(["; ".join(parts), *_error(attendance, mine)])


def missing(attendance: Attendance, members: Sequence[int]) -> list[str]:
    """Return phrases on ranks without an answer, or with other sizes; empty if none."""
    silent = set(attendance.expected) - attendance.answers.keys() - attendance.ended
    parts = []
    if attendance.ended:
        its = "its process has" if len(attendance.ended) == 1 else "their processes have"
        parts.append(f"{_ranks(attendance.ended, members)} did not answer: {its} ended")
    if silent and attendance.complete:
        seconds = f"{attendance.seconds:.0f} s"
        parts.append(f"{_ranks(silent, members)} did not answer within {seconds}")
    elif silent:
        parts.append(_without_store(attendance, silent, members))
    return parts + _sizes(attendance, members)


def _sizes(attendance: Attendance, members: Sequence[int]) -> list[str]:
    """Return phrases on ranks in one operation with different numbers of elements."""
    by_size: dict[tuple[str, int], list[int]] = {}
    for place, answer in sorted(attendance.answers.items()):
        if answer.elements is not None:
            by_size.setdefault((answer.operation, answer.elements), []).append(place)
    found = []
    for operation in dict.fromkeys(name for name, _ in by_size):
        sizes = {size: places for (name, size), places in by_size.items() if name == operation}
        if len(sizes) > 1:
            told = [f"{size} elements on {_ranks(sizes[size], members)}" for size in sizes]
            found.append(f"{operation} has {' and '.join(told)}")
    return found


def _without_store(attendance: Attendance, silent: set[int], members: Sequence[int]) -> str:
    text = "the store through which ranks find each other does not answer"
    answered = [members[place] for place in attendance.answers]
    if 0 in answered:
        return f"{text} any more; {_ranks(silent, members)} did not answer before"
    return f"{text}, nor does the rank that hosts it: rank 0, unless torchrun hosts it"


def _nobody_missing(attendance: Attendance, members: Sequence[int]) -> str:
    text = "all ranks answered, so none is missing"
    places = sorted(attendance.answers)
    if len({attendance.answers[place].operation for place in places}) == 1:
        return f"{text}: one may have been too slow"
    where = [f"rank {members[p]} in {attendance.answers[p].operation}" for p in places]
    return f"{text}, but they were in different operations: {'; '.join(where)}"


def _error(attendance: Attendance, mine: int) -> list[str]:
    own = attendance.answers[mine].error
    if own is not None:
        return [own]
    errors = [answer.error for answer in attendance.answers.values() if answer.error is not None]
    return [f"Another rank reported: {error}" for error in errors[:1]]


def _ranks(places: Iterable[int], members: Sequence[int]) -> str:
    return ranks_text(sorted(members[place] for place in places), most=math.inf)


def ranks_text(ranks: Iterable[int], most: float = 16) -> str:
    """Return a list of ranks as text, shortened if there are more than `most`."""
    numbers = list(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > most:
        return f"{len(numbers)} ranks from {numbers[0]} to {numbers[-1]}"
    return f"ranks {', '.join(map(str, numbers))}"


def own_connection(store: dist.Store) -> dist.Store:
    """Return a store with its own connection, if it has any, so that waits block no other."""
    try:
        return store.clone()  # type: ignore[attr-defined, no-any-return]
    except (AttributeError, RuntimeError):
        return store
