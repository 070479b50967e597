"""The leg of the harness on XLA: cases, receipts and mutants."""

import json

import pytest

from samestep import cli
from samestep.lab.stress.campaign import MutantRunner
from samestep.lab.stress.judge import PROGRAM_CHECKS
from samestep.lab.stress.mutants import XLA_MUTANTS
from samestep.lab.stress.receipt import check_receipt

RANDOM = ["--scenario", "dist_adamw_muon_random", "--steps", "9", "--sample-every", "3"]


@pytest.mark.xla
def test_a_run(tmp_path):
    layouts = ["--device", "xla", "--layout", "xla_data", "--world-size", "2"]
    assert cli.main(["stress", *RANDOM, *layouts, "--out", str(tmp_path)]) == 0
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    check_receipt(receipt)
    ran, (case,) = receipt["ran"], receipt["cases"]
    assert (ran["actual_backend"], ran["runtime_mode"], ran["device"]) == ("xla", "spmd", "xla")
    assert ran["versions"]["torch_xla"].startswith("2.9")
    assert [sample["max_abs_param_diff"] for sample in case["samples"]] == [0, 0, 0]
    # Four kinds of presence, and the first step; of the second, a parameter's first, there might be
    # one more.
    assert (case["program"]["programs"], case["program"]["kinds_of_step"]) == (5, 6)
    assert case["program"]["host_reads"] == 0


HYBRID = ["--scenario", "hybrid_gpt", "--layout", "xla_hybrid_tp_sp_ep", "--world-size", "8"]


@pytest.mark.xla
def test_the_hybrid_mesh_of_eight_devices(tmp_path):
    """Data, expert and model axes of two devices each, against the reference of one process."""
    asked = [*HYBRID, "--device", "xla", "--steps", "3", "--sample-every", "1"]
    assert cli.main(["stress", *asked, "--out", str(tmp_path)]) == 0
    (case,) = json.loads((tmp_path / "receipt.json").read_text())["cases"]
    assert [sample["max_abs_param_diff"] for sample in case["samples"]] == [0, 0, 0]
    assert case["program"]["programs"] == 2  # the first step, and all others
    assert case["program"]["host_reads"] == 0


@pytest.mark.xla
@pytest.mark.parametrize("name", XLA_MUTANTS)
def test_every_mutant_is_caught_by_its_check(name):
    result = MutantRunner(watchdog=10.0).run(XLA_MUTANTS[name])
    assert result.unpatched in ("exact", "within_tolerance")
    assert result.caught, result.findings


def test_every_check_of_a_program_has_a_mutant():
    caught = {mutant.expected for mutant in XLA_MUTANTS.values()}
    assert caught == {*PROGRAM_CHECKS, "contract", "plan"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--layout", "xla_data"], "--layout xla_data needs --device xla"),
        (["--device", "xla", "--layout", "zero2"], "one program for all"),
        (["--device", "xla", "--backend", "gloo"], "leave out --backend"),
        (["--device", "xla", "--lanes", "2"], "leave out --lanes"),
    ],
)
def test_what_does_not_go_together(asked, message, capsys):
    assert cli.main(["stress", *asked]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_without_xla_one_line_says_why(capsys, monkeypatch):
    monkeypatch.setattr("samestep.xla.runtime.find_spec", lambda name: None)
    assert cli.main(["stress", "--device", "xla"]) == 2
    assert "--device xla cannot run: torch_xla is not installed" in " ".join(
        capsys.readouterr().err.split()
    )
