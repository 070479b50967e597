"""`samestep stress` from its arguments to its files and exit status."""

import json
import multiprocessing
import os
import signal
import sys
import textwrap
import time
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

import samestep
from samestep import cli
from samestep.lab.stress import command
from samestep.lab.stress.campaign import CaseResult, MutantResult, Stopped, stopped_once
from samestep.lab.stress.command import Display, Session, left_out, results_table
from samestep.lab.stress.judge import Finding
from samestep.lab.stress.layouts import EVERY_LAYOUT, LAYOUTS
from samestep.lab.stress.mutants import MUTANTS
from samestep.lab.stress.options import Options, own_model
from samestep.lab.stress.rank import Case, Ending
from samestep.lab.stress.ranks import TorchrunRanks
from samestep.lab.stress.receipt import check_receipt
from samestep.lab.stress.scenarios import EVERY_SCENARIO
from tests.limits import HANG, TEST, eventually, limit
from tests.ranks import RanksFailed, free_port, run_forked
from tests.soak import SOAK, some
from tests.stress import example_receipt
from tests.stress.forked_command import running

QUICK = ["stress", "--scenario", "dist_adamw_muon", "--steps", "4", "--sample-every", "2"]


@pytest.fixture(autouse=True, scope="module")
def narrow_terminal(no_torchrun):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        yield


class Result(NamedTuple):
    out: Path
    receipt: dict
    shown: str


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> Result:
    out = tmp_path_factory.mktemp("stress") / "made" / "by it"
    with redirect_stdout(StringIO()) as shown:
        assert cli.main([*QUICK, "--out", str(out)]) == 0
    return Result(out, json.loads((out / "receipt.json").read_text()), shown.getvalue())


def test_receipt_follows_its_schema_and_says_what_ran(result):
    check_receipt(result.receipt)
    assert result.receipt["verdict"] == "clean"
    asked, ran = result.receipt["asked"], result.receipt["ran"]
    assert (asked["scenario"], asked["layout"], asked["steps"]) == ("dist_adamw_muon", "all", 4)
    assert (ran["requested_backend"], ran["actual_backend"], ran["world_size"]) == (None, "gloo", 2)
    assert (ran["runtime_mode"], ran["device"]) == ("forked", "cpu")
    assert ran["fallback_reason"] == "2 ranks, but 0 CUDA devices here"
    assert ran["versions"]["samestep"] == samestep.__version__
    assert ran["versions"]["torch"] == torch.__version__


def test_receipt_has_every_layout_with_every_sample(result):
    cases = result.receipt["cases"]
    assert [case["layout"] for case in cases] == list(result.receipt["layouts"])
    assert len(cases) == len(LAYOUTS)
    for case in cases:
        if case["layout"] == "hsdp":  # on two ranks
            assert case["status"] == "does_not_apply"
            continue
        assert (case["status"], case["findings"], case["steps_taken"]) == ("exact", [], 4)
        assert [sample["step"] for sample in case["samples"]] == [2, 4]
        assert (case["positions"], case["flights"]) == ({}, {})
        alone = case["layout"] == "one_process"
        assert (case["bytes_per_step"] == 0) == alone
        assert (case["collectives_per_step"] == 0) == alone
        for sample in case["samples"]:
            names = ("max_adam_abs_diff", "max_mu_a_abs_diff", "max_mu_b_abs_diff")
            assert [sample[name] for name in names] == ([None] * 3 if alone else [0.0] * 3)
            assert sample["max_abs_param_diff"] == sample["max_abs_state_diff"] == 0.0
            assert 0 < sample["reference"]["adam"] < 2e-5
    presence = result.receipt["scenarios"]["dist_adamw_muon"]["presence"]
    assert presence["params"][0] == "adam"
    assert presence["ranks_with_gradient"][0] == [1, 1, 2, 0]


def test_table_and_files(result):
    assert "dist_adamw_muon" in result.shown
    ran = len(LAYOUTS) - 1  # not hsdp, on two ranks
    assert f"0 in {ran} layouts" in result.shown.replace("\n", " ")
    assert f"All {ran} cases are clean: every difference is exactly 0." in result.shown
    assert max(map(len, result.shown.splitlines())) <= 80 + len(str(result.out))
    assert sorted(path.name for path in result.out.iterdir()) == ["receipt.json", "report.html"]
    assert "dist_adamw_muon" in (result.out / "report.html").read_text()


