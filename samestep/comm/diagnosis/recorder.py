"""The last collectives of this rank, and a watchdog that reports overdue ones."""

import hashlib
import json
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from samestep.comm.diagnosis.flight import Flight, has_passed, recorded_event
from samestep.comm.groups import RankGroup, ranks_text
from samestep.plan.transfers import Transfer

LOOKS = 4  # of the watchdog, per period
PATIENCE_S = 5.0  # for one that is writing when it is stopped

# Not a warning: those are often silenced, an error under -W error, and not made for threads.
_log = logging.getLogger("samestep")


@dataclass(slots=True)
class Record:
    """One collective as this rank launched it."""

    number: int  # 0, 1, ... per recorder
    name: str  # the same on every rank
    kind: str  # as launched: a gather of unequal segments is an all_to_all
    ranks: tuple[int, ...]  # global ranks of the group
    elements: int  # of the whole operation, the same on every rank
    dtype: str
    sent: int  # bytes that this rank must send at least
    launched: float  # time.monotonic()
    waited: float = 0.0  # seconds that the host spent inside wait()
    finished: float | None = None  # None: in flight, or never waited for
    failed: bool = False  # it raised, and will never finish


@dataclass(slots=True)
class Totals:
    """Sums over all operations of a kind."""

    calls: int = 0
    elements: int = 0
    sent: int = 0  # bytes
    waited: float = 0.0  # seconds inside wait(), of those that have finished
    in_flight: float = 0.0  # seconds from launch to the end, of those that have finished


