"""A run that was stopped goes on, and leaves the receipt of one that was not."""

import json
import multiprocessing
import resource
import signal
import subprocess
import tempfile
import time
from contextlib import nullcontext

import pytest
import torch

from samestep import cli
from samestep.lab.common.provenance import code_digest, commit
from samestep.lab.stress import command, options, progress
from samestep.lab.stress.campaign import Campaign, CaseResult, Stopped
from samestep.lab.stress.judge import Distance, SampleVerdict
from samestep.lab.stress.layouts import LAYOUTS
from samestep.lab.stress.progress import Progress
from samestep.lab.stress.rank import Case, Ending
from samestep.lab.stress.ranks import ForkedRanks
from samestep.tooling.request import BadRequestError
from tests.limits import HANG, TEST, eventually, limit

FEW = ("one_process", "none", "zero2", "flat_zero1")
ARGUMENTS = ["stress", "--steps", "4", "--sample-every", "2"]


@pytest.fixture(autouse=True)
def few_cases(no_torchrun, monkeypatch):
    """Two scenarios in four layouts."""
    names = ("dist_adamw_muon", "clipped")
    monkeypatch.setattr(options, "SCENARIOS", {name: options.SCENARIOS[name] for name in names})
    monkeypatch.setattr(command, "LAYOUTS", {name: LAYOUTS[name] for name in FEW})


class FakeCampaign(Campaign):
    """Cases without ranks; `stop_after` says how often Ctrl-C is waited for."""

    ran: list
    stop_after: int | None
    away = 1e-7  # from the reference

    def run_all(self, cases, on_result, progress):
        for case in cases:
            if len(self.ran) == self.stop_after:
                on_result(CaseResult(case, "interrupted", [], [], ended=False))
                raise Stopped(signal.SIGINT)
            self.ran.append((case.scenario, case.layout))
            near = Distance(adam=self.away)
            samples = [SampleVerdict(step, Distance(), near, None, 0, True, "") for step in (2, 4)]
            told = {"seconds": 1.0, "presence": {"p": [2, 0, 1, 2]}}
            on_result(CaseResult(case, "exact", [], samples, {0: Ending(4)}, **told))


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(FakeCampaign, "ran", [], raising=False)
    monkeypatch.setattr(FakeCampaign, "stop_after", None, raising=False)
    monkeypatch.setattr(command, "Campaign", FakeCampaign)
    return FakeCampaign


