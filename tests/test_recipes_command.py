"""`samestep recipes`, and the page that names them."""

import re
from pathlib import Path
from types import SimpleNamespace

from torch import nn

import samestep
from samestep.cli import main
from samestep.recipes import RECIPES

RULES = Path(__file__).parent.parent / "docs" / "rules.md"


def test_the_page_of_rules_names_every_recipe():
    text = RULES.read_text().split("by `model.config.model_type`: ")[1].split(". ")[0]
    assert re.findall(r"`(\w+)`", text) == sorted(RECIPES)


def test_recipes_by_name(capsys):
    assert main(["recipes", "gpt_oss"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert "`'interleaved:2x2880'` | (in, out)" in lines[2]


def test_the_routers_of_older_releases():
    """Mixtral's experts were a list of modules, and its router had another name."""
    model = nn.Module()
    model.config = SimpleNamespace(model_type="mixtral")
    model.block_sparse_moe = nn.Module()
    model.block_sparse_moe.gate = nn.Linear(8, 3, bias=False)
    model.block_sparse_moe.experts = nn.ModuleList([nn.Linear(8, 6, bias=False)])
    groups = samestep.MuonAdamW(model).param_groups
    assert {group["rule"]: group["param_names"] for group in groups} == {
        "adamw": ["block_sparse_moe.gate.weight"],
        "muon": ["block_sparse_moe.experts.0.weight"],
    }


def test_an_unknown_recipe_is_refused(capsys):
    assert main(["recipes", "llamas"]) == 2
    assert "there is no recipe 'llamas'; choose from bert, bloom" in capsys.readouterr().err


def test_all_recipes(capsys):
    assert main(["recipes"]) == 0
    told = capsys.readouterr().out
    assert "deepseek_v3" in told
    assert told.endswith(" vit, whisper.\n")


def test_a_recipe_without_anything_special(capsys):
    assert main(["recipes", "llama"]) == 0
    assert capsys.readouterr().out == "\nNothing is fused, stacked or a router in llama.\n"
