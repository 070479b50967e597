"""The check that ends every test here finds what it is there for."""

import os
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests import left_behind
from tests.left_behind import Belongings


def begun(pid, command):
    """Wait until it is what it was started as: at first it has its parent's command, or none."""
    while left_behind.command(pid) != command:
        time.sleep(0.001)  # a test has a limit
    return f"process {pid} ({command})"


@contextmanager
def a_process():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield begun(process.pid, "sleep 600 ")
        process.wait()  # the check has ended it


@contextmanager
def an_orphan():
    shown = subprocess.run(
        ["sh", "-c", "sleep 601 >/dev/null 2>&1 & echo $!"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    yield begun(int(shown), "sleep 601 ")


@contextmanager
def a_thread():
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait, name="left alone")
    thread.start()
    yield "thread 'left alone'"
    may_end.set()
    thread.join()


@contextmanager
def a_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"port {listening.getsockname()[1]} is listened at"


@contextmanager
def a_folder():
    with suppress(FileNotFoundError), tempfile.TemporaryDirectory() as folder:  # which is removed
        (Path(folder) / "file").touch()
        yield folder


@contextmanager
def a_group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield "torch.distributed's default group"
    dist.destroy_process_group()


@pytest.mark.parametrize("leak", [a_process, an_orphan, a_thread, a_port, a_folder, a_group])
def test_it_is_told(monkeypatch, leak):
    monkeypatch.setattr(left_behind, "PATIENCE_S", 0.0)
    before = Belongings(Path(tempfile.gettempdir()))
    with leak() as told:
        assert before.left_behind() == [told]
    monkeypatch.undo()
    assert before.left_behind() == []


def test_what_is_about_to_end_is_waited_for():
    before = Belongings(Path(tempfile.gettempdir()))
    ended = threading.Event()
    threading.Thread(target=ended.wait, args=(0.05,)).start()
    subprocess.run(["sh", "-c", "sleep 0.05 >/dev/null &"], check=True)
    assert before.left_behind() == []


def test_temporary_files_of_this_process_are_apart():
    assert os.environ["TMPDIR"] == tempfile.gettempdir()
    assert Path(tempfile.gettempdir()).name.startswith("samestep_tests_")
