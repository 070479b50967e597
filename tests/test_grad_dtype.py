"""Gradients of 16-bit parameters that are accumulated and reduced in 32 bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import samestep
from tests.ranks import run_cases, run_forked
from tests.soak import twin

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


class TwoDtypes(nn.Module):
    """A trunk of 32 bits and a larger head of 16, part of which a rank may leave out."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 24, dtype=torch.bfloat16)

    def forward(self, x, *, short):
        x = self.trunk(x)
        return self.head((x if short else self.middle(x)).bfloat16()).float().square().sum()


@twin
def test_two_dtypes_in_every_layout():
    """Gradients of both have one dtype, so flat buffers are used for buckets of both."""
    layouts = [
        {"sharding": "none"},
        {"sharding": "zero2"},
        {"buffers": "flat", "sharding": "zero1"},
        {"buffers": "flat", "sharding": "zero2"},
        {"buffers": "flat", "sharding": "zero2", "overlap_grad_reduce": True, "bucket_size": 150},
    ]
    cases = list(itertools.product(layouts, [None, torch.float32, torch.bfloat16], [False, True]))

    def job(rank, case):
        layout, grad_dtype, uneven = case
        torch.manual_seed(0)
        model = TwoDtypes()
        opt = samestep.MuonAdamW(
            model,
            lr=0.01,
            master_weights=True,
            grad_dtype=grad_dtype,
            reduction="ordered",
            **layout,
        )
        inputs = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(1))
        for step in range(3):
            model(inputs[step, rank], short=uneven and step % 2 == rank).backward()
            opt.step()
            opt.zero_grad()
        return [param.detach() for param in model.parameters()]

    found = run_cases(2, cases, job)
    reference = {(dtype, uneven): ranks[0] for (_, dtype, uneven), ranks in found[:6]}
    for (layout, dtype, uneven), ranks in found:
        for values in ranks:
            for value, same in zip(values, reference[dtype, uneven], strict=True):
                assert torch.equal(value, same), (layout, dtype, uneven)


@pytest.mark.parametrize("buffers", ["per_parameter", "flat"])
def test_one_parameter_of_a_bucket_has_a_wider_gradient(buffers):
    """What 32 bits hold arrives, whichever parameter of the bucket comes first."""

    def job(rank):
        found = []
        for wide in ("weight", "bias"):
            layer = nn.Linear(3, 5, dtype=torch.bfloat16)
            layer.get_parameter(wide).grad_dtype = torch.float32
            opt = samestep.AdamW(layer, lr=0.5, master_weights=True, buffers=buffers)
            for param in layer.parameters():
                param.grad = torch.full(param.shape, 256.5, dtype=param.grad_dtype)
            opt.step()
            found.append(opt.full_state(wide, "exp_avg"))
        layer = nn.Linear(3, 5, dtype=torch.bfloat16)
        if rank == 1:
            layer.bias.grad_dtype = torch.float32
        with pytest.raises(RuntimeError, match=r"rank 1 has 'bias: gradients of torch\.float32'"):
            samestep.AdamW(layer, master_weights=True, buffers=buffers)
        return found

    for moments in run_forked(2, job):
        for moment in moments:
            assert torch.allclose(moment, torch.tensor(25.65), atol=1e-4, rtol=0)


def test_wrong_dtypes():
    with pytest.raises(TypeError, match=r"grad_dtype must be a floating torch.dtype, got 'fp32'"):
        samestep.AdamW(nn.Linear(2, 2), grad_dtype="fp32")
