"""Runs of the trainer: they learn, they go on where they were, and no layout shows."""

import shutil
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import samestep
from samestep.models.gpt import GPT
from samestep.train.layouts import place
from samestep.train.options import parse
from samestep.train.world import World
from tests.checkpoint.beside import names, put, tree
from tests.ranks import RanksFailed, run_forked
from tests.soak import SOAK, some, twin
from tests.train.runs import EXPERTS, STEPS, losses, rows, run_all, text_file, train, words

pytestmark = pytest.mark.usefixtures("no_torchrun")

RICH = {key.removeprefix("--").replace("-", "_"): value for key, value in EXPERTS.items()}


class Run(NamedTuple):
    out: Path
    data: Path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Run:
    """Two ranks, zero2, experts, dropout, accumulation, from the first step to the last."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = Run(folder / "out", text_file(folder))
    assert train(2, words(*run, **RICH), draws=True) == [0, 0]
    return run


@twin
def test_loss_falls(undisturbed):
    found = losses(undisturbed.out)
    assert list(found) == list(range(1, STEPS + 1))
    assert found[1] == pytest.approx(5.545, abs=0.1)  # ln(256)
    assert found[STEPS] < found[1] - 1
    validated = losses(undisturbed.out, "val_loss")
    assert list(validated) == [5, 10]
    assert validated[10] < validated[5]


def test_log_tells_what_ran(undisturbed):
    start, *_, end = rows(undisturbed.out)
    assert (start["event"], start["ranks"], start["layout"]) == ("started", 2, "zero2")
    receipt = ("requested_backend", "actual_backend", "runtime_mode", "fallback_reason")
    assert [start[key] for key in receipt] == ["gloo", "gloo", "caller", None]
    assert start["versions"]["torch"] == torch.__version__
    assert start["versions"].keys() == {"samestep", "torch", "python"}
    assert end == {"step": STEPS, "event": "saved"}
    steps = [row for row in rows(undisturbed.out) if "loss" in row]
    assert steps[0]["lr"] == pytest.approx(0.015)
    assert steps[1]["lr"] == pytest.approx(0.03)
    assert 0 < steps[-1]["lr"] < 0.01
    assert steps[0]["momentum"] == pytest.approx(0.85)
    assert steps[-1]["momentum"] == pytest.approx(0.95)
    assert all(row["grad_norm"] > 0 and row["seconds"] > 0 for row in steps)


def test_only_the_newest_checkpoints_are_kept(undisturbed):
    folder = undisturbed.out / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["LATEST", "step_00000008", "step_00000010"]
    assert (folder / "LATEST").read_text().strip() == "step_00000010"


def test_picture(undisturbed):
    assert (undisturbed.out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(
    ("first", "then"),
    [("fsdp2", "flat"), *([("zero2", "zero2"), ("flat", "hsdp"), ("none", "zero1")] * SOAK)],
)
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(undisturbed, tmp_path, first, then):
    """Also in another layout: sums are in rank order in all of them."""
    run = Run(tmp_path / "out", undisturbed.data)
    assert train(2, words(*run, layout=first, **RICH), stop_in=7) == [130, 130]
    assert max(losses(run.out)) == 6  # what will be forgotten: the checkpoint is of step 4
    assert train(2, words(*run, layout=then, **RICH)) == [0, 0]
    assert [row["step"] for row in rows(run.out) if row.get("event") == "resumed"] == [4]
    assert losses(run.out) == losses(undisturbed.out)
    assert losses(run.out, "val_loss") == losses(undisturbed.out, "val_loss")


@pytest.mark.parametrize(
    ("ranks", "stopped", "number", "saved"),
    some([(1, [0], signal.SIGINT, 2), (1, [0], signal.SIGTERM, 2), (2, [1], signal.SIGTERM, 3)]),
)
def test_a_signal_before_the_first_save_saves(
    undisturbed, tmp_path, capfd, ranks, stopped, number, saved
):
    """After the step that is on; of several ranks one has it, and all stop one step later."""
    run = Run(tmp_path / "out", undisturbed.data)
    asked = {"stop_in": 2, "signals": [number], "ranks_stopped": stopped}
    assert train(ranks, words(*run, **RICH, log_every=7), **asked) == [128 + number] * ranks
    told = f"stopped after step {saved}, which is saved: the same command goes on there"
    assert told in capfd.readouterr().out
    assert max(losses(run.out)) == saved
    rest = {} if SOAK or ranks == 2 else {"steps": saved + 1}
    assert train(ranks, words(*run, **RICH, **rest)) == [0] * ranks
    assert [row["step"] for row in rows(run.out) if row.get("event") == "resumed"] == [saved]
    if ranks == 2:
        assert losses(run.out) == losses(undisturbed.out)
        assert losses(run.out, "val_loss") == losses(undisturbed.out, "val_loss")


def test_a_second_ctrl_c_tells_that_nothing_is_saved(undisturbed, tmp_path, capfd):
    run = Run(tmp_path / "out", undisturbed.data)
    assert train(1, words(*run), stop_in=2) == [130]
    assert "in step 2, and nothing is saved: the same command begins anew" in capfd.readouterr().out
    assert not (run.out / "checkpoints").exists()
    assert train(1, words(*run), stop_in=6) == [130]
    assert "in step 6: the same command goes on after step 4, as saved" in capfd.readouterr().out


def test_every_layout_has_the_same_losses(undisturbed, tmp_path):
    layouts = ["none", "zero2", "flat_zero1", "fsdp2", "hsdp", *(["zero1", "flat"] * SOAK)]
    given = {"steps": 2, "log_every": 1, "eval_sequences": 1, **RICH}
    short = [words(tmp_path / own, undisturbed.data, layout=own, **given) for own in layouts]
    assert run_forked(2, run_all, short) == [[0] * len(layouts)] * 2
    expected = {step: losses(undisturbed.out)[step] for step in (1, 2)}
    for own in layouts:
        assert losses(tmp_path / own) == expected, own


@pytest.mark.skipif(not SOAK, reason="more of the same")
@pytest.mark.parametrize(("ranks", "layouts"), [(3, ("flat", "fsdp2")), (4, ("zero2", "hsdp"))])
def test_every_layout_on_more_ranks(undisturbed, tmp_path, ranks, layouts):
    for layout in layouts:
        arguments = words(tmp_path / layout, undisturbed.data, layout=layout, **RICH)
        assert train(ranks, arguments) == [0] * ranks
    first, second = (losses(tmp_path / layout) for layout in layouts)
    assert first == second


def test_the_number_of_ranks_may_change(undisturbed, tmp_path):
    """The batches are the same, so only the rounding differs."""
    run = Run(tmp_path / "out", undisturbed.data)
    alone = Run(tmp_path / "alone", undisturbed.data)
    short = {} if SOAK else {"steps": 6, "save_every": 3, "eval_every": 3}
    assert train(2, words(*run, **short), stop_in=5) == [130, 130]
    assert train(3, words(*run, layout="fsdp2", **short)) == [0, 0, 0]
    assert train(1, words(*alone, micro_batch=7, **short)) == [0]
    assert [row["ranks"] for row in rows(run.out) if "ranks" in row] == [2, 3]
    for key in ("loss", "val_loss"):
        expected, found = losses(alone.out, key), losses(run.out, key)
        assert found == pytest.approx(expected, rel=1e-4)
    assert losses(run.out)[max(losses(run.out))] < losses(run.out)[1] - 0.3


def runs_and_offloads(rank, commands):
    """The statuses of runs, and which of them keep state on the host."""
    asked = [parse(words, "train") for words in commands]
    alone = World(0, 1, torch.device("cpu"))
    built = [place(GPT(options.model), options, alone)[0] for options in asked]
    return run_all(rank, commands), ["offload = state" in opt.layout_lines() for opt in built]


def test_small_state_that_stays_on_the_host(tmp_path, capfd):
    """Where state stays changes no bit, and what was in 8 bits goes on in 32, which is told."""
    tiny = {"width": 32, "layers": 1, "eval_every": 9, "steps": 2}
    asked = {"wide": {}, "here": {"state": "8bit/32"}}
    asked["on_host"] = {**asked["here"], "offload": "state", "layout": "none"}
    outs = {name: tmp_path / name for name in asked}
    data = text_file(tmp_path)
    commands = [words(outs[name], data, **tiny, **flags) for name, flags in asked.items()]
    commands.append(words(outs["on_host"], data, **{**tiny, "steps": 3}))
    assert run_forked(1, runs_and_offloads, commands) == [([0] * 4, [False, False, True, False])]
    told = "resumed at step 2; state was 8bit/32, is float32 now: converted\n"
    shown = capfd.readouterr().out
    assert (shown.count("state was"), told in shown) == (1, True)
    wide, here, on_host = (losses(out, "val_loss") for out in outs.values())
    assert on_host.pop(3) < on_host[2]
    assert here == on_host != wide
    assert here == pytest.approx(wide, rel=1e-3)


def test_bf16_stays_close(undisturbed, tmp_path):
    run = Run(tmp_path / "out", undisturbed.data)
    assert train(1, words(*run, steps=2, dtype="bf16")) == [0]
    assert losses(run.out)[2] < losses(run.out)[1]


def keeps(rank, commands):
    """The statuses of runs; what their optimizers keep and send at once."""
    found = []
    world = World(rank, 2, torch.device("cpu"))
    for command in commands:
        options = parse(command, "train")
        model = GPT(options.model)
        opt = place(model, options, world)[0]
        state = {key for entry in opt.state.values() for key in entry}
        dtypes = {param.dtype for param in model.parameters()}
        found.append((dtypes, "master_weight" in state, opt.layout_lines()))
    return run_all(rank, commands), found


@pytest.mark.parametrize("layout", some(["flat_zero1", "fsdp2"]))
def test_16_bit_parameters_with_main_parameters_beside(undisturbed, tmp_path, layout):
    """As Megatron's distributed optimizer runs: flat zero1, buckets of a size, 16 bits."""
    flags = {"layout": layout, "steps": 3, "log_every": 1, "save_every": 3, "eval_every": 3}
    narrow = words(
        tmp_path / "narrow", undisturbed.data, **flags, parameters="bf16", bucket_size=500,
        recompute="selective",
    )  # fmt: skip
    wide = words(tmp_path / "wide", undisturbed.data, **flags)
    (statuses, (of_narrow, of_wide)), _ = run_forked(2, keeps, [narrow, wide])
    assert statuses == [0, 0]
    assert of_narrow[:2] == ({torch.bfloat16}, True)
    assert of_wide[:2] == ({torch.float32}, False)
    assert "bucket_size = 500" in of_narrow[2]
    assert "bucket_size = None" in of_wide[2]
    found, expected = losses(tmp_path / "narrow"), losses(tmp_path / "wide")
    assert found != expected
    assert found == pytest.approx(expected, rel=0.01)
    # What was saved in 16 bits goes on in 32: parameters are the main parameters then.
    again = words(tmp_path / "narrow", undisturbed.data, **{**flags, "steps": 4})
    assert train(2, again) == [0, 0]
    wider = words(tmp_path / "wide", undisturbed.data, **{**flags, "steps": 4})
    assert train(2, wider) == [0, 0]
    found, expected = losses(tmp_path / "narrow"), losses(tmp_path / "wide")
    assert found[4] == pytest.approx(expected[4], rel=0.01)


