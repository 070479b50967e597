"""Host time of a step over NCCL: the script of the benchmark, at its smallest."""

import json
import sys

import pytest
import torch

from benchmarks import nccl_host
from samestep.comm.nccl import sharing_problem

pytestmark = [pytest.mark.gpu, pytest.mark.own_process]


def test_every_contestant_counts_its_collectives(tmp_path, monkeypatch):
    reason = sharing_problem()
    if torch.cuda.device_count() < 2 and reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(nccl_host, "WARMUP", 1)
    monkeypatch.setattr(nccl_host, "STEPS", 2)
    given = ["benchmarks.nccl_host", "--ranks", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", given)
    nccl_host.main()
    rows = json.loads((tmp_path / "receipt.json").read_text())["rows"]
    assert {row["contestant"] for row in rows} == set(nccl_host.CONTESTANTS)
    assert all(row["collectives"] >= 1 for row in rows)
