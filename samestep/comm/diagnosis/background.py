"""A call that may block for ever."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """A call in a thread of its own, which may be given up and keeps no process from ending."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._ended = threading.Event()
        self._value: T | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except Exception:  # of a store whose host is gone: it gives no value
            self._value = None
        finally:
            self._ended.set()

    def ended(self, patience: float) -> bool:
        """Whether it ends within that many seconds."""
        return self._ended.wait(patience)

    @property
    def value(self) -> T | None:
        """What the call gave; None if it raised or has not ended."""
        return self._value
