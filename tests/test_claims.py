"""Pages say what receipts and registries have: numbers are computed, and looked for in the text."""

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from statistics import geometric_mean, mean, stdev

import pytest

from benchmarks import fine_tuning, foreign
from samestep.lab.stress.layouts import LAYOUTS
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


def test_steps_beside_dion():
    sets = result("step_lanes_dion")["sets"]
    assert {each["set"] for each in sets} == {"gpt-1280", "gpt-2048"}
    for each in sets:
        ms = medians(each["contestants"])
        said = f"| {ms['ours']:.1f} ms | "
        ratio = f"{ms['dion-triton'] / ms['ours']:.2f} times that"
        assert_said("docs/proof.md", f"{said}dion {ratio}")
        assert_said("docs/gpu.md", f"{ms['ours']:.1f} ms, dion {ratio}")
    for each in result("step_residue_dion")["sets"]:
        ms = medians(each["contestants"])
        said = f"`{each['set']}` {ms['ours']:.1f} ms, dion {ms['dion-triton'] / ms['ours']:.2f}"
        assert_said("docs/gpu.md", said)


def test_steps_beside_all_peers():
    sets = {each["set"]: medians(each["contestants"]) for each in result("step_all_peers")["sets"]}
    ms = sets["gpt-2048"]
    assert_said(
        "docs/proof.md",
        f"| {ms['ours']:.1f} ms | dion {ms['dion-triton']:.1f}, nanochat {ms['nanochat']:.1f}, "
        f"torch.optim.Muon {ms['torch']:.1f} ms |",
    )


def test_trainings_of_others():
    for layers in (12, 20):
        ms = medians(result(f"client_nanochat_{layers}")["contestants"], "optimizer_ms")
        assert_said("docs/proof.md", f"| {ms['ours']:.1f} ms | its own {ms['nanochat']:.1f} ms |")
    llama = result("client_llama")
    ms = medians(llama["contestants"], "optimizer_ms")
    assert_said("docs/proof.md", f"| {ms['ours']:.1f} ms | dion {ms['dion']:.1f} ms |")
    version = llama["model"]["transformers"].rpartition(".")[0]
    assert_said(
        "docs/gpu.md", f"A Llama of transformers {version}", f"| ours | 2.471 | {ms['ours']:.2f} |"
    )


def test_tables_of_trainings_of_others():
    """Of each seed, in whichever receipt it came to its end."""
    rows = []
    for receipts in (("12", "12_third"), ("20", "20_more")):
        seeds = [each for name in receipts for each in result(f"client_nanochat_{name}")["seeds"]]
        for each in seeds:
            both = {training["name"]: training for training in each["trainings"]}
            if any(training["final_loss"] is None for training in both.values()):
                continue
            theirs, ours = both["nanochat"], both["ours"]
            losses = f"{theirs['final_loss']:.4f} / {ours['final_loss']:.4f}"
            ms = [training["optimizer_ms"]["median"] for training in (theirs, ours)]
            rows.append(f"{losses} | {ms[0]:.2f} / {ms[1]:.2f} | {ms[1] / ms[0]:.2f} |")
    assert len(rows) == 6
    labels = {
        "ours": "ours",
        "dion": "dion",
        "ours-adamw": "ours, AdamW alone",
        "torch-adamw": "torch's AdamW, fused",
    }
    for each in result("client_llama")["contestants"]:
        if each["name"] in labels:
            ms = each["optimizer_ms"]["median"], each["iteration_ms"]["median"]
            (loss,) = each["final_losses"]
            rows.append(f"| {labels[each['name']]} | {loss:.3f} | {ms[0]:.2f} | {ms[1]:.1f} |")
    assert_said("docs/gpu.md", *rows)


def test_table_of_where_steps_on_several_ranks_go():
    rows = []
    for case in result("breakdown")["cases"]:
        first = case["ranks"][0]
        parts = " | ".join(
            f"{first[f'{part}_ms'] / first['profiled_ms']:.0%}"
            for part in ("elementwise", "products", "exposed")
        )
        ms = f"{first['ms']:.1f}" if first["ms"] < 100 else f"{first['ms']:.0f}"
        rates = f"{first['tflops_computed']:.0f} | {first['tflops_plain']:.0f}"
        rows.append(f"| {ms} | {parts} | {rates} |")
    assert_said("docs/gpu.md", *rows)


