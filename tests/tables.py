"""Tables of pages that are made of receipts and results: `python -m tests.pages` writes them.

A page has a table between `<!-- made: NAME -->` and `<!-- end -->`; a test compares what stands
there with what is made of the files. `TABLES` has them by name.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from itertools import compress
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from samestep.tooling.pages import stored_pages

ROOT = Path(__file__).parent.parent
MARKED = re.compile(r"(<!-- made: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Layouts that are one line of the matrix of support, by the beginning of their names.
FAMILIES = {
    "one process": ("one_process",),
    '`sharding="none"`': ("none",),
    "ZeRO-1, ZeRO-2": ("zero",),
    '`buffers="flat"`': ("flat",),
    "state on the host": ("one_process_offload", "none_offload", "zero2_offload", "flat_offload",
                          "fsdp2_offload"),
    "sums in two levels": ("hosts_",),
    "FSDP2": ("fsdp2_gather", "fsdp2_parallel"),
    "HSDP": ("hsdp",),
    "TP x FSDP2, EP x FSDP2": ("tp_fsdp2", "ep_fsdp2"),
    "TP, EP with copies that the optimizer averages": ("tp_dp", "tp4_dp", "ep_dp", "ep_tp_dp"),
    "hybrid stack: TP, SP, EP, FSDP2": ("hybrid_tp", "hybrid_ep", "hybrid_hsdp"),
    "hybrid stack with pipelines": ("hybrid_pp",),
    "one XLA program": ("xla_",),
}  # fmt: skip
NEVER = "**never**"


class Run(NamedTuple):
    """Cases of one layout in a receipt of the harness."""

    receipt: Path
    where: str
    ranks: int
    steps: tuple[int, int]  # and how many cases had that many at most
    furthest: float


@cache
def receipt(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@cache
def result(name: str) -> Any:
    return receipt(ROOT / "benchmarks" / "results" / f"{name}.json")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# --- where every layout has run ------------------------------------------------------------------


def where_of(ran: dict[str, Any]) -> str:
    """The column of the matrix of support that a receipt belongs to."""
    if ran["actual_backend"] == "nccl":
        return "NCCL, one shared GPU" if ran.get("shared_gpus") else "NCCL, a GPU per rank"
    if ran["device"] == "cuda":
        return "gloo, one shared GPU"
    return "XLA on CPU" if ran["device"] == "xla" else "gloo, CPU"


def runs() -> dict[str, list[Run]]:
    """All runs of the harness that have receipts, by layout; a case that failed is an error."""
    found: dict[str, list[Run]] = defaultdict(list)
    for path in sorted((ROOT / "receipts").glob("*/receipt.json")):
        content = receipt(path)
        if content.get("kind") != "samestep stress" or "cases" not in content:
            continue
        by_layout: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for case in content["cases"]:
            if case["status"] == "does_not_apply":
                continue
            if case["status"] not in ("exact", "within_tolerance"):
                raise AssertionError(f"{path}: {case['scenario']} in {case['layout']} failed")
            by_layout[case["layout"]].append(case)
        ran = content["ran"]
        for layout, cases in by_layout.items():
            steps = max(case["steps"] for case in cases)
            world = 1 if layout.startswith("one_process") else ran["world_size"]
            apart = max(map(_apart, cases))
            found[layout].append(Run(path, where_of(ran), world, (steps, len(cases)), apart))
    return found


def _apart(case: dict[str, Any]) -> float:
    """The largest difference of a parameter between ranks that share it, or to another layout."""
    found = [0.0]
    for sample in case["samples"]:
        of_layouts = sample["layouts"] or {}
        found += [far or 0.0 for kind, far in of_layouts.items() if kind != "state"]
        found.append(sample["max_abs_param_diff"] or 0.0)
    return max(found)


def family_of(layout: str) -> str:
    begins = {name: family for family, names in FAMILIES.items() for name in names}
    fitting = [name for name in begins if layout.startswith(name)]
    return begins[max(fitting, key=len)]


# Where a layout can run, and what stands there without a receipt.
COLUMNS = {
    "gloo, CPU": "-",
    "gloo, one shared GPU": "-",
    "NCCL, one shared GPU": "-",
    "NCCL, a GPU per rank": NEVER,
}


def _ranks(runs: Iterable[Run], up: str, none: str = "-") -> str:
    """Numbers of ranks, each with the receipt of most steps, and most cases."""
    best: dict[int, Run] = {}
    for run in runs:
        if run.ranks not in best or run.steps > best[run.ranks].steps:
            best[run.ranks] = run
    links = [
        f"[{ranks}]({up}{run.receipt.relative_to(ROOT).as_posix()})"
        for ranks, run in sorted(best.items())
    ]
    return ", ".join(links) or none


def support(up: str) -> str:
    """Layout by backend by ranks, where it has run with receipts."""
    by_family: dict[str, list[Run]] = {family: [] for family in FAMILIES}
    for layout, of_layout in runs().items():
        by_family[family_of(layout)] += of_layout
    rows = []
    for family, found in by_family.items():
        cells = [
            _ranks((run for run in found if run.where == where), up, none)
            for where, none in COLUMNS.items()
        ]
        if family == "one XLA program":
            cells = [f"XLA: {_ranks(found, up)}", "-", "-", "TPU: " + NEVER]
        furthest = max((run.furthest for run in found), default=None)
        if furthest is not None:
            rows.append(
                [family, *cells, f"{furthest:.0e}".replace("e-0", "e-") if furthest else "0"]
            )
    return table(["layout", *COLUMNS, "layouts differ by"], rows)


# --- speed ---------------------------------------------------------------------------------------

# The receipt of `samestep bench step` with all peers, its sets, and that of a whole training.
ALL_PEERS, TRAINING = "step_all_peers", "client_llama"
SETS = ("gpt-1280", "gpt-2048")
# Contestants of one optimizer, in the order of the table, by the beginning of their names.
OPTIMIZERS = ("ours", "dion", "speedrun", "nanochat", "torch")
OTHER_MATH = ("float16", "variance", "remainder", "adamw", "plain", "eager")
LABELS = {
    "ours": "samestep, clipping gradients",
    "ours-graph": "samestep, clipping gradients, CUDA graph",
    "dion-triton": "dion, Triton",
    "dion-graph": "dion, Triton, CUDA graph",
    "dion-gns": "dion, gram-newton-schulz kernels",
    "dion-gns-graph": "dion, gram-newton-schulz kernels, CUDA graph",
    "speedrun": "modded-nanogpt",
    "nanochat": "nanochat, compiled",
    "torch": "torch.optim.Muon, fused AdamW",
}


def peers(up: str) -> str:
    """Milliseconds of a step of the best configuration of each optimizer, in one run."""
    sets = [each for each in result(ALL_PEERS)["sets"] if each["set"] in SETS]
    head = ["optimizer, its fastest configuration there"]
    head += [
        f"{(s['matrix_parameters'] + s['other_parameters']) / 1e9:.2f} B parameters, ms"
        for s in sets
    ]
    rows = []
    for optimizer in OPTIMIZERS:
        found = [
            {
                each["name"]: each["ms"]["median"]
                for each in of_set["contestants"]
                if each["name"].partition("-")[0] == optimizer
                and not each["failed"]
                and not any(other in each["name"] for other in OTHER_MATH)
            }
            for of_set in sets
        ]
        if all(found):
            fastest = min(found[-1], key=found[-1].__getitem__)
            label = LABELS.get(fastest, fastest)
            rows.append([label, *(f"{min(of_set.values()):.1f}" for of_set in found)])
    return table(head, rows)


def beside_adamw(up: str) -> str:
    """Tokens per second of a whole training."""
    of_training = result(TRAINING)
    tokens = of_training["training"]["batch"] * of_training["training"]["sequence"]
    took = {each["name"]: each["iteration_ms"]["median"] for each in of_training["contestants"]}
    named = {
        "torch-adamw": "torch's fused AdamW",
        "ours": "samestep.MuonAdamW",
        "dion": "dion's Muon",
    }
    rows = [[label, f"{tokens / took[name]:.0f}"] for name, label in named.items()]
    return table(["whole training", "thousand tokens per second"], rows)


CLIENTS = {
    "client_nanochat_12": "nanochat's GPT, 12 layers",
    "client_nanochat_20": "nanochat's GPT, 20 layers",
    "client_llama": "Llama of transformers, 12 layers",
}
TRAINED = {
    "ours": "**samestep**",
    "ours-adamw": "samestep, AdamW",
    "torch-adamw": "torch AdamW, fused",
    "dion": "dion Muon",
    "nanochat": "nanochat's own",
}


def trainings(up: str) -> str:
    """Whole trainings with optimizers of others and with ours; losses of seeds that all ended."""
    rows = []
    for name, label in CLIENTS.items():
        content = result(name)
        tokens = content["training"]["batch"] * content["training"]["sequence"]
        losses = zip(*(each["final_losses"] for each in content["contestants"]), strict=True)
        ended = [None not in of_seed for of_seed in losses]
        for each in content["contestants"]:
            if each["name"] not in TRAINED:
                continue
            iteration = each["iteration_ms"]["median"]
            row = [
                f"[{label}]({up}benchmarks/results/{name}.json)",
                TRAINED[each["name"]],
                f"{each['optimizer_ms']['median']:.1f}",
                f"{iteration:.1f}",
                f"{tokens / iteration:.0f}",
                f"{mean(compress(each['final_losses'], ended)):.3f}",
            ]
            rows.append(row)
    head = ["training", "optimizer", "step, ms", "iteration, ms", "thousand tokens/s", "loss"]
    return table(head, rows)


def rivals(_: str) -> str:
    """Steps and time that rules need to AdamW's loss."""
    from benchmarks.rivals import table as made  # with what draws pictures

    return made(result("rivals_cpu")).strip() + "\n"