def test_a_run_that_is_done_has_nothing_to_do(undisturbed, tmp_path):
    run = Run(tmp_path / "out", undisturbed.data)
    shutil.copytree(undisturbed.out, run.out)
    assert train(2, words(*run, **RICH)) == [0, 0]
    assert losses(run.out) == losses(undisturbed.out)


def test_killed_between_a_checkpoint_and_its_name(undisturbed, tmp_path):
    """The checkpoint of step 10 is there, and LATEST still says 8: it is written once more."""
    run = Run(tmp_path / "out", undisturbed.data)
    shutil.copytree(undisturbed.out, run.out)
    folder = run.out / "checkpoints"
    (folder / "LATEST").rename(folder / "step_00000010" / ".LATEST")
    (folder / "LATEST").write_text("step_00000008\n")
    assert train(2, words(*run, **RICH)) == [0, 0]
    assert names(folder / "step_00000010") == names(undisturbed.out / "checkpoints/step_00000010")
    assert (run.out / "checkpoints" / "LATEST").read_text() == "step_00000010\n"
    assert losses(run.out) == losses(undisturbed.out)


def test_a_folder_in_the_way_of_a_checkpoint_stays(undisturbed, tmp_path, capfd):
    """It is said, and training goes on; of the last step it is an error."""
    run = Run(tmp_path / "out", undisturbed.data)
    for step in (4, 10):
        put(run.out / "checkpoints" / f"step_{step:08d}" / "thesis.txt")
    refused = "step_00000010 exists: save under another name, or remove it first"
    with pytest.raises(RanksFailed, match=refused):
        train(1, words(*run, **RICH))
    assert "step 4 was not saved, training goes on: " in capfd.readouterr().out
    for step in (4, 10):
        folder = run.out / "checkpoints" / f"step_{step:08d}"
        assert tree(folder) == {"thesis.txt": b"precious"}
    assert losses(run.out).keys() == losses(undisturbed.out).keys()


