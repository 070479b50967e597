"""Folders that appear whole or not at all, and a pointer to the newest of them."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from samestep.checkpoint.storage import INDEX, CheckpointError, sync

LATEST = "LATEST"
METADATA = ".metadata"  # what folders of torch.distributed.checkpoint have
PARTIAL = ".partial"
REMOVED = ".removed"
LOCK = ".lock"


class Unfinished:
    """A folder beside the one that it becomes. Whoever writes it holds its lock, until it dies."""

    def __init__(self, path: Path) -> None:
        if os.path.lexists(path) and not _never_named(path):
            raise CheckpointError(f"{path} exists: save under another name, or remove it first")
        self.path, self.folder = path, partial_of(path)
        self._lock: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(path.parent, self.folder)
            if path.exists():
                _remove(path)
            if self.folder.exists():
                raise CheckpointError(f"{path} is being written by another process")
            self.folder.mkdir()
            try:
                self._lock = os.open(self.folder / LOCK, os.O_CREAT | os.O_RDWR)
            except OSError:
                self.abandon()
                raise
        except OSError as error:
            raise _unwritable(path, error) from None
        with suppress(OSError):  # a disk without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def commit(self, keep: int | None) -> None:
        """Move the folder to its place, then the pointer; then remove all but the newest."""
        path, parent = self.path, self.path.parent
        pointer = parent / f".{LATEST}{PARTIAL}"
        try:
            sync(self.folder)
            with pointer.open("w") as file:
                file.write(f"{path.name}\n")
            sync(pointer)
            os.rename(self.folder, path)
        except OSError as error:
            self.abandon()
            pointer.unlink(missing_ok=True)
            raise _unwritable(path, error) from None
        try:
            sync(parent)
            os.replace(pointer, parent / LATEST)
        except OSError as error:
            _remove(path)
            pointer.unlink(missing_ok=True)
            raise _unwritable(path, error) from None
        with suppress(OSError):  # LATEST names it: what fails now must not undo it
            sync(parent)
            (path / LOCK).unlink()  # until here it says that LATEST may not know of this folder
        self._unlock()
        if keep is not None:
            for old in sorted(checkpoints(parent), key=_age)[:-keep]:
                if old != path:
                    _remove(old)

    def abandon(self) -> None:
        """Remove what was written of a save that failed."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def partial_of(path: Path) -> Path:
    """Where a checkpoint is written before it is moved to its place."""
    return path.with_name(f".{path.name}{PARTIAL}")


def checkpoints(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if not path.name.startswith(".") and (path / INDEX).is_file():
            yield path


def find(path: Path) -> Path:
    """The checkpoint that is meant: this one, or the newest in this folder."""
    if (path / INDEX).is_file():
        return path
    pointer = path / LATEST
    if pointer.is_file():
        named = path / pointer.read_text(errors="replace").strip()
        if (named / INDEX).is_file():
            return named
        raise CheckpointError(
            f"{pointer} names {named.name!r}, which is no checkpoint: name the one you mean"
        )
    if (path / METADATA).is_file():
        return path
    what = f"is no checkpoint: it has no {INDEX} and no {LATEST}"
    raise CheckpointError(f"{path} {what if path.exists() else 'does not exist'}")


def _named(parent: Path) -> Path | None:
    with suppress(OSError):
        return parent / (parent / LATEST).read_text(errors="replace").strip()
    return None


def _never_named(path: Path) -> bool:
    """Whether a save was killed when it had moved this folder to its place, and before LATEST."""
    lock = path / LOCK
    return lock.is_file() and _named(path.parent) != path and not _locked(lock)


def _remove_leftovers(parent: Path, mine: Path) -> None:
    """What killed saves have left; not what somebody else may be writing."""
    newest = _named(parent)
    with suppress(OSError, ValueError):  # LATEST may name anything
        if newest is not None and not _locked(newest / LOCK):
            (newest / LOCK).unlink(missing_ok=True)  # before LATEST names another
    for path in parent.iterdir():
        hidden = path.name.startswith(".") and path.is_dir()
        if hidden and path.name.endswith((PARTIAL, REMOVED)):
            locked = _locked(path / LOCK)
            if locked is False or (locked is None and path == mine):
                shutil.rmtree(path)


def _locked(lock: Path) -> bool | None:
    """None: this disk has no locks."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def _remove(path: Path) -> None:
    """First out of sight, so that half of it is never taken for a checkpoint."""
    hidden = path.with_name(f".{path.name}{REMOVED}")
    with suppress(OSError):
        os.rename(path, hidden)
        shutil.rmtree(hidden)


def _age(path: Path) -> tuple[int, str]:
    return path.stat().st_mtime_ns, path.name


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot write {path}: {error.strerror or error}")
