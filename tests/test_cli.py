"""The command `samestep`, up to the point where a command takes over."""

import re
import runpy
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import samestep
from samestep import cli
from samestep.bench.crossover import command
from tests.limits import HANG

pytestmark = pytest.mark.usefixtures("no_torchrun")

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("group", [[], ["bench"]])
def test_help_lists_the_commands(capsys, group, flag):
    assert cli.main([*group, flag]) == 0
    shown = capsys.readouterr()
    assert f"usage: {' '.join(['samestep', *group])} COMMAND" in shown.out
    assert re.search("samestep bench crossover +from which size", shown.out)
    assert shown.err == ""


@pytest.mark.parametrize("group", [[], ["bench"]])
def test_without_a_command_help_is_an_error(capsys, group):
    assert cli.main(group) == 2
    shown = capsys.readouterr()
    assert "samestep bench crossover" in shown.err
    assert shown.out == ""


def test_help_on_a_command(capsys):
    assert cli.main(["bench", "crossover", "--help"]) == 0
    out = capsys.readouterr().out
    assert "usage: samestep bench crossover" in out
    for option in ("world-size", "backend", "sizes", "rounds", "reduction", "out"):
        assert f"--{option} " in out
    assert "None" not in out


def test_version(capsys, monkeypatch):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"samestep {samestep.__version__}\n"
    monkeypatch.setattr(sys, "argv", ["samestep", "--version"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("samestep", run_name="__main__")
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"samestep {samestep.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sing"], "there is no command 'sing'; there is: stress, train, mesh"),
        (["bench", "sing", "--loud"], "there is no command 'bench sing'"),
        (["crossover"], "there is no command 'crossover'"),
        (["--loud"], "unknown option '--loud'"),
        (["bench", "--version"], "unknown option '--version'"),
    ],
)
def test_commands_that_do_not_exist(capsys, arguments, message):
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {message}")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize(
    "arguments", [["--sizes", "many"], ["--backend", "mpi"], ["--loud"], ["extra"]]
)
def test_options_that_do_not_parse(capsys, arguments):
    assert cli.main(["bench", "crossover", *arguments]) == 2
    assert arguments[-1] in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["tyro", "rich", "matplotlib"])
def test_missing_extras_are_named(capsys, monkeypatch, missing):
    for name in list(sys.modules):
        if name.startswith(("samestep.bench.", f"{missing}.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert cli.main(["bench", "crossover"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f'error: "samestep bench crossover" needs {missing}')
    assert err.endswith(': pip install "samestep[cli]"\n')
    assert cli.main(["--help"]) == 0


def test_other_import_errors_are_not_blamed_on_extras(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "bench crossover", cli.Command("", "samestep.no_such"))
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        cli.main(["bench", "crossover"])


def test_ctrl_c(capsys, monkeypatch):
    def run(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", run)
    assert cli.main(["bench", "crossover"]) == 130
    assert capsys.readouterr().err == "error: stopped; nothing was written\n"


def test_every_command_is_in_a_group_and_can_be_loaded():
    for name, found in cli.COMMANDS.items():
        assert name.rpartition(" ")[0] in cli.GROUPS
        module = import_module(found.module)
        assert callable(module.run)
        assert callable(module.Options)


def test_the_installed_command_is_this_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["samestep"].partition(":")
    assert getattr(import_module(module), function) is cli.main


def test_python_m_samestep_and_the_library_need_no_extras():
    code = """
import runpy, sys
sys.modules.update(rich=None, tyro=None, matplotlib=None)
import samestep
assert "torch._dynamo" not in sys.modules, "importing takes twice as long"
import samestep.launch, samestep.bench.crossover
sys.argv[1:] = ["--help"]
runpy.run_module("samestep", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=HANG
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: samestep COMMAND" in done.stdout
