"""examples/train_gpt.py under a real torchrun that starts all ranks again when one is killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.limits import HANG, eventually, limit
from tests.soak import SOAK
from tests.train.runs import losses, rows, text_file, train, words

pytestmark = pytest.mark.usefixtures("no_torchrun")

ROOT = Path(__file__).parent.parent.parent
FLAGS = {"steps": 60 if SOAK else 40, "dropout": 0.1, "micro_batch": 4, "log_every": 1}


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
        assert process.wait(HANG) == 0, log.read_text()
    events = [row["event"] for row in rows(out) if "ranks" in row]
    assert events == ["started"] + ["resumed"] * kills
    assert losses(out) == losses(tmp_path / "undisturbed")
    assert losses(out, "val_loss") == losses(tmp_path / "undisturbed", "val_loss")


@contextmanager
def torchrun(arguments: list[str], restarts: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Two ranks under torchrun; nothing of them is left at the end."""
    log = Path(arguments[arguments.index("--data") + 1]).with_name("torchrun.txt")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", str(restarts), "--monitor-interval", "0.1", "examples/train_gpt.py",
    ]  # fmt: skip
    seen: set[int] = set()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            # torchrun itself leaves a folder of logs behind.
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(log.parent)},
        )
    try:
        yield process, log
    finally:
        seen.update(children(process.pid))
        process.terminate()
        try:
            process.wait(limit(20.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in seen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """The ranks of a torchrun, in the order of their start; none if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def wait_for(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    eventually(lambda: condition() or process.poll() is not None, HANG)
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
