"""A gradient's way stays short: files, functions and lines that a step passes."""

from __future__ import annotations

from pathlib import Path

import pytest

import samestep
from samestep.launch.forked import run_forked
from tests.journeys import LAYOUTS, way_of_a_gradient

ROOT = Path(samestep.__file__).parent
# Files and functions. Whoever needs more shortens another place, or says why here.
MOST = {"zero2": (23, 130), "flat": (24, 148), "FSDP2": (27, 130)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_way_of_a_gradient(layout):
    way = run_forked(2, way_of_a_gradient, layout, timeout=120.0)[0]
    files, functions = MOST[layout]
    assert len(way.files) <= files, str(way)
    assert way.functions <= functions, str(way)
    assert way.longest <= 60, str(way)
    long = {file for file in way.files if len((ROOT / file).read_text().splitlines()) > 500}
    assert not long
