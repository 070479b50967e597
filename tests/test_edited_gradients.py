"""Gradients that are edited between backward and step, in every way that torch has.

Before they are averaged that is told, since it is most often clipping by the norm of one rank.
After they were reduced inside backward an edit would be lost, so that it is an error.
"""

from __future__ import annotations

import gc
import math
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import samestep
from samestep.shards.replicated.reduced_gradient import GradientIsReducedError
from tests.ranks import run_forked
from tests.soak import SOAK, twin

LAYOUTS = {
    "none": {"sharding": "none"},
    "zero1": {"sharding": "zero1"},
    "zero2": {"sharding": "zero2"},
    "flat zero1": {"buffers": "flat", "sharding": "zero1"},
    "flat zero2": {"buffers": "flat", "sharding": "zero2"},
}
# What is looked for in a layout of each kind, and in all of them where there is time.
WHERE = {"plain": ["zero1", "flat zero1"], "DTensors": ["none"]}
if SOAK:
    WHERE = {"plain": list(LAYOUTS), "DTensors": ["none", "zero1", "zero2"]}
STAY = ("none", "zero1")  # gradients that were reduced inside backward
EDITS = {
    "in place": lambda params: [param.grad.mul_(0.5) for param in params],
    "through .data": lambda params: [param.grad.data.mul_(0.5) for param in params],
    "detached": lambda params: [param.grad.detach().mul_(0.5) for param in params],
    "signs": lambda params: [param.grad.data.neg_() for param in params],
    "foreach": lambda params: torch._foreach_mul_([param.grad for param in params], 0.5),
    "clip_grad_norm_": lambda params: nn.utils.clip_grad_norm_(params, 0.01),
    "each clipped": lambda params: nn.utils.clip_grad_norm_(params, 0.01, foreach=False),
    "clip_grad_value_": lambda params: nn.utils.clip_grad_value_(params, 0.01),
    "what a rank holds": lambda params: [local(param.grad).mul_(0.5) for param in params],
}


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def small_model(mesh):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
    for layer in model if mesh is not None else ():
        for name, param in list(layer.named_parameters()):
            placed = distribute_tensor(param.data, mesh, [Shard(0)])
            setattr(layer, name, nn.Parameter(placed))
    return model


def built(mesh, layout, **options):
    """Another optimizer that is still there would hold its launches back beside this one."""
    gc.collect()
    gc.freeze()  # what is older is not looked through again
    model = small_model(mesh)
    return model, samestep.MuonAdamW(model, lr=0.1, **LAYOUTS[layout], **options)


def backward(model, data, factor=1.0):
    sum(
        local(param * factor).square().sum() * (1 + data) for param in model.parameters()
    ).backward()


