"""`samestep bench crossover` at tiny sizes, its receipt, and the verdict on made-up times."""

import json
import os
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import samestep
from samestep import cli
from samestep.comm.groups import RankGroup, rank_group
from samestep.groups.crossover import Measurement, crossover_of, read_crossover
from samestep.groups.distribution import Distribution
from samestep.lab.bench import crossover as command
from samestep.lab.bench import crossover as measure
from samestep.lab.bench.crossover import Way, cells, verdict_text
from tests.ranks import free_port, run_forked, run_threaded

pytestmark = pytest.mark.usefixtures("no_torchrun")

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
TINY = ["bench", "crossover", "--rounds", "2", "--sizes", "64", "8", "1", "8"]


class Result(NamedTuple):
    out: Path
    receipt: dict
    shown: str


@pytest.fixture(scope="module")
def result(tmp_path_factory, no_torchrun) -> Result:
    out = tmp_path_factory.mktemp("crossover") / "made" / "by it"
    with redirect_stdout(StringIO()) as shown:
        assert cli.main([*TINY, "--out", str(out)]) == 0
    return Result(out, json.loads((out / "crossover.json").read_text()), shown.getvalue())


# The receipt


def test_receipt_says_what_was_asked_and_what_ran(result):
    assert result.receipt["asked"] == {
        "world_size": None,
        "backend": None,
        "sizes": [64, 8, 1, 8],
        "rounds": 2,
        "reduction": "fast",
        "out": str(result.out),
    }
    ran = result.receipt["ran"]
    assert (ran["requested_backend"], ran["actual_backend"], ran["world_size"]) == (None, "gloo", 2)
    assert (ran["device"], ran["started_by"], ran["threads_per_rank"]) == ("cpu", "samestep", 1)
    assert ran["versions"]["samestep"] == samestep.__version__
    assert ran["versions"]["torch"] == torch.__version__


def test_receipt_holds_the_measurements_and_the_verdict(result):
    measurements = [Measurement(**entry) for entry in result.receipt["measurements"]]
    assert [each.size for each in measurements] == [1, 8, 64]
    assert all(0 < each.all_reduce_ms < 1e4 and 0 < each.shard_ms < 1e4 for each in measurements)
    assert result.receipt["crossover"] == crossover_of(measurements)
    assert read_crossover(result.out / "crossover.json") == crossover_of(measurements)
    assert read_crossover(str(result.out / "crossover.json")) == crossover_of(measurements)


def test_table_verdict_and_picture(result):
    for text in ("2 gloo ranks, fast reduction", "all-reduce ms", "shard ms", "faster"):
        assert text in result.shown
    for entry in result.receipt["measurements"]:
        row = next(line for line in result.shown.splitlines() if f" {entry['size']} │" in line)
        assert f"{entry['all_reduce_ms']:.3f}" in row
        assert f"{entry['shard_ms']:.3f}" in row
    assert f"crossover={result.receipt['crossover']}" in result.shown
    assert (result.out / "crossover.png").read_bytes().startswith(PNG_SIGNATURE)
    names = sorted(path.name for path in result.out.iterdir())
    assert names == ["crossover.json", "crossover.png"]


def test_options_reach_the_ranks(tmp_path, monkeypatch, capsys):
    def fake(job, local_rank, report):
        assert (dist.get_world_size(), dist.get_rank()) == (3, local_rank)
        assert job == measure.Job((5, 7), 4, "ordered", "gloo")
        report(1, 2)
        # Only rank 0 decides: what the others found must not show.
        times = (
            [(5, 1.0, 2.0), (7, 2.0, 1.0)] if local_rank == 0 else [(5, 1.0, 9.0), (7, 1.0, 9.0)]
        )
        return measure.Measured([Measurement(*each) for each in times], "cpu", 1)

    monkeypatch.setattr(command, "measure", fake)
    options = "--world-size 3 --backend gloo --sizes 7 5 --rounds 4 --reduction ordered --out"
    assert cli.main(["bench", "crossover", *options.split(), str(tmp_path)]) == 0
    content = json.loads((tmp_path / "crossover.json").read_text())
    assert content["asked"]["backend"] == content["ran"]["requested_backend"] == "gloo"
    assert (content["asked"]["world_size"], content["ran"]["world_size"]) == (3, 3)
    assert content["crossover"] == 7
    assert "crossover=7" in capsys.readouterr().out


def test_ranks_of_torchrun_are_joined(tmp_path):
    port = str(free_port())

    def fn(rank):
        dist.destroy_process_group()  # these ranks now are as torchrun starts them
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2", RANK=str(rank))
        with redirect_stdout(StringIO()) as shown:
            return cli.main([*TINY, "--out", str(tmp_path)]), shown.getvalue()

    (first, shown), (second, nothing) = run_forked(2, fn)
    assert (first, second, nothing) == (0, 0, "")
    assert "Wrote crossover.json" in shown
    content = json.loads((tmp_path / "crossover.json").read_text())
    assert (content["ran"]["started_by"], content["ran"]["world_size"]) == ("torchrun", 2)
    assert content["asked"]["world_size"] is None


