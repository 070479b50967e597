"""Files in which earlier versions kept state in other shapes load without loss."""

import pytest
import torch
from torch import nn

import samestep
from samestep.checkpoint import saving
from samestep.checkpoint.logical import Pieces, tensors_of
from samestep.layout.boxes import whole_box
from tests.ranks import run_forked

SHAPES = {"tall": (7, 1), "wide": (1, 6), "experts": (3, 4, 1), "usual": (5, 4)}


def built(seed, **options):
    torch.manual_seed(seed)
    model = nn.ParameterDict({name: torch.randn(shape) for name, shape in SHAPES.items()})
    named = list(model.named_parameters())
    return model, samestep.Muon(named, lr=0.1, variance_beta2=0.9, **options)


def step(model, opt, seed):
    torch.manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape)
    opt.step()


def trained():
    model, opt = built(0)
    step(model, opt, 1)
    return model, opt


def variances(opt):
    return {name: opt.full_state(name, "variance") for name in SHAPES}


def old_tensors(*given):
    """Variances of as many numbers as their parameters have their shapes."""
    found = tensors_of(*given)
    for name in ("tall", "wide", "experts"):
        (held,) = found[f"state.{name}.variance"].held
        tensor = held.tensor.view(SHAPES[name])
        found[f"state.{name}.variance"] = Pieces(
            tensor.shape, tensor.dtype, tensor.device, [whole_box(tensor)]
        )
    return found


def load_job(rank, folder, saved):
    found = []
    for load in (
        lambda model, opt: samestep.load(folder, model, opt),
        lambda model, opt: opt.load_state_dict(saved),
    ):
        model, opt = built(7, sharding="zero2", crossover=1)
        step(model, opt, 8)
        load(model, opt)
        found.append(variances(opt))
    return found


def test_variances_in_the_shape_of_their_parameters(tmp_path, monkeypatch):
    model, opt = trained()
    monkeypatch.setattr(saving, "tensors_of", old_tensors)
    samestep.save(tmp_path / "a", model, opt)
    saved = opt.state_dict()
    for name, number in zip(
        *(saved["param_groups"][0][k] for k in ("param_names", "params")), strict=True
    ):
        entry = saved["state"][number]
        assert entry["variance"].ndim == 1
        if name != "usual":
            saved["state"][number] = {**entry, "variance": entry["variance"].view(SHAPES[name])}
    expected = variances(opt)
    for found in [each for rank in run_forked(2, load_job, tmp_path / "a", saved) for each in rank]:
        assert all(torch.equal(found[name], expected[name]) for name in SHAPES)
    _, into = built(7)
    into.load_state_dict(saved)
    assert all(torch.equal(variances(into)[name], expected[name]) for name in SHAPES)


def test_other_shapes_are_still_refused():
    """A moment of as many elements is that of another parameter."""
    param = nn.Parameter(torch.zeros(6))
    saved = samestep.AdamW([nn.Parameter(torch.zeros(2, 3))]).state_dict()
    with pytest.raises(ValueError, match=r"was saved with shape \(2, 3\), but \(6,\)"):
        samestep.AdamW([param]).load_state_dict(saved)
