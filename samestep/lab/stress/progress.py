"""Stores the finished cases of a run in a file, from which `--continue` resumes.

The first line of `progress.jsonl` has all that was known when the last stretch of the run began; a
line is added whenever a case ends. A line that was cut short is the last one, and is ignored. The
file is deleted once the receipt of all cases is written.
"""

import fcntl
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from samestep.lab.common.provenance import commit
from samestep.lab.stress.campaign import Presence
from samestep.lab.stress.compare import read_receipt
from samestep.lab.stress.rank import Case
from samestep.tooling.output import write_files
from samestep.tooling.request import BadRequestError, spelled

FILE = "progress.jsonl"
KIND = "samestep stress progress"
FORMAT = 1
ASKED = (
    "scenario", "layout", "steps", "other_steps", "sample_every", "reduction", "seed", "model",
    "watchdog",
)  # fmt: skip
RAN = ("world_size", "actual_backend", "device", "runtime_mode", "machine", "code")

Entry = Mapping[str, Any]  # a case as the receipt tells it
Key = tuple[str, str]  # scenario and layout: they name a case of a run


@dataclass
class Progress:
    """The finished cases of a run, and the stretches in which it ran.

    asked, ran: the parts of the receipt with these names.
    on_disk: whether later runs may go on with this one.
    finished: whether there is a receipt of all cases.
    """

    folder: Path
    asked: Mapping[str, Any]
    ran: Mapping[str, Any]
    entries: dict[Key, Entry] = field(default_factory=dict)
    presence: dict[str, Presence] = field(default_factory=dict)  # by scenario
    stretches: list[dict[str, Any]] = field(default_factory=list)
    on_disk: bool = True
    finished: bool = False
    _file: FileIO | None = None

    def left(self, alike: Sequence[Case]) -> list[Case]:
        """Return the cases of a scenario that have not finished.

        If some have ended before, the one that others are compared with runs again.
        """
        left = [case for case in alike if key(case) not in self.entries]
        known = [case for case in alike if self.entries.get(key(case), {}).get("samples")]
        return known[:1] + left if left else []

    def begin(self) -> None:
        self.stretches.append(
            {
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "seconds": 0.0,
                "cases": 0,
                "commit": commit(),
                "command": ["samestep", *sys.argv[1:]],
                "cpus": os.cpu_count(),
            }
        )

    def add(self, entry: Entry, presence: Presence, seconds: float) -> None:
        """Record a finished case, with the seconds since its stretch began."""
        before = self.entries.get(key(entry))
        if before is not None and entry["samples"] == before["samples"]:
            return
        if before is not None:
            entry = _contradicted(before, entry)
        if self.on_disk:
            self._write({"case": entry, "presence": presence, "seconds": seconds})
        self._take(entry, presence, seconds)

    def stop(self, seconds: float) -> None:
        self.stretches[-1]["seconds"] = seconds
        if self._file is not None:
            self._write({"seconds": seconds})

    def remove(self) -> None:
        """Delete the file, because the receipt has all of it."""
        if self._file is not None:
            (self.folder / FILE).unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:  # others may write now
            self._file.close()
            self._file = None

    def open(self) -> FileIO:
        """Write the file with all finished cases; raise BadRequestError if another run uses it."""
        path = self.folder / FILE
        with suppress(FileNotFoundError):
            _lock(FileIO(path), path).close()
        known = {
            "kind": KIND,
            "format": FORMAT,
            "asked": self.asked,
            "ran": self.ran,
            "cases": list(self.entries.values()),
            "presence": self.presence,
            "stretches": self.stretches,
        }
        write_files(self.folder, {FILE: _line(known)})
        self._file = _lock(FileIO(path, "ab"), path)
        return self._file

    def _write(self, record: Mapping[str, Any]) -> None:
        """Append one whole line, or nothing."""
        file = self._file or self.open()
        line, end = _line(record), file.seek(0, os.SEEK_END)
        try:
            if file.write(line) != len(line):
                raise OSError("no space is left on the device")
        except OSError as error:
            file.truncate(end)
            why = error.strerror or error
            raise BadRequestError(
                f"cannot write to {str(self.folder)!r}: {why}; free space and resume "
                "with --continue"
            ) from error

    def _take(self, entry: Entry, presence: Presence, seconds: float) -> None:
        self.stretches[-1]["cases"] += key(entry) not in self.entries
        self.entries[key(entry)] = entry
        if presence:
            self.presence[entry["scenario"]] = presence
        self.stretches[-1]["seconds"] = seconds


