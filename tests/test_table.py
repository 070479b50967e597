"""What `opt.table()` shows: one line per parameter, and totals that add up."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
import torch
from torch import nn

import samestep

TOTAL = re.compile(
    r"(?P<rule>\w+): (?P<count>[\d,]+) parameters?, (?P<elements>[\d,]+) elements? "
    r"\((?P<share>[\d.]+)%\)(?: in (?P<blocks>[\d,]+) blocks?)?"
)


class Total(NamedTuple):
    """One line below the table."""

    count: int
    elements: int
    share: float
    blocks: int | None


def number(text: str) -> int:
    return int(text.replace(",", ""))


def read_table(text: str) -> tuple[list[dict[str, str]], dict[str, Total]]:
    """The rows by column title, and the totals by rule; fails on any line it does not know."""
    header, ruler, *lines = text.splitlines()
    spans = [match.span() for match in re.finditer("-+", ruler)]
    titles = [header[slice(*span)].strip() for span in spans]
    rows, totals = [], {}
    for line in lines:
        total = TOTAL.fullmatch(line)
        if total:
            totals[total["rule"]] = Total(
                number(total["count"]),
                number(total["elements"]),
                float(total["share"]),
                None if total["blocks"] is None else number(total["blocks"]),
            )
        else:
            assert not totals, f"a row below the totals: {line!r}"
            cells = [line[slice(*span)].strip() for span in spans]
            assert " ".join(line.split()) == " ".join(" ".join(cells).split()), line
            rows.append(dict(zip(titles, cells, strict=True)))
    return rows, totals


def row_of(opt: torch.optim.Optimizer, name: str) -> dict[str, str]:
    rows, _ = read_table(opt.table())
    (row,) = [row for row in rows if row["parameter"] == name]
    return row


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=dtype))


class Attention(nn.Module):
    """Three kinds of parameter, one of them cut into blocks of two shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 64)
        self.out = nn.Linear(16, 16, bias=False)
        self.gain = parameter()


def test_a_whole_table():
    opt = samestep.MuonAdamW(
        Attention(), lr=0.01, scalar_lr=0.5, overrides={"qkv.weight": {"split_sizes": (32, 16, 16)}}
    )
    rows, totals = read_table(opt.table())
    assert {row["parameter"]: tuple(row.values())[1:7] for row in rows} == {
        "embed.weight": ("100 x 16", "adamw", "embedding", "-", "0.01", "1"),
        "norm.weight": ("16", "adamw", "scalar", "-", "0.5", "1"),
        "norm.bias": ("16", "adamw", "scalar", "-", "0.5", "1"),
        "qkv.weight": ("64 x 16", "muon", "matrix", "32 x 16, 2 of 16 x 16", "0.01", "1.131, 0.8"),
        "qkv.bias": ("64", "adamw", "scalar", "-", "0.5", "1"),
        "out.weight": ("16 x 16", "muon", "matrix", "16 x 16", "0.01", "0.8"),
        "gain": ("scalar", "adamw", "scalar", "-", "0.5", "1"),
    }
    assert {row["parameter"]: tuple(row.values())[7:] for row in rows} == {
        "embed.weight": ("0.1", "in an embedding"),
        "norm.weight": ("0.1", "a vector"),
        "norm.bias": ("0.1", "a vector"),
        "qkv.weight": ("0.1", "a hidden matrix"),
        "qkv.bias": ("0.1", "a vector"),
        "out.weight": ("0.1", "a hidden matrix"),
        "gain": ("0.1", "a vector"),
    }
    assert totals == {
        "adamw": Total(5, 1697, 57.0, None),
        "muon": Total(2, 1280, 43.0, 4),
    }


def test_the_columns_line_up_and_have_titles():
    lines = samestep.MuonAdamW(nn.Linear(3, 2)).table().splitlines()
    assert lines[0].split() == [
        "parameter",
        "shape",
        "rule",
        "role",
        "blocks",
        "lr",
        "lr",
        "factor",
        "decay",
        "reason",
    ]
    assert set(lines[1]) == {"-", " "}
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("adjust_lr", "shape", "factor"),
    [
        # 0.2 sqrt(max(rows, cols)): whichever way round.
        ("match_rms_adamw", (100, 4), "2"),
        ("match_rms_adamw", (4, 100), "2"),
        # sqrt(max(1, rows / cols)): only a tall matrix is scaled.
        ("original", (100, 4), "5"),
        ("original", (4, 100), "1"),
        (None, (100, 4), "1"),
    ],
)
def test_the_learning_rate_factor(adjust_lr, shape, factor):
    opt = samestep.Muon([("w", parameter(*shape))], adjust_lr=adjust_lr)
    assert row_of(opt, "w")["lr factor"] == factor