def read(folder):
    return json.loads((folder / "receipt.json").read_text())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_killed_run_goes_on_and_leaves_the_receipt_of_one_run(tmp_path):
    """SIGKILL, with two lanes of real ranks; layouts are compared across the gap."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert cli.main([*ARGUMENTS, "--out", str(whole)]) == 0
    arguments = [*ARGUMENTS, "--lanes", "2", "--out", str(parts)]

    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def until_killed():
        tempfile.tempdir = str(scratch)  # who is killed cannot tidy up
        command.Progress._take = take_two_and_wait
        cli.main(arguments)

    def take_two_and_wait(self, *case):
        self.__dict__.setdefault("seen", []).append(case)
        if len(self.seen) == 3:
            time.sleep(2 * TEST)

    process = multiprocessing.get_context("fork").Process(target=until_killed)
    process.start()
    file = parts / progress.FILE
    eventually(lambda: file.exists() and file.read_bytes().count(b"\n") == 4)
    process.kill()
    process.join()
    assert names(parts) == [progress.FILE]
    assert cli.main([*arguments, "--continue"]) == 0

    assert names(parts) == ["receipt.json", "report.html"]
    one, two = read(whole), read(parts)
    assert one["verdict"] == two["verdict"] == "clean"
    assert (one["scenarios"], one["layouts"]) == (two["scenarios"], two["layouts"])
    for a, b in zip(one["cases"], two["cases"], strict=True):
        for key in a.keys() - {"seconds", "collectives"}:  # both of which tell times
            assert a[key] == b[key], (a["scenario"], a["layout"], key)
    assert [stretch["cases"] for stretch in two["ran"]["stretches"]] == [3, 5]
    assert [stretch["cases"] for stretch in one["ran"]["stretches"]] == [8]


def test_only_what_is_missing_runs_and_what_others_are_compared_with(tmp_path, fake, capsys):
    arguments = [*ARGUMENTS, "--out", str(tmp_path)]
    fake.stop_after = 6
    assert cli.main(arguments) == 130
    assert read(tmp_path)["verdict"] == "interrupted"
    assert names(tmp_path) == [progress.FILE, "receipt.json", "report.html"]
    first, fake.ran[:] = list(fake.ran), []
    fake.stop_after = 2
    assert cli.main([*arguments, "--continue"]) == 130
    fake.stop_after = None
    assert cli.main([*arguments, "--continue"]) == 0
    assert first == [("dist_adamw_muon", name) for name in FEW] + [
        ("clipped", "one_process"), ("clipped", "none"),
    ]  # fmt: skip
    assert fake.ran == [
        ("clipped", "one_process"), ("clipped", "zero2"),
        ("clipped", "one_process"), ("clipped", "flat_zero1"),
    ]  # fmt: skip
    content = read(tmp_path)
    stretches = content["ran"]["stretches"]
    assert [stretch["cases"] for stretch in stretches] == [6, 1, 1]
    assert content["ran"]["seconds"] == sum(stretch["seconds"] for stretch in stretches)
    assert content["ran"]["started"] == stretches[0]["started"]
    assert {stretch["commit"] for stretch in stretches} == {commit()}
    assert content["scenarios"]["clipped"]["presence"]["params"] == ["p"]
    assert names(tmp_path) == ["receipt.json", "report.html"]

    before, fake.ran[:] = (tmp_path / "receipt.json").read_bytes(), []
    capsys.readouterr()
    assert cli.main([*arguments, "--continue"]) == 0
    assert "Nothing was left to run." in capsys.readouterr().out
    assert fake.ran == []
    assert (tmp_path / "receipt.json").read_bytes() == before


def test_a_receipt_so_far_is_enough(tmp_path, fake):
    fake.stop_after = 3
    assert cli.main([*ARGUMENTS, "--out", str(tmp_path)]) == 130
    (tmp_path / progress.FILE).unlink()
    fake.stop_after = None
    assert cli.main([*ARGUMENTS, "--out", str(tmp_path), "--continue"]) == 0
    assert [stretch["cases"] for stretch in read(tmp_path)["ran"]["stretches"]] == [3, 5]


def test_without_the_option_a_run_begins_anew(tmp_path, fake):
    fake.stop_after = 3
    assert cli.main([*ARGUMENTS, "--out", str(tmp_path)]) == 130
    fake.stop_after, fake.ran[:] = None, []
    assert cli.main([*ARGUMENTS, "--out", str(tmp_path)]) == 0
    assert len(fake.ran) == 8
    assert len(read(tmp_path)["ran"]["stretches"]) == 1


CHANGES = {
    "--steps": ["--steps", "6"],
    "--seed": ["--seed", "1"],
    "--reduction": ["--reduction", "fast"],
    "--scenario": ["--scenario", "clipped"],
    "--watchdog": ["--watchdog", "9"],
    "world size": ["--world-size", "3"],
    "device": [],
    "torch": [],
    "code": [],
    "OMP_NUM_THREADS": [],
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_request_is_refused_and_named(tmp_path, fake, monkeypatch, capsys, change):
    fake.stop_after = 3
    assert cli.main([*ARGUMENTS, "--out", str(tmp_path)]) == 130
    before = (tmp_path / progress.FILE).read_bytes()
    if change == "device":
        monkeypatch.setattr(command.Options, "chosen_device", lambda self, backend: "cuda")
    elif change == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    elif change == "code":
        monkeypatch.setattr(command, "code_digest", lambda _: "other")
    elif change.isupper():
        monkeypatch.setenv(change, "7")
    fake.stop_after, fake.ran[:] = None, []
    capsys.readouterr()
    arguments = [*ARGUMENTS, *CHANGES[change], "--out", str(tmp_path), "--continue"]
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert f"is an unfinished run of another request: {change} was " in error
    assert error.count("\n") == 1
    assert error.count(" was ") == 1
    assert fake.ran == []
    assert (tmp_path / progress.FILE).read_bytes() == before


def test_ranks_of_torchrun_do_not_go_on(tmp_path, fake, monkeypatch, capsys):
    """Those on other machines would not know what has ended."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert cli.main([*ARGUMENTS, "--out", str(tmp_path), "--continue"]) == 2
    assert capsys.readouterr().err.startswith("error: --continue starts its own ranks")
    assert fake.ran == []


def test_a_finished_run_of_another_request_is_no_obstacle(tmp_path, fake, capsys):
    assert cli.main([*ARGUMENTS, "--out", str(tmp_path), "--continue"]) == 0
    fake.ran.clear()
    assert cli.main([*ARGUMENTS, "--seed", "1", "--out", str(tmp_path), "--continue"]) == 0
    assert "--seed was 0 and is 1" in " ".join(capsys.readouterr().out.split())
    assert len(fake.ran) == 8
    assert read(tmp_path)["asked"]["seed"] == 1


def test_a_case_that_gives_other_numbers_when_it_runs_again(tmp_path, fake, monkeypatch, capsys):
    fake.stop_after = 2
    assert cli.main([*ARGUMENTS, "--out", str(tmp_path)]) == 130
    fake.stop_after = None
    monkeypatch.setattr(fake, "away", 2e-7)
    assert cli.main([*ARGUMENTS, "--out", str(tmp_path), "--continue"]) == 1
    assert "1 of 8 cases failed" in capsys.readouterr().out
    failed = read(tmp_path)["cases"][0]
    assert (failed["layout"], failed["status"]) == ("one_process", "failed")
    assert failed["findings"][0]["message"].startswith("run again in a later stretch")