def fewer_steps(_: str) -> str:
    """Losses of trainings with fewer steps of the orthogonalization."""
    from benchmarks.fewer_steps_training import table as made  # with what draws pictures

    return "\n".join(made(result("fewer_steps_training"))) + "\n"


ITERATIONS = (
    "forward and backward", "ZeRO as it comes", "ZeRO fused, views",
    "samestep flat zero1, fused, overlap", "samestep flat zero1, fused", "samestep fast",
    "samestep ordered",
)  # fmt: skip


def two_ranks(up: str) -> str:
    """Iterations of AdamW on two CPU ranks."""
    rows = []
    (contest,) = result("two_ranks_512")["contests"]
    for name in ITERATIONS:
        each = contest["contestants"][name]
        sent = each.get("bytes_per_step_and_rank")
        ms = each["median_ms"]
        rows.append(
            [
                name,
                f"{ms['iteration']:.0f}",
                f"{ms['cpu']:.0f}",
                f"{sent / 1e6:.0f} MB" if sent else "-",
            ]
        )
    return table(["AdamW", "iteration, ms", "processor time, ms", "sent per rank"], rows)


def orthogonalization(_: str) -> str:
    """The orthogonalization alone, beside the fastest of all peers."""
    rows = []
    for each in result("orthogonalize")["shapes"]:
        found = {c["name"]: c["ms"]["median"] for c in each["contestants"]}
        peers = {name: ms for name, ms in found.items() if not name.startswith("ours")}
        best = min(peers, key=lambda name: peers[name])
        shape = " x ".join(map(str, each["shape"]))
        lead = f"{peers[best] / found['ours']:.2f}"
        rows.append([shape, f"{found['ours']:.2f}", f"{best} {peers[best]:.2f}", lead])
    return table(["blocks", "ours, ms", "best other, ms", "best other / ours"], rows)


