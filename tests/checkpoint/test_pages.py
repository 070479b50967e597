"""Pages for who comes from elsewhere: their examples run, and what they name is there."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import samestep
from samestep.checkpoint import convert_command
from samestep.groups.distribution import Distribution
from samestep.groups.step_options import StepOptions
from samestep.optimizer.muon_adamw import MuonAdamW, MuonAdamWOptions
from samestep.rules import RULES
from tests.checkpoint.foreign.net import Net, adamw_groups, tokens_of
from tests.checkpoint.test_switching import named

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = ["from_megatron", "from_deepspeed", "from_torchtitan", "from_nanochat"]
KNOWN = {
    *(field.name for kind in (Distribution, StepOptions) for field in dataclasses.fields(kind)),
    *(key for rule in RULES.values() for key in rule.defaults),
    *inspect.signature(MuonAdamW.__init__).parameters,
    *MuonAdamWOptions.__annotations__,
    *("format", "keep", "rule", "True", "False", "samestep", "torch", "model", "fully_shard"),
}
OF_TORCH = {"GradScaler", "bfloat16", "amp"}


def table_cells(page):
    """The second cell of every row: what stands for it here."""
    for line in (DOCS / f"{page}.md").read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) >= 3 and not set(cells[0]) <= {"-", ":", " "}:
            yield cells[1]


@pytest.mark.parametrize("page", PAGES)
def test_options_that_a_page_names(page):
    """Keywords in the column of ours are keywords of ours."""
    unknown = []
    for cell in table_cells(page):
        for code in re.findall(r"`([^`]+)`", cell):
            words = re.findall(r"(?<![\w.\"\-*/])([a-z_]\w+)(?==)", code)
            if re.fullmatch(r"[a-z_]\w+", code):
                words.append(code)
            unknown += [word for word in words if word not in KNOWN | OF_TORCH]
            for name in re.findall(r"samestep\.(\w+)", code):
                assert hasattr(samestep, name), name
    assert unknown == []


def test_options_of_the_command():
    """Every option that convert.md has is one, and the other way round."""
    text = (DOCS / "convert.md").read_text()
    told = set(re.findall(r"`--([a-z-]+)", text))
    fields = {field.name.replace("_", "-") for field in dataclasses.fields(convert_command.Options)}
    fields = fields - {"source", "target"} - {"kind"} | {"from"}
    assert told == fields - {"verify"}


class Chat(nn.Module):
    """As nanochat's: an embedding, matrices in layers, a head and scalars."""

    def __init__(self):
        super().__init__()
        layers = nn.ModuleList([nn.ModuleDict({"c_fc": nn.Linear(4, 8, bias=False)})])
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(16, 4), "h": layers})
        self.lm_head = nn.Linear(4, 16, bias=False)
        self.resid_lambdas = nn.Parameter(torch.ones(1))


def examples(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_examples_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = Chat() if page == "from_nanochat" else Net()
    optimizer = torch.optim.AdamW(model.parameters())
    kind = {"from_megatron": named(model, adamw_groups(model)), "from_deepspeed": model}
    if page in kind:
        opt = samestep.AdamW(kind[page])
        for step in (100, 1000):
            samestep.save(f"runs/b/step_{step}", model, opt)
    names = {
        "samestep": samestep,
        "json": json,
        "model": model,
        "optimizer": optimizer,
        "build": lambda: model,
        "groups": named(model, adamw_groups(model)),
        "data": [tokens_of(0), tokens_of(1)],
        "loss": lambda own, batch: own(batch),
    }
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = examples(page)
    assert found
    for text in found:
        exec(text, names)
    assert isinstance(names["opt"], torch.optim.Optimizer)
    if page == "from_deepspeed":
        assert not torch.equal(before["up.weight"], model.up.weight)
    if page == "from_nanochat":
        written = json.loads((tmp_path / "names.json").read_text())
        assert written == [[name for name, _ in model.named_parameters()]]
        rates = {g["rule"]: g["lr"] for g in names["opt"].param_groups if g["rule"] == "muon"}
        assert rates == {"muon": 0.02}
    if page == "from_torchtitan":
        assert "up.weight" in capsys.readouterr().out
