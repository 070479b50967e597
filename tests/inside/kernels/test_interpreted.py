"""The kernels on CPU, through Triton's interpreter, in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import BATTERY

HERE = Path(__file__).parent
CASES = [HERE / name for name in ("cases.py", "part_cases.py", "small_cases.py")]


@pytest.mark.timeout(1.1 * BATTERY)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_give_what_plain_torch_gives():
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist",
         "-W", "ignore", *map(str, CASES)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=BATTERY,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
