"""What happens to a model between construction and step: followed, or refused by name."""

import pytest
import torch
from torch import nn

import samestep

KINDS = [samestep.Muon, samestep.AdamW]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False))


def set_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)


@kinds
def test_a_changed_shape_is_refused_before_anything_moves(kind):
    model = two_layers()
    opt = kind(model)
    model[1].weight.data = torch.zeros(8, 4)
    set_gradients(model)
    before = model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"'1\.weight' is .*\(8, 4\) now, but .*\(6, 4\)"):
        opt.step()
    assert torch.equal(model[0].weight, before)


@kinds
def test_a_changed_precision_is_refused_before_anything_moves(kind):
    model = two_layers()
    opt = kind(model)
    model[1].double()
    set_gradients(model)
    before = model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"'1\.weight' is torch.float64.*build the optimizer"):
        opt.step()
    assert torch.equal(model[0].weight, before)


@kinds
def test_cleared_state_starts_afresh(kind):
    """`opt.state.clear()` is how people reset momentum."""
    model, fresh = two_layers(), two_layers()
    opt = kind(model)
    set_gradients(model)
    opt.step()
    opt.state.clear()
    with torch.no_grad():
        for param, other in zip(model.parameters(), fresh.parameters(), strict=True):
            other.copy_(param)
    set_gradients(fresh)
    opt.step()
    kind(fresh).step()
    for param, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(param, other)


def test_an_override_that_its_rule_does_not_read_is_refused():
    with pytest.raises(ValueError, match=r"'0\.bias' follows rule 'adamw', and 'momentum' is"):
        samestep.MuonAdamW(nn.Sequential(nn.Linear(3, 3)), overrides={"0.bias": {"momentum": 0.5}})
    with pytest.raises(ValueError, match="'initial_lr' is no option"):
        samestep.MuonAdamW(nn.Sequential(nn.Linear(3, 3)), overrides={"*": {"initial_lr": 1.0}})