def test_what_quick_stands_for():
    usual = Options(quick=True).quickened()
    assert (usual.layout, usual.steps, usual.sample_every) == ("quick", 20, 10)
    assert (usual.lanes, usual.watchdog) == (2, 60.0)
    asked = Options(quick=True, scenario="clipped", steps=3, world_size=4).quickened()
    assert (asked.scenario, asked.layout, asked.steps) == ("clipped", "quick", 3)
    assert Options(steps=7).quickened() == Options(steps=7)
    cases = Session(usual, None, Console()).cases()
    assert len(cases) == 7 * 6
    kinds = {EVERY_LAYOUT[case.layout].parameters for case in cases}
    assert {"plain", "fsdp2", "tp_fsdp2"} <= kinds
    assert not [case for case in cases if _reason_against(case)]


def _reason_against(case):
    return EVERY_LAYOUT[case.layout].reason_against(EVERY_SCENARIO[case.scenario], case.world)


def test_quick_beside_what_it_is(capsys):
    for words in (["--mutants"], ["--model", "gpt"]):
        assert cli.main(["stress", "--quick", *words]) == 2
        assert "--quick chooses its own scenarios and layouts" in capsys.readouterr().err


@pytest.mark.skipif(not SOAK, reason="takes 20 s: `make soak` runs it")
def test_quick_is_clean(tmp_path, capsys):
    assert cli.main(["stress", "--quick", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "All 42 cases are clean: every difference is exactly 0." in shown
    assert max(map(len, shown.splitlines()[:-1])) <= 80


def test_the_table_has_room_on_80_columns_and_tells_reasons_once():
    receipt = example_receipt.dense()
    for case in receipt["cases"]:
        case["seconds"], case["steps"] = 123.4, 1000
    cases = receipt["cases"]
    text = StringIO()
    Console(file=text, width=80).print(results_table(cases))
    lines = text.getvalue().splitlines()
    row = next(line for line in lines if "uneven_accumulation_sharded" in line)
    exact = sum(c["status"] == "exact" for c in cases) // 2
    assert f"1000  0 in {exact} layouts" in row
    assert row.rstrip().endswith(f" {123.4 * len(cases) / 2:.0f}")
    assert "…" not in text.getvalue()
    assert len(next(line for line in lines if "──" in line).rstrip()) <= 80
    assert left_out(cases) == ["[dim]does not apply to hsdp: it needs four ranks[/]"]
    few = left_out([case for case in cases if case["scenario"] == "dist_adamw_muon"])
    assert few == ["[dim]does not apply to hsdp in dist_adamw_muon: it needs four ranks[/]"]


def test_a_log_has_a_line_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: now[0]))
    case = Case("clipped", "zero1", 2, 20, 10)
    log, screen = StringIO(), StringIO()
    silent = Display(Console(file=log, force_terminal=False), 5, "never begun")
    silent.step(case, 10, 0.0)
    with (
        Display(Console(file=log, force_terminal=False), 5, "5 cases") as lines,
        Display(Console(file=screen, force_terminal=True), 5, "5 cases") as bars,
    ):
        for seconds in (4.0, 4.0, 4.0, 1.0, 20.0):
            now[0] += seconds
            for each in (lines, bars):
                each.done()
                each.step(case, int(now[0]), 0.0)
    assert log.getvalue().split("\n") == [
        "5 cases ...",
        "3 of 5 after 12 s · clipped · zero1 · step 112",
        "5 of 5 after 33 s · clipped · zero1 · step 133",
        "",
        "",
    ]
    assert "after 12 s" not in screen.getvalue()


def test_two_receipts_are_compared(result, tmp_path, capsys):
    path = str(result.out / "receipt.json")
    assert cli.main(["stress", "--compare", path, path]) == 0
    assert capsys.readouterr().out == "Nothing changed.\n"
    content = json.loads(Path(path).read_text())
    content["verdict"] = "failed"
    content["cases"][1]["status"] = "failed"
    (tmp_path / "worse.json").write_text(json.dumps(content))
    assert cli.main(["stress", "--compare", path, str(tmp_path / "worse.json")]) == 1
    assert "none" in capsys.readouterr().out
    assert cli.main(["stress", "--compare", path, str(tmp_path / "missing.json")]) == 2
    assert "missing.json" in capsys.readouterr().err


