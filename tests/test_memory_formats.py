"""Parameters with strides of their own (channels_last, transposed) train in every layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import samestep
from tests.ranks import run_cases, run_forked, run_threaded
from tests.soak import SOAK

STEPS = 3 if SOAK else 2
CASES = [
    {"sharding": "none"},
    {"sharding": "none", "grads": "reduced"},
    {"sharding": "zero1"},
    {"sharding": "zero2"},
    {"sharding": "zero2", "overlap_grad_reduce": True, "bucket_size": 200},
    {"buffers": "flat", "sharding": "zero2", "overlap_param_gather": True, "bucket_size": 200},
    {"sharding": "zero1", "master_weights": True, "dtype": torch.bfloat16},
    {"sharding": "zero2", "offload": "state"},
    {"buffers": "flat", "sharding": "zero1"},
    {"buffers": "flat", "sharding": "zero2", "overlap_grad_reduce": True},
]


class Net(nn.Module):
    """A convolution for Muon, one for AdamW, whose slices lie on several ranks, and a matrix."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Conv2d(3, 5, 3)
        self.second = nn.Conv2d(4, 6, 3)
        self.turned = nn.Parameter(torch.empty(6, 7))
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(generator=generator)
        self.to(dtype)

    def forward(self, rank, step):
        """Elementwise, so that strides have no part in the gradients."""
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss = 0.0
        for param in self.parameters():
            noise = torch.randn(param.shape, generator=generator).to(param.dtype)
            loss = loss + (param * noise).float().square().sum()
        return loss


def strided(model):
    """The same values, otherwise laid out."""
    model.to(memory_format=torch.channels_last)
    model.turned.data = model.turned.data.t().contiguous().t()
    return model


def trained(rank, case, layout, folder=None):
    options = {key: value for key, value in case.items() if key != "dtype"}
    model = Net(case.get("dtype", torch.float32))
    if layout == "strided":
        strided(model)
    before = [param.stride() for param in model.parameters()]
    opt = samestep.MuonAdamW(
        model,
        lr=0.02,
        overrides={
            "first.weight": {"rule": "muon", "flatten": True},
            "second.weight": {"rule": "adamw"},
        },
        reduction="ordered",
        **options,
    )
    for step in range(STEPS):
        opt.wait_for_parameters()  # read here, and not by the modules that have them
        if layout == "later" and step == 1:
            strided(model)
        model(0 if case.get("grads") == "reduced" else rank, step).backward()
        opt.step()
        opt.zero_grad()
    opt.wait_for_parameters()
    after = [param.stride() for param in model.parameters()]
    if case.get("buffers") != "flat" and layout != "later":
        assert after == before
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    state = opt.whole_state()
    if folder is not None:
        samestep.save(folder, model, opt)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        samestep.load(folder, model, opt)
        for name, value in values.items():
            assert torch.equal(model.get_parameter(name), value), name
            assert torch.equal(opt.full_parameter(name).to(value.dtype), value), name
    return values, state


def test_every_layout_gives_the_bits_of_contiguous_parameters(tmp_path):
    def job(rank, numbered):
        number, case = numbered
        folder = tmp_path / str(number)
        return [
            trained(rank, case, "contiguous"),
            trained(rank, case, "strided", folder),
            trained(rank, case, "later"),
        ]

    for (_, case), ranks in run_cases(2, list(enumerate(CASES)), job):
        values, state = ranks[0][0]
        for found in ranks:
            for others, states in found:
                for name, value in values.items():
                    assert torch.equal(others[name], value), (case, name)
                    for key, tensor in state[name].items():
                        assert torch.equal(states[name][key], tensor), (case, name, key)


def test_replicas_that_differ_take_the_first_ones_values():
    def job(rank):
        model = strided(Net())
        with torch.no_grad():
            model.first.weight.add_(rank)
        with pytest.warns(UserWarning, match="parameters differ between ranks"):
            samestep.MuonAdamW(model)
        return model.first.weight.detach()

    first, second = run_forked(2, job)
    assert torch.equal(first, second)
    assert torch.equal(first, Net().first.weight)
    assert first.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("buffers", ["per_parameter", "flat"])
def test_an_expanded_parameter_is_refused_by_name(buffers):
    def job(rank):
        params = [("fine", nn.Parameter(torch.ones(3)))]
        params.append(("spread", nn.Parameter(torch.ones(3, 1).expand(3, 4))))
        with pytest.raises(
            ValueError, match=r"'spread' is expanded, so that several of its elements"
        ):
            samestep.MuonAdamW(params, buffers=buffers)
        return True

    assert run_threaded(2, job) == [True, True]
