"""Result files that appear whole or not at all."""

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from samestep.tooling.request import BadRequestError


def check_folder(folder: Path) -> None:
    """Raise BadRequestError unless files can be written in it; make nothing yet."""
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
    """Write all files beside their places, then move them there; what cannot be is undone."""
    made: list[Path] = []
    partial = {name: folder / f".{name}.{os.getpid()}.partial" for name in contents}
    try:
        for parent in [*reversed(folder.parents), folder]:
            if not parent.exists():
                parent.mkdir()
                made.append(parent)
        for name, content in contents.items():
            partial[name].write_bytes(content)
        for name, path in partial.items():
            os.replace(path, folder / name)
    except BaseException as error:
        for file in partial.values():
            with suppress(OSError):
                file.unlink()
        for parent in reversed(made):
            with suppress(OSError):  # not empty: somebody else uses it
                parent.rmdir()
        if isinstance(error, OSError):
            raise _named(folder, error) from error
        raise


def _named(folder: Path, error: OSError) -> BadRequestError:
    return BadRequestError(f"cannot write to {str(folder)!r}: {error.strerror or error}")
