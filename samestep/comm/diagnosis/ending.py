"""End a process whose peers are gone, with a message.

`verdict` says who is at fault and where all ranks are; `end_process` raises that in the thread that
steps, and ends the process if it does not end by itself.
"""

import ctypes
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch

from samestep.comm import nccl
from samestep.comm.diagnosis.flight import (
    CollectiveError,
)
from samestep.comm.diagnosis.roll_call import (
    Answer,
    Attendance,
    Background,
    missing,
)

MOST_POSITIONS = 16
WHERE = "Where they were:"
NOWHERE = "no operation of samestep"
GRACE_S = 5.0  # from the message to the end of a process that does not end by itself

_PACKAGE = Path(__file__).parents[2]
TORCH = str(Path(torch.__file__).parent)
# Commands such as `samestep train` are scripts; who waits for a data loader waits for no rank.
WAITING_IN = (
    *(
        str(Path(TORCH, name))
        for name in ("distributed", "autograd", "optim", "utils/_contextlib.py")
    ),
    *(str(_PACKAGE / name) for name in ("comm", "fsdp", "optimizer", "parallel", "shards")),
)
STANDARD_LIBRARY = str(Path(os.__file__).parent)

_log = logging.getLogger("samestep")


def verdict(
    attendance: Attendance,
    answers: Mapping[int, Answer],
    ended: Mapping[int, str],
    ranks: Sequence[int],
    mine: int,
) -> str:
    """Return sentences on the failed rank, the reason, and the position of all ranks."""
    parts = [
        f"rank {rank} has ended" + (f" by {text}" if text else " without an error")
        for rank, text in ended.items()
    ]
    parts += missing(attendance, ranks)
    parts += [
        f"rank {rank} is in no collective, but at {answers[rank].outside}"
        for rank in sorted(answers)
        if answers[rank].outside is not None
    ]
    reasons = [answers[mine].error, *(answers[rank].error for rank in sorted(answers))]
    reason = next((each for each in reasons if each is not None), None)
    if reason is not None:
        parts.append(reason)
    elif not parts:
        parts.append("all ranks answered, so none is missing")
    shown = sorted(answers)[:MOST_POSITIONS]
    where = [f"rank {rank} in {answers[rank].operation}" for rank in shown]
    return f"{'; '.join(dict.fromkeys(parts))}. {WHERE} {'; '.join(where)}"


def positions_elsewhere(attendance: Attendance, silent: set[int], answered: set[int]) -> list[str]:
    """Return sentences on live ranks outside samestep's collectives; see `Watch.elsewhere`."""
    found = []
    for rank, answer in sorted(attendance.answers.items()):
        if rank in silent or (rank not in answered and answer.operation.startswith(NOWHERE)):
            where = "in no collective" if answer.outside else "in a collective of its own"
            line = answer.outside or answer.operation.rpartition(", at ")[2]
            found.append(f"Rank {rank} is alive, {where}, at {line}")
    return found


def ended_after(ended: Mapping[int, str], steps_of: Callable[[int], int], step: int) -> list[str]:
    """Return sentences on ranks that have ended, with step numbers: a skipped step shows.

    ended: by rank its error, "" if there was none. steps_of: the number of steps a rank has begun.
    """
    return [
        f"Rank {rank} ended {f'by {text}' if text else 'without an error'} after its step "
        f"{steps_of(rank)}; this is step {step}"
        for rank, text in ended.items()
    ]


def line_of(thread: int | None, trace: TracebackType | None = None) -> tuple[bool, str]:
    """Return whether a thread is in code that waits for other ranks, and its script line.

    trace: the traceback to read; None: the present stack of the thread.
    """
    frame = sys._current_frames().get(thread or 0)
    if trace is not None:
        frames = traceback.extract_tb(trace)
    elif frame is not None:
        frames = traceback.extract_stack(frame)
    else:
        return False, "an unknown place"
    stack = [
        each
        for each in frames
        if "site-packages" in each.filename or not each.filename.startswith(STANDARD_LIBRARY)
    ]
    scripts = [each for each in stack if not each.filename.startswith(WAITING_IN)]
    if not scripts:
        return False, "an unknown place"
    # The script's own line tells more than torch's that it has called.
    own = [each for each in scripts if not each.filename.startswith(TORCH)] or scripts
    return scripts[-1] is not stack[-1], f"{own[-1].filename}:{own[-1].lineno}"


def end_process(error: CollectiveError, thread: int) -> None:
    """Report an error, raise it in the waiting thread, and end the process."""
    _log.critical("%s", error)
    if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        # Ends the process also where Python is no more, inside destructors of communicators.
        signal.setitimer(signal.ITIMER_REAL, 2 * GRACE_S)

    def make(self: CollectiveError) -> None:
        CollectiveError.__init__(self, str(error), error.operation, error.positions)

    # A thread is given a class, not an instance.
    kind = type("CollectiveError", (CollectiveError,), {"__init__": make})
    kind.__module__ = CollectiveError.__module__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
    Background(nccl.abort)
    time.sleep(GRACE_S)
    sys.stderr.write(f"{error}\n")
    sys.stderr.flush()
    os._exit(1)
