"""Locks that let several processes save into one folder: partial folders and renames.

`.NAME.TOKEN.partial/.lock` is the mark: JSON that says who writes there (host, process, since
when), locked by the kernel for as long as they do. A second name of that file, `.samestep.lock`
beside the checkpoints, is the turn of its saver: without it nobody moves a name there.
"""

import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from samestep.checkpoint.storage import CheckpointError
from samestep.version import __version__

OWNER = ".lock"
TURN = ".samestep.lock"
PARTIAL = ".partial"
WAIT_S = 60.0  # for the turn of another saver, which moves names and writes nothing
QUIET_S = 30.0  # after which the turn of a saver of which nothing is known is over
WRITTEN_S = 0.5  # in which a lock is written that is no second name
PAUSE_S = 0.02
# What disks say that have no second names for files.
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
MOST = 1 << 16  # bytes of an owner file, by far


class Owner(NamedTuple):
    """The process that a lock file names."""

    samestep: str  # its version
    name: str  # of the checkpoint that it writes
    token: str
    host: str
    boot: str  # of the kernel it runs on; empty where that does not say
    namespace: str  # in which its number is that of a process
    pid: int
    started: str  # when the process did, in ticks of that kernel
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


class Saver:
    """This process as owner of a partial folder, until `release`."""

    def __init__(self, path: Path) -> None:
        self.parent = path.parent
        self._turn: tuple[int, int] | None = None  # the lock of the folder, while it is ours
        for _ in range(100):
            token = uuid4().hex
            self.folder = self.parent / f".{path.name[:40]}.{token}{PARTIAL}"
            self.folder.mkdir()
            self._text = json.dumps(_here(path.name, token)._asdict()).encode()
            try:
                self._descriptor: int | None = _created(self.folder / OWNER, self._text)
                return
            except FileNotFoundError:
                continue  # somebody else has taken the empty folder for a leftover
            except OSError:
                with suppress(OSError):
                    self.folder.rmdir()
                raise
        raise CheckpointError(
            f"{path} cannot be written: another process keeps deleting files in {self.parent}"
        )

    @property
    def has_mark(self) -> bool:
        """Whether the partial folder still has the lock of this process."""
        own = self._descriptor
        return own is not None and _identity(self.folder / OWNER) == _identity(own)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Context in which only this process renames folders of the parent."""
        lock, copy = self.parent / TURN, self._take_turn()
        try:
            yield
        finally:
            with suppress(OSError):  # who comes next sees that nobody holds it
                if _identity(lock) == self._turn:
                    lock.unlink()
            self._turn = None
            _close(copy)

    def check_turn(self) -> None:
        """Raise unless this process still holds the lock; called right before a rename."""
        lock = self.parent / TURN
        if self._turn is None or _identity(lock) != self._turn:
            raise CheckpointError(
                f"{lock} was deleted or taken by another process during the save: save again"
            )

    def _take_turn(self) -> int | None:
        """Wait for the lock of the parent folder; returns its file descriptor."""
        lock, own, copy = self.parent / TURN, self.folder / OWNER, None
        start = time.monotonic()
        seen, since = None, start  # the lock as it was seen last, and since when it is that
        while True:
            try:
                os.link(own, lock)
            except FileExistsError:
                pass
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                with suppress(FileExistsError, FileNotFoundError):
                    copy = _created(lock, self._text)
            found, now = _identity(lock), time.monotonic()
            assert self._descriptor is not None
            if found is not None and found == _identity(self._descriptor if copy is None else copy):
                self._turn = found
                return copy
            if found != seen:
                seen, since = found, now
            if found is not None:
                self._wait_for(lock, found, now - start, now - since)
            time.sleep(PAUSE_S)

    def _wait_for(self, lock: Path, found: tuple[int, int], waited: float, quiet: float) -> None:
        """Wait for another process' lock: delete it if the process died, raise after a limit."""
        owner = owner_in(lock)
        if owner is None and quiet > WRITTEN_S and _size(lock) != 0:
            raise CheckpointError(
                f"{lock} is in the way of samestep's lock file: move it to another "
                "folder, and save again"
            )
        alive = is_alive(lock)
        if owner is not None and (alive is False or (alive is None and quiet > QUIET_S)):
            _break(lock, found, quiet)
        elif waited > WAIT_S:
            who = "a process that it does not name" if owner is None else owner
            raise CheckpointError(
                f"{lock} is the lock of {who}, which is saving there too and has not "
                f"finished in {WAIT_S:.0f} s: wait for it, or delete the file if that "
                "process no longer runs"
            )

    def release(self) -> None:
        """Release the lock of the partial folder."""
        _close(self._descriptor)
        self._descriptor = None