def test_a_checkpoint_elsewhere_can_be_started_from(undisturbed, tmp_path):
    """Once there are checkpoints in --out those come first: a restart has the same flags."""
    run = Run(tmp_path / "out", undisturbed.data)
    source = undisturbed.out / "checkpoints" / "step_00000008"
    assert train(2, words(*run, resume=source, save_every=1, **RICH), stop_in=10) == [130, 130]
    assert train(2, words(*run, resume=source, save_every=1, **RICH)) == [0, 0]
    resumed = [row["step"] for row in rows(run.out) if row.get("event") == "resumed"]
    assert resumed == [8, 9]
    expected = losses(undisturbed.out)
    assert losses(run.out) == {step: expected[step] for step in (9, 10)}


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (2, {"batch_size": 1}, "--batch-size must be at least the number of ranks, 2, got 1"),
        (2, {"layout": "hsdp", "shards": 3}, "--layout hsdp has 3 ranks per copy"),
        (2, {"layout": "hsdp", "shards": 1}, "--shards 1 only copies the model"),
        (1, {"data": "nowhere"}, "cannot read the data"),
        (1, {"heads": 3}, "--width must be a multiple of 2 * --heads = 6"),
        (1, {"heads": 4, "kv_heads": 3}, "--heads must be a multiple of --kv-heads, got 4 and 3"),
        (1, {**RICH, "active_experts": 9}, "--active-experts must be from 1 to --experts = 3"),
        (1, {**RICH, "null_experts": -2}, "--null-experts must be at least 0, got -2"),
        (1, {"context": 600}, "--context must be below the 600 bytes of validation text"),
        (1, {"device": "cuda"}, "--device is cuda, and torch sees no GPU here"),
        (1, {"resume": "nowhere"}, "cannot resume: nowhere does not exist"),
    ],
)
def test_what_cannot_be_done(undisturbed, tmp_path, monkeypatch, capfd, ranks, changes, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    changes = {"data": undisturbed.data, **changes}
    assert train(ranks, words(tmp_path / "out", **changes)) == [2] * ranks
    assert_one_line(capfd, message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resume": "never"}, "has checkpoints, and --resume is never"),
        ({"seed": 3}, "cannot resume: the seed of the data was 0 and is 3 here"),
        ({"width": 32}, "cannot resume: --width was 16 and is 32 here, which makes another model"),
        ({"layers": 3}, "cannot resume: --layers was 2 and is 3 here, which makes another model"),
        ({"layers": 1}, "cannot resume: --layers was 2 and is 1 here, which makes another model"),
        ({"heads": 4, "kv_heads": 2}, "--heads was 2 and is 4 here, --kv-heads was 1 and is 2"),
        ({"experts": 0, "active_experts": 2}, "cannot resume: --experts was 3 and is 0 here"),
        ({"shared_experts": 1}, "cannot resume: --shared-experts was 0 and is 1 here"),
    ],
)
def test_another_run_is_not_gone_on_with(undisturbed, capfd, changes, message):
    before = (undisturbed.out / "log.jsonl").read_bytes()
    assert train(1, words(*undisturbed, **{**RICH, **changes})) == [2]
    assert_one_line(capfd, message)
    assert (undisturbed.out / "log.jsonl").read_bytes() == before


