"""The demo, at a tiny size, and the model it trains."""

import json
import math
import os
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from rich.console import Console

import samestep
from examples import demo
from examples.gpt import GPT, GPTConfig
from tests.soak import some, twin, twin_cases

TINY = ["--width", "32", "--layers", "1", "--batch-size", "8", "--context", "32"]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run_tiny(out: Path, *more: str) -> int:
    return demo.main([*TINY, "--steps", "12", "--out", str(out), *more])


class Result(NamedTuple):
    out: Path
    summary: dict
    shown: str


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    out = tmp_path_factory.mktemp("demo") / "made" / "by it"
    with redirect_stdout(StringIO()) as shown:
        assert run_tiny(out, "--lr", "0.02") == 0
    summary = json.loads((out / "result.json").read_text())
    return Result(out, summary, shown.getvalue())


@pytest.fixture(scope="module")
def corpus() -> demo.Corpus:
    return demo.load_corpus()


def make_tree(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_result_says_what_was_asked_and_what_ran(result):
    summary = result.summary
    asked = summary["asked"]
    assert (asked["steps"], asked["width"], asked["layers"]) == (12, 32, 1)
    assert (asked["batch_size"], asked["context"], asked["seed"]) == (8, 32, 0)
    assert (asked["lr"], asked["out"]) == (0.02, str(result.out))
    assert summary["versions"]["torch"] == torch.__version__
    assert summary["versions"]["samestep"] == samestep.__version__
    assert summary["completed"]
    assert summary["steps_done"] == 12


def test_result_holds_every_loss_and_timing(result):
    summary = result.summary
    assert list(summary["runs"]) == ["AdamW", "MuonAdamW"]
    assert summary["validated_at"] == list(range(13))
    for run in summary["runs"].values():
        assert len(run["train_loss"]) == 12
        assert len(run["validation_loss"]) == 13
        assert run["final_validation_loss"] == run["validation_loss"][-1]
        bits = run["final_validation_bits_per_byte"]
        assert bits * math.log(2) == pytest.approx(run["final_validation_loss"])
        for whole, part in zip(run["step_seconds"], run["optimizer_seconds"], strict=True):
            assert 0 < part < whole
        tokens = 8 * 32
        assert run["tokens_per_second"] == pytest.approx(1e3 * tokens / run["median_step_ms"])


def test_both_runs_learn_from_the_same_start(result):
    adamw, muon = result.summary["runs"].values()
    assert adamw["train_loss"][0] == muon["train_loss"][0]
    assert adamw["train_loss"][0] == pytest.approx(math.log(256), rel=0.05)
    assert adamw["train_loss"][1:] != muon["train_loss"][1:]
    for run in (adamw, muon):
        assert run["train_loss"][-1] < run["train_loss"][0] - 0.5
        assert run["validation_loss"][-1] < run["validation_loss"][0] - 0.5


def test_steps_to_target_is_the_first_validation_at_or_below_it(result):
    summary = result.summary
    target = summary["runs"]["AdamW"]["final_validation_loss"]
    for run in summary["runs"].values():
        losses = dict(zip(summary["validated_at"], run["validation_loss"], strict=True))
        reached = run["steps_to_target"]
        assert reached is None or losses[reached] <= target
        assert all(loss > target for step, loss in losses.items() if step < (reached or 99))
    assert summary["runs"]["AdamW"]["steps_to_target"] is not None


def test_hidden_matrices_go_to_muon_and_the_rest_to_adamw(result):
    model = GPT(GPTConfig(context=32, width=32, layers=1))
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
    everything = sum(p.numel() for p in model.parameters())
    runs = result.summary["runs"]
    assert runs["AdamW"]["parameters_by_rule"] == {"adamw": everything}
    expected = {"muon": matrices, "adamw": everything - matrices}
    assert runs["MuonAdamW"]["parameters_by_rule"] == expected


@pytest.mark.parametrize("width", [32, 64, 128])
def test_routing_does_not_depend_on_the_width(width):
    """256 x width is the shape of the embedding, and at some widths of a hidden matrix too."""
    options = demo.Options(width=width, layers=1)
    muon = demo.make_runs(options)[1]
    matrices = sum(p.numel() for p in muon.model.blocks.parameters() if p.ndim == 2)
    assert muon.parameters_by_rule()["muon"] == matrices


def test_picture_is_a_png_and_nothing_else_is_left(result):
    out = result.out
    assert (out / "loss.png").read_bytes().startswith(PNG_SIGNATURE)
    assert sorted(path.name for path in out.iterdir()) == ["loss.png", "result.json"]


@twin
def test_seed_decides_the_losses(result, corpus):
    def losses(seed: int) -> list[float]:
        options = demo.Options(
            steps=12, batch_size=8, context=32, width=32, layers=1,
            seed=seed, lr=0.02,
        )  # fmt: skip
        runs = demo.make_runs(options)
        demo.train(options, corpus, runs, Console(quiet=True))
        return runs[1].train_loss

    before = result.summary["runs"]["MuonAdamW"]["train_loss"]
    assert losses(seed=0) == before
    assert losses(seed=1) != before


def test_closing_table_shows_the_numbers(result):
    for text in ("bits per byte", "steps to validation loss", "in the optimizer", "by muon"):
        assert text in result.shown
    for run in result.summary["runs"].values():
        assert f"{run['final_validation_loss']:.3f}" in result.shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--batch-size", "-3"], "--batch-size must be at least 1, got -3"),
        (["--context", "0"], "--context must be at least 1, got 0"),
        (["--layers", "0"], "--layers must be at least 1, got 0"),
        (["--width", "30"], "width must be a multiple of 2 * heads = 8"),
        (["--lr", "0"], "--lr must be above 0, got 0.0"),
        (["--lr", "nan"], "--lr must be above 0, got nan"),
        (["--seed", "-1"], "--seed must be from 0"),
        (["--context", "100000000"], "--context must be below"),
    ],
)
def test_bad_values_end_with_status_2_and_one_line(arguments, message, tmp_path, capsys):
    assert demo.main([*arguments, "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["--steps", "many"], ["--stepz", "3"], ["surprise"]])
def test_arguments_that_do_not_parse_end_with_status_2(arguments, capsys):
    assert demo.main(arguments) == 2
    assert arguments[-1] in capsys.readouterr().err


def test_out_that_is_a_file_ends_with_status_2(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert run_tiny(tmp_path / "file") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


@twin_cases("MuonAdamW")
@pytest.mark.parametrize("interrupted", some(["MuonAdamW", "AdamW"]))
def test_interrupt_writes_the_steps_both_runs_finished(interrupted, tmp_path, monkeypatch):
    finished: list[str] = []
    step = demo.Run.step

    def step_until_interrupted(run, *batch):
        measured = step(run, *batch)
        finished.append(run.name)
        if finished.count(interrupted) == 6:
            raise KeyboardInterrupt
        return measured

    monkeypatch.setattr(demo.Run, "step", step_until_interrupted)
    assert run_tiny(tmp_path) == 130
    summary = json.loads((tmp_path / "result.json").read_text())
    assert summary["steps_done"] == 5
    assert not summary["completed"]
    assert [len(run["train_loss"]) for run in summary["runs"].values()] == [5, 5]
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG_SIGNATURE)


def test_interrupt_before_the_first_step_writes_nothing(tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.Run, "step", interrupt)
    assert run_tiny(tmp_path) == 130
    assert "nothing to write" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("disk full")

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        demo.write_whole(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_corpus_is_sorted_split_by_file_and_the_same_each_time(tmp_path):
    names = [f"{letter}.py" for letter in "kjihgfedcba"]
    root = make_tree(tmp_path, {name: name.encode() + b"\r\n" for name in names})
    make_tree(root, {"test/x.py": b"no", "site-packages/y.py": b"no", "notes.txt": b"no"})
    corpus = demo.load_corpus(root)
    assert corpus.validation_files == ("j.py",)
    assert corpus.train_files == tuple(f"{letter}.py" for letter in "abcdefghik")
    assert bytes(corpus.validation.tolist()) == b"j.py\n"
    assert bytes(corpus.train.tolist()).startswith(b"a.py\nb.py\n")
    assert demo.load_corpus(root).sha256 == corpus.sha256
    (root / "a.py").write_bytes(b"changed")
    assert demo.load_corpus(root).sha256 != corpus.sha256


def test_standard_library_is_the_default_corpus(corpus):
    assert "argparse.py" in corpus.train_files + corpus.validation_files
    assert not set(corpus.train_files) & set(corpus.validation_files)
    assert len(corpus.train) > 1_000_000
    assert len(corpus.validation) > 100_000
    assert demo.load_corpus().sha256 == corpus.sha256


def test_too_little_text_is_refused(tmp_path):
    root = make_tree(tmp_path, {"only.py": b"pass\n"})
    with pytest.raises(ValueError, match="found 1 Python source files"):
        demo.load_corpus(root)


def test_windows_pair_each_byte_with_the_next():
    inputs, targets = demo.windows(torch.arange(10, dtype=torch.uint8), torch.tensor([0, 6]), 3)
    assert inputs.tolist() == [[0, 1, 2], [6, 7, 8]]
    assert targets.tolist() == [[1, 2, 3], [7, 8, 9]]
    assert inputs.dtype == torch.int64


def test_schedule_rises_to_the_peak_and_falls_to_almost_zero():
    shares = [demo.schedule(step, steps=20, warmup=5) for step in range(20)]
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(later < earlier for earlier, later in pairwise(shares[5:]))
    assert shares[5] == 1.0
    assert shares[-1] == pytest.approx(1 / 15)


def test_smoothing_keeps_a_straight_line_and_flattens_a_zigzag():
    line = [float(number) for number in range(100)]
    assert demo.smooth(line)[4:-4] == pytest.approx(line[4:-4])
    assert demo.smooth(line)[-1] == pytest.approx(97.0)  # the mean of 95 to 99
    zigzag = [float(number % 2) for number in range(200)]
    assert all(abs(value - 0.5) < 0.1 for value in demo.smooth(zigzag))


def test_gpt_shapes():
    config = GPTConfig(vocab_size=50, context=16, width=32, layers=2, heads=4, kv_heads=2)
    assert config.head_dim == 8
    model = GPT(config)
    assert model.blocks[0].attention.q.weight.shape == (32, 32)
    assert model.blocks[0].attention.k.weight.shape == (16, 32)
    assert model(torch.zeros(3, 16, dtype=torch.int64)).shape == (3, 16, 50)
    assert model(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 50)
    tokens = torch.randint(50, (3, 16))
    assert model.loss(tokens, tokens).shape == ()
    with pytest.raises(ValueError, match="17 tokens are more than the model's context of 16"):
        model(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_gpt_does_not_look_ahead(kv_heads):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=50, context=16, width=32, layers=2, kv_heads=kv_heads))
    tokens = torch.randint(50, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 50
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :9], before[:, :9])
    moved = (after[:, 9:] - before[:, 9:]).abs().amax(dim=(0, 2))
    assert (moved > 1e-5).all()  # and every later position does look back


def test_gpt_knows_the_order_of_the_past():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=50, context=8, width=32, layers=1))
    forward = model(torch.tensor([[1, 2, 3, 4]]))[:, -1]
    swapped = model(torch.tensor([[2, 1, 3, 4]]))[:, -1]
    assert (forward - swapped).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 36}, "multiple of 2"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads, got 4 and 3"),
        ({"layers": 0}, "layers must be at least 1"),
    ],
)
def test_gpt_config_refuses_impossible_shapes(changes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**changes)
