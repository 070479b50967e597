"""Calibration: every number is measured, and the file is what --hardware takes."""

import json

import pytest

from samestep import cli
from samestep.lab.estimate import calibration
from samestep.lab.estimate.hardware import find_hardware
from samestep.plan.links import CPU_LINKS, Fabric

PAIR = Fabric(*CPU_LINKS, ranks=2, per_host=2)


def test_this_machine_is_measured_and_can_be_planned_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibration, "ROUNDS", 2)
    monkeypatch.setattr(
        calibration.measure, "__defaults__", ((16, 32), calibration.time.perf_counter)
    )
    assert cli.main(["plan", "--calibrate", "--world-size", "2", "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "hardware.json").read_text())
    assert set(content["measured"]) == {"all_to_all", "reduce_scatter", "all_reduce"}
    for by_ranks in content["measured"].values():
        assert list(by_ranks) == ["2"]
        # How much is the machine's; the next test has a clock of its own.
        assert by_ranks["2"]["latency"] > 0
        assert by_ranks["2"]["bandwidth"] > 0
    assert list(content["product_rates"]) == ["16", "32"]
    found = find_hardware(str(tmp_path / "hardware.json"))
    assert found.on_cpu
    assert found.seconds("all_to_all", 1e6, PAIR) > found.inside.latency
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", str(tmp_path / "config.json"), "--mesh", "dp=2"]
    assert cli.main([*words, "--hardware", str(tmp_path / "hardware.json")]) == 0
    assert "this machine" in " ".join(capsys.readouterr().out.split())


def test_one_rank_measures_no_collective(capsys):
    assert cli.main(["plan", "--calibrate", "--world-size", "1"]) == 2
    assert "--world-size must be at least 2" in capsys.readouterr().err


@pytest.mark.parametrize("rate", [1e9, 4e9])
def test_hardware_of_what_was_found(rate):
    links = {"all_to_all": {2: calibration.Link(1e-4, 1e8), 4: calibration.Link(2e-4, 5e7)}}
    found = calibration.Measured({64: rate}, 1e10, 1e-5, 1e9, links)
    machine = calibration.hardware(found, 4)
    assert machine.product_rate(64) == rate
    assert machine.inside == links["all_to_all"][4]
    assert machine.seconds("all_to_all", 0.0, PAIR) == 1e-4
