"""Saves that fail in the middle: all ranks hear of it, nothing is left, training goes on."""

from __future__ import annotations

import os

import pytest

import samestep
from samestep.checkpoint import folder, storage
from samestep.checkpoint.savers import OWNER
from tests.checkpoint.beside import names
from tests.checkpoint.training import Case, build, different, snapshot, train
from tests.ranks import run_forked
from tests.soak import some

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning")


def no_room_after(boxes):
    real, done = storage._append, []

    def append(*args):
        done.append(args)
        if len(done) > boxes:
            raise OSError(28, "No space left on device")
        return real(*args)

    return append


@pytest.mark.parametrize(("way", "who"), some([("save", 1), ("async_save", 0)]))
def test_one_rank_has_no_room(tmp_path, way, who):
    """The disk is full when it writes its fourth box."""

    def job(rank):
        model, opt = build(Case("zero2", 2))
        train(model, opt, range(2))
        samestep.save(tmp_path / "good", model, opt)
        try:
            with pytest.MonkeyPatch.context() as patch:
                if rank == who:
                    patch.setattr(storage, "_append", no_room_after(3))
                handle = getattr(samestep, way)(tmp_path / "bad", model, opt)
                if way == "async_save":
                    handle.wait()
        except samestep.CheckpointError as error:
            text = str(error)
        left = sorted(path.name for path in tmp_path.iterdir())
        train(model, opt, range(2, 4))
        samestep.save(tmp_path / "later", model, opt)
        again = build(Case("zero2", 2), seed=2)
        samestep.load(tmp_path, *again)
        return text, left, different(snapshot(*again), snapshot(model, opt))

    for text, left, wrong in run_forked(2, job):
        assert "No space left on device" in text
        assert left == ["LATEST", "good"]
        assert wrong == []


@pytest.mark.parametrize("call", ["mkdir", "open", "link", "rename", "fsync"])
def test_the_first_and_the_last_moment(tmp_path, monkeypatch, call):
    """The disk fails at the start or when all is written: the earlier checkpoint stays."""
    model, opt = build(Case("one", 1))
    samestep.save(tmp_path / "good", model, opt)

    real = getattr(os, call)

    def fail(*args, **kwargs):
        if call == "open" and not str(args[0]).endswith(OWNER):
            return real(*args, **kwargs)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(samestep.CheckpointError, match="No space left on device"):
            samestep.save(tmp_path / "bad", model, opt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "good"]
    assert folder.find(tmp_path) == tmp_path / "good"
    samestep.save(tmp_path / "bad", model, opt)


def test_what_others_write_is_left_alone(tmp_path):
    """A save that is going on; who writes there is named."""
    model, opt = build(Case("one", 1))
    going_on = folder.Unfinished(tmp_path / "others")
    samestep.save(tmp_path / "a", model, opt)
    with pytest.raises(
        samestep.CheckpointError, match=r"others is being written by process \d+ on"
    ):
        samestep.save(tmp_path / "others", model, opt)
    assert names(tmp_path) == sorted([going_on.folder.name, "LATEST", "a"])
    going_on.abandon()
    assert names(tmp_path) == ["LATEST", "a"]


def test_keep(tmp_path):
    model, opt = build(Case("one", 1))
    (tmp_path / "not a checkpoint").mkdir()
    for name in "cbad":
        samestep.save(tmp_path / name, model, opt, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "LATEST",
        "a",
        "d",
        "not a checkpoint",
    ]
    assert folder.find(tmp_path).name == "d"
