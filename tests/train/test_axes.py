"""Runs of the trainer on meshes of several axes."""

import json

import pytest
import torch

from samestep import cli
from samestep.train import journal, trainer
from tests.ranks import run_forked
from tests.soak import SOAK, twin
from tests.train.runs import losses, rows, text_file, train, words

pytestmark = pytest.mark.usefixtures("no_torchrun")

EACH = 3 if SOAK else 1  # steps on each mesh
STEPS = 3 * EACH
SHAPE = {
    "layers": 4 if SOAK else 2, "heads": 4, "kv_heads": 2, "context": 8, "batch_size": 4,
    "micro_batch": 2,
    "eval_sequences": 4, "steps": STEPS, "save_every": EACH, "eval_every": STEPS, "keep": 5,
}  # fmt: skip
EXPERTS = {"experts": 4, "expert_size": 8}


def go_on(rank: int, steps: int, runs: list[list[str]]) -> list[int]:
    """Train with one set of flags after the other, each for so many steps."""
    torch.set_num_threads(1)
    save = trainer.Trainer._save

    def save_and_stop(self, stops):
        save(self, stops)
        if self.step < self.options.steps and self.step % steps == 0:
            raise KeyboardInterrupt

    trainer.Trainer._save = save_and_stop  # in this process, which ends soon
    journal.picture = lambda rows: b""
    return [cli.main(["train", *arguments]) for arguments in runs]


@twin
def test_a_run_goes_on_in_other_meshes(tmp_path):
    """Tensor parallel of 2, 1 and 2 ranks, experts on 2 or 4: the run of one process."""
    data = text_file(tmp_path)
    arguments = words(tmp_path / "out", data, **SHAPE, **EXPERTS)
    on_four, on_two = [["--tp", "2", "--sp", "--ep", "2"]], [["--ep", "2"], ["--pp", "2"]]
    names = ["pipe1.data1.expert2.model2", "pipe1.data1.expert2.model1"]
    names += ["pipe2.data1.expert1.model1"]
    if SOAK:
        on_four, on_two = [*on_four, ["--ep", "4"], ["--tp", "2", "--pp", "2"]], []
        names[1:] = ["pipe1.data1.expert4.model1", "pipe2.data1.expert1.model2"]
    ended = []
    for ranks, meshes in ((4, on_four), (2, on_two)):
        if meshes:
            given = [[*arguments, *mesh] for mesh in meshes]
            first, *others = run_forked(ranks, go_on, EACH, given)
            assert others == [first] * (ranks - 1)
            ended += first
    assert ended == [130, 130, 0]
    assert train(1, words(tmp_path / "alone", data, **SHAPE, **EXPERTS)) == [0]
    for key in ("loss", "val_loss"):
        found, expected = losses(tmp_path / "out", key), losses(tmp_path / "alone", key)
        assert found == pytest.approx(expected, abs=1e-4)
    meshed = [row["mesh"] for row in rows(tmp_path / "out") if row.get("event") == "mesh"]
    assert meshed == names


def test_a_run_goes_on_where_data_ranks_keep_copies(tmp_path):
    """Tensor parallel, experts and stages beside the optimizer's own sharding and buffers."""
    data = text_file(tmp_path)
    shape = {**SHAPE, **EXPERTS, "batch_size": 8}
    arguments = words(tmp_path / "out", data, **shape)
    stages = "--pp 2 --layout flat_zero1 --bucket-size 900 --recompute full"
    meshes = ["--tp 2 --sp --layout zero2", "--ep 2 --layout flat", stages]
    given = [[*arguments, *mesh.split()] for mesh in meshes]
    assert run_forked(4, go_on, EACH, given) == [[130, 130, 0]] * 4
    assert train(1, words(tmp_path / "alone", data, **shape)) == [0]
    for key in ("loss", "val_loss"):
        found, expected = losses(tmp_path / "out", key), losses(tmp_path / "alone", key)
        assert found == pytest.approx(expected, abs=1e-4)


