"""`samestep recipes`, and the page that it writes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

import samestep
from samestep.cli import main
from samestep.recipes import RECIPES
from samestep.recipes.command import page

PAGE = Path(__file__).parent.parent / "docs" / "recipes.md"


def test_the_page_is_what_the_command_writes():
    """samestep recipes --page > docs/recipes.md."""
    assert PAGE.read_text() == page()


def test_every_recipe_is_on_the_page():
    missing = [name for name in RECIPES if f"`{name}`" not in page()]
    assert missing == []


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
    assert "there is no recipe 'llamas'; there is: bert, bloom" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--page"]])
def test_all_recipes(words, capsys):
    assert main(["recipes", *words]) == 0
    assert "deepseek_v3" in capsys.readouterr().out
