"""Compiled test files, made once before workers of xdist begin.

pytest rewrites the asserts of a file when it is imported, which takes longer than everything else
of a collection, and keeps the result. In a fresh clone all workers would do that for all files at
the same time: half a minute of CPU on two cores. Private names of pytest, and nothing depends on
them: a file that is not there compiled is compiled by whoever imports it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import (
    PYC_TAIL,
    _read_pyc,
    _rewrite_test,
    _write_pyc,
    assertstate_key,
    get_cache_dir,
)

from tests.limits import limit

ENOUGH = 20  # files to rewrite: fewer are no work


def rewrite_once(config: pytest.Config) -> None:
    """Rewrite the test files below the folders that were asked for, where they have changed."""
    if sys.dont_write_bytecode or assertstate_key not in config.stash:
        return
    folders = [path for path in map(Path, config.args) if path.is_dir()]
    files = sorted({file for path in folders for file in path.rglob("test_*.py")}, key=_size)
    stale = [file for file in files if _read_pyc(file, _compiled(file)) is None]
    if len(stale) < ENOUGH:
        return
    fork = multiprocessing.get_context("fork")
    count = len(os.sched_getaffinity(0))
    shares = [stale[n::count] for n in range(count)]
    processes = [fork.Process(target=_rewrite, args=(config, share)) for share in shares]
    for process in processes:
        process.start()
    for process in processes:
        process.join(limit(60.0))
        process.kill()
        process.join()


def _rewrite(config: pytest.Config, files: Sequence[Path]) -> None:
    for file in files:
        source, code = _rewrite_test(file, config)
        _compiled(file).parent.mkdir(exist_ok=True)
        _write_pyc(config.stash[assertstate_key], code, source, _compiled(file))


def _compiled(file: Path) -> Path:
    return get_cache_dir(file) / (file.name.removesuffix(".py") + PYC_TAIL)


def _size(file: Path) -> int:
    return file.stat().st_size