def test_everything_known_is_listed(capsys):
    assert cli.main(["stress", "--list"]) == 0
    shown = capsys.readouterr().out
    for name in ("megatron_conditional", "zero2_overlap", "no_presence_mask"):
        assert name in shown


def restrict(monkeypatch, *layouts):
    """All layouts are those, but for `make soak`."""
    if not SOAK:
        monkeypatch.setattr(command, "LAYOUTS", {name: LAYOUTS[name] for name in layouts})


def test_ranks_of_torchrun_are_joined(tmp_path, monkeypatch):
    restrict(monkeypatch, "one_process", "zero2", "flat_zero2_overlap", "fsdp2_parallel", "hsdp")
    port = str(free_port())

    def fn(rank):
        dist.destroy_process_group()  # these ranks now are as torchrun starts them
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="3", RANK=str(rank))
        with redirect_stdout(StringIO()) as shown:
            return cli.main([*QUICK, "--out", str(tmp_path)]), shown.getvalue()

    results = run_forked(3, fn)
    assert [status for status, _ in results] == [0, 0, 0]
    assert [bool(shown) for _, shown in results] == [True, False, False]
    content = json.loads((tmp_path / "receipt.json").read_text())
    assert (content["ran"]["runtime_mode"], content["ran"]["world_size"]) == ("torchrun", 3)
    assert {case["layout"]: case["status"] for case in content["cases"]} == {
        name: "does_not_apply" if name == "hsdp" else "exact" for name in command.LAYOUTS
    }
    ran = [case for case in content["cases"] if case["status"] != "does_not_apply"]
    assert all(len(case["samples"]) == 2 for case in ran)


def test_a_rank_of_torchrun_that_vanishes_is_not_waited_for(tmp_path):
    """Rank 1 is gone after the first case: the others notice before the next, and stop."""
    seconds = round(limit(3.0))
    port = str(free_port())

    def fn(rank):
        dist.destroy_process_group()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="3", RANK=str(rank))
        meet, meetings = TorchrunRanks._meet, []

        def meet_or_vanish(self):
            meetings.append(None)
            if rank == 1 and len(meetings) == 2:
                self._pulse.stop()  # as the end of its process would
                time.sleep(2 * TEST)
            meet(self)

        with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as shown:
            patch.setattr(TorchrunRanks, "_meet", meet_or_vanish)
            status = cli.main([*QUICK, "--watchdog", f"{seconds:g}", "--out", str(tmp_path)])
        return status, shown.getvalue()

    results = multiprocessing.get_context("fork").SimpleQueue()

    def tell(rank):
        results.put((rank, fn(rank)))
        (tmp_path / f"told_{rank}").touch()

    def until_told():
        return 0.0 if len(list(tmp_path.glob("told_*"))) == 2 else HANG

    with pytest.raises(RanksFailed) as caught:
        run_forked(3, tell, timeout=until_told)
    assert 1 in caught.value.reports
    found = dict(results.get() for _ in range(2))
    assert (found[0][0], found[2][0]) == (1, 0)
    said = " ".join(found[0][1].split())
    assert f"rank 1 did not report for {seconds} s between two cases" in said
    assert "stopping here" in found[0][1]
    content = json.loads((tmp_path / "receipt.json").read_text())
    found = [case["status"] for case in content["cases"] if case["status"] != "does_not_apply"]
    assert found == ["exact", "exact", "failed"]


# Models of one's own

