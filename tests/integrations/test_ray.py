"""examples/ray_train.py: a local Ray whose worker is killed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile

import pytest

from examples import ray_train

HAS_RAY = importlib.util.find_spec("ray") is not None


@pytest.mark.skipif(not HAS_RAY, reason="make test-integrations installs it")
def test_a_killed_worker(tmp_path):
    """In a process of its own, since Ray leaves threads; its sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as short:
        found = subprocess.run(
            [sys.executable, "-m", "examples.ray_train", "--out", str(tmp_path)],
            env={**os.environ, "RAY_TMPDIR": short},
            capture_output=True,
            text=True,
            timeout=1500,
        )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "without a break: began at [0]" in found.stdout
    assert "a worker killed in step 6: began at [0, 4]" in found.stdout
    assert "23 of 23 parameters have the same bits" in found.stdout


def test_what_is_refused(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        ray_train.main(["--kill-at", "2"])
    assert "--kill-at is after the first checkpoint" in capsys.readouterr().err
    (tmp_path / "killed").mkdir()
    with pytest.raises(SystemExit):
        ray_train.main(["--out", str(tmp_path)])
    assert f"--out: {tmp_path} is not empty" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    assert ray_train.main(["--out", str(tmp_path / "new")]) == 2
    assert 'pip install "ray[train]"' in capsys.readouterr().err
