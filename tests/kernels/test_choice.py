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


def test_a_graph_of_the_step_is_refused_where_there_cannot_be_one():
    param = torch.nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match="cuda_graph=True and compile exclude each other"):
        samestep.Muon([param], cuda_graph=True, compile="eager")
    with pytest.raises(TypeError, match="cuda_graph"):
        samestep.Muon([param], cuda_graph="yes")
    optimizer = samestep.AdamW([param], cuda_graph=True)
    param.grad = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match=r"param_groups\[0\]: kernels are for CUDA"):
        optimizer.step()
    assert torch.equal(param, torch.ones(4, 4))
