"""Result files that appear whole or not at all."""

import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest

from samestep.tooling.output import check_folder, write_files
from samestep.tooling.request import BadRequestError


@contextmanager
def little_room():
    """Files cannot grow past 100 bytes; not for longer than needed, since pytest writes too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_files_are_written_and_replaced(tmp_path):
    folder = tmp_path / "not there" / "yet"
    write_files(folder, {"a": b"1", "b": b"2"})
    write_files(folder, {"a": b"3"})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a": b"3", "b": b"2"}


def test_a_full_disk_leaves_everything_as_it_was(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    too_large = pytest.raises(BadRequestError, match=r"cannot write to .*: File too large")
    with too_large as caught, little_room():
        write_files(tmp_path, {"a": b"new", "b": b"x" * 101})
    assert str(tmp_path) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"

    with pytest.raises(BadRequestError), little_room():
        write_files(tmp_path / "new" / "folder", {"b": b"x" * 101})
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_interrupt_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_files(tmp_path / "new", {"a": b"1"})
    assert list(tmp_path.iterdir()) == []


def test_checking_makes_nothing(tmp_path):
    check_folder(tmp_path)
    check_folder(tmp_path / "not there" / "yet")
    assert list(tmp_path.iterdir()) == []


def test_checking_refuses_files_and_places_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.touch()
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    for folder, culprit in ((file, file), (file / "below", file), (dangling, dangling)):
        with pytest.raises(BadRequestError) as caught:
            check_folder(folder)
        assert str(caught.value) == f"cannot write to '{folder}': {culprit} is not a directory"
    with pytest.raises(BadRequestError, match="cannot write to '/proc/new': "):
        check_folder(Path("/proc/new"))