def fused_qkv(_: str) -> str:
    """Losses where fused queries, keys and values are one block, three, or one for each head."""
    rows = [
        [row["arm"], str(row["lr"]), f"{mean(losses):.3f}", ", ".join(f"{x:.3f}" for x in losses)]
        for row in result("fused_qkv")["rows"]
        for losses in [[run["loss"] for run in row["runs"]]]
    ]
    return table(["orthogonalized as", "learning rate", "loss, mean", "of each seed"], rows)


def distances(_: str) -> str:
    """Medians over shapes of the distance from the polynomial in float64, by spectrum."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    content = result("accuracy_gpu_residue")["distances to the polynomial in float64, relative"]
    for row in content:
        for name, each in row["distances"].items():
            if "before" not in name:
                found[row["spectrum"]][name].append(each["median"])
    names = list(next(iter(found.values())))
    rows = [
        [spectrum, *(f"{median(of[name]):.2g}" for name in names)] for spectrum, of in found.items()
    ]
    return table(["singular values", *names], rows)


# --- optimizers of others ------------------------------------------------------------------------


def foreign(_: str) -> str:
    """What optimizers of others did in the harness."""
    rows = []
    for label, row in receipt(ROOT / "receipts" / "foreign.json")["rows"].items():
        by_status: dict[str, set[str]] = defaultdict(set)
        for case in row["cases"]:
            by_status[case["status"]].add(case["scenario"].replace("_", " "))
        bad = {status: names for status, names in by_status.items()
               if status not in ("held", "does_not_apply")}  # fmt: skip
        failed = set().union(*bad.values())
        said = "; ".join(f"{status} in {', '.join(sorted(names))}" for status, names in bad.items())
        rows.append([label, str(len(by_status["held"] - failed)), said])
    return table(["optimizer", "scenarios held", "did not hold"], rows)


# --- plans ---------------------------------------------------------------------------------------


def planned(up: str) -> str:
    """How far steps that were planned are from steps that were taken."""
    rows = []
    for name in ("wall", "cpu", "cpu_16", "2_hosts"):
        content = result(f"plan_time_{name}")
        found = content["rows"]
        ranks = ", ".join(map(str, sorted({row["ranks"] for row in found})))
        errors = [abs(row["error"]) for row in found]
        rows.append(
            [
                ranks + (" on 2 modelled hosts" if "hosts" in content else ""),
                "wall" if content["clock"] == "wall" else "computing time",
                f"{sum(error <= content['bar'] for error in errors)} of {len(found)}",
                f"{max(errors):.0%}",
                f"[receipt]({up}benchmarks/results/plan_time_{name}.json)",
            ]
        )
    return table(["gloo ranks", "clock", "steps within 25%", "furthest", ""], rows)


# --- commands ------------------------------------------------------------------------------------


def commands(_: str) -> str:
    """Commands, the question each answers, and their options."""
    rows = []
    for name, page in stored_pages().items():
        flags = [flag for flag in page.flags if not flag.startswith(("--no-", "--help"))]
        rows.append([f"`{name}`", page.line, " ".join(f"`{flag}`" for flag in flags)])
    return table(["command", "what it answers or does", "options"], rows)


TABLES: dict[str, Callable[[str], str]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        support,
        peers,
        beside_adamw,
        trainings,
        rivals,
        fewer_steps,
        two_ranks,
        orthogonalization,
        fused_qkv,
        distances,
        foreign,
        planned,
        commands,
    )
}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def with_tables(page: Path, text: str) -> str:
    """The text of a page, each of its marked tables made anew."""
    up = "../" * len(page.parent.relative_to(ROOT).parts)
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]](up)}{found[3]}", text)


def write() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (made := with_tables(page, text)) != text:
            page.write_text(made, encoding="utf-8")
