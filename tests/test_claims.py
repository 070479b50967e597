"""Pages say what receipts and registries have: numbers are computed, and looked for in the text."""

import json
import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from statistics import mean

import pytest

from benchmarks import fine_tuning
from samestep.lab.stress.mutants import MUTANTS
from samestep.lab.stress.scenarios import SCENARIOS
from tests import tables

ROOT = Path(__file__).parent.parent
SOAKS = ("soak_2", "soak_3", "soak_4", "soak_8")


@cache
def receipt(name):
    return json.loads((ROOT / "receipts" / name / "receipt.json").read_text())


@cache
def result(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def page(name):
    """Its text with single spaces, wherever lines end."""
    return " ".join((ROOT / name).read_text().split())


def assert_said(name, *texts):
    said = page(name)
    assert [text for text in texts if text not in said] == [], name


def medians(contestants, key="ms"):
    return {each["name"]: each[key]["median"] for each in contestants}


def applying(name):
    """Cases of a receipt that apply, all of which have to be exact."""
    cases = [case for case in receipt(name)["cases"] if case["status"] != "does_not_apply"]
    assert {case["status"] for case in cases} == {"exact"}, name
    return cases


def test_tables_of_the_readme():
    """Their numbers are made of these receipts, which `tests/tables.py` names."""
    for name in (tables.ALL_PEERS, tables.TRAINING):
        assert_said("README.md", f"([receipt](benchmarks/results/{name}.json))")


def test_bugs_of_the_readme():
    caught = receipt("field_bugs")["mutants"]
    assert all(each["caught"] for each in caught)
    assert_said("README.md", f"all {len(caught)} of")
    bugs = (ROOT / "README.md").read_text().partition("## Bugs")[2].partition("## Words")[0]
    links = re.findall(r"\]\((https://github\.com/\S+)\)", bugs)
    pages = "".join(each.read_text() for each in (ROOT / "docs").glob("*.md"))
    assert len(links) > 5
    assert [link for link in links if link not in pages] == []


def test_state_on_the_host():
    found = {each["name"]: each for each in result("offload_gpu")["found"]}
    ms = {name: f"{1e3 * each['step']:.1f}" for name, each in found.items()}
    ours, narrow = (
        f"samestep adamw, state on the host{more}"
        for more in ("", ", bfloat16 without master weights")
    )
    torchao = next(name for name in found if name.startswith("torchao"))
    assert found[narrow]["step"] < found[torchao]["step"]
    memory = [found[name]["memory"] for name in ("samestep adamw, on the device", ours)]
    trained = result("offload_train_gpu")["found"]
    assert not trained["device"]["fits"]
    assert_said(
        "docs/saving_memory.md",
        *(f"| {each} | " for each in ms.values()),
        "{:.3f} GB with AdamW and {:.3f}".format(*(m / 1e9 for m in memory)),
        f"{trained['host']['memory'] / 1e9:.2f} GB there",
        f"{trained['host']['seconds'][-1]:.2f} s a step",
    )


def test_small_state():
    rows = {
        (r["rule"], r["name"]): r["ms"]["median"] for r in result("small_state_step_gpu")["rows"]
    }
    for form, word in {"32 bits": "32 bits", **FORMATS}.items():
        adamw, muon = (rows[rule, f"samestep {form}"] for rule in ("adamw", "muon"))
        assert_said("docs/saving_memory.md", f"| {word} | {adamw:.2f} | ", f" | {muon:.2f} | ")
    theirs = rows["adamw", "bitsandbytes.optim.AdamW8bit"]
    assert_said("docs/saving_memory.md", f"`AdamW8bit` | {theirs:.1f} |")
    finals = {}
    for run in result("small_state_train_gpu")["runs"]:
        finals.setdefault(run["form"], []).append(run["final"])
    for form, word in (("32 bits", "32 bits"), ("8bit", '`"8bit"`')):
        told = [f"{loss:.4f}" for loss in (*finals[form], mean(finals[form]))]
        assert_said("docs/saving_memory.md", f"| {word} | {' | '.join(told)} |")
    means = {
        row["rule"]: row["mean"]
        for row in result("small_state_error_cpu")["rows"]
        if row["form"] == "8bit"
    }
    assert_said(
        "docs/saving_memory.md", f"({means['muon']:.2f} against {means['adamw']:.2f} of their size"
    )


FORMATS = {"bf16": "bfloat16", "bf16_stochastic": '`"bf16_stochastic"`', "8bit": '`"8bit"`'}


def test_logits_of_qk_clip():
    lines, content = [], result("qk_clip_gpu")
    for row in content["rows"]:
        (batch, heads, kv_heads, places, size) = row["layer"].values()
        ms = {name: own["median"] for name, own in row["ms"].items()}
        forward, both, looking, plain = ms.values()
        lines.append(
            f"| {batch} x {heads} / {kv_heads} x {places} x {size} "
            f"| {forward:.2f} | {both:.2f} | {looking:.2f} | {plain:.1f} |"
        )
    without, with_it = (own["median"] for own in content["training"]["ms"].values())
    said = f"takes {without:.1f} ms without a QK-clip and {with_it:.1f} with one"
    assert_said("docs/qk_clip.md", *lines, said)


def test_bytes_of_adamw_on_two_ranks():
    (contest,) = result("two_ranks_512")["contests"]
    names = ("samestep flat zero1, fused, overlap", "ZeRO fused, views")
    sent = [contest["contestants"][name]["bytes_per_step_and_rank"] / 1e6 for name in names]
    assert_said(
        "docs/several_gpus.md",
        f"ZeroRedundancyOptimizer for AdamW on 2 ranks: {sent[0]:.0f} MB instead of {sent[1]:.0f}",
    )


def test_long_runs():
    furthest = Counter()
    for name in SOAKS:
        cases = applying(name)
        assert len({case["scenario"] for case in cases}) == len(SCENARIOS) == 22
        assert {case["steps_taken"] for case in cases} == {1000}
        for case in cases:
            for sample in case["samples"]:
                assert sample["max_abs_param_diff"] == sample["max_abs_state_diff"] == 0
                for kind, distance in (sample["reference"] or {}).items():
                    furthest[kind] = max(furthest[kind], distance or 0)
    counts = [len(applying(name)) for name in SOAKS]
    assert counts[0] == counts[1]
    assert counts[2] == counts[3]
    assert furthest["adam"] < 2e-5
    assert max(far for kind, far in furthest.items() if kind.startswith("mu")) < 3e-4


def test_fsdp2_in_the_harness():
    for name in SOAKS:
        ran = Counter(case["layout"] for case in applying(name))
        assert ran["fsdp2_parallel"] == ran["tp_fsdp2"] == ran["ep_fsdp2"] == 21
        assert ran["hsdp"] == (21 if name in ("soak_4", "soak_8") else 0)
    assert_said(
        "docs/fsdp2.md",
        "of 2, 3, 4 and 8 ranks, FSDP2 (HSDP on 4 and 8) took 21 of the harness's 22 scenarios",
    )


def test_runs_on_a_gpu():
    shared = receipt("stress_gpu_2")
    assert (shared["ran"]["actual_backend"], shared["ran"]["world_size"]) == ("gloo", 2)
    assert len(applying("stress_gpu_2")) > 280


@pytest.mark.parametrize("ranks", [2, 4])
def test_runs_over_nccl(ranks):
    found, cases = receipt(f"nccl_{ranks}"), applying(f"nccl_{ranks}")
    ran = found["ran"]
    assert (ran["actual_backend"], ran["world_size"], ran["shared_gpus"]) == ("nccl", ranks, True)
    assert min(case["steps"] for case in cases) >= 100
    assert len({case["layout"] for case in cases}) >= 10


@pytest.mark.parametrize(("backend", "late"), [("nccl", 14.0), ("gloo", 12.0)])
def test_faults_are_named(backend, late):
    found = json.loads((ROOT / "receipts" / f"faults_{backend}.json").read_text())
    assert found["verdict"] == "clean"
    assert found["ran"]["actual_backend"] == backend
    cases = found["cases"]
    assert all(case["passed"] and case["timeout"] == late for case in cases)
    assert len({case["layout"] for case in cases}) == 4
    reports = [report for case in cases for report in case["reports"]]
    assert all(each["named"] or each.get("aborted") for each in reports)
    assert all(each["status"] not in (None, 0) for each in reports)
    assert max(each["seconds"] for each in reports) <= late + 10.0
    assert_said("docs/several_hosts.md", f"All {len(cases)} faults of the harness")


def test_fine_tuning():
    """The page has the table of its receipt."""
    assert fine_tuning.table(result("fine_tuning")) in (ROOT / "docs" / "rules.md").read_text()


def test_checkpoints_between_layouts():
    matrix = json.loads((ROOT / "receipts" / "checkpoint_matrix.json").read_text())
    assert matrix["verdict"] == "pass"
    sides = round(matrix["pairs"] ** 0.5)
    assert_said("docs/checkpoints.md", f"all {matrix['pairs']} pairs of {sides} layouts")


def test_mutants():
    caught = receipt("mutants")["mutants"]
    assert all(each["caught"] and each["expected"] in each["by"] for each in caught)
    assert {each["name"] for each in caught} <= set(MUTANTS)


def test_the_page_of_the_harness():
    any_model = sum(scenario.takes_any_model for scenario in SCENARIOS.values())
    assert any_model == 12
    assert_said("docs/prove.md", "Twelve of the scenarios take any model")
    text = (ROOT / "docs" / "prove.md").read_text()
    known = {mutant.expected for mutant in MUTANTS.values()}
    assert {"replicas", "layouts", "reference", "state", "hang"} <= known
    assert [name for name in known - {"promise", "contract"} if f"`{name}`" not in text] == []


def test_versions_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = re.fullmatch(r">=([\d.]+)", project["requires-python"])[1]
    (torch,) = [re.fullmatch(r"torch>=([\d.]+)", each)[1] for each in project["dependencies"]]
    assert_said("docs/status.md", f"Python {oldest} or later and torch {torch} or later")
    pythons = [each.rpartition(" ")[2] for each in project["classifiers"] if "Python :: 3." in each]
    assert_said("docs/status.md", f"Python {', '.join(pythons[:-1])} and {pythons[-1]}")


def test_layouts_beside_one_process():
    found = json.loads((ROOT / "receipts" / "hybrid.json").read_text())
    assert found["verdict"] == "pass"
    rows = found["rows"].values()
    ranks = sorted({row["ranks"] for row in rows})
    most = {key: max(row[key] for row in rows) for key in ("gradient", "loss", "adamw", "muon")}
    assert ranks == [2, 4, 8]
    assert_said(
        "docs/hybrid.md",
        f"{len(rows)} combinations of TP, SP, EP, PP",
        f"gradients within {most['gradient']:.1e}, losses within {most['loss']:.1e}, "
        f"parameters within {most['adamw']:.1e} (AdamW) and {most['muon']:.1e} (Muon)",
    )


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_programs_of_xla(devices):
    cases = applying(f"xla_{devices}")
    classic, random = (
        {case["program"]["programs"] for case in cases if case["scenario"] == name}
        for name in ("dist_adamw_muon", "dist_adamw_muon_random")
    )
    programs = " and ".join(str(most) for (most,) in (classic, random))
    (whole,) = [c for c in cases if (c["scenario"], c["layout"]) == ("dist_adamw_muon", "xla_data")]
    bytes_of = whole["program"]
    assert {case["program"]["host_reads"] for case in cases} == {0}
    said = f"| {programs} | {bytes_of['state_bytes']}, {bytes_of['even_state_bytes']}"
    (row,) = [
        line
        for line in (ROOT / "docs" / "xla.md").read_text().splitlines()
        if line.startswith(f"| `receipts/xla_{devices}` |")
    ]
    assert said in row
    furthest = Counter()
    for sample in (sample for case in cases for sample in case["samples"]):
        for kind, distance in (sample["reference"] or {}).items():
            furthest[kind] = max(furthest[kind], distance or 0)
    muon = max(distance for kind, distance in furthest.items() if kind.startswith("mu"))
    far = [f"{distance:.1e}".replace("e-0", "e-") for distance in (furthest["adam"], muon)]
    assert f"| {', '.join(far)} |" in row


def test_the_hybrid_mesh_in_an_xla_program():
    (case,) = applying("xla_hybrid_8")
    assert {sample["max_abs_param_diff"] for sample in case["samples"]} == {0}
    program = case["program"]
    assert (program["programs"], program["host_reads"]) == (2, 0)
    apart = [sample["reference"] for sample in case["samples"]]
    adam, muon = (max(each[key] for each in apart) for key in ("adam", "mu_a"))
    far = " and ".join(f"{distance:.1e}".replace("e-0", "e-") for distance in (adam, muon))
    assert_said("docs/xla.md", f"for {case['steps']} steps: {far} from the reference")


def test_speed_of_checkpoints():
    found = result("checkpoint_250m")
    rows = {
        "throughput, of that of `dcp.save`": f"{found['found']['with checksums']:.2f}",
        "the same without checksums": f"{found['found']['without checksums']:.2f}",
        "memory on top, of what a rank holds": f"{found['found']['extra memory']:.3f}",
        "time that `async_save` blocks, of the whole save": f"{found['found']['blocked']:.3f}",
    }
    assert_said("docs/checkpoints.md", *(f"| {name} | {value} |" for name, value in rows.items()))
    seconds = found["medians"]
    assert_said(
        "docs/checkpoints.md",
        f"2,962 MB took {seconds['ours']:.1f} s with checksums, "
        f"{seconds['ours unchecked']:.1f} s without, and {seconds['dcp']:.1f} s with `dcp.save`",
    )


def test_training_with_fewer_steps():
    from benchmarks.fewer_steps_training import WAYS  # with what draws pictures

    found = result("fewer_steps_training")
    losses = {}
    for run in found["runs"]:
        losses.setdefault((run["steps"], run["start"]), []).append(run["loss"])
    assert set(losses) == set(WAYS)
    apart = {
        way: [one - five for one, five in zip(each, losses[5, "norm"], strict=True)]
        for way, each in losses.items()
    }
    four = [apart[4, "norm"], apart[4, "gram"]]
    assert all(min(each) < 0 < max(each) for each in four)
    assert min(apart[3, "gram"] + apart[3, "norm"]) > 0


def test_rivals_are_those_of_the_receipt():
    from benchmarks.rivals import RATES, table  # with what draws pictures

    found = result("rivals_cpu")
    assert_said("docs/rules.md", *table(found).splitlines())
    assert {(run["rule"], run["lr"]) for run in found["runs"]} <= {
        (rule, rate) for rule, rates in RATES.items() for rate in rates
    }
