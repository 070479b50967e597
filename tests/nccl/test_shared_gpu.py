"""Layouts and faults over NCCL, by ranks that share a GPU where there is one for all of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from samestep.comm.nccl import sharing_problem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nccl_ranks")]


@pytest.fixture
def nccl_ranks() -> None:
    reason = sharing_problem()
    if torch.cuda.device_count() < 4 and reason is not None:
        pytest.skip(reason)


def stress(out: Path, *words: str) -> dict:
    """Run `samestep stress` over NCCL; its receipt."""
    command = [sys.executable, "-m", "samestep", "stress", "--backend", "nccl", "--share-gpus"]
    done = subprocess.run(
        [*command, "--watchdog", "60", "--out", str(out), *words],
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    (path,) = out.glob("*.json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_bytes())


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_is_exact(tmp_path: Path, ranks: int) -> None:
    scenario = "conditional_compute"
    words = ["--scenario", scenario, "--steps", "20", "--world-size", str(ranks), "--lanes", "1"]
    receipt = stress(tmp_path / "out", *words)
    ran = [case for case in receipt["cases"] if case["status"] != "does_not_apply"]
    assert len(ran) >= 13
    assert {case["status"] for case in ran} == {"exact"}
    assert receipt["ran"]["actual_backend"] == "nccl"
    assert receipt["ran"]["shared_gpus"] == (torch.cuda.device_count() < ranks)


def test_faults_are_named(tmp_path: Path) -> None:
    words = ["--faults", "--layout", "zero2,flat_overlap,fsdp2", "--watchdog", "15", "--lanes", "4"]
    receipt = stress(tmp_path / "out", *words)
    assert len(receipt["cases"]) == 36
    assert all(case["passed"] for case in receipt["cases"])
