"""A command of samestep in a process of its own, which need not import torch again."""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from samestep import cli
from tests.limits import HANG


class Command:
    """A command that runs; what it shows is complete once it has ended."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.temporary = folder / "temporary"  # where it has its temporary files
        self.temporary.mkdir()
        self._shown, self._errors = folder / "stdout", folder / "stderr"
        self._process = multiprocessing.get_context("fork").Process(
            target=self._run, args=(arguments,)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def _run(self, arguments: list[str]) -> None:
        for descriptor, path in ((1, self._shown), (2, self._errors)):
            with path.open("wb") as file:
                os.dup2(file.fileno(), descriptor)
        # Those of pytest may be objects of its own.
        sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115
        os.environ["TMPDIR"] = str(self.temporary)
        tempfile.tempdir = None
        raise SystemExit(cli.main(arguments))

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def ended(self) -> tuple[int | None, str, str]:
        """Wait for its end: exit status, output, errors."""
        self._process.join(HANG)
        return self._process.exitcode, self._shown.read_text(), self._errors.read_text()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def running(arguments: list[str], folder: Path) -> Iterator[Command]:
    """Start a command, and leave nothing of it behind."""
    command = Command(arguments, folder)
    try:
        yield command
    finally:
        command.close()
