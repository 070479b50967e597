"""The commands of docs/several_hosts.md, with two hosts that are one machine."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import free_port
from tests.soak import SOAK

PAGE = (Path(__file__).parents[2] / "docs" / "several_hosts.md").read_text()
SMALL = (
    "--layers 1 --width 32 --heads 2 --context 16 --batch-size 4 --warmup 2 --eval-every 100000 "
    "--eval-sequences 4"
)
pytestmark = pytest.mark.skipif(not SOAK, reason="make soak runs it: torch is imported many times")


def torchrun(number):
    """The n-th command of the page that has torchrun train."""
    lines = [line.strip() for line in PAGE.splitlines() if line.startswith("    torchrun")]
    return [line for line in lines if "samestep train" in line][number]


def started(command, folder, port, steps, **environment):
    """A command of the page on this machine, with one rank, a small model and a folder."""
    command = re.sub(r"--nproc-per-node \d+", "--nproc-per-node 1", command)
    command = command.replace("host0:29500", f"localhost:{port}").replace(
        "/shared/run1", str(folder)
    )
    command = command.replace("--save-every 50", f"--save-every 4 --steps {steps} {SMALL}")
    words = shlex.split(command)
    if words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    own = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **environment}
    own["TMPDIR"] = str(folder.parent)  # torchrun leaves its own there
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.Popen(
        words,
        env={**os.environ, "PATH": path, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(processes):
    return [(each.communicate(timeout=300)[0], each.returncode) for each in processes]


@pytest.fixture
def port():
    return free_port()


def worker_of(agent):
    """The process that a torchrun has started, and its rank."""
    (pid,) = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    rank = re.search(r"\0RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_text())
    return int(pid), int(rank[1])


def test_a_rank_of_two_hosts_dies_and_one_host_goes_on(port, tmp_path):
    folder = tmp_path / "run1"
    command = torchrun(0)
    assert "--nnodes 2" in command
    hosts = [started(command, folder, port, steps=100_000) for _ in range(2)]
    latest = folder / "checkpoints" / "LATEST"
    until = time.monotonic() + 300
    while not latest.exists():
        assert time.monotonic() < until, "no checkpoint came"
        assert all(host.poll() is None for host in hosts), ended(hosts)
        time.sleep(0.2)
    pid, rank = worker_of(hosts[1])
    os.kill(pid, signal.SIGKILL)
    (told, left), (killed, other) = ended(hosts)
    assert f"rank {rank} did not answer: its process has ended" in told
    assert "exitcode  : -9" in killed
    assert left != 0 != other

    saved = int(latest.read_text().strip().removeprefix("step_"))
    command = torchrun(1)
    assert "--nnodes" not in command
    ((told, code),) = ended([started(command, folder, port, steps=saved + 2)])
    assert code == 0, told
    assert f"on 1 rank(s) of cpu, resumed at step {saved}" in told


def test_slurm_without_torchrun(port, tmp_path):
    """What the page has srun run, with Slurm's variables for two hosts of one rank."""
    (script,) = re.findall(r"srun --kill-on-bad-exit bash -c '(.*?)'", PAGE, re.DOTALL)
    tasks = [
        started(
            shlex.join(["bash", "-c", script]),
            tmp_path / "run1",
            port,
            steps=2,
            SLURM_PROCID=str(rank),
            SLURM_NTASKS="2",
            SLURM_LOCALID="0",
            SLURM_NTASKS_PER_NODE="1",
            MASTER_ADDR="localhost",
            MASTER_PORT=str(port),
        )
        for rank in range(2)
    ]
    (told, first), (rest, second) = ended(tasks)
    assert first == second == 0, told + rest
    assert "on 2 rank(s) of cpu, started at step 0" in told
