"""Tests in several processes: each is run once and told as if it had run here, whatever happens."""

import multiprocessing
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, deque

import pytest

from tests.lanes import Lane, Lanes
from tests.limits import HANG
from tests.repeat import outcomes

CONFTEST = """
import pytest
from tests.lanes import Lanes

def begin():
    return lambda: open("ended", "a").write("x")

def pytest_runtestloop(session):
    Lanes(session, 3, begin).run()
    return True
"""

FILES = {
    "test_first.py": """
import multiprocessing, os, signal, sys, pytest

def test_a_process_ends_with_its_status():
    child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(7,))
    child.start()
    child.join()
    assert child.exitcode == 7

@pytest.fixture(scope="module")
def shared():
    with open("set_up", "a") as file:
        file.write("x")
    yield os.getpid()
    with open("torn_down", "a") as file:
        file.write("x")

@pytest.mark.parametrize("place", range(8))
def test_shares(shared, place, tmp_path):
    print("said by", place)
    assert shared == os.getpid()
    tmp_path.joinpath("here").touch()
    assert place != 3
""",
    "test_second.py": """
import os, signal, pytest

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.parametrize("place", range(6))
def test_goes_on(place):
    pass

@pytest.mark.skip(reason="because")
def test_is_skipped():
    pass
""",
}


FAILS = """
import pytest

@pytest.mark.parametrize("place", range(500))
def test_fails(place):
    assert place
"""


def run(folder, files, *arguments):
    """A session of its own in a child of this process: its exit status and outcomes."""
    for name, text in {"conftest.py": CONFTEST, **files}.items():
        folder.joinpath(name).write_text(text)
    report = folder / "report.xml"

    def job():
        os.chdir(folder)
        words = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov", "-c", os.devnull]
        words += ["--rootdir", ".", "--basetemp", "tmp", f"--junitxml={report}"]
        status = pytest.main([*words, *arguments])
        sys.stdout.flush()
        os._exit(status)

    child = multiprocessing.get_context("fork").Process(target=job)
    child.start()
    child.join(HANG)
    child.kill()
    child.join()
    return child.exitcode, outcomes(report), ElementTree.parse(report)


def test_every_test_is_run_once_and_told(tmp_path, capfd):
    status, found, report = run(tmp_path, FILES)
    told = capfd.readouterr().out
    assert status == pytest.ExitCode.TESTS_FAILED
    assert Counter(found.values()) == {"passed": 14, "failed": 2, "skipped": 1}
    failed = [name.rpartition("::")[2] for name, outcome in found.items() if outcome == "failed"]
    assert sorted(failed) == ["test_dies", "test_shares[3]"]
    assert len(list(report.iter("testcase"))) == len(found) == 17
    assert "said by 3" in told
    assert "said by 4" not in told
    assert "the process that ran it died" in told
    ups, downs = ((tmp_path / name).read_text() for name in ("set_up", "torn_down"))
    assert 1 <= len(ups) == len(downs) < 8  # not for each test
    assert (tmp_path / "ended").read_text() == "xxx"  # also of what was started for who has died


def test_nothing_more_is_run_after_enough_failures(tmp_path):
    status, found, _ = run(tmp_path, {"test_fails.py": FAILS}, "-x")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert list(found.values()).count("failed") == 1
    assert len(found) < 500


def test_who_has_nothing_left_takes_half_of_the_rest():
    lanes = Lanes.__new__(Lanes)
    lanes._session = type("Session", (), {"shouldfail": False, "shouldstop": False})
    lanes._lanes = own, other = Lane(deque()), Lane(deque([4, 5, 6, 7, 8]))
    for _ in range(4):
        lanes._take(own)
    assert list(own.settled) == [6, 7, 8, 5]
    assert list(other.left) == [4]
