"""Result files that appear whole or not at all, and formats that several commands share."""

import gzip
import io
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from samestep.tooling.request import BadRequestError


def check_folder(folder: Path) -> None:
    """Raise BadRequestError unless files can be written in a folder; make nothing yet."""
    nearest = folder
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        raise BadRequestError(f"cannot write to {str(folder)!r}: {nearest} is not a directory")
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise _named(folder, error) from error


def write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files beside their places, then move them there; undo everything on an error."""
    made: list[Path] = []
    mine = uuid4().hex  # processes of several machines may have the same number
    partial = {name: folder / f".{name}.{mine}.partial" for name in contents}
    try:
        for parent in [*reversed(folder.parents), folder]:
            if not parent.exists():
                parent.mkdir()
                made.append(parent)
        for name, content in contents.items():
            with partial[name].open("xb") as file:
                file.write(content)
        for name, path in partial.items():
            os.replace(path, folder / name)
    except BaseException as error:
        for path in partial.values():
            with suppress(OSError):
                path.unlink()
        for parent in reversed(made):
            with suppress(OSError):  # not empty: somebody else uses it
                parent.rmdir()
        if isinstance(error, OSError):
            raise _named(folder, error) from error
        raise


def _named(folder: Path, error: OSError) -> BadRequestError:
    return BadRequestError(f"cannot write to {str(folder)!r}: {error.strerror or error}")


def json_file(content: object, indent: int = 1) -> bytes:
    return json.dumps(content, indent=indent).encode() + b"\n"


def png_file(figure: Any, **look: Any) -> bytes:
    """Return the PNG of a figure of matplotlib."""
    png = io.BytesIO()
    figure.savefig(png, format="png", **look)
    return png.getvalue()


class Drawn(NamedTuple):
    """A slice in a row of a trace, with times in seconds; `about` is shown on a click."""

    row: int
    name: str
    start: float
    end: float
    about: Mapping[str, Any] | None = None


def trace_file(processes: Iterable[tuple[str, Sequence[str], Iterable[Drawn]]]) -> bytes:
    """Return a gzipped trace for ui.perfetto.dev; `processes`: name, rows and slices of each."""
    events: list[dict[str, Any]] = []
    for pid, (title, rows, drawn) in enumerate(processes):
        names = [("process_name", 0, title)]
        names += [("thread_name", tid, row) for tid, row in enumerate(rows)]
        for what, tid, name in names:
            events.append({"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})
        for tid, name, start, end, about in drawn:
            times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * (end - start), 3)}
            args = {} if about is None else {"args": about}
            events.append({"name": name, "ph": "X", "pid": pid, "tid": tid, **times, **args})
    content = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()
    return gzip.compress(content, mtime=0)
