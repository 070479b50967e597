"""Savers and what lies beside: only what is ours is removed, and two savers lose nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import signal
import sys
import time
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import samestep
from samestep.checkpoint import folder, savers
from samestep.checkpoint.storage import INDEX, CheckpointError, read_json, write_json
from tests.checkpoint.beside import HEX, names, put, put_foreign, still_there, tree
from tests.limits import HANG
from tests.ranks import run_forked
from tests.soak import SOAK, some

PAIRS = 100 if SOAK else 8
SAVES = 4  # of each saver of a pair
FORMATS = ("fully_reshardable", "fsdp_dtensor", "dp_local")


def model_of(number, size=40):
    """All values are the number of its checkpoint."""
    model = nn.Linear(size, size)
    with torch.no_grad():
        for part in model.parameters():
            part.fill_(number)
    return model


def newest(path):
    """The number of the checkpoint that LATEST names, every bit of which is checked."""
    model = model_of(-1)
    number = samestep.load(path, model).extra
    assert all((part == number).all() for part in model.parameters())
    return number


# --- what is not ours ------------------------------------------------------------------------


@pytest.mark.filterwarnings(
    "ignore:.*is not counted by keep=", "ignore:.*may be left over from a save that was killed"
)
@pytest.mark.parametrize("way", ["save", "async_save"])
def test_what_is_not_ours_is_not_touched(tmp_path, way):
    """Whatever it is called, with `keep` and without, in every format."""
    runs = tmp_path / "runs"
    samestep.save(runs / "old", model_of(0), extra=0)
    foreign = put_foreign(runs)
    for number, form in enumerate(FORMATS, 1):
        done = getattr(samestep, way)(
            runs / str(number), model_of(number), extra=number, keep=1, format=form
        )
        if way == "async_save":
            done.wait()
        still_there(runs, foreign)
        assert newest(runs) == number
        own = {key.split("/")[0] for key in tree(runs).keys() - foreign.keys()}
        assert own == {"LATEST", str(number)}


def test_links_to_checkpoints_are_none(tmp_path):
    """`best -> 1` and one to a checkpoint elsewhere: not followed, not counted, not in the way."""
    outside, runs = tmp_path / "outside", tmp_path / "runs"
    samestep.save(outside / "kept", model_of(9), extra=9)
    samestep.save(runs / "1", model_of(1), extra=1)
    os.symlink("1", runs / "best")
    os.symlink("../outside/kept", runs / "start")
    before = tree(outside)
    for number in range(2, 6):
        samestep.save(runs / str(number), model_of(number), extra=number, keep=2)
        expected = [str(n) for n in (number - 1, number)] + ["LATEST", "best", "start"]
        assert names(runs) == sorted(expected)
        assert newest(runs) == number
    assert tree(outside) == before
    assert os.readlink(runs / "best") == "1"
    with pytest.raises(CheckpointError, match="best exists: save under another name"):
        samestep.save(runs / "best", model_of(7))
    # A file of a checkpoint that is a link: it is not as it was saved.
    os.rename(runs / "4" / "rank_0.bin", outside / "moved.bin")
    os.symlink("../../outside/moved.bin", runs / "4" / "rank_0.bin")
    with pytest.warns(
        UserWarning, match=r"4 is not counted .*these files differ from what was saved: rank_0.bin"
    ):
        samestep.save(runs / "6", model_of(6), extra=6, keep=1)
    assert (outside / "moved.bin").is_file()
    assert "4" in names(runs)


def test_a_link_under_the_name_of_the_pointer(tmp_path):
    """It is replaced, and what it names stays."""
    put(tmp_path / "other.txt")
    os.symlink("other.txt", tmp_path / "LATEST")
    samestep.save(tmp_path / "1", model_of(1), extra=1)
    assert (tmp_path / "other.txt").read_bytes() == b"precious"
    assert newest(tmp_path) == 1


@pytest.mark.parametrize("form", FORMATS)
def test_what_others_have_put_into_a_checkpoint_stays(tmp_path, form):
    samestep.save(tmp_path / "1", model_of(1), format=form)
    put(tmp_path / "1" / "loader.json")
    put(tmp_path / "1" / "export" / "model.bin")
    with pytest.warns(
        UserWarning, match=r"1 was deleted, except for files that samestep has not written"
    ):
        samestep.save(tmp_path / "2", model_of(2), extra=2, keep=1)
    assert tree(tmp_path / "1") == {
        "loader.json": b"precious",
        "export": None,
        "export/model.bin": b"precious",
    }
    assert names(tmp_path) == ["1", "2", "LATEST"]
    assert newest(tmp_path) == 2


def test_a_damaged_checkpoint_stays_and_is_not_counted(tmp_path):
    """Said once; the good ones beside it are as many as was asked for."""
    for number in range(1, 4):
        samestep.save(tmp_path / str(number), model_of(number), extra=number)
    (tmp_path / "3" / "rank_0.bin").write_bytes(b"short")
    os.truncate(tmp_path / "2" / INDEX, 100)
    with pytest.warns(UserWarning, match="is not counted by keep= and was not deleted") as told:
        samestep.save(tmp_path / "4", model_of(4), extra=4, keep=2)
    assert len(told) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samestep.save(tmp_path / "5", model_of(5), extra=5, keep=2)
    assert names(tmp_path) == ["2", "3", "4", "5", "LATEST"]


def test_half_of_a_checkpoint_is_never_seen(tmp_path, monkeypatch):
    """Its deletion fails in the middle: it is out of sight by then, and the next save goes on."""
    real = folder.Path.unlink

    def fail(path, **options):
        if path.name == "rank_0.bin":
            raise OSError(errno.EIO, "Input/output error")
        real(path, **options)

    samestep.save(tmp_path / "1", model_of(1))
    with monkeypatch.context() as patch:
        patch.setattr(folder.Path, "unlink", fail)
        with pytest.warns(UserWarning, match="could not be deleted completely"):
            samestep.save(tmp_path / "2", model_of(2), extra=2, keep=1)
    (hidden,) = (name for name in names(tmp_path) if name.endswith(".removed"))
    assert names(tmp_path) == [hidden, "2", "LATEST"]
    samestep.save(tmp_path / "3", model_of(3), extra=3)
    assert names(tmp_path) == ["2", "3", "LATEST"]


def test_a_copy_of_a_partial_folder_stays(tmp_path):
    """Its mark tells of another folder."""
    copy = tmp_path / f".1.{HEX}.partial"
    copy.mkdir()
    lock_of(copy / savers.OWNER, token=HEX[::-1], pid=1 << 22)
    samestep.save(tmp_path / "1", model_of(1), extra=1)
    assert names(tmp_path) == [copy.name, "1", "LATEST"]


def test_an_index_is_read_once(tmp_path, monkeypatch):
    """It is large where there are many tensors, and `keep` looks at all of them in every save."""
    real, read = folder.read_json, []
    monkeypatch.setattr(
        folder, "read_json", lambda path: read.append(path.parent.name) or real(path)
    )
    for number in range(6):
        samestep.save(tmp_path / str(number), model_of(number), extra=number, keep=3)
    assert read == [str(number) for number in range(5)]
    assert names(tmp_path) == ["3", "4", "5", "LATEST"]


def test_checkpoints_of_earlier_versions_are_ours(tmp_path):
    """Their index had no `written_as`, and all else that is looked at."""
    samestep.save(tmp_path / "1", model_of(1))
    content = read_json(tmp_path / "1" / INDEX)
    for file in (INDEX, folder.SUM):
        (tmp_path / "1" / file).unlink()
    older = {key: value for key, value in content.items() if key not in ("written_as", "layout")}
    write_json(tmp_path / "1" / INDEX, older)
    samestep.save(tmp_path / "2", model_of(2), extra=2, keep=1)
    assert names(tmp_path) == ["2", "LATEST"]


def test_leftovers_of_earlier_versions_are_told_of(tmp_path):
    put(tmp_path / ".7.partial" / "rank_0.bin")
    put(tmp_path / ".7.partial" / ".lock", b"")
    with pytest.warns(
        UserWarning, match=r"\.7\.partial may be left over from a save that was killed"
    ):
        samestep.save(tmp_path / "8", model_of(8), extra=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samestep.save(tmp_path / "9", model_of(9), extra=9)
    assert names(tmp_path) == [".7.partial", "8", "9", "LATEST"]


@pytest.mark.parametrize("name", ["LATEST", "1 ", "a\nb", ".samestep.lock"])
def test_names_that_latest_cannot_have(tmp_path, name):
    with pytest.raises(CheckpointError, match="cannot be the name of a checkpoint"):
        samestep.save(tmp_path / name, model_of(1))
    assert names(tmp_path) == []


def test_a_folder_or_a_large_file_under_the_name_of_the_pointer(tmp_path):
    (tmp_path / "a" / "LATEST").mkdir(parents=True)
    put(tmp_path / "b" / "LATEST", b"data" * 2000)
    for parent in (tmp_path / "a", tmp_path / "b"):
        before = tree(parent)
        with pytest.raises(CheckpointError, match="LATEST is no file of samestep"):
            samestep.save(parent / "1", model_of(1))
        assert tree(parent) == before


# --- what is left when something fails -------------------------------------------------------


def forked(act):
    """Start a child that acts and ends without cleaning up; gives its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
        finally:
            os._exit(code)
    return child