def owner_in(file: Path) -> Owner | None:
    """Read a lock file; None if it is not one of samestep."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        content = json.loads(os.read(descriptor, MOST))
        owner = Owner(**content)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    finally:
        os.close(descriptor)
    types = Owner.__annotations__
    return owner if all(type(v) is types[k] for k, v in owner._asdict().items()) else None


def is_alive(file: Path) -> bool | None:
    """Whether the owner of a lock is alive and holds it; None if that cannot be known here.

    On the same kernel the number of its process tells, and the time when that began, as numbers are
    used again. In another container, and on another machine, the kernel's lock tells that it lives;
    a lock that is free tells nothing of another machine, as there are disks whose locks are local.
    """
    owner, here = owner_in(file), _here("", "")
    is_near = owner is not None and bool(here.boot) and owner.boot == here.boot
    certain: bool | None = None
    if owner is not None and is_near and owner.namespace == here.namespace:
        certain = _runs(owner)
        if certain is False:
            return False
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return certain
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a disk without locks
        return certain
    finally:
        os.close(descriptor)
    return False if is_near else None


def _created(file: Path, text: bytes) -> int:
    """Create a locked file and return its descriptor; raises if it exists."""
    descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    try:
        with suppress(OSError):  # a disk without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # others lock it to see whether they can
        if os.write(descriptor, text) != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        os.fsync(descriptor)
        if _identity(file) != _identity(descriptor):
            raise FileNotFoundError(errno.ENOENT, "it was removed", str(file))
    except BaseException:
        with suppress(OSError):
            if _identity(file) == _identity(descriptor):
                file.unlink()
        os.close(descriptor)
        raise
    return descriptor


def _break(lock: Path, found: tuple[int, int], quiet: float) -> None:
    """Delete the lock of a dead process; safe if several try."""
    with suppress(FileNotFoundError):
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if quiet < 1.0:
                    return  # another one removes it; else a child has inherited what the dead held
            except OSError:
                pass  # a disk without locks
            if _identity(lock) == _identity(descriptor) == found:
                lock.unlink()
        finally:
            os.close(descriptor)


def _close(descriptor: int | None) -> None:
    """Unlock and close, also for child processes that inherited the descriptor."""
    if descriptor is not None:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _identity(file: Path | int) -> tuple[int, int] | None:
    try:
        found = os.fstat(file) if isinstance(file, int) else os.lstat(file)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _size(file: Path) -> int | None:
    """Size of a regular file; None if it is missing or something else."""
    with suppress(FileNotFoundError):
        found = os.lstat(file)
        return found.st_size if stat.S_ISREG(found.st_mode) else None
    return 0


def _here(name: str, token: str) -> Owner:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    boot, namespace = "", ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    pid = os.getpid()
    return Owner(
        __version__, name, token, socket.gethostname(), boot, namespace, pid, _started(pid), now
    )


def _runs(owner: Owner) -> bool | None:
    """Whether a process runs; None if this process cannot see it."""
    started = _started(owner.pid)
    if started:
        return started == owner.started
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return None
    return False  # it has ended, and its parent has not asked how


def _started(pid: int) -> str:
    """Start time of a process in clock ticks; empty if it does not exist."""
    try:
        fields: Any = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