MODEL = """
    import random
    import torch

    def make():
        return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 5, bias=False))

    def nothing():
        return None

    def frozen():
        return torch.nn.Linear(2, 2).requires_grad_(False)

    def half():
        return torch.nn.Linear(2, 2).half()

    def large():
        return torch.nn.Linear(2048, 2048)

    def broken():
        raise KeyError("weights")

    def many_lines():
        raise RuntimeError("first line\\nsecond line")

    def leaves():
        raise SystemExit(3)

    def unseeded():
        model = torch.nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.fill_(random.random())
        return model

    def renamed():
        return torch.nn.ModuleDict({f"n{random.random()}".replace(".", ""): torch.nn.Linear(2, 2)})

    def lazy():
        return torch.nn.LazyLinear(2)

    def meta():
        return torch.nn.Linear(2, 2, device="meta")

    def transposed():
        model = torch.nn.Linear(2, 3)
        model.weight = torch.nn.Parameter(torch.randn(2, 3).T)
        return model

    def sparse():
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.eye(3).to_sparse())
        return model

    def counted():
        with open("calls", "a") as file:
            file.write("x")
        return make()

    def compiled():
        return torch.compile(make())

    def checkpointed():
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        return torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(6, 9)), torch.nn.Linear(9, 5))
"""
SIBLINGS = """
    from __future__ import annotations
    from dataclasses import dataclass
    from beside_it import WIDTH
    import torch

    @dataclass
    class Config:
        width: int = WIDTH

    def make():
        return torch.nn.Linear(Config().width, 3)
"""


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    (tmp_path / "own_models.py").write_text(textwrap.dedent(MODEL))
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "own_models.py"
    sys.modules.pop("own_models", None)


def test_a_model_of_ones_own(own_models, tmp_path):
    for path in ("own_models:make", f"{own_models}:make"):
        assert cli.main([*QUICK, "--layout", "zero2", "--model", path, "--out", "out"]) == 0
        content = json.loads((tmp_path / "out" / "receipt.json").read_text())
        names = content["scenarios"]["dist_adamw_muon"]["presence"]["params"]
        assert sorted(names) == ["0.bias", "0.weight", "1.weight"]
        assert content["asked"]["model"] == path


def test_a_factory_file_may_import_files_beside_it_and_define_dataclasses(tmp_path, monkeypatch):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "with_siblings.py").write_text(textwrap.dedent(SIBLINGS))
    (folder / "beside_it.py").write_text("WIDTH = 5")
    monkeypatch.setattr(sys, "path", list(sys.path))
    make = own_model(f"{folder}/with_siblings.py:make", 0)
    assert make().weight.shape == (3, 5)
    for name in ("with_siblings", "beside_it"):
        del sys.modules[name]


def test_a_model_that_the_optimizer_refuses(own_models, monkeypatch, capsys):
    def refuse(model, **options):
        raise ValueError("no such shape\nfor 'weight'")

    monkeypatch.setattr(samestep, "MuonAdamW", refuse)
    assert cli.main(["stress", "--model", "own_models:make"]) == 2
    assert capsys.readouterr().err == "error: --model own_models:make: ValueError: no such shape\n"


def test_ranks_get_copies_so_that_a_slow_factory_is_no_hang(own_models, tmp_path):
    """Resuming makes a new model every ten steps, on every rank."""
    options = ["--scenario", "resume", "--steps", "22", "--layout", "zero2", "--out", "out"]
    assert cli.main(["stress", *options, "--model", "own_models:counted"]) == 0
    assert (tmp_path / "calls").read_text() == "xx"


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("factory", some(["compiled", "checkpointed"]))
def test_wrapped_models_have_their_names_without_wrappers(own_models, tmp_path, factory):
    options = ["--layout", "zero2", "--model", f"own_models:{factory}", "--out", "out"]
    assert cli.main([*QUICK, *options]) == 0
    content = json.loads((tmp_path / "out" / "receipt.json").read_text())
    names = set(content["scenarios"]["dist_adamw_muon"]["presence"]["params"])
    assert names >= {"0.bias", "0.weight", "1.weight"}


def test_all_scenarios_on_another_model_are_those_that_take_one():
    options = command.Options(model="gpt")
    session = command.Session(options, None, console=None)
    scenarios = {case.scenario for case in session.cases()}
    assert "dist_adamw_muon" in scenarios
    assert "fused_qkv_mha" not in scenarios
    assert {case.steps for case in session.cases()} == {1000}


