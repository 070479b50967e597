"""`samestep doctor`: what it finds, and that it finds what is broken."""

import json
import sys

import pytest
import torch
import torch.distributed as dist

from samestep import cli
from samestep.doctor import checks, trials
from samestep.launch import RanksFailed
from tests.limits import HANG

pytestmark = pytest.mark.usefixtures("no_torchrun")
WAIT = ["--timeout", str(HANG)]


def test_a_healthy_machine(capsys):
    assert cli.main(["doctor", *WAIT]) == 0
    shown = capsys.readouterr().out
    for area in (
        "versions",
        "backends",
        "topology",
        "ranks",
        "gpus",
        "kernels",
        "MuonAdamW(model) by default",
    ):
        assert f"\n{area}\n" in f"\n{shown}"
    assert f"torch                {torch.__version__}" in shown
    assert "2 ranks over gloo    MuonAdamW steps as one process does, bit for bit" in shown
    assert "plain torch: kernels are for CUDA" in shown
    assert "muon                 24 parameters, 720,896 elements (91.5%) in 24 blocks" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_as_json_with_a_model_and_a_broken_environment(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "step_on_two_ranks", lambda timeout: True)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    file = tmp_path / "mine.py"
    file.write_text("import torch\ndef make():\n    return torch.nn.Linear(8, 4)\n")
    assert cli.main(["doctor", "--json", "--model", f"{file}:make"]) == 1
    content = json.loads(capsys.readouterr().out)
    broken = [check for check in content["checks"] if check["state"] == "broken"]
    assert content["broken"] == len(broken) == 1
    assert broken[0]["value"] == "RANK=5 in the environment is not below WORLD_SIZE=2"
    assert broken[0]["way_out"] == "start ranks with torchrun, or unset RANK and WORLD_SIZE"
    by_name = {check["name"]: check["value"] for check in content["checks"]}
    assert by_name["model"].endswith("mine.py:make: 2 parameters, 36 elements")


def test_ranks_that_take_another_step_are_found(monkeypatch):
    usual = trials._gradients
    monkeypatch.setattr(
        trials, "_gradients", lambda rank: usual(0 if dist.is_initialized() else rank)
    )
    (check,) = checks.ranks(HANG)
    assert (check.state, check.value) == (
        "broken",
        "MuonAdamW steps otherwise than one process does",
    )


def test_ranks_that_fail_are_told(monkeypatch):
    def fails(timeout):
        raise RanksFailed(2, {1: "raised:\nRuntimeError: no route to host"})

    monkeypatch.setattr(checks, "step_on_two_ranks", fails)
    (check,) = checks.ranks(1.0)
    assert check.state == "broken"
    assert check.value == "1 of 2 ranks failed: RuntimeError: no route to host"
    assert "GLOO_SOCKET_IFNAME" in check.way_out


@pytest.mark.parametrize(
    ("environment", "gpus", "state", "says", "way_out"),
    [
        ({"RANK": "0"}, 0, "broken", "RANK is set and WORLD_SIZE is not", "unset RANK"),
        ({"WORLD_SIZE": "2"}, 0, "broken", "WORLD_SIZE is set and RANK is not", "torchrun"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, 0, "broken", "RANK='x'", "unset RANK and WORLD_SIZE"),
        ({"SLURM_NTASKS": "16"}, 0, "note", "Slurm has 16 tasks", "let srun start torchrun"),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, 2, "broken",
            "4 on this host, and 2 GPUs", "--nproc-per-node 2",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2"}, 0, "note",
            "rank 0 of 5, 2 on this host", "the same number of ranks on every host",
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 0, "ok", "rank 1 of 2, 2 on this host", ""),
        ({}, 0, "ok", "one process", ""),
    ],
)  # fmt: skip
def test_topology(monkeypatch, environment, gpus, state, says, way_out):
    for name in checks.SHOWN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    told = {check.name: check for check in checks.topology()}
    assert told["ranks"].state == state
    assert says in told["ranks"].value
    assert way_out in told["ranks"].way_out
    assert {name: told[name].value for name in environment} == environment


def test_threads_that_take_the_cores_from_each_other(monkeypatch):
    monkeypatch.setattr(checks.os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "OMP_NUM_THREADS": "8"}.items():
        monkeypatch.setenv(name, value)
    told = {check.name: check for check in checks.topology()}
    assert told["threads"].way_out.startswith("set OMP_NUM_THREADS=2:")


def test_versions_that_are_missing_or_old(monkeypatch):
    usual = checks._version
    monkeypatch.setattr(checks, "_version", lambda p: None if p in ("rich", "jinja2") else usual(p))
    monkeypatch.setattr(torch, "__version__", "2.8.1+cpu")
    told = {check.name: check for check in checks.versions()}
    assert told["command packages"].state == "note"
    assert "without rich, jinja2" in told["command packages"].value
    assert told["torch"].state == "broken"
    assert told["torch"].way_out == "install torch 2.9 or newer, at most 2.13"
    monkeypatch.setattr(torch, "__version__", "2.14.0+cpu")
    monkeypatch.setattr(checks.sys, "version_info", (3, 15, 0))
    told = {check.name: check for check in checks.versions()}
    assert told["torch"].state == told["python"].state == "note"
    assert told["python"].way_out == "not tested with this version; 3.11 to 3.14 are"


def test_what_raises_is_a_finding(monkeypatch):
    def raises():
        raise OSError("no such thing")

    monkeypatch.setattr(checks, "versions", raises)
    monkeypatch.setattr(checks, "step_on_two_ranks", lambda timeout: True)
    first = next(checks.every(None, "a GPT", 1.0))
    assert (first.area, first.state) == ("versions", "broken")
    assert first.value.startswith("OSError: no such thing at test_doctor.py:")


def test_it_runs_without_the_packages_of_commands(capsys, monkeypatch):
    for name in ("rich", "matplotlib", "jinja2", "jsonschema"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(checks, "step_on_two_ranks", lambda timeout: True)
    assert cli.main(["doctor", "--json"]) == 0


@pytest.mark.parametrize("words", [["--timeout", "0"], ["--model", "mine"], ["--loud"]])
def test_what_cannot_be_done(capsys, words):
    assert cli.main(["doctor", *words]) == 2
    assert words[0] in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.own_process
def test_a_gpu_takes_a_step():
    told = {check.name: check for check in [*checks.gpus(), *checks.kernels()]}
    assert told["cuda:0"].state == "ok"
    assert told["step on cuda:0"].value == "Triton kernels"