def assert_one_line(capfd, message):
    lines = set(capfd.readouterr().err.splitlines())  # forked ranks all say it
    assert len(lines) == 1
    line = lines.pop()
    assert line.startswith("error: ")
    assert message in line


def test_a_disk_that_is_full_for_a_while_ends_nothing(undisturbed, tmp_path, monkeypatch, capfd):
    save = samestep.save

    def save_unless_full(path, *args, **options):
        if path.name == "step_00000004":
            raise samestep.CheckpointError("no space left")
        return save(path, *args, **options)

    monkeypatch.setattr(samestep, "save", save_unless_full)
    run = Run(tmp_path / "out", undisturbed.data)
    assert train(1, words(*run)) == [0]
    assert "step 4 was not saved, training goes on: no space left" in capfd.readouterr().out
    saved = [row["step"] for row in rows(run.out) if row.get("event") == "saved"]
    assert saved == [8, 10]


def test_torch_alone_is_enough(undisturbed, tmp_path, monkeypatch):
    for name in ("rich", "matplotlib", "jinja2", "jsonschema"):
        monkeypatch.setitem(sys.modules, name, None)
    run = Run(tmp_path / "out", undisturbed.data)
    assert train(1, words(*run, steps=2)) == [0]
    assert len(losses(run.out)) == 2
    assert not (run.out / "loss.png").exists()