def ended(child):
    deadline = time.monotonic() + HANG
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


def test_latest_that_cannot_be_replaced(tmp_path, monkeypatch):
    """What is finished stays, the error says where it is, and others can save on."""
    samestep.save(tmp_path / "1", model_of(1), extra=1)

    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(CheckpointError, match=r"2 is written and complete, but .*LATEST could"):
            samestep.save(tmp_path / "2", model_of(2), extra=2, keep=1)
    assert names(tmp_path) == ["1", "2", "LATEST"]
    assert newest(tmp_path) == 1
    assert samestep.load(tmp_path / "2", model_of(-1)).extra == 2
    with pytest.raises(CheckpointError, match="2 exists: save under another name"):
        samestep.save(tmp_path / "2", model_of(2))
    samestep.save(tmp_path / "3", model_of(3), extra=3, keep=2)
    assert names(tmp_path) == ["2", "3", "LATEST"]


def fail_from(number, once):
    """The disk fails at the n-th call of this process that could change it, or from then on."""
    left = number

    def hook(event, arguments):
        nonlocal left
        changes = event == "open" and isinstance(arguments[2], int) and arguments[2] & 0o103
        changes |= event in ("os.mkdir", "os.rename", "os.link", "os.truncate")
        if not changes:
            return
        left -= 1
        if left == 0 or (left < 0 and not once):
            raise OSError(errno.ENOSPC, "No space left on device")

    sys.addaudithook(hook)


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("once", some([True, False]))
def test_the_disk_fails_at_any_call(tmp_path, once):
    """LATEST names a complete checkpoint, nothing foreign is touched, and saving goes on after."""
    runs = tmp_path / "runs"
    samestep.save(runs / "0", model_of(0), extra=0)
    foreign = put_foreign(runs)
    told = set()

    def save(number, form, at):
        with (tmp_path / "said").open("w") as said:
            fail_from(at, once)
            try:
                path = runs / f"x{number}"
                samestep.save(path, model_of(number), extra=number, keep=2, format=form)
                said.write("saved")
            except CheckpointError as error:
                said.write(str(error))

    number = 0
    for form in FORMATS:
        for at in range(1, 40) if SOAK else (2, 7, 12, 30):
            number += 1
            before = newest(runs)
            child = forked(partial(save, number, form, at))
            assert ended(child) == 0
            said = (tmp_path / "said").read_text()
            told.add("saved" if said == "saved" else "told")
            assert newest(runs) == (number if said == "saved" else before), said
            still_there(runs, foreign)
            samestep.save(runs / f"y{number}", model_of(number), extra=number, keep=2)
            assert newest(runs) == number
            still_there(runs, foreign)
            own = {key.split("/")[0] for key in tree(runs).keys() - foreign.keys()}
            assert {name for name in own if name.startswith(".")} == set()
    assert told == {"saved", "told"}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk(tmp_path):
    """A disk of 300 kB: saves until it is full, and on with `keep`, which makes room again."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)

    def act():
        if libc.unshare(0x00020000) or libc.mount(b"none", b"/", None, 0x44000, None):
            os._exit(77)
        if libc.mount(b"none", os.fsencode(tmp_path), b"tmpfs", 0, b"size=300k"):
            os._exit(77)
        put(tmp_path / "foreign" / INDEX)
        model, failed, number = model_of(0, size=80), 0, 0
        while failed < 3 and number < 100:
            number += 1
            try:
                samestep.save(tmp_path / str(number), model, extra=number)
                last = number
            except CheckpointError as error:
                failed += "No space left on device" in str(error)
        assert 3 < number < 99
        assert read_json(folder.find(tmp_path) / INDEX)["extra"] == last
        samestep.load(tmp_path, model)
        done = [str(n) for n in range(1, last + 1)]
        assert names(tmp_path) == sorted([*done, "LATEST", "foreign"])
        removed, _ = (
            done[:2],
            [
                [os.unlink(tmp_path / name / file) for file in os.listdir(tmp_path / name)]
                for name in done[:2]
            ],
        )
        for number in range(200, 220):
            samestep.save(tmp_path / str(number), model, extra=number, keep=1)
        assert names(tmp_path) == sorted([*removed, "219", "LATEST", "foreign"])
        samestep.load(tmp_path, model)

    status = ended(forked(act))
    if os.waitstatus_to_exitcode(status) == 77:
        pytest.skip("no disk can be mounted here")
    assert status == 0


# --- two savers ------------------------------------------------------------------------------


def save_some(runs, first, own, keep, way, said):
    """Save several checkpoints and write down what came of each."""
    results = {}
    for number in range(first, first + SAVES):
        name = f"{own}{number}"
        try:
            done = getattr(samestep, way)(runs / name, model_of(number), extra=number, keep=keep)
            if way == "async_save":
                done.wait()
            results[name] = "saved"
        except CheckpointError as error:
            results[name] = str(error)
    said.write_text(json.dumps(results))


def watch(runs, children):
    """Until they have ended: LATEST always names what is there and complete."""
    seen, running, statuses = 0, list(children), []
    while running:
        for child in list(running):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                running.remove(child)
                statuses.append(status)
        try:
            name = (runs / "LATEST").read_text().strip()
        except FileNotFoundError:
            assert seen == 0  # once it is there, it stays
            continue
        if folder.own_files(runs / name) is None:  # removed meanwhile, as `keep` asks
            assert (runs / "LATEST").read_text().strip() != name
        seen += 1
        time.sleep(0.001)
    return statuses


@pytest.mark.parametrize("links", some([False, True]))
def test_pairs_of_savers(tmp_path, monkeypatch, links):
    """In one folder at the same time, with the same names or others; one may be killed."""
    chance = random.Random(f"pairs {links}")
    if not links:  # a disk without second names for files

        def refuse(*_, **__):
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    for pair in range(PAIRS // 2):
        runs = tmp_path / str(pair)
        runs.mkdir()
        keep = [None, 1, 2][pair % 3]
        same, kills = pair % 2 == 0, pair % 4 == 2 or pair % 5 == 4
        way = "async_save" if pair % 4 == 3 else "save"
        foreign = put_foreign(runs) if pair % 7 == 3 else {}
        first = 10
        said = [tmp_path / "said0", tmp_path / "said1"]
        for file in said:
            file.unlink(missing_ok=True)
        act = [
            partial(save_some, runs, first, "" if same else "ab"[who], keep, way, said[who])
            for who in range(2)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            children = [forked(one) for one in act]
            if kills:
                time.sleep(chance.uniform(0.0, 0.08))
                os.kill(children[0], signal.SIGKILL)
            statuses = watch(runs, children)
            assert statuses.count(0) >= 2 - kills
            results = [json.loads(file.read_text()) for file in said if file.exists()]
            for result in results:
                for name, text in result.items():
                    allowed = same and (
                        " is being written by process" in text or " exists:" in text
                    )
                    assert text == "saved" or allowed, (name, text)
            done = [name for result in results for name, text in result.items() if text == "saved"]
            if not kills:  # with `keep` a name may be free again
                assert len(done) == 2 * SAVES or (same and len(done) >= SAVES)
                assert keep is not None or len(set(done)) == len(done)
            there = [name for name in names(runs) if folder.own_files(runs / name) is not None]
            if keep is None:
                assert set(done) <= set(there)
            else:
                assert len(there) == keep or kills
            number = newest(runs)
            assert number >= first
            samestep.save(runs / "last", model_of(99), extra=99)
            still_there(runs, foreign) if foreign else None
            assert newest(runs) == 99
            own = {key.split("/")[0] for key in tree(runs).keys() - foreign.keys()}
            assert [name for name in own if name.startswith(".")] == []


def test_a_refused_save_is_told_to_all_ranks(tmp_path):
    """The first rank looks at the folder; the others say what it has found."""
    going_on = folder.Unfinished(tmp_path / "1")

    def job(rank):
        opt = samestep.MuonAdamW(model := model_of(1), sharding="zero2")
        with pytest.raises(CheckpointError) as caught:
            samestep.save(tmp_path / "1", model, opt)
        samestep.save(tmp_path / "2", model, opt, extra=1)
        return str(caught.value)

    first, second = run_forked(2, job)
    assert f"1 is being written by process {os.getpid()} on " in first
    assert second == f"rank 0: {first}"
    assert newest(tmp_path) == 1
    going_on.commit(None)


def test_who_is_refused_is_gone_before_others_look(tmp_path, monkeypatch):
    """Or two that begin at the same time would refuse each other."""
    going_on = folder.Unfinished(tmp_path / "1")
    left = []
    with monkeypatch.context() as patch:
        patch.setattr(folder.Unfinished, "abandon", lambda _: left.extend(names(tmp_path)))
        with pytest.raises(CheckpointError, match="1 is being written by process"):
            folder.Unfinished(tmp_path / "1")
    assert left == [going_on.folder.name]
    going_on.abandon()


def test_one_of_two_that_end_at_the_same_name(tmp_path):
    """Begun while the other was not seen: what is finished first stays."""
    first = folder.Unfinished(tmp_path / "1")
    put(first.folder / "begun")
    (tmp_path / first.folder.name / savers.OWNER).rename(tmp_path / "away")
    second = folder.Unfinished(tmp_path / "1")
    (tmp_path / "away").rename(tmp_path / first.folder.name / savers.OWNER)
    for one in (first, second):
        put(one.folder / "rank_0.bin", str(one.folder).encode())
        write_json(one.folder / INDEX, {"format": 1, "samestep": "0", "files": {}})
    first.commit(None)
    with pytest.raises(CheckpointError, match="1 exists: save under another name"):
        second.commit(None)
    second.abandon()
    assert (tmp_path / "1" / "rank_0.bin").read_bytes() == str(first.folder).encode()
    assert names(tmp_path) == ["1", "LATEST"]


# --- the lock --------------------------------------------------------------------------------


def lock_of(path, **changes):
    """The lock of a saver, with some facts changed; nobody holds it in the kernel."""
    owner = savers._here("x", HEX)._replace(**changes)
    path.write_text(json.dumps(owner._asdict()))
    return owner


def test_the_turn_of_who_has_died_is_over(tmp_path):
    for changes in ({"pid": 1 << 22}, {"started": "1"}):
        lock_of(tmp_path / savers.TURN, **changes)
        samestep.save(tmp_path / changes.popitem()[0], model_of(1), extra=1)
        assert newest(tmp_path) == 1
        assert not (tmp_path / savers.TURN).exists()


def test_the_turn_of_a_child_that_was_killed_is_over(tmp_path):
    """A child of its own still has the descriptor, as a worker of a data loader has."""
    stays, ends = os.pipe()

    def act():
        unfinished = folder.Unfinished(tmp_path / "1")
        unfinished._saver._take_turn()
        forked(lambda: os.read(stays, 1))
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WTERMSIG(ended(forked(act))) == signal.SIGKILL
    assert savers.TURN in names(tmp_path)
    samestep.save(tmp_path / "1", model_of(1), extra=1)
    os.write(ends, b"x")
    assert newest(tmp_path) == 1
    assert names(tmp_path) == ["1", "LATEST"]
    os.close(stays)
    os.close(ends)


def test_who_holds_it_is_named(tmp_path, monkeypatch):
    """It lives and moves names for too long: what can be done is said, and nothing is removed."""
    monkeypatch.setattr(savers, "WAIT_S", 0.1)
    holder = savers.Saver(tmp_path / "1")
    with holder.turn():
        expected = rf"the lock of process {os.getpid()} on .* \(since .*delete the file if"
        with pytest.raises(CheckpointError, match=expected):
            samestep.save(tmp_path / "2", model_of(2))
        assert (tmp_path / savers.TURN).exists()
    samestep.save(tmp_path / "2", model_of(2), extra=2)
    assert newest(tmp_path) == 2
    assert holder.folder.exists()
    folder._delete_partial(holder.folder)
    holder.release()


def test_on_another_machine(tmp_path, monkeypatch):
    """Its lock tells that it lives; if it is free, time without a change must tell."""
    away = {"boot": "another", "host": "elsewhere"}
    monkeypatch.setattr(savers, "WAIT_S", 0.1)
    lock = tmp_path / savers.TURN
    lock_of(lock, **away)
    with lock.open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(savers, "QUIET_S", 0.0)
        with pytest.raises(CheckpointError, match=r"the lock of process \d+ on elsewhere"):
            samestep.save(tmp_path / "1", model_of(1))
    monkeypatch.setattr(savers, "QUIET_S", 1e9)
    with pytest.raises(CheckpointError, match=r"the lock of process \d+ on elsewhere"):
        samestep.save(tmp_path / "1", model_of(1))
    assert lock.exists()
    monkeypatch.setattr(savers, "QUIET_S", 0.05)
    monkeypatch.setattr(savers, "WAIT_S", 1e9)
    samestep.save(tmp_path / "1", model_of(1), extra=1)
    assert newest(tmp_path) == 1


def test_a_partial_folder_of_another_machine(tmp_path):
    """It stays until nothing in it has changed for an hour, and is in nobody's way."""
    theirs = tmp_path / f".1.{HEX}.partial"
    theirs.mkdir()
    lock_of(theirs / savers.OWNER, boot="another", host="elsewhere", name="1")
    put(theirs / "rank_0.bin")
    samestep.save(tmp_path / "1", model_of(1), extra=1)
    assert theirs.exists()
    for entry in (theirs / "rank_0.bin", theirs / savers.OWNER, theirs):
        os.utime(entry, (0, time.time() - 2 * folder.ABANDONED_S))
    put(theirs / "rank_1.bin")
    samestep.save(tmp_path / "2", model_of(2), extra=2)
    assert theirs.exists()
    for entry in (theirs / "rank_1.bin", theirs):
        os.utime(entry, (0, time.time() - 2 * folder.ABANDONED_S))
    samestep.save(tmp_path / "3", model_of(3), extra=3)
    assert names(tmp_path) == ["1", "2", "3", "LATEST"]


