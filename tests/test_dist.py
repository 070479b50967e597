"""The sdist and the wheel: whole, the same by either way, and of use without a checkout."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from samestep.version import PYTHON, TORCH, __version__
from tests.dist import ROOT, build, run_backend, wrong_tags
from tests.install_matrix import PYTHONS, TORCHES, Cell, table
from tests.limits import HANG
from tests.soak import twin

STEP = """
import sys
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
import samestep, torch
assert Path(samestep.__file__).is_relative_to(sys.argv[1]), samestep.__file__
assert samestep.__version__ == sys.argv[2]
assert files("samestep").joinpath("py.typed").is_file()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
before = [param.clone() for param in model.parameters()]
opt = samestep.MuonAdamW(model, lr=0.01)
model(torch.ones(2, 8)).sum().backward()
opt.step()
assert not any(map(torch.equal, before, model.parameters()))
from samestep import cli
assert cli.main(["stress", "--help"]) == 0
"""
FIND = """
import site, sys
from importlib.util import find_spec
site.addsitedir(sys.argv[1])
print(find_spec("samestep").origin)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    sdist, wheel = build(folder / "out", folder / "scratch")
    return sdist, wheel, folder


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_every_file_of_the_package(built):
    sdist, wheel, _ = built
    assert wheel.name == f"samestep-{__version__}-py3-none-any.whl"
    assert sdist.name == f"samestep-{__version__}.tar.gz"
    packaged = {name for name in contents(wheel) if name.startswith("samestep/")}
    there = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "samestep").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packaged == there
    assert {"samestep/py.typed", "samestep/lab/common/style.css"} <= packaged


def test_the_sdist_builds_the_wheel_of_the_checkout(built):
    _, wheel, folder = built
    (folder / "direct").mkdir()
    direct = run_backend("build_wheel", folder / "scratch" / "sources", folder / "direct")
    assert contents(direct) == contents(wheel)


@twin
def test_the_installed_wheel_takes_a_step_outside_of_the_checkout(built, tmp_path):
    """Into an empty folder, with the torch of this environment: nothing is downloaded."""
    _, wheel, _ = built
    target, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
    ]
    environment = os.environ | {"PYTHONPATH": str(target), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, timeout=HANG)
    done = subprocess.run(
        [sys.executable, "-c", STEP, str(target), __version__],
        cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: samestep stress" in done.stdout
    script = subprocess.run(
        [target / "bin" / "samestep", "--version"],
        cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    assert script.stdout == f"samestep {__version__}\n"


def test_an_editable_install_is_found_from_the_folder_that_holds_the_clone(built, tmp_path):
    """Where `git clone URL samestep` has put a folder of the package's name, without a package."""
    _, _, folder = built
    clone, site = tmp_path / "samestep", tmp_path / "site"
    shutil.copytree(folder / "scratch" / "sources", clone)
    site.mkdir()
    with zipfile.ZipFile(run_backend("build_editable", clone, site)) as archive:
        archive.extractall(site)
    found = subprocess.run(  # without packages of the environment: samestep is one of them
        [sys.executable, "-S", "-E", "-c", FIND, str(site)],
        cwd=tmp_path, capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    assert (found.stdout, found.stderr) == (f"{clone / 'samestep' / '__init__.py'}\n", "")


def test_the_readme_names_the_versions():
    python, torch = (
        " to ".join(f"{major}.{minor}" for major, minor in each) for each in (PYTHON, TORCH)
    )
    assert f"Python {python}, torch {torch}." in (ROOT / "README.md").read_text()


def test_the_version_stands_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "samestep.version.__version__"
    }


def test_supported_versions_are_the_same_everywhere():
    """pyproject.toml, the doctor, the matrix of tests and its published table."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest_python, oldest_torch = (".".join(map(str, each[0])) for each in (PYTHON, TORCH))
    assert project["requires-python"] == f">={oldest_python}"
    assert f"torch>={oldest_torch}" in project["dependencies"]
    prefix = "Programming Language :: Python :: "
    classified = [each.removeprefix(prefix) for each in project["classifiers"] if prefix in each]
    assert tuple(classified) == PYTHONS
    assert (PYTHONS[-1], TORCHES[-1]) == tuple(".".join(map(str, e[1])) for e in (PYTHON, TORCH))
    (page,) = (ROOT / "docs").rglob("releasing.md")
    lines = page.read_text().splitlines()
    header = next(line for line in lines if line.startswith("| torch | Python"))
    assert header == f"| torch | {' | '.join(f'Python {each}' for each in PYTHONS)} |"
    rows = lines[lines.index(header) + 2 :][: len(TORCHES)]
    assert tuple(row.split(" | ")[0].removeprefix("| ") for row in rows) == TORCHES


def test_tags_that_say_another_version():
    assert wrong_tags(["v0.1.0", "nightly", "very-good"], "0.1.0") == []
    assert wrong_tags(["v0.1.1", "v0.1.0"], "0.1.0") == ["v0.1.1"]


def test_the_table_of_versions():
    cells = [
        Cell("3.14", "2.13", "passed", "460 passed"),
        Cell("3.11", "2.9", "failed", "3 failed, 457 passed"),
        Cell("3.14", "2.9", "not available", "no wheel"),
    ]
    assert table(cells).splitlines() == [
        "| torch | Python 3.11 | Python 3.14 |",
        "|---|---|---|",
        "| 2.9 | **failed** | **not available** |",
        "| 2.13 | not run | 460 passed |",
        "",
        "- torch 2.9, Python 3.11: 3 failed, 457 passed",
        "- torch 2.9, Python 3.14: no wheel",
    ]
