"""What the pages say to who comes from elsewhere: options are ours, figures are the receipt's."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path

import samestep
from samestep.checkpoint import convert_command
from samestep.groups.distribution import Distribution
from samestep.groups.step_options import StepOptions
from samestep.optimizer.muon_adamw import MuonAdamW, MuonAdamWOptions
from samestep.rules import RULES
from tests.peers.__main__ import RECEIPT, summary

DOCS = Path(__file__).parent.parent.parent / "docs"
KNOWN = {
    *(field.name for kind in (Distribution, StepOptions) for field in dataclasses.fields(kind)),
    *(key for rule in RULES.values() for key in rule.defaults),
    *inspect.signature(MuonAdamW.__init__).parameters,
    *MuonAdamWOptions.__annotations__,
    *("rule", "kernel"),  # a key of groups, and an argument of presets
}
OF_TORCH = {"GradScaler", "bfloat16", "fully_shard"}


def table_cells():
    """The second cell of every row of a table of two columns: what stands for it here."""
    for line in (DOCS / "coming_from.md").read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 2:
            yield cells[1]


def test_options_that_a_page_names():
    """Keywords in the column of ours are keywords of ours."""
    unknown = []
    for cell in table_cells():
        for code in re.findall(r"`([^`]+)`", cell):
            words = re.findall(r"(?<![\w.\"\-*/])([a-z_]\w+)(?==)", code)
            if re.fullmatch(r"[a-z_]\w+", code):
                words.append(code)
            unknown += [word for word in words if word not in KNOWN | OF_TORCH]
            for name in re.findall(r"samestep\.(\w+)", code):
                assert hasattr(samestep, name), name
    assert unknown == []


def test_differences_are_those_of_the_receipt():
    table = "\n".join(summary(json.loads(RECEIPT.read_text())))
    assert table in (DOCS / "coming_from.md").read_text()


def test_options_of_the_command():
    """Every option of the command that the page has is one, and the other way round."""
    text = (DOCS / "checkpoints.md").read_text()
    told = set(re.findall(r"`--([a-z-]+)", text))
    fields = {field.name.replace("_", "-") for field in dataclasses.fields(convert_command.Options)}
    fields = fields - {"source", "target"} - {"kind"} | {"from"}
    assert told == fields
