"""Folders that appear whole or not at all, and a pointer to the newest of them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from samestep.checkpoint.errors import CheckpointError
from samestep.checkpoint.storage import INDEX

LATEST = "LATEST"
PARTIAL = ".partial"


def begin(path: Path) -> Path:
    """Make the folder that is written first, beside its place; a killed save's is removed."""
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists: save under another name, or remove it first")
    partial = path.with_name(f".{path.name}{PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from None
    return partial


def commit(partial: Path, path: Path, keep: int | None) -> None:
    """Move a written folder to its place, then the pointer, then remove all but the newest."""
    try:
        _sync(partial)
        os.rename(partial, path)
        _sync(path.parent)
        pointer = path.parent / f".{LATEST}{PARTIAL}"
        pointer.write_text(f"{path.name}\n")
        _sync(pointer)
        os.replace(pointer, path.parent / LATEST)
        _sync(path.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from None
    if keep is not None:
        for old in sorted(checkpoints(path.parent), key=_age)[:-keep]:
            if old != path:
                # First out of sight, so that half of it is never taken for a checkpoint.
                hidden = old.with_name(f".{old.name}.removed")
                with suppress(OSError):
                    os.rename(old, hidden)
                    shutil.rmtree(hidden)


def abandon(partial: Path) -> None:
    """Remove what was written of a save that failed."""
    shutil.rmtree(partial, ignore_errors=True)


def checkpoints(folder: Path) -> Iterator[Path]:
    """The complete checkpoints in a folder."""
    for path in folder.iterdir():
        if not path.name.startswith(".") and (path / INDEX).is_file():
            yield path


def find(path: Path) -> Path:
    """The checkpoint that is meant: this one, or the newest in this folder."""
    if (path / INDEX).is_file():
        return path
    pointer = path / LATEST
    if pointer.is_file():
        named = path / pointer.read_text().strip()
        if (named / INDEX).is_file():
            return named
        raise CheckpointError(f"{pointer} names {named.name!r}, which is no checkpoint any more")
    what = "is no checkpoint, and has none in it" if path.exists() else "does not exist"
    raise CheckpointError(f"{path} {what}")


def _age(path: Path) -> float:
    return path.stat().st_mtime


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