@pytest.mark.parametrize(
    ("shape", "options", "cut", "factor"),
    [
        ((3, 25, 4), {}, "3 of 25 x 4", "1"),
        ((4, 5, 5, 4), {"flatten": True}, "4 x 100", "2"),
        ((50, 25), {"split_sizes": (25, 25)}, "2 of 25 x 25", "1"),
        # Unequal blocks are listed, each with the factor of its own shape.
        ((125, 1), {"split_sizes": (100, 25)}, "100 x 1, 25 x 1", "2, 1"),
        ((2, 125, 1), {"split_sizes": (100, 25)}, "2 of 100 x 1, 2 of 25 x 1", "2, 1"),
        # Two shapes with the same longer side have the same factor: shown once.
        ((75, 50), {"split_sizes": (50, 25)}, "50 x 50, 25 x 50", "1.414"),
        ((0, 5), {}, "-", "1"),
    ],
)
def test_the_factor_is_that_of_the_blocks_not_of_the_parameter(shape, options, cut, factor):
    row = row_of(samestep.Muon([("w", parameter(*shape))], **options), "w")
    assert row["blocks"] == cut
    assert row["lr factor"] == factor


def test_parameters_without_names_are_shown_by_their_place():
    opt = samestep.MuonAdamW(
        [
            {"params": [parameter(2, 3), parameter(4, 3)], "rule": "muon"},
            {"params": [parameter(5)], "rule": "adamw"},
        ]
    )
    rows, totals = read_table(opt.table())
    assert [(row["parameter"], row["shape"], row["role"]) for row in rows] == [
        ("param_groups[0][0]", "2 x 3", ""),
        ("param_groups[0][1]", "4 x 3", ""),
        ("param_groups[1][0]", "5", ""),
    ]
    assert (totals["muon"].count, totals["adamw"].count) == (2, 1)


@pytest.mark.parametrize("make", [torch.tensor, lambda lr: torch.tensor([lr])], ids=["0-D", "1-D"])
def test_a_tensor_learning_rate_is_shown_as_its_number(make):
    lr = make(0.25)
    opt = samestep.MuonAdamW(nn.Linear(3, 2), lr=lr)
    assert [row["lr"] for row in read_table(opt.table())[0]] == ["0.25", "0.25"]
    for group in opt.param_groups:  # each group has a tensor of its own
        group["lr"].fill_(0.125)
    assert [row["lr"] for row in read_table(opt.table())[0]] == ["0.125", "0.125"]


def test_the_table_follows_the_groups():
    """A scheduler's learning rate and a group added later are shown."""
    opt = samestep.Muon([("w", parameter(3, 2))], lr=1.0)
    opt.param_groups[0]["lr"] = 0.75
    opt.add_param_group({"params": [("new", parameter(2, 2))], "lr": 0.125})
    rows, totals = read_table(opt.table())
    assert [(row["parameter"], row["lr"]) for row in rows] == [("w", "0.75"), ("new", "0.125")]
    assert totals == {"muon": Total(2, 10, 100.0, 2)}


def test_large_totals_are_grouped_in_thousands():
    """No memory is needed for this: meta tensors have shapes only."""
    param = nn.Parameter(torch.empty(2000, 3000, device="meta"))
    text = samestep.AdamW([("w", param)]).table()
    assert "6,000,000 elements (100.0%)" in text
    assert read_table(text)[1] == {"adamw": Total(1, 6_000_000, 100.0, None)}


def test_parameters_without_elements_have_a_table():
    opt = samestep.MuonAdamW([("w", parameter(0, 3)), ("b", parameter(0))])
    totals = read_table(opt.table())[1]
    assert totals == {"muon": Total(1, 0, 0.0, 0), "adamw": Total(1, 0, 0.0, None)}


def test_printing_changes_nothing():
    opt = samestep.MuonAdamW(Attention(), overrides={"qkv.weight": {"split_sizes": (32, 16, 16)}})
    before = repr(opt.state_dict())
    assert opt.table() == opt.table()
    assert repr(opt.state_dict()) == before