def test_state_on_the_host():
    found = {each["name"]: each for each in result("offload_gpu")["found"]}
    ms = {name: f"{1e3 * each['step']:.1f}" for name, each in found.items()}
    ours, narrow = (
        f"samestep adamw, state on the host{more}"
        for more in ("", ", bfloat16 without master weights")
    )
    torchao = next(name for name in found if name.startswith("torchao"))
    before = {each["name"]: each for each in result("offload_deepspeed_gpu")["found"]}
    deepspeed = next(name for name in before if name.startswith("DeepSpeed"))
    theirs = f"{1e3 * before[deepspeed]['step']:.1f}"
    for own, peer in ((narrow, f"torchao {ms[torchao]} ms"), (ours, f"DeepSpeed {theirs} ms")):
        ratio = f"{found[own]['ratio']:.2f}"
        assert_said("docs/proof.md", f"| {ms[own]} ms, {ratio} of what the link allows | {peer}")
    assert_said("docs/offload.md", *(f"| {each} | " for each in [*ms.values(), theirs]))
    memory = [found[name]["memory"] for name in ("samestep adamw, on the device", ours)]
    assert_said(
        "docs/offload.md", "{:.3f} GB with AdamW and {:.3f}".format(*(m / 1e9 for m in memory))
    )
    trained = result("offload_train_gpu")["found"]
    assert not trained["device"]["fits"]
    assert_said(
        "docs/offload.md",
        f"{trained['host']['memory'] / 1e9:.2f} GB there, {trained['host']['planned'] / 1e9:.1f}",
        f"{trained['host']['seconds'][-1]:.2f} s a step",
    )


def test_small_state():
    rows = {
        (r["rule"], r["name"]): r["ms"]["median"] for r in result("small_state_step_gpu")["rows"]
    }
    for form, word in (("32 bits", "32 bits"), ("8bit", '`"8bit"`')):
        adamw, muon = (rows[rule, f"samestep {form}"] for rule in ("adamw", "muon"))
        said = f"| {word} | {adamw:.2f} | "
        assert_said("docs/small_state.md", said, f"| {muon:.2f} | ")
    for rule in ("adamw", "muon"):
        in_32 = rows[rule, "samestep 32 bits"], rows[rule, "samestep 32 bits, master 32 bits"]
        for form in ("bf16", "bf16_stochastic", "8bit"):
            assert rows[rule, f"samestep {form}"] < in_32[0]
        assert rows[rule, "samestep 8bit, master remainder"] < in_32[1]
    muon, muon_32 = (rows["muon", f"samestep {form}"] for form in ("8bit", "32 bits"))
    assert_said("docs/proof.md", f"| {muon:.1f} ms ({muon_32:.1f} in 32 bits) |")
    small, wide = rows["adamw", "samestep 8bit"], rows["adamw", "samestep 32 bits"]
    assert small < wide
    theirs = rows["adamw", "bitsandbytes.optim.AdamW8bit"]
    said = f"| {small:.2f} ms ({wide:.2f} in 32 bits) | bitsandbytes {theirs:.1f} ms |"
    assert_said("docs/proof.md", said)
    finals = {(r["form"], r["seed"]): r["final"] for r in result("small_state_train_gpu")["runs"]}
    assert_said("docs/small_state.md", *(f"{final:.4f}" for final in finals.values()))


FORMATS = {"bf16": "bfloat16", "bf16_stochastic": '`"bf16_stochastic"`', "8bit": '`"8bit"`'}


def test_trainings_with_small_state():
    finals = {}
    for run in result("small_state_train_cpu")["runs"]:
        finals.setdefault(run["form"], []).append(run["final"])
    for form, word in {"32 bits": "32 bits", **FORMATS}.items():
        told = [f"{loss:.4f}" for loss in (*finals[form], mean(finals[form]))]
        assert_said("docs/small_state.md", f"| {word} | {' | '.join(told)} |")


