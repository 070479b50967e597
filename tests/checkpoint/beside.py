"""Folders of others beside checkpoints, as near to ours as can be; whether they are untouched."""

from __future__ import annotations

import os
from pathlib import Path

from samestep.checkpoint.storage import INDEX, write_json

HEX = "0123456789abcdef" * 2  # as a partial folder has one in its name


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def tree(path):
    """All that is there, with contents; links are not followed."""
    found = {}
    for base, folders, files in os.walk(path):
        for name in (*folders, *files):
            entry = os.path.join(base, name)
            key = os.path.relpath(entry, path)
            if os.path.islink(entry):
                found[key] = ("link", os.readlink(entry))
            else:
                found[key] = None if os.path.isdir(entry) else Path(entry).read_bytes()
    return found


def put(file, content=b"precious"):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def put_foreign(path):
    """What others may have beside checkpoints, as near to ours as it can be; gives what it is."""
    before = set(tree(path))
    put(path / "dataset" / INDEX, b'{"shards": ["data.bin"]}')
    put(path / "dataset" / "data.bin")
    write_json(path / "dataset" / "meta.json", {"format": 1})
    (path / "checked").mkdir()
    write_json(path / "checked" / INDEX, {"format": 1, "files": {"data.bin": 8}})
    put(path / "checked" / "data.bin")
    (path / "wild").mkdir()
    away = {"../../precious": 8, "/etc/passwd": 1, "a/../../precious": 8}
    write_json(path / "wild" / INDEX, {"format": 1, "samestep": "0", "files": away})
    put(path / ".download.partial" / "model.gguf")
    put(path / ".download.partial" / ".lock", b"")
    put(path / ".trash.removed" / "thesis.txt")
    put(path / f".mine.{HEX}.partial" / "data.bin")
    put(path / f".mine.{HEX}.removed" / "data.bin")
    put(path / f".other.{HEX}.partial" / ".lock", b'{"samestep": "me", "pid": 1}')
    put(path / f".wild.{HEX}.removed" / "data.bin")
    write_json(path / f".wild.{HEX}.removed" / INDEX, {"format": 1, "samestep": "0", "files": away})
    put(path / f".file.{HEX}.partial")
    put(path / ".LATEST.partial")
    put(path / "notes.partial" / "a.txt")
    put(path.parent / "precious")
    put(path.parent / "elsewhere" / "a.txt")
    os.symlink("../elsewhere", path / "results")
    os.symlink("nowhere", path / "dangling")
    os.symlink("../../elsewhere", path / f".linked.{HEX}.partial")
    os.symlink("../../elsewhere", path / f".linked.{HEX}.removed")
    return {key: value for key, value in tree(path).items() if key not in before}


def still_there(path, foreign):
    now = tree(path)
    wrong = [key for key, value in foreign.items() if now.get(key, "gone") != value]
    assert wrong == []
    assert (path.parent / "precious").read_bytes() == b"precious"
    assert tree(path.parent / "elsewhere") == {"a.txt": b"precious"}
