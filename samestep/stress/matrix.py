"""The table of layouts that equal one process: `python -m samestep.stress.matrix`.

Every row runs on forked ranks. Rows are kept in a receipt; those that run again replace what was
there, so the table can be made bit by bit.
"""

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

import torch

import samestep
from samestep.launch import RanksFailed, run_forked
from samestep.mesh import Degrees
from samestep.mesh.gates import GATES, CompileFacts, Decision, decide
from samestep.models.gpt import GPTConfig
from samestep.stress.prove import COMPARED, THRESHOLDS, Case, Outcome, reference, run_rank
from samestep.tooling.flags import parse_flags
from samestep.tooling.output import write_files

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "context": 16, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2,
}  # fmt: skip
DENSE = GPTConfig(**SHAPE)
EXPERTS = GPTConfig(**SHAPE, experts=8, expert_size=16)
ROOMY = replace(EXPERTS, capacity=4.0)  # every expert has room for all tokens
LANE: dict[str, Any] = {
    "context": 128, "width": 128, "layers": 16, "heads": 4, "kv_heads": 2, "experts": 8,
    "expert_size": 64,
}  # fmt: skip
SP = {"tp": 2, "sequence_parallel": True}
COMPARED_STEPS = 20
# Rows that go on, until copies of each kind have had time to drift apart: of tensor parallel, with
# and without a part of the sequence each, of data parallel, of both and experts.
LONG = {"TP", "TP, SP", "HSDP", "TP, SP x EP"}


@dataclass(frozen=True)
class Options:
    """Compare layouts of the example GPT with one process, and write the table."""

    only: Annotated[str, "rows to run, as in a shell"] = "*"
    missing: Annotated[bool, "only those that the receipt does not have"] = False
    steps: Annotated[int, "after which copies are compared; the first 20 with one process"] = 100
    lane_steps: Annotated[int, "the same for the lanes of 16 layers"] = 20
    table: Annotated[Path, "the table to write"] = Path("docs/hybrid_table.md")
    receipt: Annotated[Path, "the receipt to write"] = Path("receipts/hybrid.json")
    timeout: Annotated[float, "seconds that a row may take"] = 1800.0


def cases(options: Options) -> Iterator[Case]:
    """The rows."""
    axes: dict[str, tuple[int, GPTConfig, dict[str, Any]]] = {
        "TP": (2, DENSE, {"tp": 2}),
        "TP, SP": (2, DENSE, SP),
        "EP": (2, EXPERTS, {"ep": 2}),
        "EP, the same tokens": (2, EXPERTS, {"ep": 2, "ep_carries_data": False}),
        "PP": (2, DENSE, {"pp": 2}),
        "FSDP2": (2, DENSE, {}),
        "HSDP": (4, DENSE, {"replicate": 2}),
        "TP x EP": (4, EXPERTS, {"tp": 2, "ep": 2}),
        "TP x EP, whole experts": (4, EXPERTS, {**SP, "ep": 2, "expert_tensor_parallel": 1}),
        "TP, SP x EP": (4, EXPERTS, {**SP, "ep": 2}),
        "TP x PP": (4, DENSE, {"tp": 2, "pp": 2}),
        "TP, SP x PP": (4, DENSE, {**SP, "pp": 2}),
        "TP x FSDP2": (4, DENSE, {"tp": 2}),
        "TP, SP x FSDP2": (4, DENSE, SP),
        "EP x PP": (4, EXPERTS, {"ep": 2, "pp": 2}),
        "EP x FSDP2": (4, EXPERTS, {"ep": 2}),
        "PP x FSDP2": (4, DENSE, {"pp": 2}),
        "HSDP x TP": (8, DENSE, {"replicate": 2, "tp": 2}),
        "HSDP x EP": (4, EXPERTS, {"replicate": 2, "ep": 2}),
        "HSDP x PP": (8, DENSE, {"replicate": 2, "pp": 2}),
        "TP, SP x EP x PP": (8, EXPERTS, {**SP, "ep": 2, "pp": 2}),
        "TP, SP x EP x FSDP2": (8, EXPERTS, {**SP, "ep": 2}),
    }
    more = max(0, options.steps - COMPARED_STEPS)
    for name, (ranks, model, mesh) in axes.items():
        yield Case(name, ranks, model, mesh, more=more if name in LONG else 0)
    factors = {
        "LoRA, TP, SP x FSDP2": (4, DENSE, SP),
        "LoRA, TP x EP": (4, EXPERTS, {"tp": 2, "ep": 2}),
    }
    factors["LoRA, PP x FSDP2"] = (4, DENSE, {"pp": 2})
    for name, (ranks, model, mesh) in factors.items():
        yield Case(name, ranks, model, mesh, lora=True)
    yield Case("TP, SP x FSDP2, compiled", 4, DENSE, SP, compile=True)
    yield Case("TP, SP x EP, compiled", 4, ROOMY, {**SP, "ep": 2}, compile=True)
    more = max(0, options.lane_steps - COMPARED_STEPS)
    same = {**SP, "ep": 2, "ep_carries_data": False}
    own = {**SP, "ep": 2}
    roomy = GPTConfig(**LANE, capacity=4.0)
    yield Case("lane, 4 ranks", 4, GPTConfig(**LANE), same, sequences=2, more=more)
    yield Case("lane, 4 ranks, own tokens", 4, roomy, own, sequences=2, more=more)
    yield Case("lane, 4 ranks, own tokens, compiled", 4, roomy, own, sequences=2, compile=True)
    yield Case("lane, 8 ranks", 8, GPTConfig(**LANE), same, sequences=2, more=more)
    yield Case("lane, 8 ranks, own tokens", 8, roomy, own, sequences=4, more=more)


