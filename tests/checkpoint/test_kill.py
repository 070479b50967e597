"""A process that is killed while it saves: the newest checkpoint is whole, at any moment."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import warnings
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn

import samestep
from samestep.checkpoint import folder, loading, storage
from samestep.checkpoint.saving import finish_background
from samestep.comm.diagnosis.flight import CollectiveError
from tests.checkpoint.beside import names, put_foreign, still_there
from tests.limits import limit
from tests.ranks import RanksFailed, run_forked
from tests.soak import SOAK, some

KILLS = 200 if SOAK else 12


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


def die_at_file(number, within=""):
    """Be killed just before the n-th time that this process touches a file or folder of a name."""
    left = number

    def count(event, arguments):
        nonlocal left
        if (event == "open" or event.startswith("os.")) and within in str(arguments[:1]):
            left -= 1
            if left == 0:
                die()

    sys.addaudithook(count)


def killed(act, prepare=lambda: None, seconds=None):
    """Fork, and let the child act until it is killed: so long after it has begun, or by itself."""
    ready, begins = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.write(begins, b"x")
            prepare()
            act()
        finally:
            os._exit(1)
    os.read(ready, 1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(ready)
    os.close(begins)
    assert os.WTERMSIG(status) == signal.SIGKILL  # it did not end by itself


@pytest.mark.parametrize("way", some(["save", "async_save"]))
@pytest.mark.filterwarnings(
    "ignore:.*is not counted by keep=", "ignore:.*may be left over from a save that was killed"
)
def test_killed_at_any_moment(tmp_path, way):
    chance = random.Random(way)
    model = Numbered()
    opt = samestep.AdamW(model)
    runs = tmp_path / "runs"
    samestep.save(runs / "0", model, opt, extra=0)
    foreign = put_foreign(runs)
    before, first = 0, 1
    for kill in range(KILLS // 2):
        first += 10_000
        act = partial(save_without_end, runs, model, opt, first, way)
        if kill == 0:  # whatever chance has for the others: once it is in the middle
            before_it = names(runs)
            killed(act, partial(die_at_file, 1, "rank_0.bin"))
            assert len(names(runs)) == len(before_it) + 1  # what is partial
        elif kill % 2:
            killed(act, seconds=chance.uniform(0.0, 0.15))
        else:  # of which one save has about 50
            killed(act, partial(die_at_file, chance.randint(60, 200)))
        number = newest(runs)
        assert number >= before
        before = number
        still_there(runs, foreign)
    model.set(1 << 20)
    samestep.save(runs / "last", model, opt, extra=1 << 20, keep=1)
    assert set(names(runs)) - {key.split("/")[0] for key in foreign} == {"LATEST", "last"}
    assert newest(runs) == 1 << 20
    still_there(runs, foreign)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def killed_rank_of(job, who):
    """Two ranks of which one is killed; the other ends by itself, on a busy machine too."""
    with pytest.raises(RanksFailed) as caught:
        run_forked(2, job, grace=limit(60.0))
    assert list(caught.value.reports) == [who], caught.value
    assert "SIGKILL" in caught.value.reports[who]


@pytest.mark.parametrize("who", [0, 1])
def test_one_of_two_ranks_is_killed(tmp_path, who):
    """The other one says which, and what both have written is no checkpoint."""
    model = Numbered()
    opt = samestep.AdamW(model)
    samestep.save(tmp_path / "0", model, opt, extra=0)

    def job(rank):
        here = Numbered()
        own = samestep.AdamW(here, sharding="zero2")
        if rank == who:
            signal.signal(signal.SIGALRM, lambda *_: die())
            signal.setitimer(signal.ITIMER_REAL, 0.12)
        with suppress(CollectiveError):
            save_without_end(tmp_path, here, own, 1, "async_save")

    killed_rank_of(job, who)
    newest(tmp_path)
    samestep.save(tmp_path / "last", model, opt, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "last"]
    assert folder.find(tmp_path).name == "last"


def act(way, path, model, opt):
    if way == "load":
        samestep.load(path, model, opt)
    else:
        getattr(samestep, way)(path / "1", model, opt, extra=1)
        finish_background()


@pytest.mark.parametrize(("way", "who"), some([("save", 0), ("async_save", 1), ("load", 1)]))
def test_the_rank_that_died_is_named(tmp_path, monkeypatch, way, who):
    """While it writes or reads its part; the checkpoint before is there, and nothing else."""

    def job(rank):
        model = Numbered()
        opt = samestep.AdamW(model, sharding="zero2")
        samestep.save(tmp_path / "0", model, opt, extra=0)
        if rank == who:
            monkeypatch.setattr(storage, "_append", lambda *_: die())
            monkeypatch.setattr(loading, "read_into", lambda *_: die())
        with pytest.raises(CollectiveError) as caught:
            act(way, tmp_path, model, opt)
        (tmp_path / "said").write_text(str(caught.value))

    killed_rank_of(job, who)
    said = (tmp_path / "said").read_text()
    operation = f"load of {tmp_path}" if way == "load" else f"save of {tmp_path / '1'}"
    assert f"{operation} failed: rank {who} did not answer: its process has ended" in said
    assert newest(tmp_path) == 0
    assert not (tmp_path / "1").exists()


# --- between the rename and LATEST --------------------------------------------------------


def test_a_checkpoint_that_latest_never_named_is_replaced(tmp_path, monkeypatch):
    """Killed when the folder was in its place: the same name can be saved once more."""
    model = Numbered()
    samestep.save(tmp_path / "0", model, extra=0)
    real = os.replace

    def die_at_latest(source, target):
        if os.path.basename(target) == folder.LATEST:
            die()
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die_at_latest)
        with pytest.raises(RanksFailed):
            run_forked(1, lambda _: samestep.save(tmp_path / "1", model, extra=1))
    assert (tmp_path / "1" / "index.json").is_file()
    assert newest(tmp_path) == 0
    model.set(7)
    samestep.save(tmp_path / "1", model, extra=7)
    assert newest(tmp_path) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "LATEST"]


def test_a_checkpoint_that_latest_has_named_is_kept(tmp_path, monkeypatch):
    """Also if the process was killed before it had cleaned up, and LATEST has moved on."""
    model = Numbered()
    real = os.replace

    def die_after_latest(source, target):
        real(source, target)
        if os.path.basename(target) == folder.LATEST:
            die()

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die_after_latest)
        with pytest.raises(RanksFailed):
            run_forked(1, lambda _: samestep.save(tmp_path / "0", model, extra=0))
    assert names(tmp_path) == [".samestep.lock", "0", "LATEST"]
    assert newest(tmp_path) == 0
    for name in ("0", "1", "0"):
        if name == "0":
            with pytest.raises(samestep.CheckpointError, match="0 exists: save under another"):
                samestep.save(tmp_path / name, model, extra=3)
        else:
            samestep.save(tmp_path / name, model, extra=0)
    (tmp_path / folder.LATEST).write_bytes(b"\xff\x00gone")
    samestep.save(tmp_path / "2", model, extra=0)
    assert newest(tmp_path) == 0