def key(case: Case | Entry) -> Key:
    told = case if isinstance(case, Mapping) else vars(case)
    return told["scenario"], told["layout"]


def go_on(now: Progress, say: Callable[[str], None]) -> Progress:
    """Load the unfinished run of the same request from the folder, if there is one.

    Raises:
        BadRequestError: If the folder has an unfinished run of another request.
    """
    earlier = _earlier(now.folder)
    if earlier is None:
        return now
    before, after = _request(earlier), _request(now)
    different = "; ".join(
        f"{name} was {before.get(name)} and is {after.get(name)}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    )
    if not different:
        return earlier
    if earlier.finished:
        say(f"Beginning anew: {now.folder} has a finished run, of which {different}.")
        return now
    raise BadRequestError(
        f"--continue: in {str(now.folder)!r} is an unfinished run of another request: "
        f"{different}. Choose another --out, or leave out --continue to start over"
    )


def _earlier(folder: Path) -> Progress | None:
    """Read the file of an earlier run; None if there is none."""
    path = folder / FILE
    if path.exists():
        try:
            return _read(path)
        except OSError as error:
            raise BadRequestError(f"--continue: {path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise BadRequestError(f"--continue: {path} is damaged: {error!r}") from error
    if not (folder / "receipt.json").exists():
        return None
    try:
        return _of_receipt(folder, read_receipt(folder / "receipt.json"))
    except ValueError as error:
        raise BadRequestError(f"--continue: {error}") from error


def _request(progress: Progress) -> dict[str, Any]:
    """The parts of a request that must agree between stretches of a run."""
    asked, ran = progress.asked, progress.ran
    return {
        **{spelled(name): asked.get(name) for name in ASKED},
        **{name.replace("_", " "): ran.get(name) for name in RAN},
        **ran["versions"],
        **ran["environment"],
    }


def _read(path: Path) -> Progress:
    lines = path.read_bytes().split(b"\n")[:-1]  # without one that was cut short
    first, *records = map(json.loads, lines)
    if (first["kind"], first["format"]) != (KIND, FORMAT):
        raise ValueError(f"it is no {KIND} of format {FORMAT}")
    found = Progress(path.parent, first["asked"], first["ran"])
    found.entries = {key(entry): entry for entry in first["cases"]}
    found.presence, found.stretches = first["presence"], first["stretches"]
    for record in records:
        if "case" in record:
            found._take(record["case"], record["presence"], record["seconds"])
        else:
            found.stretches[-1]["seconds"] = record["seconds"]
    return found


def _of_receipt(folder: Path, receipt: Mapping[str, Any]) -> Progress:
    ran = receipt["ran"]
    ended = [entry for entry in receipt["cases"] if entry["status"] != "interrupted"]
    entries = {key(entry): entry for entry in ended}
    presence: dict[str, Presence] = {}
    for name, scenario in receipt["scenarios"].items():
        shown = scenario["presence"]
        presence[name] = dict(zip(shown["params"], shown["ranks_with_gradient"], strict=True))
    finished = receipt["verdict"] != "interrupted" and len(entries) == len(receipt["cases"])
    stretches = list(ran.get("stretches", ()))
    asked = receipt["asked"]
    return Progress(folder, asked, ran, entries, presence, stretches, finished=finished)


def _contradicted(before: Entry, again: Entry) -> Entry:
    """Return the entry of a case that ran again with another result."""
    pairs = zip(before["samples"], again["samples"], strict=False)
    common = [new["step"] for old, new in pairs if old != new]
    finding = {
        "check": "error",
        "step": min(common, default=again["steps_taken"]),
        "message": "run again in a later stretch, it gave other numbers: is it the same machine?",
    }
    return {**before, "status": "failed", "findings": [*before["findings"], finding]}


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _lock(file: FileIO, path: Path) -> FileIO:
    """Lock a file until it is closed or this process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise BadRequestError(f"another run is writing {path}: wait for it") from None
    return file
