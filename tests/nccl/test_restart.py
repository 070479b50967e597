"""A host is lost in training: the others say so and end, torchrun starts again on fewer ranks."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from samestep.comm.nccl import sharing_problem
from tests.limits import HANG, eventually
from tests.train.runs import text_file

STEPS = 40
FLAGS = {
    "--width": 32, "--layers": 2, "--heads": 2, "--kv-heads": 1, "--context": 16,
    "--batch-size": 8, "--steps": STEPS, "--warmup": 4, "--momentum-warmup": 10,
    "--log-every": 1, "--eval-every": STEPS, "--eval-sequences": 4, "--save-every": 5,
    "--lr": 0.01,
}  # fmt: skip


def losses(out: Path) -> dict[int, float]:
    """The loss of each step, as the last attempt has it."""
    path = out / "log.jsonl"
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def agent(port: int, hosts: str, place: int, words: list[str], log: Path) -> subprocess.Popen:
    """A torchrun with two ranks, one of several hosts; they meet at the first of them."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", hosts,
        "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
        "--rdzv-id", "restart", "--local-addr", "127.0.0.1", "--max-restarts", "3",
        "--rdzv-conf", f"last_call_timeout=2,keep_alive_interval=1,is_host={int(place == 0)}",
        "-m", "samestep", *words,
    ]  # fmt: skip
    # What torchrun leaves behind when it is killed goes with the folder.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(log.parent)}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    with log.open("w") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=file, start_new_session=True, env=environment
        )


def end(process: subprocess.Popen) -> None:
    """Kill a torchrun with its ranks."""
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
    )
    for pid in [process.pid, *map(int, children.stdout.split())]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def lose_a_host(folder: Path, device: str) -> None:
    """Two hosts of two ranks, of which one is killed, beside one host that nobody disturbs."""
    data = text_file(folder)
    words = ["train", "--data", str(data), "--device", device]
    words += [str(word) for pair in FLAGS.items() for word in pair]
    undisturbed, lost = folder / "undisturbed", folder / "lost"
    alone = agent(free_port(), "1:1", 0, [*words, "--out", str(undisturbed)], folder / "alone.txt")
    try:
        assert alone.wait(HANG) == 0, (folder / "alone.txt").read_text()
    finally:
        end(alone)
    port = free_port()
    logs = folder / "first.txt", folder / "second.txt"
    words += ["--out", str(lost)]
    both = [agent(port, "1:2", place, words, log) for place, log in enumerate(logs)]
    try:
        eventually(lambda: len(losses(lost)) >= 12 or both[0].poll() is not None)
        assert both[0].poll() is None, logs[0].read_text()
        end(both[1])
        assert both[0].wait(HANG) == 0, logs[0].read_text()
    finally:
        for process in both:
            end(process)
    told = logs[0].read_text()
    assert "did not answer" in told or "gone" in told or "ended" in told, told
    rows = [json.loads(line) for line in (lost / "log.jsonl").read_text().splitlines()]
    starts = [(row["event"], row["ranks"]) for row in rows if "ranks" in row]
    assert starts == [("started", 4), ("resumed", 2)]
    found, expected = losses(lost), losses(undisturbed)
    assert found.keys() == expected.keys() == set(range(1, STEPS + 1))
    worst = max(abs(found[step] - expected[step]) for step in expected)
    # Four ranks and two add up in another order; that is all that may differ.
    assert worst < 1e-3, worst


@pytest.mark.gpu
def test_training_goes_on_over_nccl(tmp_path: Path) -> None:
    reason = sharing_problem()
    if torch.cuda.device_count() < 4 and reason is not None:
        pytest.skip(reason)
    lose_a_host(tmp_path, "cuda")