def test_errors_of_updates_with_small_state():
    content = result("small_state_error_cpu")
    rows = {(row["rule"], row["form"]): row for row in content["rows"]}
    for form, word in FORMATS.items():
        said = [
            f"{of:.3f}"
            for row in (rows[rule, form] for rule in ("adamw", "muon"))
            for of in (row["spans"][0], row["spans"][-1], row["mean"])
        ]
        assert_said("docs/small_state.md", f"| {word} | {' | '.join(said)} |")
    first, last = content["losses"][0], content["losses"][-1]
    assert_said("docs/small_state.md", f"from {first:.2f} to {last:.2f}")


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
        if places == 4096 and size == 128:
            said = (
                f"{looking:.2f} ms, its forward and backward {both:.2f} | plain torch {plain:.1f}"
            )
            assert_said("docs/proof.md", said)
    without, with_it = (own["median"] for own in content["training"]["ms"].values())
    said = f"takes {without:.1f} ms without a QK-clip and {with_it:.1f} with one"
    assert_said("docs/qk_clip.md", *lines, said)


STEPS = {
    "ours": "ours, clipping on",
    "ours-graph": "ours, CUDA graph",
    "ours-float16": "ours, float16",
    "ours-variance": "ours, variance reduction and cautious decay",
    "dion-triton": "dion, Triton",
    "nanochat": "nanochat, compiled",
    "torch": "torch.optim.Muon + AdamW fused",
}


@pytest.mark.parametrize("name", ["step_all_peers", "step_gpt-2048", "step_gpt-1280"])
def test_tables_of_steps(name):
    for of_set in result(name)["sets"]:
        digits = 2 if of_set["set"] == "gpt-1280" else 1
        found = {each["name"]: each for each in of_set["contestants"]}
        rows = []
        for each in (found[key] for key in STEPS if key in found):
            label = STEPS[each["name"]]
            if (name, label) == ("step_all_peers", "ours, clipping on"):
                label = f"`{of_set['set']}`, {label}"
            ms, host = each["ms"]["median"], each["host_ms"]["median"]
            row = f"| {label} | {ms:.{digits}f} | {host:.1f} | {each['times_ours']:.2f} |"
            if "gaussian" in each and each["name"] in ("ours", "torch", "ours-float16"):
                far = (each[kind]["distance"] for kind in ("gaussian", "power_law"))
                row += f" {' / '.join(f'{distance:.2g}' for distance in far)} |"
            rows.append(row)
        alone = [
            found[key] for key in ("ours-adamw", "ours-adamw-graph", "torch-adamw") if key in found
        ]
        if alone:
            ms = " / ".join(f"{each['ms']['median']:.2f}" for each in alone)
            host = " / ".join(f"{each['host_ms']['median']:.1f}" for each in alone)
            rows.append(f"| AdamW alone: ours / CUDA graph / torch's fused | {ms} | {host} |")
        assert_said("docs/gpu.md", *rows)


def test_table_of_orthogonalization():
    rows = []
    for shape in result("orthogonalize")["shapes"]:
        ms = medians(shape["contestants"])
        size = " x ".join(map(str, shape["shape"]))
        order = ("ours", "dion-triton", "torch-batched", "gram-torch")
        cells = " | ".join(_three_digits(ms[key]) for key in order)
        rows.append(f"| {size} | {cells} | {shape['lead']:.2f} |")
    assert_said("docs/gpu.md", *rows)


def _three_digits(ms):
    return f"{ms:.{3 if ms < 1 else 2 if ms < 10 else 1}f}"


def test_table_of_trainings():
    rows = []
    for label in ("kernels", "plain torch"):
        found = result("training_gpu")["variants"][label]
        losses = " ".join(f"{loss:.4f}" for loss in found["final_losses"])
        mean_loss = f"{found['mean']:.4f} ± {found['standard_deviation']:.4f}"
        ms = f"{found['iteration_ms']:.1f} | {found['optimizer_ms']:.1f}"
        rows.append(f"| {label} | {losses} | {mean_loss} | {ms} | {found['optimizer_share']:.1%} |")
    assert_said("docs/gpu.md", *rows)


def test_table_of_what_has_changed_in_a_step():
    """Of a table in plain text: a part of its lines."""
    lines = (ROOT / "benchmarks" / "results" / "step_parts_gpu.txt").read_text().splitlines()
    first, second = (
        [re.split(r" {2,}", line.strip())[:2] for line in part.splitlines()]
        for part in "\n".join(lines).split("gpt-1280, chosen")[0:2]
    )
    large, small = dict(filter(_has_two, first)), dict(filter(_has_two, second))
    mirrored = "the last P A of a segment mirrored, with its residue"
    begun, turned = large["both"], large["both, and the symmetric factor turned (Q^T X): as it is"]
    before = large["as it was: P A whole, norm inside the step, Q X"], small["as it was"]
    assert_said(
        "docs/gpu.md",
        f"| before | {before[0]} | {before[1]} |",
        f"| the last `P A` of a segment mirrored | {large[mirrored]} | {small[mirrored]} |",
        f"| and the norm begun ahead | {begun} | {small['both: as it is']} |",
        f"| and `Q^T X` from 2048 rows on | {turned} | |",
    )
    less = [
        1 - float(now) / float(then)
        for now, then in zip((turned, small["both: as it is"]), before, strict=True)
    ]
    assert_said("docs/gpu.md", f"| less than before | {less[0]:.1%} | {less[1]:.1%} |")


