"""examples/train_gpt.py under a real torchrun that starts all ranks again when one is killed."""

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from torch.distributed.run import main

from tests.limits import HANG, eventually, limit
from tests.soak import SOAK
from tests.train.runs import losses, rows, text_file, train, words

pytestmark = pytest.mark.usefixtures("no_torchrun")

ROOT = Path(__file__).parent.parent.parent
FLAGS = {"steps": 60 if SOAK else 16, "dropout": 0.1, "micro_batch": 4, "log_every": 1}


@pytest.mark.parametrize(
    ("layout", "kills"), [("zero2", 5), ("fsdp2", 5), ("flat", 5)] if SOAK else [("zero2", 1)]
)
def test_killed_ranks_leave_no_trace_in_the_losses(tmp_path, layout, kills):
    data = text_file(tmp_path)
    assert train(2, words(tmp_path / "undisturbed", data, **FLAGS)) == [0, 0]
    out = tmp_path / "killed"
    with torchrun(words(out, data, layout=layout, **FLAGS), kills) as (process, log):
        for kill in range(kills):
            wait_for(process, lambda kill=kill: last_step(out, starts=kill + 1) >= 7 * kill + 6)
            victim = children(process.pid)[kill % 2]
            os.kill(victim, signal.SIGKILL)
            wait_for(process, lambda victim=victim: victim not in children(process.pid))
        process.join(HANG)
        assert process.exitcode == 0, log.read_text()
    events = [row["event"] for row in rows(out) if "ranks" in row]
    assert events == ["started"] + ["resumed"] * kills
    assert losses(out) == losses(tmp_path / "undisturbed")
    assert losses(out, "val_loss") == losses(tmp_path / "undisturbed", "val_loss")


@contextmanager
def torchrun(arguments: list[str], restarts: int) -> Iterator[tuple[BaseProcess, Path]]:
    """Two ranks under torchrun; nothing of them is left at the end."""
    log = Path(arguments[arguments.index("--data") + 1]).with_name("torchrun.txt")
    options = ["--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.1"]
    options += ["--max-restarts", str(restarts)]
    if not SOAK:  # so that no rank imports torch again
        options += ["--run-path", "--start-method", "fork"]
    process = multiprocessing.get_context("fork").Process(
        target=run_torchrun, args=([*options, "examples/train_gpt.py", *arguments], log)
    )
    process.start()
    try:
        yield process, log
    finally:
        seen = children(process.pid)
        process.terminate()
        process.join(limit(20.0))
        process.kill()
        process.join()
        for pid in seen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def run_torchrun(words: list[str], log: Path) -> None:
    with log.open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(log.parent)}
    tempfile.tempdir = None  # torchrun itself leaves a folder of logs behind
    main(words)


def children(pid: int) -> list[int]:
    """The ranks of a torchrun, in the order of their start; none if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def wait_for(process: BaseProcess, condition: Callable[[], bool]) -> None:
    eventually(lambda: condition() or process.exitcode is not None, HANG)
    assert condition(), "torchrun has ended"


def last_step(out: Path, starts: int) -> int:
    """The last step in the log once it tells of so many starts; 0 before that."""
    if not (out / "log.jsonl").exists():
        return 0
    with suppress(ValueError):  # half a line
        found = rows(out)
        if sum("ranks" in row for row in found) == starts:
            return max(row["step"] for row in found)
    return 0
