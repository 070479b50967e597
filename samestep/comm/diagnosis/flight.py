"""A named collective in flight, with an explanation if it fails."""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from samestep.comm.diagnosis.roll_call import Answer, RollCall, verdict

if TYPE_CHECKING:
    from samestep.comm.diagnosis.operations import Operation
    from samestep.comm.groups import RankGroup

T = TypeVar("T")

SLICE = timedelta(seconds=0.25)


class CollectiveError(RuntimeError):
    """A collective failed: a peer died, never arrived, or sent something else.

    `operation` is the name of the collective. `positions` has, by global rank, the operation that
    the rank was in when the group failed; ranks that did not answer are left out.
    """

    def __init__(
        self, message: str, operation: str = "", positions: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.positions: dict[int, str] = dict(positions or {})


class Flight:
    """A collective in flight.

    Args:
        name: Name of the operation in error messages.
        group: The ranks that take part.
        call: Launches the collective, without waiting.
        on_host: Whether the host waits for the collective. It then looks now and then whether
            another rank has failed; a GPU's stream waits by itself.
        elements: Elements of the whole operation, the same on every rank; None: not known.
    """

    def __init__(
        self,
        name: str,
        group: "RankGroup",
        call: Callable[[], dist.Work | None],
        *,
        on_host: bool,
        elements: int | None = None,
    ) -> None:
        self._name = name
        self._elements = elements
        self._group = group
        self._on_host = on_host
        self._since = time.monotonic()
        self._calls = _roll_call(group)
        self.operation: Operation | None = None  # in the watch's list
        try:
            self.work = call()
        except RuntimeError as error:
            _fail(name, group, error, self._since, elements=elements)

    def wait(self) -> None:
        """Wait for the collective; raise a CollectiveError that names the missing ranks."""
        if self.operation is not None:
            self.operation.waited = True
        if self.work is None:
            return
        joined = False
        try:
            if self._on_host and self._calls is not None:
                joined = _wait_or_join(self.work, self._calls)
            else:
                self.work.wait()
        except RuntimeError as error:
            _fail(self._name, self._group, error, self._since, elements=self._elements)
        if joined:
            _fail(self._name, self._group, None, self._since, elements=self._elements)

    def has_arrived(self) -> bool:
        """Whether the backend has finished the collective; does not wait."""
        return self.work is None or self.work.is_completed()


def attempt(
    name: str,
    group: "RankGroup",
    call: Callable[[], T],
    expected: Sequence[int] | None = None,
    *,
    of_others: Callable[[RuntimeError], bool] = lambda error: True,
) -> T:
    """Return `call()`; if it raises, raise a CollectiveError that names the missing ranks.

    `expected` are the places in the group that take part, if not all do. An error for which
    `of_others` is false is raised unchanged.
    """
    since = time.monotonic()
    _roll_call(group)
    try:
        return call()
    except RuntimeError as error:
        if not of_others(error):
            raise
        _fail(name, group, error, since, expected)


def explained(name: str, group: "RankGroup", call: Callable[[], T]) -> T:
    """Return `call()`; if it fails because of other ranks, a CollectiveError names them.

    FSDP2, DTensors and pipelines launch collectives of their own, whose errors are the backend's.
    An error of the model is raised unchanged.
    """
    return attempt(name, group, call, of_others=is_of_communication)


def is_of_communication(error: BaseException) -> bool:
    """Whether an error is of the communication backend, and no CollectiveError yet.

    Gloo raises plain errors, known by their text.
    """
    if isinstance(error, CollectiveError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


_roll_calls: WeakKeyDictionary[dist.ProcessGroup, RollCall] = WeakKeyDictionary()


def _roll_call(group: "RankGroup") -> RollCall | None:
    """Return the one roll call of a process group; None if the group has no store.

    The first call comes before anything can fail, so that this process is known to other ranks.
    """
    known = _roll_calls.get(group.handle)
    if known is None:
        try:
            store = group.handle.get_group_store()
        except (AttributeError, RuntimeError):  # a group made in Python may have none
            return None
        if store is None:
            return None
        known = _roll_calls[group.handle] = RollCall(store, group.rank)
    return known


def _wait_or_join(work: dist.Work, calls: RollCall) -> bool:
    """Wait for work in slices of time; return True if another rank has failed."""
    while not work.is_completed():
        start = time.monotonic()
        try:
            work.wait(SLICE)
            return False
        except RuntimeError:
            if work.is_completed():
                break
        if time.monotonic() - start < SLICE.total_seconds() / 2:
            break  # this backend does not wait for a limited time
        if calls.has_begun():
            return True
    work.wait()  # gives the work's own error, if it has one
    return False


def _fail(
    name: str,
    group: "RankGroup",
    error: RuntimeError | None,
    since: float,
    expected: Sequence[int] | None = None,
    elements: int | None = None,
) -> NoReturn:
    calls = _roll_call(group)
    if calls is None:
        mine = {group.members[group.rank]: name}
        raise CollectiveError(f"{name} failed: {error}", name, mine) from error
    line = None if error is None else str(error).strip().split("\n")[0]
    answer = Answer(name, line, elements=elements)
    attendance = calls.hold(answer, since, expected or range(group.size))
    text = verdict(attendance, group.rank, group.members)
    answers = dict(attendance.answers)  # a copy: the roll call may still be at it
    places = set(attendance.expected) - answers.keys() - attendance.ended
    silent = {group.members[place] for place in places}
    if silent or attendance.ended:
        answered = {group.members[place] for place in answers}
        text = ". ".join([text, *_elsewhere(silent, answered)])
    positions = {group.members[place]: answers[place].operation for place in sorted(answers)}
    raise CollectiveError(f"{name} failed: {text}", name, positions) from error


def _elsewhere(silent: set[int], answered: set[int]) -> list[str]:
    """Return sentences on live ranks outside samestep's collectives, as their watches say."""
    from samestep.comm.diagnosis import watch  # which imports this module

    watching = watch.current()
    return [] if watching is None else watching.elsewhere(silent, answered)


# --- how far a GPU has got, asked without waiting for it ------------------------------------------


def recorded_event(device: torch.device) -> torch.cuda.Event | None:
    """Record an event after the present work of the current stream; return None on the host."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def has_passed(event: torch.cuda.Event) -> bool:
    """Whether the device has passed an event; does not wait."""
    try:
        return bool(event.query())  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
