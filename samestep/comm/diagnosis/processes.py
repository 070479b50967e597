"""Processes of this machine: which one is this, and has another one ended?"""

import os
from pathlib import Path


def this_process() -> str | None:
    """A name by which `has_ended` knows this process; None where there is no /proc."""
    machine, stat = _machine(), _stat(os.getpid())
    return f"{machine} {os.getpid()} {stat[1]}" if machine and stat else None


def has_ended(process: str) -> bool:
    """Whether that process certainly is no more; False for processes of other machines."""
    machine, pid, start = process.rsplit(" ", 2)
    if machine != _machine():
        return False
    stat = _stat(int(pid))
    # A zombie has ended, and a number may have been given to a new process.
    return stat is None or stat[0] in "ZX" or stat[1] != start


def _machine() -> str | None:
    """This boot of this machine, and which numbers its processes have here."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _stat(pid: int) -> tuple[str, str] | None:
    """The state of a process and its time of start; None if there is none."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return after_name[0], after_name[19]
