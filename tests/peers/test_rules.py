"""The rules of examples/rules beside the code of those who made them, in float64."""

from importlib import import_module

import pytest
import torch
from torch import nn

import samestep
from examples.rules.muonh import MuonH
from examples.rules.soap import SOAP
from samestep.rules import RULES
from tests.peers.checkouts import FOLDER, importable

pytestmark = [
    pytest.mark.skipif(
        FOLDER is None, reason="checkouts of peers are needed: make test-peers PEERS=/path"
    ),
    pytest.mark.filterwarnings("ignore"),  # theirs
]
SHAPES = [(16, 16), (12, 20), (24, 10)]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    for rule in (MuonH(), SOAP()):
        monkeypatch.setitem(RULES, rule.name, rule)
    torch.set_default_dtype(torch.float64)  # of state that they make
    yield
    torch.set_default_dtype(torch.float32)


def apart(here, there, ours, theirs):
    """The largest difference in 30 steps, against the largest value."""
    largest = 0.0
    for _ in range(30):
        here.grad = torch.randn(here.shape)
        there.grad = here.grad.clone()
        ours.step()
        theirs.step()
        difference = (here.detach() - there.detach()).abs().max()
        largest = max(largest, float(difference / there.detach().abs().max()))
    return largest


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("frequency", [1, 3, 10])
def test_soap_is_its_authors(shape, frequency):
    torch.manual_seed(0)
    here, there = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    options = {"lr": 0.01, "weight_decay": 0.0, "precondition_frequency": frequency}
    ours = samestep.MuonAdamW([{"rule": "soap", "params": [here], **options}])
    with importable(torch.float64):
        theirs = import_module("soap").SOAP([there], **options)
        assert apart(here, there, ours, theirs) < 1e-14


@pytest.mark.parametrize("shape", SHAPES)
def test_muonh_is_megatrons(shape):
    torch.manual_seed(0)
    start = torch.randn(shape)
    here, there = (nn.Parameter(3 * start / start.norm()) for _ in range(2))
    own = {"radius": 3.0, "nesterov": False, "orthogonalize": "quintic", "eps": 1e-15}
    ours = samestep.MuonAdamW(
        [{"rule": "muonh", "params": [here], "lr": 0.05, "compute_dtype": torch.float64, **own}]
    )
    with importable(torch.float64):
        home = import_module("emerging_optimizers.orthogonalized_optimizers.muon_hyperball")
        theirs = home.MuonHyperball([there], lr=0.05, weight_decay=0.0, hyperball_radius=3.0)
        assert apart(here, there, ours, theirs) < 1e-14
