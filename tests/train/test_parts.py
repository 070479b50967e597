"""The trainer's parts, without training."""

import json
import math
import sys

import pytest
import torch
import torch.distributed as dist

from samestep import cli
from samestep.models.gpt import GPT, GPTConfig, MixtureOfExperts
from samestep.tooling.request import BadRequestError
from samestep.train import world
from samestep.train.corpus import Order, load_file, validation_starts
from samestep.train.journal import Journal, display
from samestep.train.options import Options, parse
from samestep.train.world import World

pytestmark = pytest.mark.usefixtures("no_torchrun")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--stepz", "3"], "unrecognized arguments: --stepz 3"),
        (["--step", "3"], "unrecognized arguments: --step 3"),
        (["surprise"], "unrecognized arguments: surprise"),
        (["--layout", "ddp"], "argument --layout: invalid choice: 'ddp'"),
        (["--micro-batch", "0"], "--micro-batch must be at least 1, got 0"),
        (["--bucket-size", "0"], "--bucket-size must be at least 1, got 0"),
        (["--warmup", "-1"], "--warmup must be at least 0, got -1"),
        (["--lr", "nan"], "--lr must be above 0, got nan"),
        (["--max-grad-norm", "0"], "--max-grad-norm must be above 0"),
        (["--momentum", "1"], "--momentum must be from 0 to below 1, got 1.0"),
        (["--seed", "-1"], "--seed must be from 0"),
        (["--width", "30"], "--width must be a multiple of 2 * --heads = 8"),
        (["--experts", "2", "--active-experts", "3"], "--active-experts must be from 1 to"),
        (["--dropout", "1"], "--dropout must be from 0 to below 1, got 1.0"),
        (["--final-lr", "2"], "--final-lr must be from 0 to 1, got 2.0"),
    ],
)
def test_bad_flags_end_with_status_2_and_one_line(arguments, message, capsys):
    assert cli.main(["train", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_one_rank_of_torchrun_says_what_is_wrong(monkeypatch, capsys, rank, lines):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", "--steps", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == lines


def test_out_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert cli.main(["train", "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_help_shows_every_flag_and_its_default(capsys):
    assert cli.main(["train", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())  # wherever lines end
    assert "usage: samestep train" in shown
    for text in (
        "--layout {auto,none,zero1,zero2,flat_zero1,flat,fsdp2,hsdp}", "--batch-size INT",
        "(default: 16)",
    ):  # fmt: skip
        assert text in shown


def test_flags_are_the_fields():
    assert parse([], "x") == Options()
    found = parse(["--micro-batch", "3", "--layout", "fsdp2", "--lr", "0.1"], "x")
    assert (found.micro_batch, found.layout, found.lr) == (3, "fsdp2", 0.1)
    with pytest.raises(BadRequestError, match="`x --help` lists the options"):
        parse(["--no"], "x")


def test_schedules():
    options = Options(steps=100, warmup=10, final_lr=0.1, momentum_warmup=20)
    rates = [options.lr_share(step) for step in range(101)]
    assert rates[:11] == pytest.approx([*(n / 10 for n in range(1, 11)), 1.0])
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert options.momentum_at(0) == pytest.approx(0.85)
    assert options.momentum_at(10) == pytest.approx(0.9)
    assert options.momentum_at(500) == pytest.approx(0.95)
    assert Options(warmup=0, momentum_warmup=0).lr_share(0) == 1.0
    assert Options(momentum_warmup=0).momentum_at(0) == pytest.approx(0.95)


def test_rises_are_parts_of_short_runs():
    """A tenth and a third of the steps by default, so that 30 steps are not all warm-up."""
    short, usual, long = Options(steps=30), Options(steps=300), Options(steps=3000)
    for options, rise in ((short, 3), (usual, 30), (long, 30)):
        rates = [options.lr_share(step) for step in range(rise + 2)]
        assert rates[:rise] == pytest.approx([(step + 1) / rise for step in range(rise)])
        assert rates[rise] == pytest.approx(1.0)
        assert rates[rise + 1] < 1.0
    assert short.lr_share(29) < 0.1
    for options, rise in ((short, 10), (usual, 100), (long, 100)):
        assert options.momentum_at(rise - 1) < options.momentum_at(rise) == 0.95
    assert Options(steps=1).lr_share(0) == 1.0


def test_every_epoch_has_every_window_once_in_an_order_of_its_own():
    order = Order(length=101, context=10, seed=0)
    epochs = [order.starts(torch.arange(10) + 10 * epoch).tolist() for epoch in range(3)]
    for starts in epochs:
        assert sorted(starts) == list(range(0, 100, 10))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert Order(101, 10, seed=1).starts(torch.arange(10)).tolist() != epochs[0]


def test_what_a_number_means_does_not_depend_on_what_was_asked_before():
    numbers = torch.tensor([3, 9, 10, 25, 31])
    order = Order(length=101, context=10, seed=0)
    one_by_one = [order.starts(number.reshape(1)).item() for number in numbers.flip(0)]
    assert Order(101, 10, seed=0).starts(numbers).tolist() == one_by_one[::-1]
    assert order.starts(torch.empty(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_ranks_divide_a_batch_by_index(ranks):
    batch = torch.arange(7)
    worlds = [World(rank, ranks, torch.device("cpu")) for rank in range(ranks)]
    shares = [world.share(batch) for world in worlds]
    assert torch.cat(shares).tolist() == batch.tolist()
    assert max(map(len, shares)) == worlds[0].largest_share(7)


def test_the_last_tenth_of_a_file_is_for_validation(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(100)))
    corpus = load_file(tmp_path / "text")
    assert bytes(corpus.train.tolist()) == bytes(range(90))
    assert bytes(corpus.validation.tolist()) == bytes(range(90, 100))
    starts = validation_starts(corpus.validation, context=4, count=3)
    assert starts.tolist() == [0, 2, 5]


def test_half_a_line_of_a_killed_process_is_no_row(tmp_path):
    journal = Journal(tmp_path / "new", active=True)
    journal.go_back_to(0)
    journal.add({"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0})
    with (tmp_path / "new" / "log.jsonl").open("a") as log:
        log.write('{"step": 3, "lo')
    assert [row["step"] for row in journal.rows()] == [1, 2]
    journal.go_back_to(1)
    journal.add({"step": 2, "loss": 2.5})
    lines = (tmp_path / "new" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_only_one_rank_keeps_a_journal(tmp_path):
    journal = Journal(tmp_path, active=False)
    journal.go_back_to(0)
    journal.add({"step": 1})
    assert not journal.draw()
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_no_number_is_null(tmp_path):
    journal = Journal(tmp_path, active=True)
    journal.add({"step": 1, "loss": math.nan, "grad_norm": math.inf})
    assert journal.rows() == [{"step": 1, "loss": None, "grad_norm": None}]
    assert not journal.draw()
    journal.add({"step": 2, "loss": 3.0}, {"step": 2, "event": "resumed"})
    assert journal.draw()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "loss.png"]


@pytest.mark.parametrize("terminal", [True, False])
def test_display(capsys, monkeypatch, terminal):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    with display(True) as shown:
        shown.show(3, 20, "loss 3.5")
        shown.say("said [this]")
    out = capsys.readouterr().out
    for text in ("3/20", "loss 3.5", "said [this]"):
        assert text in out
    with display(False) as shown:
        shown.show(3, 20, "loss 3.5")
        shown.say("said [this]")
    assert capsys.readouterr().out == ""


def test_experts_mix_those_with_the_highest_scores():
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=8, width=16, layers=1, heads=2, experts=4, active_experts=2))
    experts = model.blocks[0].mlp
    assert isinstance(experts, MixtureOfExperts)
    up, down = experts.experts.up, experts.experts.down
    assert up.shape == (4, 32, 16)
    x = torch.randn(3, 5, 16)
    found = experts(x)
    for place in ((0, 0), (2, 4)):
        token = x[place]
        scores = experts.router(token).sigmoid()
        best = scores.topk(2)
        weights = best.values / best.values.sum()
        expected = sum(
            weight * down[e] @ (up[e] @ token).relu().square()
            for weight, e in zip(weights, best.indices.tolist(), strict=True)
        )
        torch.testing.assert_close(found[place], expected)
    assert experts.load.sum() == 3 * 5 * 2
    assert experts(x[:0]).shape == (0, 5, 16)


SHARED = "NCCL lets ranks share a GPU only with"


@pytest.mark.parametrize(
    ("device", "gpus", "ranks", "told"),
    [
        ("auto", 0, 1, (None, "gloo", "one process", "torch sees no GPU")),
        ("auto", 0, 2, (None, "gloo", "torchrun", "torch sees no GPU")),
        ("cpu", 2, 2, ("gloo", "gloo", "torchrun", None)),
        ("auto", 2, 2, (None, "nccl", "torchrun", None)),
        ("cuda", 2, 2, ("nccl", "nccl", "torchrun", None)),
        ("cuda", 1, 2, ("nccl", "gloo", "torchrun", f"2 ranks share 1 GPUs: {SHARED}")),
    ],
)
def test_what_ranks_talk_over_is_told_with_the_reason(monkeypatch, device, gpus, ranks, told):
    began = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: began.append(backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(world, "sharing_problem", lambda: SHARED)
    monkeypatch.setattr(world, "_store", dist.HashStore)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    if ranks > 1:
        here = {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks}
        for name, value in here.items():
            monkeypatch.setenv(name, str(value))
    with world.joined(device) as joined:
        assert tuple(joined.running) == told
    assert began == [told[1]]


def test_a_busy_expert_becomes_less_likely():
    config = GPTConfig(context=8, width=16, layers=1, heads=2, experts=3, active_experts=1)
    experts = GPT(config).blocks[0].mlp
    experts.balance(torch.tensor([6, 3, 0]), rate=0.5)
    assert experts.bias.tolist() == [-0.5, 0.0, 0.5]
    assert experts.load.tolist() == [0, 0, 0]
    experts.eval()
    experts(torch.randn(1, 4, 16))
    assert experts.load.tolist() == [0, 0, 0]


def test_dropout_is_for_training_only():
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=8, width=16, layers=1, heads=2, dropout=0.5))
    tokens = torch.randint(256, (2, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    assert math.isfinite(model.loss(tokens, tokens).item())
