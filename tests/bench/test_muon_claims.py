"""Two claims about Muon in small trainings: what is measured, and that the page has it."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import samestep
from benchmarks import muon_claims
from benchmarks.muon_claims import GATED, Options, completed, gate_optimizer, measure, table
from samestep.models.gpt import GPT, GPTConfig
from samestep.rules import RULES
from samestep.train.corpus import Corpus

ROOT = Path(__file__).parents[2]
TINY = {"seeds": 2, "steps": 3, "width": 16, "layers": 1, "context": 8, "batch": 2}


@pytest.fixture(autouse=True)
def gated_rules():
    """The rules of the script, for one test: messages elsewhere list all that are registered."""
    muon_claims.register_gated()
    yield
    for rule in GATED.values():
        RULES.pop(rule.name, None)


def receipt(claim):
    path = ROOT / "benchmarks" / "results" / f"muon_claims_{claim}.json"
    return json.loads(path.read_text())


def text():
    data = torch.arange(4000, dtype=torch.int64).sin().mul(99).add(100).to(torch.uint8)
    return Corpus(data[:3000], data[3000:], ("a",), ("b",))


@pytest.mark.parametrize("claim", ["qkv", "gate"])
def test_the_page_has_the_tables_of_the_receipts(claim):
    found = receipt(claim)
    assert found["asked"]["seeds"] == 3
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert "\n\n" + "\n".join(table(found)) + "\n\n" in page


@pytest.mark.parametrize("claim", ["qkv", "gate"])
def test_all_arms_of_a_seed_start_alike(claim):
    options = completed(Options(claim, rates=(0.02,), **TINY))
    found = measure(options, text(), lambda line: None)
    arms = {row["arm"]: [run["loss"] for run in row["runs"]] for row in found["rows"]}
    assert len(arms) == (3 if claim == "qkv" else 4)
    assert all(len(losses) == 2 and None not in losses for losses in arms.values())
    assert len({tuple(losses) for losses in arms.values()}) == len(arms)  # each does something
    for seed in (0, 1):  # and three small steps lead to about the same
        losses = [each[seed] for each in arms.values()]
        assert max(losses) - min(losses) < 0.1
    assert len(table(found)) == 2 + len(arms)


def test_a_training_that_breaks_is_told(monkeypatch):
    def broken(self, param, grad, *args):
        update = original(self, param, grad, *args)
        return update._replace(param=update.param * float("inf"))

    original = muon_claims.GatedMuon.update
    monkeypatch.setattr(muon_claims.GatedMuon, "update", broken)
    options = completed(Options("gate", rates=(0.02,), **TINY))
    with pytest.warns(UserWarning, match="was not finite"):
        found = measure(options, text(), lambda line: None)
    told = {row["arm"]: row["runs"][0]["not_finite_at"] for row in found["rows"]}
    assert told == {
        "none": None, "decay by parameter": None, "decay by gradient": 1, "update by gradient": 1
    }  # fmt: skip
    assert table(found)[-1].endswith("| - | - | 2 of 2 (step 1, 1) |")


def stepped(rule, decay):
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(6, 4))
    before = param.detach().clone()
    opt = samestep.MuonAdamW([{"params": [param], "rule": rule, "lr": 0.5, "weight_decay": decay}])
    param.grad = torch.randn(6, 4)
    opt.step()
    return before, param.detach(), param.grad


def test_gates_are_what_they_say():
    """Of the first step: against the shipped rule without a gate."""
    before, plain, grad = stepped("muon", 0.0)
    _, gated, _ = stepped(GATED["update by gradient"].name, 0.0)
    against = (before - plain) * grad < 0
    assert 0 < against.sum() < grad.numel()
    assert torch.equal(gated[against], before[against])
    enlarged = grad.numel() / int((~against).sum())
    moved = (before - gated)[~against]
    torch.testing.assert_close(moved, enlarged * (before - plain)[~against], rtol=1e-4, atol=1e-6)
    _, decayed, _ = stepped(GATED["decay by gradient"].name, 0.5)
    _, every, _ = stepped("muon", 0.5)
    torch.testing.assert_close(decayed[against], plain[against], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(decayed[~against], every[~against], rtol=1e-4, atol=1e-6)


def test_matrices_of_the_gated_model_are_all_muons():
    opt = gate_optimizer(GPT(GPTConfig(width=16, layers=2, heads=2)), 0.1, "decay by parameter")
    matrices, others = opt.param_groups
    assert matrices["cautious"]
    assert all(name.startswith("blocks.") for name in matrices["param_names"])
    assert len(matrices["params"]) == 2 * 6
    assert others["rule"] == "adamw"
