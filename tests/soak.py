"""Whether there is all the time in the world: `make soak` runs long what `make test` runs short."""

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

SOAK = bool(os.environ.get("SAMESTEP_SOAK"))

# A test that runs no line, and catches no mutant, that others do not (tests/mutation.py).
twin = pytest.mark.skipif(not SOAK, reason="others run its lines and catch its mutants: make soak")


def twin_cases(*ids: str) -> pytest.MarkDecorator:
    """As `twin`, of some cases of a test, by their ids."""
    return pytest.mark.twin_cases(*ids)


def leave_out_twins(items: Sequence[pytest.Item]) -> None:
    """Skip the cases that `twin_cases` names."""
    for item in items:
        for mark in () if SOAK else item.iter_markers("twin_cases"):
            if item.callspec.id in mark.args:  # type: ignore[attr-defined]
                item.add_marker(twin)


Case = TypeVar("Case")


def some(cases: Sequence[Case], every: int = 2) -> Sequence[Case]:
    """The first of each so many cases that are alike; all of them in `make soak`."""
    return cases if SOAK else cases[::every]
