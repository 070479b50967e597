"""Damaged checkpoints are refused, and nothing in memory has changed."""

from __future__ import annotations

import os
import random
import shutil

import pytest

import samestep
from tests.checkpoint.training import Case, build, local_bits, same_bits, train
from tests.ranks import run_forked
from tests.soak import SOAK

FLIPS = 2000 if SOAK else 200
ONE = Case("one", 1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two ranks: two files of values, and the index."""
    path = tmp_path_factory.mktemp("damage") / "a"

    def job(rank):
        model, opt = build(Case("flat zero2", 2))
        train(model, opt, range(2))
        samestep.save(path, model, opt, extra={"step": 2})

    run_forked(2, job)
    return path


@pytest.fixture(scope="module")
def here():
    model, opt = build(ONE, seed=2)
    train(model, opt, range(2))
    return model, opt, local_bits(model, opt)


def assert_refused(folder, file, here, how):
    model, opt, before = here
    with pytest.raises(samestep.CheckpointError) as caught:
        samestep.load(folder, model, opt)
    text = str(caught.value)
    assert file in text, how
    assert "load another checkpoint" in text, how
    assert same_bits(local_bits(model, opt), before), how


def test_any_byte_of_any_file(saved, here):
    """200 flips, spread evenly over the files, so that the index is hit as often as values."""
    chance = random.Random(0)
    files = sorted(saved.iterdir())
    assert [f.name for f in files] == [
        "index.json",
        "index.json.sha256",
        "rank_0.bin",
        "rank_1.bin",
    ]
    for number in range(FLIPS):
        file = files[number % len(files)]
        with file.open("r+b") as opened:
            place = chance.randrange(file.stat().st_size)
            opened.seek(place)
            byte = opened.read(1)[0]
            flipped = byte ^ (1 << chance.randrange(8))
            opened.seek(place)
            opened.write(bytes([flipped]))
            opened.flush()
            try:
                assert_refused(
                    saved, file.name.removesuffix(".sha256"), here, f"{file.name} at {place}"
                )
            finally:
                opened.seek(place)
                opened.write(bytes([byte]))
    samestep.load(saved, *build(ONE, seed=2))  # all are undone


def test_files_cut_short_too_long_or_missing(saved, here, tmp_path):
    chance = random.Random(0)
    for name in sorted(f.name for f in saved.iterdir()):
        for how in ("empty", "short", "long", "missing"):
            folder = tmp_path / f"{name} {how}"
            shutil.copytree(saved, folder)
            data = (folder / name).read_bytes()
            if how == "missing":
                (folder / name).unlink()
            else:
                kept = {"empty": b"", "long": data + b"x"}
                short = data[: chance.randrange(1, len(data))]
                (folder / name).write_bytes(kept.get(how, short))
            if (name, how) == ("index.json", "missing"):
                with pytest.raises(samestep.CheckpointError, match=r"it has no index\.json"):
                    samestep.load(folder, *here[:2])
            else:
                assert_refused(folder, name.removesuffix(".sha256"), here, how)


def test_without_checking_sums_sizes_are_checked(saved, here, tmp_path):
    shutil.copytree(saved, tmp_path / "a")
    os.truncate(tmp_path / "a" / "rank_1.bin", 64)
    model, opt, before = here
    with pytest.raises(samestep.CheckpointError, match=r"rank_1\.bin has 64 bytes instead of"):
        samestep.load(tmp_path / "a", model, opt, verify=False)
    assert same_bits(local_bits(model, opt), before)


def test_all_ranks_refuse_what_one_has_found(saved, tmp_path):
    """Each rank looks at its share of the boxes."""
    shutil.copytree(saved, tmp_path / "a")
    with (tmp_path / "a" / "rank_1.bin").open("r+b") as file:
        file.write(b"\xff")

    def job(rank):
        model, opt = build(Case("zero2", 3), seed=2)
        before = local_bits(model, opt)
        try:
            samestep.load(tmp_path / "a", model, opt)
        except samestep.CheckpointError as error:
            same = same_bits(local_bits(model, opt), before)
            train(model, opt, range(1))  # nobody is left waiting
            return str(error), same

    for text, same in run_forked(3, job):
        assert "rank_1.bin is damaged" in text
        assert same
