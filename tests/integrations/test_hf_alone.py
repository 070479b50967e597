"""`samestep.hf` without Hugging Face's packages: what it gives, and what it refuses."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from torch import nn

import samestep


def built(**options):
    """As the Trainer does it: the first of the pair is called, then with the model."""
    make, given = samestep.hf.factory(**options)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    return model, make()(model, **given)


def test_the_factory_gives_an_optimizer_of_the_model():
    model, opt = built(lr=0.5, momentum=0.8)
    assert isinstance(opt, samestep.MuonAdamW)
    assert {group["rule"]: group["lr"] for group in opt.param_groups} == {"muon": 0.5, "adamw": 0.5}
    assert opt.param_groups[0]["momentum"] == 0.8
    assert not opt.state  # made in the first step
    assert opt.plan.distribution.sharding == "none"
    model(torch.ones(2, 4)).sum().backward()
    opt.step()
    assert len(opt.state) == 4


def test_options_of_the_user_win():
    _, opt = built(kind=samestep.AdamW, sharding="zero2", deferred=False, max_grad_norm=math.inf)
    assert isinstance(opt, samestep.AdamW)
    assert opt.plan.distribution.sharding == "zero2"
    assert len(opt.state) == 4


@pytest.mark.parametrize(
    "make", [samestep.hf.factory, lambda **o: samestep.hf.optimizer(None, **o)]
)
def test_clipping_twice_is_refused(make):
    with pytest.raises(ValueError, match="would clip gradients that the trainer has clipped"):
        make(max_grad_norm=1.0)


def test_an_optimizer_of_somebody_else_is_refused():
    class Wrapper:
        optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())

    with pytest.raises(TypeError, match="expected an optimizer of samestep"):
        samestep.hf.unwrapped(Wrapper())


@pytest.mark.skipif(bool(importlib.util.find_spec("transformers")), reason="transformers is there")
def test_the_callback_needs_transformers():
    with pytest.raises(ModuleNotFoundError, match="transformers"):
        samestep.hf.SaveWhole()
    with pytest.raises(AttributeError, match="no attribute 'save_whol'"):
        samestep.hf.save_whol  # noqa: B018


@pytest.mark.parametrize("kind", ["AdamW", samestep.AdamW.__name__, torch.optim.AdamW, None])
def test_a_kind_that_is_no_optimizer_of_ours_is_told(kind):
    """At once, and not when the Trainer builds it."""
    for build in (samestep.hf.factory, lambda kind: samestep.hf.optimizer(nn.Linear(2, 2), kind)):
        with pytest.raises(TypeError, match=r"kind must be samestep.MuonAdamW.*give the class"):
            build(kind)
