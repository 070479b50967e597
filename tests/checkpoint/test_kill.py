"""A process that is killed while it saves: the newest checkpoint is whole, at any moment."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings

import pytest
import torch
from torch import nn

import samestep
from samestep.checkpoint import folder
from tests.ranks import RanksFailed, run_forked
from tests.soak import SOAK

KILLS = 50 if SOAK else 12


class Numbered(nn.Module):
    """A few megabytes that all have the number of their checkpoint."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(300, 300)) for _ in range(8))

    @torch.no_grad()
    def set(self, number):
        for part in self.parts:
            part.fill_(number)


def save_without_end(path, model, opt, first, way):
    """Save one after the other, with two kept."""
    for number in range(first, first + 10_000):
        model.set(number)
        getattr(samestep, way)(path / str(number), model, opt, extra=number, keep=2)


def newest(path):
    """The number of the newest checkpoint, every bit of which is checked."""
    model = Numbered()
    number = samestep.load(path, model).extra
    assert all((part == number).all() for part in model.parts)
    return number


def killed_after(seconds, act):
    """Fork, wait until the child begins, and kill it."""
    ready, begins = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.write(begins, b"x")
            act()
        finally:
            os._exit(1)
    os.read(ready, 1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(ready)
    os.close(begins)
    assert os.WTERMSIG(status) == signal.SIGKILL  # it did not end by itself


@pytest.mark.parametrize("way", ["save", "async_save"])
def test_killed_at_any_moment(tmp_path, way):
    chance = random.Random(way)
    model = Numbered()
    opt = samestep.AdamW(model)
    samestep.save(tmp_path / "0", model, opt, extra=0)
    before, first, leftovers = 0, 1, 0
    for _ in range(KILLS // 2):
        first += 10_000
        killed_after(
            chance.uniform(0.0, 0.15),
            lambda first=first: save_without_end(tmp_path, model, opt, first, way),
        )
        leftovers += any(path.name.endswith(".partial") for path in tmp_path.iterdir())
        number = newest(tmp_path)
        assert number >= before
        before = number
    assert leftovers  # or it was never killed in the middle
    model.set(1 << 20)
    samestep.save(tmp_path / "last", model, opt, extra=1 << 20, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "last"]
    assert newest(tmp_path) == 1 << 20


@pytest.mark.parametrize("who", [0, 1])
def test_one_of_two_ranks_is_killed(tmp_path, who):
    """The other one raises, and what both have written is no checkpoint."""
    model = Numbered()
    opt = samestep.AdamW(model)
    samestep.save(tmp_path / "0", model, opt, extra=0)

    def job(rank):
        here = Numbered()
        own = samestep.AdamW(here, sharding="zero2")
        if rank == who:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 0.12)
        save_without_end(tmp_path, here, own, 1, "async_save")

    with pytest.raises(RanksFailed) as caught:
        run_forked(2, job)
    assert "SIGKILL" in caught.value.reports[who]
    newest(tmp_path)
    samestep.save(tmp_path / "last", model, opt, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "last"]
    assert folder.find(tmp_path).name == "last"
