"""What `make test-repeat` says of several runs of a suite."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests import repeat
from tests.left_behind import children
from tests.repeat import Run, busy_loops, differing, outcomes, summary

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_one" time="0.1"/>
<testcase classname="tests.a" name="test_two[x]"><skipped message="no GPU"/></testcase>
<testcase classname="tests.b" name="test_one"><failure message="no">why</failure></testcase>
<testcase classname="tests.b" name="test_two"/>
<testcase classname="tests.b" name="test_two"><error message="left behind">what</error></testcase>
</testsuite></testsuites>"""


def test_outcomes(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    assert outcomes(tmp_path / "report.xml") == {
        "tests.a::test_one": "passed",
        "tests.a::test_two[x]": "skipped",
        "tests.b::test_one": "failed",
        "tests.b::test_two": "failed",
    }
    assert outcomes(tmp_path / "none.xml") == {}


ALIKE = {"a": "passed", "b": "skipped"}


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (ALIKE, {}),
        ({"a": "passed"}, {"b": ["skipped", "missing"]}),
        ({"a": "failed", "b": "skipped"}, {"a": ["passed", "failed"]}),
        (ALIKE | {"c": "passed"}, {"c": ["missing", "passed"]}),
    ],
)
def test_what_was_not_the_same(second, found, capsys):
    runs = [Run(1, 2.0, 0, ALIKE), Run(2, 3.0, 0, second)]
    assert differing(runs) == found
    assert summary(runs) == (1 if found else 0)
    shown = capsys.readouterr().out
    assert "--shuffle 2          3.0 s   " in shown
    assert all(" ".join(seen) in shown for seen in found.values())


def test_who_fails_each_time_has_failed(capsys):
    runs = [Run(seed, 1.0, 1, {"a": "failed"}) for seed in (1, 2)]
    assert differing(runs) == {"a": ["failed", "failed"]}
    assert summary([Run(1, 1.0, 0, {})]) == 1  # nothing ran
    assert summary([Run(1, 1.0, 1, ALIKE)]) == 1  # pytest itself said no
    assert "failed" in capsys.readouterr().out


def test_each_run_has_an_order_of_its_own(monkeypatch, capsys):
    commands = []

    def pretend(command, **_):
        commands.append(command)
        (path,) = (word.partition("=")[2] for word in command if word.startswith("--junitxml="))
        Path(path).write_text(REPORT)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", pretend)
    assert repeat.main(["--times", "2", "--first-seed", "7", "-n", "3"]) == 1
    assert [command[command.index("--shuffle") + 1] for command in commands] == ["7", "8"]
    assert all(command[-2:] == ["-n", "3"] for command in commands)
    assert capsys.readouterr().out.count("failed failed   tests.b::test_") == 2


def test_busy_loops_end_with_what_they_disturb():
    before = children()

    def interrupted():
        with busy_loops(2):
            assert len(children() - before) == 2
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert children() == before