def test_factors_on_a_mesh(tmp_path):
    """LoRA, tensor parallel and FSDP2 together, beside one process."""
    steps = 3 if SOAK else 2
    few = {**SHAPE, "steps": steps, "save_every": steps, "layers": 4 if SOAK else 1}
    data = text_file(tmp_path)
    arguments = words(tmp_path / "out", data, **few, tp=2, lora_rank=2)
    assert train(4, [*arguments, "--lora", "--sp"]) == [0] * 4
    alone = words(tmp_path / "alone", data, **few, lora_rank=2)
    assert train(1, [*alone, "--lora"]) == [0]
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)
    found = losses(tmp_path / "out")
    assert found[steps] != found[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--replicate 2 --layout zero1", "--layout zero1 keeps a copy on every data rank, and"),
        (
            "--sp",
            "--sp divides the sequence among the ranks of --tp, which is 1: give --tp, or",
        ),
        ("--compile", "--compile works only with --tp"),
        ("--tp 2 --compile --recompute selective", "use --recompute full"),
        ("--ep 2", "--ep: needs experts, and the model has none: add --moe or --experts"),
        (
            "--null-experts 1 --z-loss 0.1",
            "--null-experts, --z-loss: needs experts, and the model has",
        ),
        ("--moe --z-loss -1", "--z-loss must be at least 0, got -1.0"),
        (
            "--moe --null-experts 2 --active-experts 11",
            "--active-experts must be from 1 to --experts = 8 + --null-experts = 10, got 11",
        ),
        ("--pp 2 --dropout 0.1", "--dropout cannot be combined with --pp"),
        ("--layout hsdp --replicate 2", "--layout hsdp sets the number of copies by --shards"),
        ("--tp 2 --expert-tensor-parallel 3", "--expert-tensor-parallel must be 0, 1 or --tp"),
        (
            "--tp 2",
            "the mesh axes do not fit the number of ranks: tp 2 does not divide a world of 1 ranks",
        ),
        ("--tp 0", "--tp must be at least 1, got 0"),
    ],
)
def test_axes_that_make_no_sense(flags, message, tmp_path, capsys):
    assert cli.main(["train", "--out", str(tmp_path / "out"), *flags.split()]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1


def refused(rank: int, attempts: list[list[str]]) -> list[int]:
    return [cli.main(["train", *arguments]) for arguments in attempts]


def test_axes_that_do_not_fit_the_ranks(tmp_path, capfd):
    """Every message is one line, and says what would work."""
    data = text_file(tmp_path)
    attempts = {
        "key and value heads 1 % tp 2 = 1": {"tp": 2, "kv_heads": 1},
        "experts 3 % ep 2 = 1": {"ep": 2, "experts": 3},
        "layers 3 % pp 2 = 1": {"pp": 2, "layers": 3},
        "--pp 2 needs as many micro-batches": {"pp": 2, "micro_batch": 4},
        "--batch-size 5 does not divide into micro-batches": {"pp": 2, "batch_size": 5},
        "--replicate leaves one rank per copy": {"replicate": 2},
        'blocks of 32 ("8bit/32")': {"tp": 2, "width": 64, "state": "8bit"},
    }
    given = [words(tmp_path / "out", data, **{**SHAPE, **flags}) for flags in attempts.values()]
    assert run_forked(2, refused, given) == [[2] * len(given)] * 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2 * len(given)  # forked ranks all say it
    for message in attempts:
        assert sum(message in line for line in lines) == 2, (message, lines)


def test_a_closed_gate_is_told(tmp_path):
    data = text_file(tmp_path)
    arguments = words(tmp_path / "out", data, **{**SHAPE, "steps": 1}, **EXPERTS, ep=2)
    assert train(2, [*arguments, "--compile"]) == [0, 0]
    (told,) = [row for row in rows(tmp_path / "out") if row.get("event") == "compile"]
    assert (told["requested_backend"], told["actual_backend"]) == ("compiled", "eager")
    assert told["gates_closed"] == ["moe_fsdp", "ep"]
    assert json.dumps(told)