def _has_two(cells):
    return len(cells) == 2


def test_orthogonalization():
    leads = [shape["lead"] for shape in result("orthogonalize")["shapes"]]
    said = f"{min(leads):.2f} to {max(leads):.2f} times as fast, {geometric_mean(leads):.2f} in the"
    assert len(leads) == 10
    assert_said("docs/proof.md", said)


def test_two_ranks():
    (contest,) = result("two_ranks_512")["contests"]
    rows = []
    for name, each in contest["contestants"].items():
        median = each["median_ms"]
        faster = f"{each['times_faster_than_best_peer']:.2f}"
        faster = "" if name == "forward and backward" else f" {faster}"
        name = name.replace("forward and backward", "forward and backward alone")
        rows.append(f"| {name} | {median['iteration']:.0f} ({median['cpu']:.0f}) |{faster} |")
    assert_said("docs/benchmarks.md", *rows)
    ours = contest["contestants"]["samestep flat zero1, fused, overlap"]
    theirs = contest["contestants"]["ZeRO fused, views"]
    sent = [f"{each['bytes_per_step_and_rank'] / 1e6:.0f} MB" for each in (ours, theirs)]
    took = [f"{each['median_ms']['iteration']:.0f} ms" for each in (ours, theirs)]
    assert_said("docs/proof.md", f"| {sent[0]} | ZeroRedundancyOptimizer {sent[1]} |")
    said = f"ZeroRedundancyOptimizer for AdamW on 2 ranks: {sent[0]} instead of {sent[1]}"
    assert_said("docs/several_gpus.md", said.removesuffix(" MB"))
    assert_said(
        "docs/proof.md", f"| {took[0]} | ZeroRedundancyOptimizer, fused, with all views {took[1]}"
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
    muon = max(distance for kind, distance in furthest.items() if kind.startswith("mu"))
    far = f"{furthest['adam']:.1e}".replace("e-0", "e-"), f"{muon:.1e}".replace("e-0", "e-")
    assert_said(
        "docs/proof.md",
        f"22 scenarios in up to {len(LAYOUTS)} layouts, {counts[0]} cases on 2 and 3 ranks, "
        f"{counts[2]} on 4 and 8",
        f"{far[0]} from float64 with AdamW (limit 2e-5), {far[1]} with Muon (3e-4)",
    )
    assert_said("docs/stress.md", f"{far[0]} with AdamW (limit 2e-5), {far[1]} with Muon")


@pytest.mark.parametrize(
    "name", [*SOAKS, "copies_4", "copies_conditional_4", "copies_absent_4", "copies_8"]
)
def test_the_table_of_receipts_counts_their_cases(name):
    assert_said("docs/stress.md", f"| `receipts/{name}` | {len(applying(name))}: ")


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
    cases = len(applying("stress_gpu_2"))
    assert_said("docs/proof.md", f"{cases} of {cases} cases exactly 0")
    assert_said("docs/stress.md", f"{cases} cases, all exactly 0")
    assert_said("docs/gpu.md", f"{cases} cases that fit two ranks")


@pytest.mark.parametrize("ranks", [2, 4])
def test_runs_over_nccl(ranks):
    found, cases = receipt(f"nccl_{ranks}"), applying(f"nccl_{ranks}")
    ran = found["ran"]
    assert (ran["actual_backend"], ran["world_size"], ran["shared_gpus"]) == ("nccl", ranks, True)
    assert {case["status"] for case in cases} == {"exact"}
    assert {case["steps"] for case in cases} == {100}
    assert len({case["layout"] for case in cases}) >= 10
    assert_said("docs/proof.md", f"{len(cases)} of {len(cases)}")
    assert_said("docs/gpu.md", f"5 scenarios, 100 steps: {len(cases)} cases, all exactly 0")


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
    assert_said("docs/proof.md", f"{len(cases)} of {len(cases)} over")
    assert_said("docs/several_hosts.md", f"All {len(cases)} faults of the harness")
    assert_said("docs/gpu.md", f"all {len(cases)} named")


def test_fine_tuning():
    """The page has the table of its receipt."""
    assert (
        fine_tuning.table(result("fine_tuning")) in (ROOT / "docs" / "fine_tuning.md").read_text()
    )


def test_optimizers_of_others():
    """The page has the tables of its receipt."""
    content = json.loads((ROOT / "receipts" / "foreign.json").read_text())
    assert (ROOT / "docs" / "foreign.md").read_text().endswith(foreign.page(content))


def test_checkpoints_between_layouts():
    matrix = json.loads((ROOT / "receipts" / "checkpoint_matrix.json").read_text())
    assert matrix["verdict"] == "pass"
    sides = round(matrix["pairs"] ** 0.5)
    assert_said("docs/proof.md", f"checkpoints from {sides} layouts", f"{matrix['pairs']} pairs")


def test_mutants():
    caught = receipt("mutants")["mutants"]
    assert all(each["caught"] and each["expected"] in each["by"] for each in caught)
    assert {each["name"] for each in caught} <= set(MUTANTS)
    assert_said("docs/proof.md", f"{len(caught)} of {len(caught)} caught")


def test_the_page_of_the_harness_lists_what_there_is():
    text = (ROOT / "docs" / "stress.md").read_text()
    table = text[text.index("## Mutants") : text.index("## Receipt and report")]
    listed = Counter(re.findall(r"^\| .* \| `(\w+)` \|$", table, re.MULTILINE))
    assert listed == Counter(mutant.expected for mutant in MUTANTS.values())
    any_model = sum(scenario.takes_any_model for scenario in SCENARIOS.values())
    assert_said(
        "docs/stress.md", f"The {any_model} of {len(SCENARIOS)} scenarios that take any model"
    )
    layouts = text[text.index("## Layouts") : text.index("### Copies and parts")]
    assert [name for name in LAYOUTS if f"`{name}`" not in layouts] == []


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


def test_times_of_plans():
    """Steps that were planned beside steps that were taken."""

    def errors(name):
        rows = result(f"plan_time_{name}")["rows"]
        return [row["error"] for row in rows], rows

    on_wall, rows = errors("wall")
    assert_said("docs/plan.md", f"{sum(abs(e) <= 0.25 for e in on_wall)} of {len(on_wall)} steps")
    of_two = [abs(row["error"]) for row in rows if row["ranks"] == 2]
    assert_said("docs/plan.md", f"On 2 ranks within {100 * max(of_two):.0f}%")
    by_cpu, _ = errors("cpu")
    assert max(map(abs, by_cpu)) <= 0.1
    assert_said("docs/plan.md", f"had {len(by_cpu)} of {len(by_cpu)} within 10%")
    of_sixteen, _ = errors("cpu_16")
    worst = 100 * max(map(abs, of_sixteen))
    assert_said("docs/plan.md", f"{len(of_sixteen)} of {len(of_sixteen)} within {worst:.0f}%")
    of_hosts, _ = errors("2_hosts")
    assert max(map(abs, of_hosts)) <= 0.25
    assert_said("docs/plan.md", f"{len(of_hosts)} of {len(of_hosts)} within 25%")


def test_training_with_fewer_steps():
    from benchmarks.fewer_steps_training import WAYS, table  # with what draws pictures

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
    three = {start: f"{mean(apart[3, start]):.3f}" for start in ("gram", "norm")}
    assert_said(
        "docs/fewer_steps.md",
        *table(found),
        f"within {max(abs(d) for each in four for d in each):.3f} of them in each seed",
        f"where seeds are {stdev(losses[5, 'norm']):.3f} apart",
        f'{three["gram"]} on average with `"gram"` and {three["norm"]} with `"norm"`',
    )


def test_rivals_are_those_of_the_receipt():
    from benchmarks.rivals import RATES, table  # with what draws pictures

    found = result("rivals_cpu")
    assert_said("docs/rules.md", *table(found).splitlines())
    assert {(run["rule"], run["lr"]) for run in found["runs"]} <= {
        (rule, rate) for rule, rates in RATES.items() for rate in rates
    }