class FlightRecorder:
    """Keep the last collectives of this process, from `start()` to `stop()` or in a `with` block.

    One recorder may be on per process; it records the launches of all threads, and is off in a
    forked child. On a GPU the host does not wait: an operation is in flight until the stream that
    waits for it has passed it, which is checked when the next operation is launched.

    Args:
        last: Number of operations that are kept.
        watchdog: Seconds in flight after which an operation is reported, once, by a warning of
            the logger "samestep". Nothing is ended.
        folder: Folder in which the watchdog writes `rank_<global rank>.json`, the result of `dump`.
    """

    def __init__(
        self, last: int = 256, *, watchdog: float | None = None, folder: str | Path | None = None
    ) -> None:
        if type(last) is not int or last < 1:
            raise ValueError(f"FlightRecorder: last must be a whole number above 0, got {last!r}")
        if watchdog is not None and not watchdog > 0:
            raise ValueError(
                f"FlightRecorder: watchdog must be a number of seconds above 0, got {watchdog!r}"
            )
        if folder is not None and watchdog is None:
            raise ValueError(
                "FlightRecorder: folder= is where the watchdog writes its dump: give "
                "watchdog= too, or write dump() to a file yourself"
            )
        self.on_launch: list[Callable[[Record], None]] = []
        self.totals: dict[str, Totals] = {}
        self.count = 0
        self._limit = watchdog
        self._folder = None if folder is None else Path(folder)
        self._watchdog: _Watchdog | None = None
        self._rank: int | None = None
        self._ring: deque[Record] = deque(maxlen=last)
        self._hash = hashlib.blake2b(digest_size=16)
        self._in_flight: dict[int, Record] = {}
        self._flights: dict[int, weakref.ref[Flight]] = {}  # not yet waited for
        self._on_stream: deque[tuple[Record, torch.cuda.Event]] = deque()
        self._lock = threading.RLock()  # may be entered again by a signal's handler

    # --- on and off --------------------------------------------------------------------------

    def start(self) -> None:
        """Record from now on; earlier records stay."""
        global current
        if current is not None:
            which = "this" if current is self else "another"
            raise RuntimeError(
                f"{which} FlightRecorder is already running, and a process can have "
                "only one: call stop() on it first"
            )
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        current = self
        if self._limit is not None:
            self._watchdog = _Watchdog(self, self._limit, self._folder)

    def stop(self) -> None:
        """Stop recording, and end the watchdog; does nothing when off."""
        global current
        if current is self:
            current = None
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    def __enter__(self) -> "FlightRecorder":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _disown(self) -> None:
        """Switch off in a forked child: locks may be held by threads that were not forked."""
        self._lock = threading.RLock()
        self._watchdog = None

    # --- what is known -----------------------------------------------------------------------

    @property
    def records(self) -> tuple[Record, ...]:
        """Return the last operations, oldest first."""
        with self._lock:
            self._land_those_on_streams()
            return tuple(self._ring)

    @property
    def in_flight(self) -> tuple[Record, ...]:
        """Return the collectives neither waited for nor dropped, oldest first.

        Failed collectives stay in flight.
        """
        with self._lock:
            self._land_those_on_streams()
            return tuple(self._in_flight.values())

    @property
    def digest(self) -> str:
        """Return a digest, equal on ranks that launched the same operations in the same order."""
        with self._lock:
            return self._hash.hexdigest()

    def dump(self) -> dict[str, Any]:
        """Return all records for JSON, times as seconds ago; `rank` is None before any launch."""
        with self._lock:
            records, in_flight = self.records, self.in_flight
            now = time.monotonic()
            return {
                "rank": self._rank,
                "count": self.count,
                "digest": self.digest,
                "in_flight": [_described(record, now) for record in in_flight],
                "records": [_described(record, now) for record in records],
                "totals": {kind: asdict(totals) for kind, totals in self.totals.items()},
            }

    def overdue(self, seconds: float) -> list[Record]:
        """Return collectives in flight for longer that have neither finished nor failed."""
        before = time.monotonic() - seconds
        with self._lock:
            # Streams are asked only then: asking breaks a CUDA graph that is being captured.
            if any(record.launched < before for record in list(self._in_flight.values())):
                self._land_those_on_streams()
            return [
                record
                for record in list(self._in_flight.values())
                if record.launched < before and not record.failed and not self._arrived(record)
            ]

    def _arrived(self, record: Record) -> bool:
        """Whether a collective has finished, and only was not waited for yet."""
        reference = self._flights.get(record.number)
        flight = None if reference is None else reference()
        return flight is not None and flight.has_arrived()

    # --- told by collectives -----------------------------------------------------------------

    def launch(
        self,
        transfer: Transfer,
        group: RankGroup,
        device: torch.device,
        call: Callable[[], dist.Work | None],
    ) -> Flight:
        record = self._enter(transfer, group)
        try:
            flight = _RecordedFlight(self, record, group, device, call)
        except BaseException:
            record.failed = True
            raise
        number, forget = record.number, self._forget
        self._flights[number] = weakref.ref(flight, lambda _: forget(number))
        for callback in self.on_launch:
            callback(record)
        return flight

    def _enter(self, transfer: Transfer, group: RankGroup) -> Record:
        elements, kind = transfer.elements, transfer.traffic.kind
        dtype = dtype_name(transfer.dtype)
        # Of whole numbers, so the same in every process, and short however many ranks there are.
        ranks = hash(group.members)
        line = f"{kind}\0{transfer.name}\0{ranks}\0{elements}\0{dtype}\n".encode()
        with self._lock:
            if self._on_stream:
                self._land_those_on_streams()
            record = Record(
                self.count, transfer.name, kind, group.members, elements, dtype,
                transfer.sent(group.rank, group.size), time.monotonic(),
            )  # fmt: skip
            self._rank = group.members[group.rank]
            self.count += 1
            self._hash.update(line)
            self._ring.append(record)
            self._in_flight[record.number] = record
            totals = self.totals.setdefault(kind, Totals())
            totals.calls += 1
            totals.elements += elements
            totals.sent += record.sent
        return record

    def _forget(self, number: int) -> None:
        """Drop a flight that was freed without a wait; lock-free, as a weakref callback."""
        self._flights.pop(number, None)
        self._in_flight.pop(number, None)

    def keep_failed(self, record: Record) -> None:
        """Mark a collective as failed: it stays in flight for ever."""
        record.failed = True
        self._flights.pop(record.number, None)

    def land(self, record: Record, passed: torch.cuda.Event | None) -> None:
        """Mark a collective as waited for: by the host, or by a stream up to an event."""
        with self._lock:
            self._flights.pop(record.number, None)
            if passed is None:
                self._finish(record)
            else:
                self._on_stream.append((record, passed))

    def _land_those_on_streams(self) -> None:
        while self._on_stream and has_passed(self._on_stream[0][1]):
            self._finish(self._on_stream.popleft()[0])

    def _finish(self, record: Record) -> None:
        record.finished = time.monotonic()
        self._in_flight.pop(record.number, None)
        totals = self.totals[record.kind]
        totals.waited += record.waited
        totals.in_flight += record.finished - record.launched


