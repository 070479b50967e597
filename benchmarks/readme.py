"""The tables of README.md that come from receipts: where it has run, and how fast.

    python -m benchmarks.readme        # writes them into README.md

A new receipt in receipts/ is found by itself. A layout that no row names is an error, and so is a
case that did not pass. `STEP` and `TRAINING` name the receipts of the tables of speed.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
STEP = "step_all_peers"
TRAINING = "client_llama"
PASSED = {"exact", "within_tolerance"}

# Rows: the first pattern that matches the whole name of a layout has it.
LAYOUTS = (
    ("replicated, ZeRO-1, ZeRO-2", r"none|zero[12].*"),
    ("flat buffers, as in Megatron", r"flat_.*"),
    ("FSDP2", r"fsdp2_.*"),
    ("HSDP", r"hsdp"),
    ("tensor or expert parallel, FSDP2", r"(tp|ep)_fsdp2"),
    ("tensor or expert parallel, ZeRO", r".*_dp_.*"),
    ("tensor, sequence, expert, pipeline parallel", r"hybrid_.*"),
)
# Columns: device, backend, whether ranks share a GPU.
PLACES = (
    ("CPU, gloo", ("cpu", "gloo", False)),
    ("one H200, gloo", ("cuda", "gloo", True)),
    ("one H200, NCCL", ("cuda", "nccl", True)),
    ("a GPU per rank, NCCL", ("cuda", "nccl", False)),
)
# Contestants of one peer, by the beginning of their names, in the order of the table.
PEERS = ("ours", "dion", "speedrun", "nanochat", "torch")
LEFT_OUT = re.compile(r".*(adamw|plain|float16|variance|remainder).*")


def receipts() -> Iterator[tuple[tuple[str, str, bool], dict[str, Any]]]:
    """Receipts of the harness with ranks, and where each has run."""
    for path in sorted(ROOT.glob("receipts/*/receipt.json")):
        receipt = json.loads(path.read_text())
        ran = receipt.get("ran", {})
        if receipt.get("kind") == "samestep stress" and ran.get("device") in ("cpu", "cuda"):
            gloo_on_a_gpu = (ran["device"], ran["actual_backend"]) == ("cuda", "gloo")
            shared = gloo_on_a_gpu or bool(ran.get("shared_gpus"))
            yield (ran["device"], ran["actual_backend"], shared), receipt


def row_of(layout: str) -> str:
    """The row of a layout."""
    for row, pattern in LAYOUTS:
        if re.fullmatch(pattern, layout):
            return row
    raise ValueError(f"layout {layout!r} of a receipt is in no row of LAYOUTS")


def support() -> str:
    """Layouts by places: numbers of ranks that have run."""
    ranks: dict[tuple[str, Any], set[int]] = {}
    most: dict[Any, tuple[int, int]] = {}
    for place, receipt in receipts():
        cases = [each for each in receipt["cases"] if each["status"] != "does_not_apply"]
        for case in cases:
            if case["status"] not in PASSED:
                raise ValueError(f"{case['scenario']} in {case['layout']}: {case['status']}")
            if case["layout"] != "one_process":
                key = row_of(case["layout"]), place
                ranks.setdefault(key, set()).add(receipt["ran"]["world_size"])
        of_one = len({case["scenario"] for case in cases})
        steps = max((case["steps"] for case in cases), default=0)
        most[place] = max(most.get(place, (0, 0)), (of_one, steps))
    lines = [["layout", *(name for name, _ in PLACES)]]
    for row, _ in LAYOUTS:
        cells = (sorted(ranks.get((row, place), ())) for _, place in PLACES)
        lines.append([row, *(", ".join(map(str, each)) or "never" for each in cells)])
    longest = (most.get(place) for _, place in PLACES)
    lines.append(
        [
            "longest receipt",
            *(
                f"{a} x {b}" if (a, b) != (0, 0) else ""
                for a, b in (each or (0, 0) for each in longest)
            ),
        ]
    )
    return table(lines)


def speed() -> str:
    """Milliseconds of a step, of the best configuration of everybody."""
    receipt = json.loads((RESULTS / f"{STEP}.json").read_text())
    sets = receipt["sets"]
    head = ["optimizer, best configuration"]
    for each in sets:
        size = (each["matrix_parameters"] + each["other_parameters"]) / 1e9
        head.append(f"{size:.2f} B parameters, ms")
    lines = [head]
    for peer in PEERS:
        found = [
            {each["name"]: each for each in own["contestants"] if belongs(each, peer)}
            for own in sets
        ]
        if not all(found):
            continue
        names = [min(own, key=lambda name: own[name]["ms"]["median"]) for own in found]
        shown = found[-1][names[-1]]["what"]
        ms = (own[name]["ms"]["median"] for own, name in zip(found, names, strict=True))
        lines.append([LABELS.get(names[-1], shown), *(f"{each:.1f}" for each in ms)])
    return table(lines)


LABELS = {
    "ours": "samestep, gradients clipped",
    "ours-graph": "samestep, CUDA graph, gradients clipped",
    "dion-triton": "dion, Triton",
    "dion-graph": "dion, Triton, CUDA graph",
    "dion-gns": "dion, gram-newton-schulz kernels",
    "dion-gns-graph": "dion, gram-newton-schulz kernels, CUDA graph",
    "nanochat": "nanochat, compiled",
    "torch": "torch.optim.Muon, fused AdamW",
}


def belongs(contestant: dict[str, Any], peer: str) -> bool:
    """Whether a contestant with Muon is one of a peer, and ran."""
    name = contestant["name"]
    ran = contestant.get("failed") is None and contestant.get("ms") is not None
    return ran and (name == peer or name.startswith(f"{peer}-")) and not LEFT_OUT.fullmatch(name)


def training() -> str:
    """Tokens per second of a whole training, beside fused AdamW."""
    receipt = json.loads((RESULTS / f"{TRAINING}.json").read_text())
    tokens = receipt["training"]["batch"] * receipt["training"]["sequence"]
    named = {
        "torch-adamw": "torch's fused AdamW",
        "ours": "samestep.MuonAdamW",
        "dion": "dion's Muon",
    }
    lines = [["whole training", "thousand tokens per second"]]
    found = {each["name"]: each["iteration_ms"]["median"] for each in receipt["contestants"]}
    lines += [[label, f"{tokens / found[name]:.0f}"] for name, label in named.items()]
    return table(lines)


def table(lines: list[list[str]]) -> str:
    """Markdown of rows, the first of which is the head."""
    rule = ["---"] * len(lines[0])
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


TABLES = {"support": support, "speed": speed, "training": training}


def rendered(text: str) -> str:
    """A text with the tables of today between their marks."""
    for name, make in TABLES.items():
        marks = rf"(<!-- {name}: benchmarks/readme.py -->\n).*?(<!-- /{name} -->)"
        text, times = re.subn(marks, rf"\g<1>{make()}\n\g<2>", text, flags=re.DOTALL)
        if times != 1:
            raise ValueError(
                f"README.md has the marks of the table {name!r} {times} times, not once"
            )
    return text


if __name__ == "__main__":
    README.write_text(rendered(README.read_text()))
