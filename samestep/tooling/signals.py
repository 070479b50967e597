"""Ctrl-C and SIGTERM: the first one ends the work, and none disturbs what is written after it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """Somebody wants this process to end; `status` is the exit status that says by which signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


@contextmanager
def stopped_once() -> Iterator[None]:
    """Inside, the first of the signals raises Stopped and all later ones are ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers belong to the main thread
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    # What is ignored already (nohup, a job in the background) stays that way.
    before = {n: was for n in SIGNALS if (was := signal.getsignal(n)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