# The file


@pytest.fixture
def begun(tmp_path):
    """With one case."""
    ran = {"versions": {}, "environment": {}}
    made = Progress(tmp_path, {}, ran)
    made.begin()
    made.add(entry("none"), {"p": [1]}, 3.0)
    yield made
    made.close()


def entry(layout, step=2):
    return {"scenario": "s", "layout": layout, "samples": [{"step": step}], "steps_taken": 4}


def test_a_line_that_was_cut_short_counts_for_nothing(begun, tmp_path):
    begun.close()
    path = tmp_path / progress.FILE
    content = path.read_bytes()
    cut_short = content.splitlines()[-1].replace(b"none", b"lost")
    path.write_bytes(content + cut_short)
    found = progress._earlier(tmp_path)
    assert (found.entries, found.presence) == ({("s", "none"): entry("none")}, {"s": {"p": [1]}})
    assert (found.stretches[0]["cases"], found.stretches[0]["seconds"]) == (1, 3.0)
    found.begin()
    found.add(entry("zero1"), {}, 1.0)
    found.close()
    found = progress._earlier(tmp_path)
    assert [layout for _, layout in found.entries] == ["none", "zero1"]
    assert [stretch["cases"] for stretch in found.stretches] == [1, 1]


def test_a_full_disk_costs_the_case_that_did_not_fit(begun, tmp_path):
    path = tmp_path / progress.FILE
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 40, limits[1]))
    try:
        with pytest.raises(
            BadRequestError, match=r"cannot write to .* free space and resume with --continue"
        ):
            begun.add(entry("zero1"), {}, 4.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert ("s", "zero1") not in begun.entries


def test_ranks_are_ended_when_nobody_can_take_their_results(tmp_path):
    """As on a full disk: nobody waits until they have done the next case, too."""
    calls = []  # of one rank

    def patch():
        calls.append(None)
        if len(calls) == 2:
            time.sleep(limit(20.0))
            (tmp_path / "went on").touch()
        return nullcontext()

    def full(result):
        raise BadRequestError("there is no room")

    cases = [Case("clipped", layout, 2, 2, 2) for layout in ("none", "zero2")]
    with pytest.raises(BadRequestError, match="there is no room"):
        Campaign(ForkedRanks(2, HANG)).run_all(cases, full, patch=patch)
    assert not (tmp_path / "went on").exists()


def test_two_runs_do_not_write_the_same_file(begun, tmp_path):
    other = progress._earlier(tmp_path)
    with pytest.raises(BadRequestError, match="another run is writing"):
        other.open()
    begun.close()
    other.open()
    other.close()


@pytest.mark.parametrize("content", [b"", b"{}\n", b"no json\n", b'{"kind": "x", "format": 1}\n'])
def test_damage_is_told_in_a_line(tmp_path, fake, capsys, content):
    (tmp_path / progress.FILE).write_bytes(content)
    assert cli.main([*ARGUMENTS, "--out", str(tmp_path), "--continue"]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / progress.FILE} is damaged: " in error
    assert error.count("\n") == 1


def test_damage_to_a_case_is_found_before_anything_runs(tmp_path, fake, capsys):
    fake.stop_after = 3
    assert cli.main([*ARGUMENTS, "--out", str(tmp_path)]) == 130
    path = tmp_path / progress.FILE
    path.write_text(path.read_text().replace('"steps_taken": 4', '"steps_taken": -4'))
    capsys.readouterr()
    assert cli.main([*ARGUMENTS, "--out", str(tmp_path), "--continue"]) == 2
    assert "steps_taken: it is -4, below 0" in capsys.readouterr().err
    assert len(fake.ran) == 3


# The code


def test_the_digest_is_of_names_contents_and_the_model(tmp_path):
    def digest(make_model=None, **files):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, content in files.items():
            (folder / f"{name}.py").write_text(content)
        return code_digest(make_model, folder)

    one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    found = [
        digest(a="x"), digest(a="y"), digest(b="x"), digest(a="x", b=""),
        digest(lambda: one, a="x"), digest(lambda: two, a="x"),
    ]  # fmt: skip
    assert len(set(found)) == 6
    assert digest(a="x") == found[0]


def test_the_commit_is_that_of_the_folder(tmp_path):
    assert commit(tmp_path) is None

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=b"]
        return subprocess.check_output(["git", "-C", tmp_path, *who, *words], text=True).strip()

    git("init", "-q")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert commit(package) is None, "a repository that has not heard of it"
    git("add", ".")
    git("commit", "-qm", "a")
    assert commit(package) == git("rev-parse", "HEAD")
    (package / "__init__.py").write_text("changed")
    assert commit(package) == git("rev-parse", "HEAD") + "+"
