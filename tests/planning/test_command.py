"""The command: what it shows and writes, and what it refuses in one line."""

import json
import re

import pytest

from samestep import cli
from samestep.lab.estimate import configs
from tests.soak import twin

FACTORY = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 64, bias=False), nn.Linear(64, 32))

def wide():
    return nn.Sequential(nn.Embedding(32, 256), nn.Linear(256, 64))

def gpt():
    from samestep.models.gpt import GPT, GPTConfig

    return GPT(GPTConfig(width=64, layers=8, heads=4, kv_heads=4))

def on_gpu():
    return nn.Linear(4, 4).cuda()

def pinned():
    return nn.Linear(4, 4, device="cpu")

def reads_values():
    layer = nn.Linear(4, 4)
    return layer if layer.weight.sum().item() > 0 else None
"""


def test_a_plan_of_a_factory_is_shown_and_written(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(FACTORY)
    words = [
        "plan",
        f"{tmp_path / 'mine.py'}:model",
        "--mesh",
        "dp=4",
        "--out",
        str(tmp_path / "o"),
    ]
    assert cli.main([*words, "--sharding", "zero1", "--buffers", "flat", "--tokens", "64"]) == 0
    shown = capsys.readouterr().out
    first = shown.splitlines()[0]
    assert re.fullmatch(
        r"FITS: the fullest rank needs [\d.]+ .?B of 150 GB \(\d+%, activations not counted\); "
        r"[\d.]+ .?s per iteration; [\d.]+ .?B sent per rank and step\. "
        r"Simulated for .*; nothing was run or measured\.",
        first,
    ), first
    for title in ("Memory of the fullest rank", "Traffic of a step", "Owners", "Every sharding"):
        assert title in shown
    content = json.loads((tmp_path / "o" / "plan.json").read_text())
    assert content["mesh"]["ranks"] == 4
    assert set(content["every_stage"]) == {"none", "zero1", "zero2", "zero3"}
    stage = content["stages"][0]
    assert stage["memory"]["peak"] >= stage["memory"]["parameters"] + stage["memory"]["state"]
    assert stage["step_seconds"] > 0
    page = (tmp_path / "o" / "plan.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "http://" not in page
    assert "<script src" not in page
    assert (tmp_path / "o" / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_activations_sends_and_bubbles_are_shown_and_written(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(FACTORY)
    words = ["plan", f"{tmp_path / 'mine.py'}:gpt", "--mesh", "dp=2,tp=2,pp=2", "--sharding"]
    words += ["zero3", "--batch", "8", "--sequence", "32", "--micro-batches", "4"]
    words += ["--sequence-parallel", "--recompute", "full", "--out", str(tmp_path / "o")]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    for text in (
        "Activations of the fullest rank",
        "micro-batches in flight",
        "bubble",
        "layers",
        "stages",
    ):
        assert text in shown
    assert "not counted" not in shown
    content = json.loads((tmp_path / "o" / "plan.json").read_text())
    assert content["bubble"] == pytest.approx(1 / 5)
    assert content["batch"] == {
        "tokens": 64, "micro_batches": 4, "recompute": "full", "stages_per_rank": 1
    }  # fmt: skip
    first, last = content["stages"]
    # Two micro-batches of four blocks' inputs, 32 of 64 positions each, in 16 bit.
    assert first["activations"]["kept"]["inputs of blocks"] == 2 * 4 * 32 * 64 * 2
    assert first["activations"]["in_flight"] == 2
    assert last["activations"]["in_flight"] == 1
    for stage in (first, last):
        found = stage["activations"]
        assert found["peak"] == sum(found["kept"].values()) + found["passing"]
        assert stage["peak"] == max(
            stage["memory"]["peak"], stage["beside"]["peak"] + found["peak"]
        )
        sent = {(t["by"], t["kind"]): t for t in stage["traffic"]}
        assert sent["stages", "send"]["mean_sent"] == 4 * 32 * 64 * 2
        # Per block two gathers and two sums in forward, and two in backward; computed again, all
        # but the last sum. Around them the embedding or the head.
        around = {"all_to_all": 4 * 2} if stage is first else {"all_gather": 2, "reduce_scatter": 1}
        assert sent["layers", "all_gather"]["collectives"] == 4 * (
            4 * 6 + around.get("all_gather", 0)
        )
        assert sent["layers", "reduce_scatter"]["collectives"] == 4 * (
            4 * 5 + around.get("reduce_scatter", 0)
        )
        assert stage["parts"]["layers"] > 0
    page = (tmp_path / "o" / "plan.html").read_text()
    for text in ("Activations of the fullest rank", "bubble", "with activations"):
        assert text in page


@twin
def test_activations_decide_whether_it_fits(capsys):
    words = ["plan", "gpt2-xl", "--mesh", "dp=8", "--hardware", "h100x8"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("FITS: ")
    assert "activations not counted); " in shown.splitlines()[0]
    assert cli.main([*words, "--batch", "64", "--sequence", "1024"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("DOES NOT FIT: ")
    assert shown.splitlines()[1].startswith("no sharding leaves 10% free")
    more = ["--batch", "64", "--sequence", "1024", "--recompute", "full", "--micro-batches", "8"]
    assert cli.main([*words, *more]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("FITS: ")
    assert "with activations); " in shown.splitlines()[0]


def test_scaling_needs_a_number_of_ranks_that_axes_divide(capsys):
    words = ["gpt2-xl", "--mesh", "dp=1,tp=3,pp=3", "--scaling"]
    assert cli.main(["plan", *words]) == 2
    assert "and the axes other than dp have 9" in capsys.readouterr().err


def test_offloaded_state_has_its_columns_in_80(tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(FACTORY)
    monkeypatch.setenv("COLUMNS", "80")
    words = [f"{tmp_path / 'mine.py'}:model", "--mesh", "dp=1", "--sharding", "none"]
    assert cli.main(["plan", *words, "--offload", "state"]) == 0
    shown = capsys.readouterr().out
    assert all(column in shown for column in ("on host", "staging", "buffers", "params"))
    assert "…" not in shown


def refused(words, capsys):
    assert cli.main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    return lines[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lama-7b"], "is no preset (gpt2-xl, llama-7b,"),
        (["lama-7b"], "did you mean 'llama-7b'?"),
        ([], "MODEL is missing: give a preset (gpt2-xl"),
        (["gpt2-xl", "--mesh", "dp=3,tp=0"], "tp must be a whole number above 0, got '0'"),
        (["gpt2-xl", "--mesh", "x=3"], "'x=3' is not AXIS=SIZE"),
        (["gpt2-xl", "--mesh", "dp=3", "--ranks", "8"], "dp 3 = 3 ranks, and there are 8; dp 8"),
        (["gpt2-xl", "--hardware", "h900"], "is neither a preset (h200x8,"),
        (["gpt2-xl", "--hardware", "none.json"], "cannot read 'none.json'"),
        (
            ["gpt2-xl", "--mesh", "replicate=2,dp=2,tp=2"],
            "replicate=2 with tp=2, ep=1 needs --sharding zero3",
        ),
        (
            ["gpt2-xl", "--mesh", "dp=2,tp=7", "--buffers", "flat"],
            "flat buffers need equal parts",
        ),
        (["gpt2-xl", "--reserve", "1"], "--reserve must be from 0 to below 1"),
        (
            ["gpt2-xl", "--remainders", "--dtype", "float32"],
            "--remainders needs bfloat16 parameters, and --dtype is float32",
        ),
        (
            ["gpt2-xl", "--mesh", "dp=1,tp=2", "--state", "8bit"],
            "of 1600, is cut between ranks at 800, "
            "and in 8 bits 64 neighbours share a scale: give state_dtypes "
            'blocks of 32 ("8bit/32")',
        ),
        (["deepseek-v3", "--mesh", "dp=2,ep=3"], "ep=3 does not divide 256 experts"),
        (["gpt2-xl", "--batch", "2"], "--batch needs --sequence"),
        (["gpt2-xl", "--batch", "2", "--sequence", "8", "--tokens", "8"], "are 16 tokens, not"),
        (["gpt2-xl", "--tokens", "-1"], "--tokens must be 0 or more, got -1"),
        (["gpt2-xl", "--tokens", "9", "--micro-batches", "2"], "use a multiple of 2"),
        (
            ["gpt2-xl", "--mesh", "pp=4", "--tokens", "8", "--micro-batches", "2"],
            "are fewer than pp=4",
        ),
        (["gpt2-xl", "--stages-per-rank", "2"], "--stages-per-rank needs a pipeline"),
        (
            [
                "gpt2-xl",
                "--mesh",
                "pp=2",
                "--stages-per-rank",
                "2",
                "--tokens",
                "9",
                "--micro-batches",
                "3",
            ],
            "are no multiple of pp=2",
        ),
        (
            ["gpt2-xl", "--mesh", "pp=2", "--stages-per-rank", "2", "--sharding", "zero3"],
            "can be planned with --sharding none, zero1 and zero2",
        ),
        (["gpt2-xl", "--sequence-parallel"], "sequence_parallel shares the sequence among"),
        (["none.json"], "cannot read 'none.json'"),
        (["no_such_module:make"], "'no_such_module' cannot be imported"),
    ],
)
def test_bad_input_is_one_line(words, message, capsys):
    assert message in refused(words, capsys)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("on_gpu", "cannot be built on the meta device"),
        ("pinned", "parameter 'weight' is on 'cpu' and would take memory"),
        ("reads_values", "cannot be built on the meta device"),
        ("nothing", "has no function 'nothing'"),
    ],
)
def test_factories_that_need_a_device_are_refused(name, message, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(FACTORY)
    assert message in refused([f"{tmp_path / 'mine.py'}:{name}"], capsys)


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128,
}  # fmt: skip


LIKE_LLAMA = {**LLAMA, "intermediate_size": 128, "vocab_size": 64, "head_dim": 16}


def test_small_models_are_told_in_thousands_and_millions(tmp_path, capsys):
    for vocabulary, ranks, told in (
        (64, 1, "llama (82.24 K parameters) on 1 rank of h200x8 ("),
        (7810, 2, "llama (1.074 M parameters) on 2 ranks of h200x8 ("),
    ):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**LIKE_LLAMA, "vocab_size": vocabulary}))
        assert cli.main(["plan", str(path), "--mesh", f"dp={ranks}"]) == 0
        assert told in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def alone(monkeypatch):
    """As where transformers is not installed."""
    monkeypatch.setattr(configs, "find_spec", lambda name: None)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "kind",
    ["qwen3_next", "starcoder2", "phi", "qwen2_moe", "llama4_text", "jamba", "falcon", "bloom",
     "gpt_bigcode", "gemma3", "llava"],
)  # fmt: skip
def test_types_that_would_be_miscounted_are_refused(kind, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LIKE_LLAMA, "model_type": kind, "text_config": LIKE_LLAMA}))
    text = refused([str(path)], capsys)
    assert f"not one of the known types: '{path}' is of type '{kind}'" in text
    assert "Install transformers" in text