class _RecordedFlight(Flight):
    """A flight that tells its recorder how it ended."""

    def __init__(
        self,
        recorder: FlightRecorder,
        record: Record,
        group: RankGroup,
        device: torch.device,
        call: Callable[[], dist.Work | None],
    ) -> None:
        self._recorder = recorder
        self._record = record
        self._device = device
        super().__init__(
            record.name, group, call, on_host=device.type == "cpu", elements=record.elements
        )

    def wait(self) -> None:
        start = time.monotonic()
        try:
            super().wait()
        except BaseException:
            self._recorder.keep_failed(self._record)
            raise
        finally:
            self._record.waited += time.monotonic() - start
        self._recorder.land(self._record, recorded_event(self._device))


class _Watchdog:
    """A daemon thread that reports overdue operations."""

    def __init__(self, recorder: FlightRecorder, limit: float, folder: Path | None) -> None:
        self._recorder = recorder
        self._limit = limit
        self._folder = folder
        self._reported: set[int] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samestep watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the dump that it may be writing."""
        self._stopping.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while not self._stopping.wait(self._limit / LOOKS):
            overdue = self._recorder.overdue(self._limit)
            new = [record for record in overdue if record.number not in self._reported]
            if new:
                self._reported.update(record.number for record in new)
                self._report(new)

    def _report(self, records: list[Record]) -> None:
        """Warn of the oldest overdue operation: later ones often wait for it alone."""
        dump = self._recorder.dump()
        first = records[0]
        _log.warning(
            "rank %s: %s has been in flight for %.3g s%s: operation %d, %s of %d %s among %s%s",
            dump["rank"],
            first.name,
            time.monotonic() - first.launched,
            f", with {len(records) - 1} after it" if len(records) > 1 else "",
            first.number,
            first.kind,
            first.elements,
            first.dtype,
            ranks_text(first.ranks, most=8),
            "" if self._folder is None else f". {_written(dump, self._folder)}",
        )


def _written(dump: dict[str, Any], folder: Path) -> str:
    """Write a dump, whole or not at all, and return a sentence that names the file."""
    path = folder / f"rank_{dump['rank']}.json"
    beside = path.with_name(f".{path.name}.{uuid4().hex}.partial")  # of this process alone
    try:
        beside.write_text(json.dumps(dump, indent=1))
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        return f"Its last operations could not be written: {error}"
    return f"Its last operations are in {path}"


current: FlightRecorder | None = None


def _off_in_child() -> None:
    global current
    recorder, current = current, None
    if recorder is not None:
        recorder._disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_off_in_child)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def _described(record: Record, now: float) -> dict[str, Any]:
    """Return a record for JSON, with seconds ago in place of times of the local clock."""
    entries = asdict(record)
    launched, finished = entries.pop("launched"), entries.pop("finished")
    entries["launched_ago"] = now - launched
    entries["finished_ago"] = None if finished is None else now - finished
    return entries