def test_long_and_short_scenarios():
    session = command.Session(command.Options(other_steps=50), None, console=None)
    long = {(case.scenario, case.layout) for case in session.cases() if case.steps == 1000}
    assert {scenario for scenario, _ in long} == {"dist_adamw_muon", "dist_adamw_muon_random"}
    assert {layout for _, layout in long} == {"none", "zero1", "zero2"}
    assert {case.sample_every for case in session.cases() if case.steps == 50} == {50}


def test_long_and_short_layouts_meet_though_samples_do_not_divide(tmp_path, monkeypatch):
    """6 steps against 2, sampled every 4: the short ones are compared after 2, in all layouts."""
    options = ["--steps", "6", "--other-steps", "2", "--sample-every", "4", "--out", str(tmp_path)]
    restrict(monkeypatch, "one_process", "none", "zero1", "flat_zero1", "fsdp2_gather")
    assert cli.main(["stress", "--scenario", "dist_adamw_muon", *options]) == 0
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert (receipt["asked"]["steps"], receipt["asked"]["other_steps"]) == (6, 2)
    cases = receipt["cases"]
    steps = {case["layout"]: [sample["step"] for sample in case["samples"]] for case in cases}
    assert steps["zero1"] == [2, 4, 6]
    assert steps["flat_zero1"] == [2]
    for case in cases[1:]:
        assert all(sample["layouts"] is not None for sample in case["samples"]), case["layout"]