def outcome(mesh, data, layout, edit, *, overlap):
    """What is said of an edit: an error at once, or in the step, or a warning."""
    model, opt = built(mesh, layout, overlap_grad_reduce=overlap)
    backward(model, data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            edit(list(model.parameters()))
        except GradientIsReducedError:
            return "at once"
        try:
            opt.step()
        except RuntimeError as error:
            return str(error)
    return " ".join(str(warning.message) for warning in caught)


# Which edit in which layout: each edit of DTensors and of plain parameters, and each layout.
CASES = [
    (kind, layout, name)
    for kind, layouts in (("plain", list(LAYOUTS)), ("DTensors", ["none", "zero1", "zero2"]))
    for place, layout in enumerate(layouts)
    for number, name in enumerate(EDITS)
    if SOAK or number % len(layouts) == place
]


def outcomes(rank, *, overlap):
    kinds = {kind: (mesh, data) for kind, mesh, data in both_kinds(rank)}
    return {
        (kind, layout, name): outcome(*kinds[kind], layout, EDITS[name], overlap=overlap)
        for kind, layout, name in CASES
    }


def both_kinds(rank):
    """Plain parameters, and DTensors whose copies are averaged, with which data a rank sees."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    return (("plain", None, rank), ("DTensors", mesh["model"], rank // 2))


@twin
def test_an_edit_of_what_is_to_be_averaged_is_told():
    for found in run_forked(4, lambda rank: outcomes(rank, overlap=False)):
        silent = [case for case, said in found.items() if "all gradients were changed" not in said]
        assert silent == []


def test_an_edit_of_what_was_reduced_is_an_error():
    for found in run_forked(4, lambda rank: outcomes(rank, overlap=True)):
        for (kind, layout, name), said in found.items():
            if layout in STAY:
                assert "after it was reduced inside backward" in said, (kind, layout, name, said)
            else:  # no memory, or sums in it
                assert said == "at once", (kind, layout, name, said)


@twin
def test_gradients_that_nobody_edits_raise_no_alarm():
    """Not finite, all zeros, missing, and accumulated."""

    def job(rank):
        for kind, mesh, data in both_kinds(rank):
            for layout in WHERE[kind]:
                for overlap in (False, True):
                    model, opt = built(
                        mesh, layout, overlap_grad_reduce=overlap, max_grad_norm=math.inf
                    )
                    for factor in (1.0, math.nan, math.inf, 0.0, 1.0):
                        with opt.no_sync():
                            backward(model, data, factor)
                        backward(model, data, factor)
                        opt.step()
                        opt.zero_grad()
                    local(model[0].weight).square().sum().backward()
                    opt.step()
        return True

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_forked(4, job) == [True] * 4


def test_gradients_without_elements():
    """They are looked for neither where `synchronize()` has taken them nor among the edited."""

    def job(rank):
        told = []
        for accumulate in (True, False):
            model = nn.Linear(4, 4)
            model.empty = nn.Parameter(torch.empty(0, 3))
            opt = samestep.MuonAdamW(model, lr=0.1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(2):
                    (model(torch.ones(4)).sum() + model.empty.sum()).backward()
                    if accumulate:
                        opt.synchronize()
                    else:
                        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    opt.step()
                    opt.zero_grad()
            told.append([str(warning.message) for warning in caught])
        return told

    for silent, warned in run_forked(2, job):
        assert silent == []
        assert "all gradients were changed between backward() and step()" in warned[0]


@twin
def test_an_assigned_gradient_counts_in_place_of_the_reduced_one():
    """A list of gradients that were clipped out of place, as functional code has it."""

    def trained(mesh, data, layout, overlap):
        model, opt = built(mesh, layout, overlap_grad_reduce=overlap)
        for _ in range(2):
            backward(model, data)
            for param in model.parameters():
                grad = torch.ones_like(param) if overlap else param.grad
                param.grad = torch.ones_like(grad) * (1 + data)
            opt.step()
            opt.zero_grad()
        return [local(param).detach().clone() for param in model.parameters()]

    def job(rank):
        for kind, mesh, data in both_kinds(rank):
            for layout in WHERE[kind]:
                left, right = (trained(mesh, data, layout, overlap) for overlap in (False, True))
                assert all(map(torch.equal, left, right)), (kind, layout)
        return True

    assert run_forked(4, job) == [True] * 4


def test_what_only_a_dtensor_has_is_told_of_the_way_out_too():
    def job(rank):
        for _, mesh, data in both_kinds(rank):
            model, opt = built(mesh, "zero2", overlap_grad_reduce=True)
            backward(model, data)
            grad = model[0].weight.grad
            assert "ReducedGradient" in repr(grad)
            if mesh is None:
                assert not hasattr(grad, "to_local")
                with pytest.raises(AttributeError, match="no attribute 'to_local'"):
                    grad.to_local()
            else:
                for name in ("to_local", "full_tensor", "redistribute", "placements"):
                    with pytest.raises(GradientIsReducedError, match=r"opt.clip_grad_norm_"):
                        getattr(grad, name)
            with pytest.raises(AttributeError):
                grad.of_somebody_else  # noqa: B018 - looked up, and not there
            opt.step()
        return True

    assert run_forked(4, job) == [True] * 4
