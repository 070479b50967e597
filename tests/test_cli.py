"""The command `samestep`, up to the point where a command takes over."""

import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import pytest

import samestep
from samestep import cli
from samestep.lab.bench import crossover as command
from tests.limits import HANG

pytestmark = pytest.mark.usefixtures("no_torchrun")

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("group", [[], ["bench"]])
def test_help_lists_the_commands(capsys, group, flag):
    assert cli.main([*group, flag]) == 0
    shown = capsys.readouterr()
    assert f"usage: {' '.join(['samestep', *group])} COMMAND" in shown.out
    assert re.search("samestep bench crossover +measure from which size", shown.out)
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
        (["sing"], "there is no command 'sing'; choose one of: stress, train, doctor"),
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


@pytest.mark.parametrize("missing", ["rich", "matplotlib"])
def test_missing_extras_are_named(capsys, monkeypatch, missing):
    for name in list(sys.modules):
        if name.startswith(("samestep.lab.bench.", "samestep.tooling.", f"{missing}.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert cli.main(["bench", "crossover"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f'error: "samestep bench crossover" needs {missing}')
    assert err.endswith(': pip install ".[cli]" in a checkout of the repository\n')
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
        assert callable(module.run), name
        assert callable(module.Options)


def test_the_installed_command_is_this_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["samestep"].partition(":")
    assert getattr(import_module(module), function) is cli.main


def test_python_m_samestep_and_the_library_need_no_extras(tmp_path):
    code = """
import runpy, sys
sys.modules.update(rich=None, matplotlib=None, jinja2=None, jsonschema=None)
import samestep
assert "torch" not in sys.modules
assert {"MuonAdamW", "save", "hf", "presets"} <= set(dir(samestep))
import torch
before = set(sys.modules)
for name in ("AdamW", "FlightRecorder", "GradScaler", "Muon", "MuonAdamW", "Rule", "presets"):
    getattr(samestep, name)
new = sorted(name for name in set(sys.modules) - before if not name.startswith("samestep"))
assert not new, f"importing takes longer than torch by {new}"
assert "torch._dynamo" not in sys.modules, "importing takes twice as long"

# Nor do an optimizer, a step and a checkpoint, which load no laboratory either.
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
optimizer = samestep.MuonAdamW(model, lr=0.01)
model(torch.ones(2, 4)).square().sum().backward()
optimizer.step()
optimizer.table(), optimizer.explain()
folder = sys.argv[1]
samestep.save(folder, model, optimizer)
samestep.load(folder, model, optimizer)
loaded = [name for name in sys.modules if name.startswith("samestep.lab")]
assert not loaded, loaded

import samestep.launch.forked, samestep.lab.bench.gpu.measure
sys.argv[1:] = ["--help"]
runpy.run_module("samestep", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "saved"],
        capture_output=True, text=True, cwd=ROOT, timeout=HANG,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: samestep COMMAND" in done.stdout


def test_help_and_completion_import_no_torch():
    code = """
import sys
from samestep import cli
for name in ["", "bench", "bench client", *cli.COMMANDS]:
    assert cli.main([*name.split(), "--help"]) == 0, name
assert cli.main(["--version"]) == cli.main(["completion", "bash"]) == 0
heavy = {"torch", "numpy", "triton", "rich", "matplotlib"} & sys.modules.keys()
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=HANG
    )
    assert (done.returncode, done.stderr) == (0, "")
    for name in cli.COMMANDS:
        assert f"usage: samestep {name}" in done.stdout
    assert max(map(len, done.stdout.partition("_samestep()")[0].splitlines())) <= 80


def test_every_public_name_has_a_home():
    for name in samestep.__all__:
        assert getattr(samestep, name) is getattr(samestep, name)
    assert samestep.fsdp is import_module("samestep.fsdp")
    with pytest.raises(AttributeError, match="has no attribute 'Adamw'"):
        _ = samestep.Adamw


def test_torch_that_is_missing_is_named(capsys, monkeypatch):
    missing = ModuleNotFoundError("No module named 'torch'", name="torch")
    monkeypatch.setattr(cli, "_run", Mock(side_effect=missing))
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == 'error: "samestep train" needs torch: pip install torch\n'


def without_a_reader(arguments):
    """Exit status and errors of a command whose output nobody reads."""
    read, write = os.pipe()
    os.close(read)
    errors, told = os.pipe()

    def be_it():
        os.dup2(write, 1)
        os.dup2(told, 2)
        sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115
        sys.exit(cli.main(arguments))

    process = multiprocessing.get_context("fork").Process(target=be_it)
    process.start()
    os.close(write)
    os.close(told)
    process.join(HANG)
    with open(errors) as text:
        return process.exitcode, text.read()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["stress", "--help"],
        ["--version"],
        ["recipes"],  # writes to the stream
        ["stress", "--list"],  # through rich
        ["mesh", "--world-size", "2"],
    ],
    ids=" ".join,
)
def test_output_that_nobody_reads_ends_a_command_quietly(arguments):
    assert without_a_reader(arguments) == (141, "")


def test_help_into_head_of_a_real_shell():
    samestep_help = f"{sys.executable} -m samestep train --help"
    line = f"({samestep_help}; echo $? >&2) | head -c 1"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, timeout=HANG
    )
    assert done.stdout == "u"
    assert done.stderr.strip() in ("0", "141")  # `head` may have read all of it


def test_other_broken_pipes_are_no_quiet_end(monkeypatch):
    monkeypatch.setattr(command, "run", Mock(side_effect=BrokenPipeError("of a rank")))
    with pytest.raises(BrokenPipeError, match="of a rank"):
        cli.main(["bench", "crossover"])