# What cannot be done


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--scenario sing", "--scenario 'sing' is unknown; choose from all, dist_adamw_muon"),
        ("--layout sing", "--layout 'sing' is unknown; choose from all, one_process, none"),
        ("--world-size 0", "--world-size must be at least 1, got 0"),
        ("--world-size -2", "--world-size must be at least 1, got -2"),
        ("--steps -5", "--steps must be at least 1, got -5"),
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--other-steps 0", "--other-steps must be at least 1, got 0"),
        ("--sample-every 0", "--sample-every must be at least 1, got 0"),
        ("--watchdog 0", "--watchdog must be above 0 seconds, got 0.0"),
        ("--watchdog inf", "--watchdog must be above 0 seconds, got inf"),
        ("--seed 99999999999999999999", "--seed must be within 62 bits"),
        ("--mutants --world-size 3", "--mutants choose their own scenarios, layouts and ranks"),
        ("--backend nccl", "--backend nccl cannot run: 2 ranks, but 0 CUDA devices here"),
        ("--mutants --device cuda", "--mutants run on gloo and on CPU, those of streams with"),
        pytest.param(
            "--device cuda",
            "--device is cuda, and torch sees no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ("--mutants --continue", "--continue does not work with --mutants: leave it out"),
        ("--mutants --model gpt", "and all on their own models"),
        ("--model sing", "--model 'sing' is not tiny, gpt or PATH:FACTORY"),
        ("--model no_such_module:make", "--model: 'no_such_module' cannot be imported"),
        ("--model no_such_file.py:make", "--model: 'no_such_file.py' cannot be imported"),
        ("--model own_models:sing", "--model: 'own_models' has no function 'sing'"),
        ("--model own_models:broken", "--model own_models:broken: KeyError: 'weights'"),
        ("--model own_models:nothing", "gave a NoneType, not a torch module"),
        ("--model own_models:frozen", "gave a module without trainable parameters"),
        ("--model own_models:half", "the harness needs float32 parameters"),
        ("--model own_models:many_lines", "own_models:many_lines: RuntimeError: first line"),
        ("--model own_models:leaves", "own_models:leaves: SystemExit: 3"),
        ("--model own_models:unseeded", "gave another value of 'weight' at its second call"),
        (
            "--model own_models:renamed",
            "gave parameters with other names at its second call: it must build the same",
        ),
        ("--model own_models:lazy", "parameter 'weight' is lazy: call the model once"),
        ("--model own_models:meta", "parameter 'weight' is on 'meta'"),
        ("--model own_models:transposed", "parameter 'weight' is not contiguous"),
        ("--model own_models:sparse", "parameter 'weight' is sparse_coo"),
        ("--model own_models:large", "has 4,196,352 trainable elements"),
        ("--model gpt --scenario resume --scenario fused_qkv_mha", "uses its own model"),
        ("--out own_models.py/x", "own_models.py is not a directory"),
    ],
)
def test_bad_usage_is_one_line_and_leaves_nothing(own_models, capsys, options, message):
    before = sorted(Path().iterdir())
    assert cli.main(["stress", *options.split()]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert [path for path in sorted(Path().iterdir()) if path.name != "__pycache__"] == before


def test_an_unwritable_folder(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    assert cli.main([*QUICK, "--out", str(tmp_path / "file")]) == 2
    assert "is not a directory" in capsys.readouterr().err


# What went wrong, and what was caught


def test_failures_are_shown_and_written(monkeypatch, tmp_path, capsys):
    def run_all(self, cases, on_result, progress):
        finding = Finding("hang", 3, "rank 0: presence failed [whatever]")
        ending = Ending(3, "presence failed", "hang", {0: "presence", 1: "gather of bucket 2"})
        for case in cases:
            bad = case.layout == "zero1"
            status, findings = ("failed", [finding]) if bad else ("exact", [])
            on_result(CaseResult(case, status, findings, [], {0: ending if bad else Ending(8)}))

    monkeypatch.setattr(command.Campaign, "run_all", run_all)
    assert cli.main([*QUICK, "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "dist_adamw_muon · zero1 · step 3 hang: rank 0: presence failed [whatever]" in shown
    assert "rank 1 was in: gather of bucket 2" in shown
    assert f"1 of {len(LAYOUTS)} cases failed" in shown
    content = json.loads((tmp_path / "receipt.json").read_text())
    assert content["verdict"] == "failed"
    failed = content["cases"][2]
    assert failed["positions"] == {"0": "presence", "1": "gather of bucket 2"}
    assert "gather of bucket 2" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("unpatched", "findings", "status", "words"),
    [
        ("exact", [Finding("state", 2, "far")], 0, "All 1 known bugs are caught"),
        ("exact", [Finding("error", 2, "TypeError")], 1, "only by accident: error"),
        ("exact", [], 1, "NOT CAUGHT"),
        ("failed", [Finding("state", 2, "far")], 1, "fails without it"),
    ],
)
def test_a_mutant_that_survives_fails_the_command(
    monkeypatch, tmp_path, capsys, unpatched, findings, status, words
):
    mutant = MUTANTS["sum_for_mean"]
    result = MutantResult(mutant, unpatched, tuple(findings), 1.0)
    monkeypatch.setattr(command.MutantRunner, "run", lambda *_: result)
    assert cli.main(["stress", "--mutant", mutant.name, "--out", str(tmp_path)]) == status
    assert words in " ".join(capsys.readouterr().out.split())
    content = json.loads((tmp_path / "receipt.json").read_text())
    assert content["mutants"][0]["caught"] == (status == 0)


@pytest.mark.parametrize(
    ("signals", "status"),
    some([([signal.SIGINT, signal.SIGINT, signal.SIGTERM], 130), ([signal.SIGTERM], 143)]),
)
def test_a_signal_ends_the_ranks_and_writes_what_there_is(tmp_path, signals, status):
    """Also a second one, which comes while the ranks are ended or the receipt is written."""
    # So many steps that it does not end by itself.
    arguments = [*QUICK, "--steps", "300", "--sample-every", "300", "--layout", "zero2"]
    with running([*arguments, "--out", str(tmp_path / "out")], tmp_path) as process:
        temporary = process.temporary
        # Each rank makes this file once it can be ended as a rank.
        eventually(lambda: len(list(temporary.glob("ranks_*/stack_*"))) == 2)
        ranks = children(process.pid)
        assert [path.name[:6] for path in temporary.iterdir()] == ["ranks_"]
        for number in signals:
            process.send_signal(number)
            time.sleep(0.05)
        returned, shown, errors = process.ended()
    assert (returned, errors) == (status, "")
    assert "Stopped before the end" in shown
    content = json.loads((tmp_path / "out" / "receipt.json").read_text())
    assert content["verdict"] == "interrupted"
    assert [case["status"] for case in content["cases"]] == ["interrupted"]
    assert len(ranks) == 2
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert list(temporary.iterdir()) == []


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with stopped_once():
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(Stopped):
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def children(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(stat.parent.name))
    return found
