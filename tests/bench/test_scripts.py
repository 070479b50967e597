"""Every script of benchmarks/ starts, explains itself, and runs at its smallest setting."""

import json
import runpy
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import benchmarks
from benchmarks import (
    accuracy,
    checkpoint,
    fewer_steps_training,
    fine_tuning,
    foreign,
    offload,
    plan_time,
    qk_clip,
    rivals,
    small_state,
    survival,
    two_hosts,
    two_ranks,
)
from samestep.rules import RULES
from samestep.tooling.request import BadRequestError
from samestep.train.corpus import Corpus
from tests.ranks import run_forked
from tests.soak import SOAK, twin

FOLDER = Path(benchmarks.__file__).parent
SCRIPTS = sorted(
    path.stem for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text()
)
RUN_ELSEWHERE = {
    "fused_qkv": "tests.bench.test_fused_qkv",
    "nccl_host": "tests.nccl.test_host",
    "two_hosts": "tests.mesh.test_two_hosts",
    "two_levels": "tests.bench.test_two_levels",
}

pytestmark = pytest.mark.usefixtures("no_torchrun")


@pytest.fixture
def threads_stay(monkeypatch):
    """Scripts that choose a number of threads do not choose it for the tests after them."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_explain_themselves(name, capsys, monkeypatch):
    module = f"benchmarks.{name}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_every_script_is_run_by_a_test():
    here = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    for name, module in RUN_ELSEWHERE.items():
        assert f"{name}" in Path(import_module(module).__file__).read_text()
    assert {name for name in SCRIPTS if name not in here} == set(RUN_ELSEWHERE)


def written(folder, name):
    return json.loads((folder / name).read_text())


def test_accuracy(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(accuracy, "SHAPES", ((6, 12),))
    assert accuracy.main(accuracy.Options(blocks=1, out=tmp_path)) == 0
    rows = written(tmp_path, "accuracy.json")["distances to the polynomial in float64, relative"]
    assert {row["spectrum"] for row in rows} == set(accuracy.SPECTRA)


@twin
def test_checkpoint(tmp_path, capsys):
    checkpoint.main(checkpoint.Options(parameters=1e4, rounds=2, out=tmp_path))
    [ours] = written(tmp_path, "checkpoint.json")["ranks"][0]["seconds"]["ours"]
    assert ours > 0


@pytest.mark.usefixtures("threads_stay")
def test_fewer_steps_training(tmp_path, capsys, monkeypatch):
    text = torch.arange(2000).remainder(7).to(torch.uint8)
    monkeypatch.setattr(fewer_steps_training, "load_corpus", lambda: Corpus(text, text, (), ()))
    monkeypatch.setattr(fewer_steps_training, "HELD_OUT", 2)
    small = fewer_steps_training.Options(steps=2, width=16, layers=1, seeds=2, out=tmp_path)
    fewer_steps_training.main(small)
    content = written(tmp_path, "fewer_steps_training.json")
    assert "\n".join(fewer_steps_training.table(content)) in capsys.readouterr().out
    for seed in range(2):
        losses = [run["loss"] for run in content["runs"] if run["seed"] == seed]
        assert len(set(losses)) == len(fewer_steps_training.WAYS)  # options reach the optimizer
        assert losses == pytest.approx([losses[0]] * len(losses), rel=0.05)


@pytest.mark.usefixtures("threads_stay")
def test_fine_tuning(monkeypatch):
    text = torch.arange(2000).remainder(7).to(torch.uint8)
    of_task = fine_tuning.Text(text, text)
    monkeypatch.setattr(fine_tuning, "texts", lambda: (of_task, of_task))
    rows = fine_tuning.of_seed(fine_tuning.Options(steps=1, tuning_steps=1, batch=1), 0)
    assert len(rows) == 1 + len(fine_tuning.WAYS) * len(fine_tuning.RATES)
    assert fine_tuning.table({"rows": rows}).count("\n") == 3 + len(fine_tuning.WAYS)


def test_foreign(tmp_path):
    with pytest.raises(BadRequestError, match="has no checkout of "):
        foreign.main(foreign.Options(peers=tmp_path, receipt=tmp_path / "a"))


def test_offload(tmp_path, capsys):
    offload.main(offload.Options(rule="adamw", rounds=1, device="cpu", out=tmp_path))
    there, on_host, narrow = written(tmp_path, "offload.json")["found"]
    assert there["moved"] == 0
    assert on_host["moved"] > 0
    assert on_host["planned"] > there["planned"]  # on a CPU staging buffers come on top
    assert narrow["moved"] == pytest.approx(on_host["moved"] / 3, rel=0.01)  # 16 bits, no masters
    capsys.readouterr()
    words = offload.Options(mode="train", steps=2, width=32, layers=1, device="cpu", out=tmp_path)
    offload.main(words)
    of_device, of_host = written(tmp_path, "offload.json")["found"].values()
    assert of_device["losses"] == of_host["losses"]


def test_rivals(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rivals, "RATES", {"adamw": (0.02,), "muonh": (0.04,), "soap": (0.01,)})
    for name in ("muonh", "soap"):  # other tests may have registered them, and are not to see ours
        monkeypatch.setitem(RULES, name, None)
        del RULES[name]
    options = rivals.Options(steps=2, width=16, layers=1, out=tmp_path / "rivals.json")
    rivals.main(options)
    assert len(written(tmp_path, "rivals.json")["runs"]) == 3


@twin
def test_small_state(tmp_path, capsys, monkeypatch):
    text = torch.arange(2000).remainder(7).to(torch.uint8)
    monkeypatch.setattr(small_state, "load_corpus", lambda: Corpus(text, text, (), ()))
    small_model = {"device": "cpu", "width": 32, "layers": 1, "out": tmp_path}
    small_state.main(small_state.Options(**small_model, rounds=1, warmup=1))
    rows = written(tmp_path, "step.json")["rows"]
    found = {(row["rule"], row["name"]): row["bytes_per_parameter"] for row in rows}
    wide, small = found["adamw", "samestep 32 bits"], found["adamw", "samestep 8bit"]
    assert 7.9 < wide < 8.1
    assert 2.2 < small < 2.3  # two codes, and two scales for 32 of them
    training = {**small_model, "steps": 3, "seeds": (0, 1), "sequences": 1, "context": 8}
    formats = ("32 bits", "8bit")
    small_state.main(small_state.Options(**training, mode="train", formats=formats))
    told = written(tmp_path, "train.json")["runs"]
    wide, small = ([run["final"] for run in told if run["form"] == f] for f in ("32 bits", "8bit"))
    assert len(wide) == 2
    assert wide != small
    assert wide == pytest.approx(small, rel=0.01)
    small_state.main(small_state.Options(**training, mode="error"))
    rows = written(tmp_path, "error.json")["rows"]
    found = {(row["rule"], row["form"]): row["mean"] for row in rows}
    assert len(found) == 2 * 3
    for rule in ("adamw", "muon"):
        assert 0 < found[rule, "bf16"] < found[rule, "8bit"] < 1


def test_qk_clip(tmp_path, capsys):
    qk_clip.main(qk_clip.Options(device="cpu", rounds=1, out=tmp_path))
    content = written(tmp_path, "qk_clip.json")
    (row,) = content["rows"]
    assert len(row["ms"]) == 4
    assert content["training"]["ms"].keys() == {"without", "with QK-clip"}
    assert "largest logits" in capsys.readouterr().out


def test_plan_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan_time, "MODELS", {"small": plan_time.MODELS["small"]})
    monkeypatch.setattr(plan_time, "SIDES", (32, 64))
    plan_time.main(plan_time.Options(ranks=(2,), rounds=1, clock="cpu", out=tmp_path))
    assert (tmp_path / "plan_time_cpu.json").exists()


@twin
def test_survival(tmp_path, capsys):
    one = "polar-express gram kernels float16"
    options = survival.Options(blocks=64, seconds=0.1, only=one, out=tmp_path)
    assert survival.main(options) == 0
    [result] = written(tmp_path, "survival.json")["results"]
    assert result["name"] == one


def of_two_hosts(rank):
    told = {"losses": []}
    two_hosts.train(1, 1, told, None)
    return told


@pytest.mark.skipif(not SOAK, reason="a model on four axes: make soak runs it")
def test_a_rank_of_two_hosts():
    told = run_forked(4, of_two_hosts)
    assert [len(each["losses"]) for each in told] == [1] * 4
    assert all(each["checksum"] for each in told)


@twin
def test_two_ranks(tmp_path, capsys):
    two_ranks.main(
        two_ranks.Options(
            width=64, layers=1, vocabulary=16, sequences=1, tokens=8, rounds=1, out=tmp_path,
        )
    )  # fmt: skip
    assert written(tmp_path, "two_ranks.json")