# What cannot be done


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--world-size 1", "--world-size must be at least 2, got 1"),
        ("--sizes 64 0", "--sizes must be at least 1, got 0"),
        ("--sizes", "argument --sizes: expected at least one argument"),
        ("--rounds 0", "--rounds must be at least 1, got 0"),
        ("--world-size 999 --backend nccl", "--backend nccl needs a CUDA device per rank: there"),
    ],
)
def test_values_that_cannot_run(tmp_path, capsys, options, message):
    out = tmp_path / "out"
    assert cli.main(["bench", "crossover", "--out", str(out), *options.split()]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {message}")
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert not out.exists()


def test_a_folder_that_cannot_be_written_is_noticed_before_measuring(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "run_forked", lambda *_, **__: pytest.fail("it measured"))
    (tmp_path / "file").write_text("mine")
    assert cli.main([*TINY, "--out", str(tmp_path / "file")]) == 2
    shown = capsys.readouterr()
    assert (
        shown.err
        == f"error: cannot write to '{tmp_path}/file': {tmp_path}/file is not a directory\n"
    )
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, [], "torchrun's WORLD_SIZE must be at least 2, got 1"),
        (
            {"RANK": "0", "WORLD_SIZE": "3"},
            ["--world-size", "2"],
            "--world-size is 2, but torchrun",
        ),
        ({"RANK": "one", "WORLD_SIZE": "3"}, [], "RANK='one' in the environment"),
        ({"RANK": "1", "WORLD_SIZE": "3"}, ["--rounds", "0"], ""),  # rank 0 says it
    ],
)
def test_bad_requests_under_torchrun(capsys, monkeypatch, environment, options, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.main([*TINY, *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}") if message else err == ""


def test_a_rank_that_fails_is_named_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    def fail(job, local_rank, report):
        report(1, 2)
        if local_rank == 1:
            raise OverflowError("too hot")
        dist.barrier()

    monkeypatch.setattr(command, "measure", fail)
    assert cli.main([*TINY, "--out", str(tmp_path / "out")]) == 1
    err = capsys.readouterr().err
    assert "rank 1 raised:" in err
    assert "OverflowError: too hot" in err
    assert list(tmp_path.iterdir()) == []


# Reading a receipt


def refused(path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        read_crossover(path)
    assert str(caught.value).startswith(f"'{path}' is not a crossover receipt: ")
    assert "samestep bench crossover" in str(caught.value)
    return str(caught.value)


def test_files_that_are_no_receipts(tmp_path):
    assert "No such file" in refused(tmp_path / "missing")
    assert "Is a directory" in refused(tmp_path)
    path = tmp_path / "file"
    for content in (b"", b"{", b"\xff\xfe\xff", b"crossover: 3"):
        path.write_bytes(content)
        assert "it is not JSON" in refused(path)
    for value in ([], 3, None, {}, {"crossover": 3}, {"kind": "samestep plan", "crossover": 3}):
        path.write_text(json.dumps(value))
        assert "it does not say {'kind': 'samestep crossover'}" in refused(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "its format is 2, not 1"),
        ({"crossover": "64"}, "its crossover is '64'"),
        ({"crossover": True}, "its crossover is True"),
        ({"crossover": None}, "its crossover is None"),
        ({"crossover": 12345}, "its crossover is 12345, its measurements say"),
        ({"measurements": []}, "its measurements are damaged"),
        ({"measurements": 3}, "its measurements are damaged"),
        ({"measurements": [{"size": 3}]}, "its measurements are damaged"),
        ({"measurements": [{"size": "3", "all_reduce_ms": 1, "shard_ms": 2}]}, "are damaged"),
        (
            {"crossover": 0, "measurements": [{"size": -1, "all_reduce_ms": 1, "shard_ms": 2}]},
            "is 0",
        ),
        ({"measurements": [{"size": 3, "all_reduce_ms": None, "shard_ms": 2}]}, "are damaged"),
    ],
)
def test_receipts_that_were_changed(result, tmp_path, change, message):
    path = tmp_path / "changed.json"
    path.write_text(json.dumps({**result.receipt, **change}))
    assert message in refused(path)


# The verdict


def measured(*times: tuple[int, float, float]) -> list[Measurement]:
    return [Measurement(*each) for each in times]


@pytest.mark.parametrize(
    ("times", "crossover"),
    [
        (measured((4, 1, 2), (8, 1, 1.5), (16, 3, 2), (32, 6, 3)), 16),
        (measured((4, 1, 2), (8, 2, 1), (16, 2, 3), (32, 6, 3)), 32),  # slower again at 16
        (measured((4, 1, 2), (8, 2, 2), (16, 3, 2)), 8),  # as fast is enough
        (measured((4, 2, 1), (8, 2, 1)), 4),  # everywhere
        (measured((4, 1, 2), (8, 1, 2)), 9),  # nowhere
        (measured((4, 2, 1), (8, 1, 2)), 9),  # not at the largest
        (measured((16, 3, 2), (4, 1, 2), (8, 1, 1.5)), 16),  # in any order
        (measured((5, 1, 2)), 6),
    ],
)
def test_verdict(times, crossover):
    assert crossover_of(times) == crossover
    assert Distribution(crossover=crossover).crossover == crossover  # the optimizer takes it


def test_verdict_in_words():
    assert verdict_text(16, [4, 16, 64]).endswith("as fast from 16 elements on: crossover=16")
    assert "the smallest measured: crossover=4" in verdict_text(4, [4, 16, 64])
    assert "is not faster up to 64 elements: crossover=65" in verdict_text(65, [4, 16, 64])


def test_table_names_the_faster_way():
    rows = map(cells, measured((4, 1, 2), (8, 2, 2), (1000, 3, 1.5)))
    columns = list(map(list, zip(*rows, strict=True)))
    assert columns[0] == ["4", "8", "1,000"]
    assert columns[3] == ["2.00", "1.00", "0.50"]
    assert columns[4] == ["all-reduce", "shard", "shard"]


# What is measured


@pytest.mark.parametrize("ordered", [True, False])
def test_both_ways_are_the_step_of_adamw(ordered):
    """Also for sizes that do not divide and ranks that own nothing."""
    sizes, ranks, steps = (2, 7, 64), 3, 2

    def fn(rank):
        result = {}
        for size in sizes:
            for sharded in (False, True):
                cpu = torch.device("cpu")
                way = Way(size, rank_group(), cpu, ordered=ordered, sharded=sharded)
                start, grad = way.param.clone(), way.grad.clone()
                for _ in range(steps):
                    way.step()
                assert torch.equal(way.grad, grad)  # or the next step would see the sum
                result[size, sharded] = start, grad, way.param
        return result

    values = run_forked(ranks, fn)
    for size in sizes:
        param = torch.nn.Parameter(values[0][size, False][0])
        optimizer = torch.optim.AdamW([param])
        grads = [value[size, False][1] for value in values]
        param.grad = (grads[0] + grads[1] + grads[2]) / ranks
        for _ in range(steps):
            optimizer.step()
        tolerance = 0.0 if ordered else 1e-5
        for value in values:
            for sharded in (False, True):
                torch.testing.assert_close(
                    value[size, sharded][2], param.detach(), rtol=0, atol=tolerance
                )


def test_state_of_a_shard_is_a_slice():
    def fn(rank):
        ways = [
            Way(10, rank_group(), torch.device("cpu"), ordered=False, sharded=sharded)
            for sharded in (False, True)
        ]
        return [way.state["exp_avg"].numel() for way in ways]

    assert run_threaded(3, fn) == [[10, 3], [10, 3], [10, 4]]


def test_the_slowest_rank_counts_medians_do_and_warmup_does_not(monkeypatch):
    turns = {rank: [] for rank in range(2)}

    def fake(way, size, control, device):
        mine = turns[control.rank]
        mine.append((size, way.sharded))
        number = mine.count((size, way.sharded)) - 1
        if number < measure.WARMUP:
            return 1e6
        slow = (control.rank + number) % 2 * 10  # ranks take turns in being slow
        return [1.0, 9.0, 2.0][number - measure.WARMUP] + slow + size + 100 * way.sharded

    monkeypatch.setattr(measure, "_milliseconds", fake)
    reports = []
    job = measure.Job((3, 5), 3, "fast", "gloo")
    for value in run_threaded(
        2, lambda rank: measure.measure(job, rank, lambda *report: reports.append(report))
    ):
        assert value.measurements == [Measurement(3, 15.0, 115.0), Measurement(5, 17.0, 117.0)]
    assert turns[0] == turns[1]
    rounds = [tuple(turns[0][begin : begin + 4]) for begin in range(0, 20, 4)]
    everything = {(size, sharded) for size in (3, 5) for sharded in (False, True)}
    assert [set(each) for each in rounds] == [everything] * 5
    assert len(set(rounds)) > 1  # neither way is always the one that comes second
    assert sorted(set(reports)) == [(done, 5) for done in range(1, 6)]


def test_time_is_per_step(monkeypatch):
    class Slow:
        def step(self):
            nonlocal now
            now += 0.003

    now = 0.0
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now))
    for size in (1, measure.STEPS_ELEMENTS // 2, 10 * measure.STEPS_ELEMENTS):
        [elapsed] = run_threaded(
            1,
            lambda rank, size=size: measure._milliseconds(
                Slow(), size, RankGroup(dist.group.WORLD, 0, 1, (0,)), torch.device("cpu")
            ),
        )
        assert elapsed == pytest.approx(3.0)
    assert now == pytest.approx(0.003 * (measure.MOST_STEPS + 2 + 1))