@pytest.mark.parametrize("content", [b"", b"theirs", b'{"pid": 1}'])
def test_a_file_of_others_under_the_name_of_the_lock(tmp_path, monkeypatch, content):
    monkeypatch.setattr(savers, "WAIT_S", 0.2)
    monkeypatch.setattr(savers, "WRITTEN_S", 0.05)
    monkeypatch.setattr(savers, "QUIET_S", 0.0)
    put(tmp_path / savers.TURN, content)
    with pytest.raises(
        CheckpointError,
        match=r"\.samestep\.lock is (in the way|the lock of a process that it does not name)",
    ):
        samestep.save(tmp_path / "1", model_of(1))
    assert tree(tmp_path) == {savers.TURN: content}


def test_a_disk_without_locks(tmp_path, monkeypatch):
    """The number of the process tells, on this machine."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    going_on = folder.Unfinished(tmp_path / "1")
    with pytest.raises(CheckpointError, match="1 is being written by process"):
        samestep.save(tmp_path / "1", model_of(1))
    samestep.save(tmp_path / "2", model_of(2), extra=2)
    going_on.abandon()

    def die():
        folder.Unfinished(tmp_path / "3")
        os.kill(os.getpid(), signal.SIGKILL)

    ended(forked(die))
    assert len(names(tmp_path)) == 3
    samestep.save(tmp_path / "3", model_of(3), extra=3)
    assert names(tmp_path) == ["2", "3", "LATEST"]
    lock_of(tmp_path / savers.TURN, started="1")  # another process has its number now
    samestep.save(tmp_path / "4", model_of(4), extra=4)
    assert names(tmp_path) == ["2", "3", "4", "LATEST"]


def test_a_turn_that_was_taken_away(tmp_path):
    """Whoever finds its lock gone moves nothing any more."""
    unfinished = folder.Unfinished(tmp_path / "1")
    write_json(unfinished.folder / INDEX, {"format": 1, "samestep": "0", "files": {}})
    move = unfinished._move_to_its_place

    def stolen():
        (tmp_path / savers.TURN).unlink()
        lock_of(tmp_path / savers.TURN)
        return move()

    unfinished._move_to_its_place = stolen
    with pytest.raises(CheckpointError, match="was deleted or taken by another process"):
        unfinished.commit(None)
    unfinished.abandon()
    assert names(tmp_path) == [savers.TURN]


def test_a_partial_folder_that_was_removed(tmp_path):
    unfinished = folder.Unfinished(tmp_path / "1")
    write_json(unfinished.folder / INDEX, {"format": 1, "samestep": "0", "files": {}})
    (unfinished.folder / savers.OWNER).unlink()
    with pytest.raises(CheckpointError, match=r"cannot write .*1: No such file"):
        unfinished.commit(None)
    assert names(tmp_path) == [unfinished.folder.name]
