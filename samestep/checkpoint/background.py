"""A save in the background: at most one at a time, which later calls wait for."""

import threading
from collections.abc import Callable
from pathlib import Path


class SaveHandle:
    """A save that goes on while training does."""

    def __init__(self, path: Path, work: Callable[[], None]) -> None:
        self.path = path
        self._work = work
        self._problem: BaseException | None = None
        # Not a daemon: a process that ends by itself finishes its last checkpoint.
        self._thread = threading.Thread(target=self._run, name=f"save {path.name}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._problem = error

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Return when the checkpoint is on the disk; raises what went wrong, once."""
        self._thread.join()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        return self.path


_running: SaveHandle | None = None


def start_background(path: Path, work: Callable[[], None]) -> SaveHandle:
    """Start a save; the one before must have ended."""
    global _running
    _running = SaveHandle(path, work)
    return _running


def finish_background() -> None:
    """Wait for the save that is running; raises if it failed and nobody has been told yet."""
    global _running
    handle, _running = _running, None
    if handle is not None:
        handle.wait()
