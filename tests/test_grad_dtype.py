"""Gradients of 16-bit parameters that are accumulated and reduced in 32 bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import samestep
from tests.ranks import run_forked

LAYOUTS = {
    "one process": {},
    "zero2": {"sharding": "zero2"},
    "flat zero1": {"buffers": "flat", "sharding": "zero1"},
    "flat zero2": {"buffers": "flat", "sharding": "zero2", "overlap_grad_reduce": True},
}


def trained(layout, rank, grad_dtype):
    """Two micro-batches: 256 and a half, which bfloat16 cannot add."""
    layer = nn.Linear(3, 5, bias=False).bfloat16()
    nn.init.zeros_(layer.weight)
    opt = samestep.AdamW(layer, lr=0.5, master_weights=True, grad_dtype=grad_dtype, **layout)
    with opt.no_sync():
        layer(torch.full((1, 3), 256.0, dtype=torch.bfloat16)).sum().backward()
    layer(torch.full((1, 3), 0.5, dtype=torch.bfloat16)).sum().backward()
    mean = opt.full_gradient("weight")
    opt.step()
    return mean, opt.full_state("weight", "exp_avg")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_added_is_not_rounded(layout):
    def job(rank):
        return trained(LAYOUTS[layout], rank, torch.float32), trained(LAYOUTS[layout], rank, None)

    found = [job(0)] if layout == "one process" else run_forked(2, job)
    for (mean, moment), (rounded, rounded_moment) in found:
        assert mean.dtype == torch.float32
        assert mean.eq(256.5).all()
        assert torch.allclose(moment, torch.tensor(25.65))
        assert rounded.eq(256).all()
        assert torch.allclose(rounded_moment, torch.tensor(25.6))


def test_wrong_dtypes():
    with pytest.raises(TypeError, match=r"grad_dtype must be a floating torch.dtype, got 'fp32'"):
        samestep.AdamW(nn.Linear(2, 2), grad_dtype="fp32")
