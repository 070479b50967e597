"""What a test leaves behind: processes, threads, sockets that listen, files, a process group.

A process whose parent has died becomes a child of this one (`adopt_orphans`), so that it is found
here too, after the test that started it.
"""

import ctypes
import gc
import getpass
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from tests.limits import limit

PR_SET_CHILD_SUBREAPER = 36
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # live until we end
LISTENING = "0A"  # in /proc/net/tcp
PATIENCE_S = limit(10.0)  # for what is about to end


def adopt_orphans() -> None:
    """From now on, what our children leave behind is our child."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def own_temporary_folder() -> Path:
    """Make a folder for the temporary files of this process and of all that it starts.

    pytest keeps those of `tmp_path` where they would have been without it, and torch what it has
    compiled: both outlive us on purpose.
    """
    usual = os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{usual}/torchinductor_{getpass.getuser()}")
    folder = Path(tempfile.mkdtemp(prefix="samestep_tests_", dir=usual))
    folder.chmod(0o711)  # tests that put down root's rights reach what is inside
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None  # it is asked for again
    return folder


def children() -> set[int]:
    """The processes that are children of this one and run; those that have ended are forgotten."""
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:  # if it lives
            found.update(map(int, file.read().split()))
    return {pid for pid in found if not _reaped(pid)}


def _reaped(pid: int) -> bool:
    """Whether it has ended. An orphan that has is waited for by nobody else."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z" and (
            os.waitpid(pid, os.WNOHANG)[0] == pid
        )
    except (OSError, ChildProcessError):
        return True


def command(pid: int) -> str:
    """What a process was started as; nothing if it has ended, or is about to begin."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except OSError:
        return ""


def open_sockets() -> set[str]:
    """The open sockets of this process, by inode."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the folder itself
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {name[8:-1] for name in found if name.startswith("socket:[")}


def listening_ports(inodes: set[str]) -> set[int]:
    """The ports at which these sockets listen."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6") if inodes else ():
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and fields[9] in inodes:
                    found.add(int(fields[1].rpartition(":")[2], 16))
    return found


class Belongings:
    """What there is now, to be compared with what there is after a test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children, self._threads = children(), set(threading.enumerate())
        self._sockets, self._files = open_sockets(), set(os.listdir(folder))

    def _new(self) -> list[str]:
        new = [f"process {pid} ({command(pid)})" for pid in sorted(self._processes())]
        new += [f"thread {t.name!r}" for t in threading.enumerate() if t not in self._threads]
        ports = listening_ports(open_sockets() - self._sockets)
        new += [f"port {port} is listened at" for port in ports]
        new += [f"{self._folder / name}" for name in set(os.listdir(self._folder)) - self._files]
        if dist.is_available() and dist.is_initialized():
            new.append("torch.distributed's default group")
        return new

    def _processes(self) -> set[int]:
        new = children() - self._children
        return {pid for pid in new if not any(name in command(pid) for name in HELPERS)}

    def left_behind(self) -> list[str]:
        """What has come since and does not go. Processes are ended then, and files removed."""
        deadline = time.monotonic() + PATIENCE_S
        new = self._new()
        while new and time.monotonic() < deadline:
            gc.collect()  # a store lives as long as somebody knows it
            time.sleep(0.005)
            new = self._new()
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in set(os.listdir(self._folder)) - self._files:
            path = self._folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return new
