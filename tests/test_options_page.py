"""docs/options.md is what the code says: every keyword and group key, and every value it takes."""

import json
import re
from functools import partial
from typing import get_args

import pytest

from samestep.groups.distribution import Distribution
from samestep.rules import RULES
from tests.inventory import LISTED
from tests.options_page import PAGE, meanings, page, table

WORDS = {
    **{
        (Distribution, name): get_args(kind)
        for name, kind in Distribution.__annotations__.items()
        if get_args(kind) and all(isinstance(each, str) for each in get_args(kind))
    },
    **{
        (type(RULES[rule]), name): check.keywords["allowed"]
        for rule in ("muon", "adamw")
        for name, check in RULES[rule].taken.items()
        if isinstance(check, partial) and "allowed" in check.keywords
    },
}


def test_the_page_is_what_the_code_says():
    """Written anew by `make pages`."""
    assert PAGE.read_text() == page()


def test_every_option_is_on_the_page():
    listed = json.loads(LISTED.read_text())
    first = {cell for row in PAGE.read_text().splitlines() for cell in row.split(" | ")[:1]}
    named = set(re.findall(r"`(\w+)`", " ".join(first)))
    wanted = {name for kind in listed if kind.startswith("options of") for name in listed[kind]}
    assert wanted - {"params", "options"} - named == set()


@pytest.mark.parametrize(("owner", "name"), WORDS, ids=lambda of: getattr(of, "__name__", of))
def test_every_word_that_an_option_takes_is_told(owner: type, name: str):
    text = meanings(owner)[name]
    assert [word for word in WORDS[owner, name] if word and f'"{word}"' not in text] == []


def test_an_option_that_came_later_has_its_version():
    rows = table({"a": "0.1.0", "b": "9.0"}, {"a": "old.", "b": "new."}, {"a": (), "b": ()})
    assert rows.splitlines()[2:] == ["| `a` | old. |", "| `b` | new. Since 9.0. |"]
