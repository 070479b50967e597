"""Whether kernels run, or why not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import samestep
from samestep.comm.agreement import RanksDisagreeError
from samestep.kernels import choice
from tests.ranks import run_forked


def test_there_are_none_for_cpu():
    assert choice.missing(torch.device("cpu")) == "kernels are for CUDA, and the device is cpu"
    assert choice.line_of(torch.device("cpu")).startswith("without kernels: kernels are for CUDA")


def test_ranks_with_and_without_kernels_are_refused(monkeypatch):
    def build(rank):
        if rank == 1:
            without = "without kernels: triton is not installed"
            monkeypatch.setattr(samestep.replicated, "line_of", lambda device: without)
        with pytest.raises(RanksDisagreeError, match="triton is not installed"):
            samestep.AdamW(nn.Linear(3, 2))
        return True

    assert run_forked(2, build) == [True, True]
