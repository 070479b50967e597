"""Tells of collectives that do not arrive."""

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samestep.comm.diagnosis.recorder import FlightRecorder, Record

LOOKS = 4  # per period
PATIENCE_S = 5.0  # for one that is writing when it is stopped

# Not a warning: those are often silenced, an error under -W error, and not made for threads.
_log = logging.getLogger("samestep")


class Watchdog:
    """A thread that looks for operations that do not arrive, and keeps no process from ending."""

    def __init__(self, recorder: "FlightRecorder", limit: float, folder: Path | None) -> None:
        self._recorder = recorder
        self._limit = limit
        self._folder = folder
        self._reported: set[int] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samestep watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what it is writing is written first."""
        self._stopping.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while not self._stopping.wait(self._limit / LOOKS):
            overdue = self._recorder.overdue(self._limit)
            new = [record for record in overdue if record.number not in self._reported]
            if new:
                self._reported.update(record.number for record in new)
                self._report(new)

    def _report(self, records: list["Record"]) -> None:
        """One warning, of the oldest: those after it often wait for it alone."""
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
            _ranks(first.ranks),
            "" if self._folder is None else f". {_written(dump, self._folder)}",
        )


def _written(dump: dict[str, Any], folder: Path) -> str:
    """Write a dump, whole or not at all, and say where it is."""
    path = folder / f"rank_{dump['rank']}.json"
    beside = path.with_suffix(".partial")
    try:
        beside.write_text(json.dumps(dump, indent=1))
        os.replace(beside, path)
    except OSError as error:
        return f"Its last operations could not be written: {error}"
    return f"Its last operations are in {path}"


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 8:
        return f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
