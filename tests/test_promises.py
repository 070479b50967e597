"""The receipt has every promise of the list, and what is broken is seen."""

import json

import pytest
import torch.distributed as dist

from tests.promises.__main__ import RECEIPT, receipt
from tests.promises.claims import refused, same
from tests.promises.listed import PROMISES, Promise
from tests.promises.trying import Cell, cells, try_cells
from tests.soak import SOAK, some


def test_promises_have_names_of_their_own():
    """The receipt has them by name."""
    assert len({each.name for each in PROMISES}) == len(PROMISES)


def test_the_receipt_has_all_that_is_promised_kept():
    """Tried anew by `make promises`."""
    kept = json.loads(RECEIPT.read_text())
    tried = {
        (name, option, layout): found
        for name, options in kept["promises"].items()
        for option, layouts in options.items()
        for layout, found in layouts.items()
    }
    assert tried == {(c.promise.name, c.option, c.layout): "kept" for c in cells()}


@pytest.mark.skipif(not SOAK, reason="minutes: make soak, or make promises")
def test_promises_are_kept():
    tried = try_cells(cells())
    assert {str(cell): found for cell, found in tried.items() if found} == {}


# --- what is broken is seen ----------------------------------------------------------------------


def cell_of(action) -> Cell:
    return Cell(Promise("", "", "works", action, ("",), ("zero2",), {}), "zero2", "")


def kept(trial):
    """Trains."""
    trial.run().train(0)


def broken_on_one_rank(trial):
    """The other rank has kept it."""
    if trial.rank == 1:
        raise ValueError("of rank 1")


def other_bits(trial):
    """One step more than one process."""
    same(trial.run().train(0, 1).weights(), trial.plain().train(0).weights())


def silent(trial):
    """Nothing is raised."""
    refused(lambda: None, "text")


def left_alone(trial):
    """A rank that waits for another one, which fails."""
    if trial.rank == 1:
        raise ValueError("gone")
    dist.barrier()


@pytest.mark.parametrize("action", some([broken_on_one_rank, other_bits, silent, left_alone]))
def test_what_is_broken_is_seen_and_the_rest_is_tried(action):
    first, bad, last = cell_of(kept), cell_of(action), cell_of(kept)
    outcome = try_cells([first, bad, last])
    assert list(outcome) == [first, bad, last]
    assert outcome[first] is None
    assert outcome[last] is None
    assert outcome[bad]
    assert receipt(outcome, 0.0)["promises"][action.__name__][""]["zero2"] == outcome[bad]