def run(options: Options) -> int:
    """Run the rows that were asked for; the exit status tells whether all are within bounds."""
    torch.set_num_threads(1)  # forked ranks inherit it
    known = json.loads(options.receipt.read_text())["rows"] if options.receipt.exists() else {}
    order = [case.name for case in cases(options)]
    bad = 0
    for case in cases(options):
        if not fnmatchcase(case.name, options.only) or (options.missing and case.name in known):
            continue
        row = _run(case, options.timeout)
        bad += row["verdict"] != "pass"
        _say(f"{case.name}: {row['verdict']}")
        known[case.name] = row
        rows = {name: known[name] for name in order if name in known}
        write_files(options.receipt.parent, {options.receipt.name: _receipt(rows)})
        write_files(options.table.parent, {options.table.name: table(rows).encode()})
    return 1 if bad else 0


def _run(case: Case, timeout: float) -> dict[str, Any]:
    asked = {
        "ranks": case.ranks,
        "mesh": dict(case.mesh),
        "model": asdict(case.model),
        "sequences": case.sequences,
        "lora": case.lora,
        "compile": _decision(case).receipt(),
    }
    try:
        outcomes = run_forked(case.ranks, run_rank, case, reference(case), timeout=timeout)
    except RanksFailed as error:
        return {**asked, "verdict": "fail", "why": [str(error)[-2000:]]}
    found = reduce(Outcome.merged, outcomes)
    why = found.failures()
    if found.recompiled:
        why.append(f"{found.recompiled} graphs were compiled after the first step")
    if case.compile and not found.graphs:
        why.append("nothing was compiled")
    if found.clipped < case.steps:
        why.append(f"gradients were clipped in {found.clipped} of {case.steps} steps")
    return {**asked, "verdict": "fail" if why else "pass", "why": why, **asdict(found)}


def _decision(case: Case) -> Decision:
    """What the gates say: rows that are compiled open all of them."""
    degrees = Degrees(case.ranks, **case.mesh)
    facts = CompileFacts(bool(case.model.experts), bool(case.model.capacity))
    gates = [gate.name for gate in GATES]
    return decide(bool(case.compile), degrees, facts, open_gates=gates, environment={})


def _receipt(rows: Mapping[str, Any]) -> bytes:
    content = {
        "kind": "samestep hybrid",
        "command": "python -m samestep.stress.matrix",
        "thresholds": THRESHOLDS,
        "gradients_compared_in_steps": [step + 1 for step in COMPARED],
        "versions": {
            "samestep": samestep.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "rows": dict(rows),
        "verdict": "pass" if all(row["verdict"] == "pass" for row in rows.values()) else "fail",
    }
    return (json.dumps(content, indent=1) + "\n").encode()


HEAD = """# Layouts that equal one process

Made by `python -m samestep.stress.matrix`, which also writes `receipts/hybrid.json`.

The example GPT on gloo ranks in fp32, beside the same model in one process with the same tokens,
for 20 steps with `MuonAdamW`, whose clipping is active in every one of them. Ranks divide a batch
by place. Gradients are compared whole, before the optimizer, in steps {compared}. All figures are
the largest differences over all parameters and ranks. Bounds are {gradient:g} for gradients,
{loss:g} for losses, and for parameters after 20 steps {adamw:g} (AdamW's) and {muon:g} (Muon's).
"Copies" are pieces of parameters that several ranks hold: the same bits on all of them after so
many steps. Capacity errors are tokens that found no room at an expert. Graphs are those of
torch.compile, in the first step and later; gates that are closed by default were opened for it.

| layout | ranks | mesh | gradients | loss | AdamW | Muon | capacity errors | copies | graphs |
|---|---|---|---|---|---|---|---|---|---|
"""
LANES = """
The lanes have 16 layers of width 128 with heads of 32, 2 key and value heads, sequences of 128 and
8 experts of size 64, of which a token uses 2; tp 2 with sequence parallel, ep 2, FSDP2; 256 tokens
per step (512 on 8 ranks with tokens of their own). Ranks along the expert axis see the same tokens,
or tokens of their own; then experts have a fixed capacity. With the same tokens on 4 ranks nothing
is left for FSDP2 to shard over.
"""


def table(rows: Mapping[str, Any]) -> str:
    """The receipt as a page."""
    text = HEAD.format(compared=", ".join(str(step + 1) for step in COMPARED), **THRESHOLDS)
    for name, row in rows.items():
        if "gradient" not in row:
            text += f"| {name} | {row['ranks']} | failed: see the receipt |||||||\n"
            continue
        figures = " | ".join(f"{row[key]:.1e}" for key in ("gradient", "loss", "adamw", "muon"))
        copies = f"{row['copies']}, {row['steps']} steps" if row["copies"] else "none"
        graphs = f"{row['graphs']}, then {row['recompiled']}" if row["graphs"] else "eager"
        failed = f" **{'; '.join(row['why'])}**" if row["why"] else ""
        text += (
            f"| {name}{failed} | {row['ranks']} | {row['trace']['mesh']} | {figures} | "
            f"{row['overflow']} | {copies} | {graphs} |\n"
        )
    return text + LANES


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run(parse_flags(Options, sys.argv[1:], "python -m samestep.stress.matrix")))
