"""Writes the table of layouts that equal one process: `python -m samestep.lab.stress.matrix`.

A row is a layout of the example GPT on forked ranks against the same model in one process. Both see
the same tokens, in the order of their places. Gradients are compared before the optimizer, whole,
parameter by parameter; then losses, and parameters after the last step. Rows are kept in a receipt;
those that run again replace what was there, so the table can be made bit by bit.
"""

import copy
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch._dynamo  # compiled graphs are counted nowhere else
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import samestep
from samestep.comm.collectives import total
from samestep.comm.groups import registry
from samestep.lab.common.provenance import versions
from samestep.lab.stress.layouts import EVERY_LAYOUT
from samestep.lab.stress.scenarios.hybrid import HybridGPT, gpt_without_ones, noisy_tokens
from samestep.launch import RanksFailed
from samestep.launch.forked import run_forked
from samestep.mesh import Degrees, Mesh, build
from samestep.mesh.gates import GATES, CompileFacts, decide
from samestep.models.gpt import GPT, GPTConfig, balance_experts, gpt_plan, mean_loss
from samestep.parallel.experts import capacity_errors
from samestep.parallel.lora import add_lora, lora_layers
from samestep.parallel.replicas import check_replicas
from samestep.parallel.router_losses import collect, set_share
from samestep.parallel.stack import Stack
from samestep.shards.dtensor.gradients import combine_gradients
from samestep.tooling.output import write_files
from samestep.tooling.request import parse_flags

COMPARED = (0, 1, 9, 19)  # steps whose gradients are compared
THRESHOLDS = {"gradient": 1e-5, "loss": 1e-4, "router": 1e-5, "adamw": 2e-5, "muon": 3e-4}
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Case:
    """A layout that is compared with one process.

    sequences: Sequences per step, of all ranks together.
    steps: Steps that are compared with one process.
    more: Further steps, after which copies are compared.
    shares: Keywords by which the optimizer averages copies, without FSDP2.
    """

    name: str
    ranks: int
    model: GPTConfig
    mesh: Mapping[str, Any]
    sequences: int = 8
    steps: int = 20
    more: int = 0
    lora: bool = False
    compile: bool | str = False
    recompute: bool = False
    seed: int = 0
    shares: Mapping[str, Any] | None = None

    @property
    def max_grad_norm(self) -> float:
        """Return a limit below all norms, so that gradients are clipped in every step."""
        return 0.001 if self.lora else 0.1


class Reference(NamedTuple):
    """The run of one process: losses, gradients of some steps, and final parameters."""

    start: GPT
    losses: list[float]
    router: list[Tensor]  # balance and z, (2,), of all layers together
    norms: list[float]
    gradients: dict[int, dict[str, Tensor]]
    parameters: dict[str, Tensor]


@dataclass
class Outcome:
    """The largest distances of a layout from one process, over all ranks."""

    gradient: float = 0.0
    gradient_of: str = ""
    largest_gradient: float = 0.0  # of the reference: what the difference is to be seen beside
    loss: float = 0.0
    router: float = 0.0
    norm: float = 0.0
    adamw: float = 0.0
    muon: float = 0.0
    clipped: int = 0
    overflow: int = 0
    copies: int = 0  # pieces that several ranks hold, the same bits on all of them at the end
    graphs: int = 0  # that were compiled in the first step
    recompiled: int = 0  # and later
    steps: int = 0
    seconds: float = 0.0  # per step
    trace: dict[str, Any] = field(default_factory=dict)

    def see(self, what: str, distance: float) -> None:
        """Merge counts by their largest values; NaN counts as infinity."""
        known = math.inf if math.isnan(distance) else distance
        setattr(self, what, max(getattr(self, what), known))

    def see_gradient(self, name: str, found: Tensor | None, expected: Tensor) -> None:
        before = self.gradient
        self.see("gradient", math.inf if found is None else _distance(found, expected))
        self.see("largest_gradient", float(expected.abs().max()))
        if self.gradient > before:
            self.gradient_of = name

    def merged(self, other: "Outcome") -> "Outcome":
        worse = self if self.gradient >= other.gradient else other
        numbers = {key for key, value in vars(self).items() if isinstance(value, int | float)}
        largest = {key: max(getattr(self, key), getattr(other, key)) for key in numbers}
        largest["clipped"] = min(self.clipped, other.clipped)
        return replace(self, **largest, gradient_of=worse.gradient_of)

    def failures(self) -> list[str]:
        found = [
            f"{key} {getattr(self, key):.1e} > {most:.0e}"
            for key, most in THRESHOLDS.items()
            if not getattr(self, key) <= most
        ]
        return found + [f"{self.overflow} tokens found no room"] * bool(self.overflow)


def tokens_of(case: Case, step: int) -> Tensor:
    """Return the sequences of a step, (sequences, context + 1)."""
    return noisy_tokens(case.model, case.sequences, 1000 * case.seed + step)


def new_model(case: Case) -> GPT:
    torch.manual_seed(case.seed)
    return gpt_without_ones(case.model)


def optimizer_keywords(case: Case) -> dict[str, Any]:
    rules: dict[Any, dict[str, Any]] = {}
    if case.lora:
        rules = {"*.q.lora_*": {"rule": "muon"}}  # and AdamW for the others
    elif case.model.experts:
        rules = {**HybridGPT.rules}
    return {"lr": LEARNING_RATE, "max_grad_norm": case.max_grad_norm, "overrides": rules}


def adapt(model: nn.Module, mesh: Mesh | None = None) -> None:
    """Add LoRA factors to all attention matrices, nonzero so that both have gradients."""
    add_lora(model, ["*.attention.[qkv]", "*.attention.out"], rank=4, mesh=mesh)
    for _, layer in lora_layers(model):
        with torch.no_grad():
            layer.lora_B.fill_(0.01)


def reference(case: Case) -> Reference:
    """Train in this process alone, and return what the layouts are compared with."""
    start = new_model(case)
    model = copy.deepcopy(start)
    if case.lora:
        adapt(model)
    optimizer = samestep.MuonAdamW(model, **optimizer_keywords(case))
    found = Reference(start, [], [], [], {}, {})
    for step in range(case.steps):
        parts = _parts(case, tokens_of(case, step))
        set_share(model, 1 / len(parts))
        losses = [mean_loss(model(part[:, :-1]), part[:, 1:]) / len(parts) for part in parts]
        torch.autograd.backward(losses)
        if step in COMPARED:
            found.gradients[step] = {
                name: param.grad.clone()
                for name, param in model.named_parameters()
                if param.grad is not None
            }
        optimizer.step()
        optimizer.zero_grad()
        balance_experts(model, case.model.layers)
        found.losses.append(sum(loss.item() for loss in losses))
        found.router.append(_collected(model))
        found.norms.append(float(optimizer.metrics()["grad_norm"]))
    found.parameters.update({n: p.detach().clone() for n, p in model.named_parameters()})
    return found


def _parts(case: Case, tokens: Tensor) -> list[Tensor]:
    """Split sequences into parts that share a router's balance loss: a pipeline's micro-batches."""
    degrees = Degrees(case.ranks, **case.mesh)
    if degrees.pp == 1 or not case.model.balance_loss:
        return [tokens]
    of_ranks = tokens.view(degrees.batch_ranks, degrees.pp, -1, tokens.shape[1])
    return [part.flatten(0, 1) for part in of_ranks.unbind(dim=1)]


def _collected(model: nn.Module) -> Tensor:
    found = collect(model)
    return torch.zeros(2, dtype=torch.float64) if found is None else found


def run_rank(rank: int, case: Case, expected: Reference) -> Outcome:
    torch.set_num_threads(1)
    model = copy.deepcopy(expected.start)
    mesh = build(**case.mesh)
    stack = Stack(
        model,
        gpt_plan(case.model),
        mesh,
        loss=mean_loss,
        adapt=(lambda part: adapt(part, mesh)) if case.lora else None,
        compile=case.compile,
        fsdp=case.shares is None,
        recompute=case.recompute,
    )
    optimizer = stack.optimizer(**optimizer_keywords(case), **(case.shares or {}))
    outcome = Outcome(trace=stack.trace(tell=lambda _: None), steps=case.steps + case.more)
    rows, ranks = case.sequences // mesh.degrees.batch_ranks, registry.of()
    start = time.perf_counter()
    for step in range(case.steps + case.more):
        tokens = tokens_of(case, step)[rows * stack.batch_place :][:rows]
        loss = stack.backward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        for name, grad in _gradients(stack, optimizer) if step in expected.gradients else ():
            outcome.see_gradient(name, grad, expected.gradients[step][name])
        optimizer.step()
        optimizer.zero_grad()
        optimizer.wait_for_parameters()
        balance_experts(model, case.model.layers, stack.token_copies)
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if step == 0:
            outcome.graphs = compiled
        outcome.recompiled = compiled - outcome.graphs
        if step < case.steps:
            mean = total("loss", loss.detach().double().reshape(1), ranks).wait() / ranks.size
            outcome.see("loss", abs(float(mean) - expected.losses[step]))
            router = total("router losses", _collected(model), ranks).wait() / stack.token_copies
            outcome.see("router", float((router - expected.router[step]).abs().max()))
            norm = float(optimizer.metrics()["grad_norm"])
            outcome.see("norm", abs(norm - expected.norms[step]))
            outcome.clipped += norm > case.max_grad_norm
        if step == case.steps - 1:
            groups = optimizer.param_groups
            rules = {name: group["rule"] for group in groups for name in group["param_names"]}
            for name, param in model.named_parameters():
                away = _distance(param.detach(), expected.parameters[name])
                outcome.see(rules.get(name, "adamw"), away)  # a frozen one does not move at all
    outcome.seconds = (time.perf_counter() - start) / outcome.steps
    outcome.overflow = capacity_errors(model)
    outcome.copies = check_replicas(model)
    return outcome


def _gradients(stack: Stack, optimizer: samestep.MuonAdamW) -> Iterator[tuple[str, Tensor | None]]:
    """Yield whole gradients by name, after FSDP2, tensor parallel and the averaging of copies."""
    if stack.fsdp:
        combine_gradients(stack.model.parameters())
    for name, param in stack.model.named_parameters():
        if param.requires_grad:
            yield name, param.grad if stack.fsdp else optimizer.full_gradient(name)


def _distance(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two whole tensors; collective for a DTensor."""
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    return float((whole - expected).abs().max())


# --- the rows ----------------------------------------------------------------------------------


SHAPE: dict[str, Any] = {
    "vocab_size": 64, "context": 16, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2,
}  # fmt: skip
DENSE = GPTConfig(**SHAPE)
EXPERTS = GPTConfig(**SHAPE, experts=8, expert_size=16)
ROOMY = replace(EXPERTS, capacity=4.0)  # every expert has room for all tokens
GROUPED = replace(EXPERTS, expert_products="grouped")
KINDS = replace(
    GROUPED, active_experts=3, shared_experts=1, null_experts=2, balance_loss=0.05, z_loss=0.01
)
LANE = GPTConfig(context=128, width=128, layers=16, heads=4, kv_heads=2, experts=8, expert_size=64)
ROOMY_LANE = replace(LANE, capacity=4.0)
# Meshes that are layouts of the harness are those.
TP, SP, EP, EP_SAME, OWN_TOKENS, EP_PP, SP_PP, ALL_AXES = (
    EVERY_LAYOUT[f"hybrid_{name}"].mesh
    for name in (
        "tp", "tp_sp", "ep", "ep_same_tokens", "tp_sp_ep", "pp_ep", "pp_tp_sp", "pp_tp_sp_ep",
    )
)  # fmt: skip
WHOLE_EXPERTS = {**OWN_TOKENS, "expert_tensor_parallel": 1}
SAME_TOKENS = {**OWN_TOKENS, "ep_carries_data": False}
ZERO2 = {"sharding": "zero2"}
FLAT = {"sharding": "zero1", "buffers": "flat"}
ROWS = (
    Case("TP", 2, DENSE, TP),
    Case("TP, SP", 2, DENSE, SP),
    Case("EP", 2, EXPERTS, EP),
    Case("EP, the same tokens", 2, EXPERTS, EP_SAME),
    Case("PP", 2, DENSE, {"pp": 2}),
    Case("FSDP2", 2, DENSE, {}),
    Case("HSDP", 4, DENSE, {"replicate": 2}),
    Case("TP x EP", 4, EXPERTS, {"tp": 2, "ep": 2}),
    Case("TP x EP, whole experts", 4, EXPERTS, WHOLE_EXPERTS),
    Case("TP, SP x EP", 4, EXPERTS, OWN_TOKENS),
    Case("TP x PP", 4, DENSE, {"tp": 2, "pp": 2}),
    Case("TP, SP x PP", 4, DENSE, SP_PP),
    Case("TP x FSDP2", 4, DENSE, TP),
    Case("TP, SP x FSDP2", 4, DENSE, SP),
    Case("EP x PP", 4, EXPERTS, EP_PP),
    Case("EP x FSDP2", 4, EXPERTS, EP),
    Case("PP x FSDP2", 4, DENSE, {"pp": 2}),
    Case("HSDP x TP", 8, DENSE, {"replicate": 2, "tp": 2}),
    Case("HSDP x EP", 4, EXPERTS, {"replicate": 2, "ep": 2}),
    Case("HSDP x PP", 8, DENSE, {"replicate": 2, "pp": 2}),
    Case("TP, SP x EP x PP", 8, EXPERTS, ALL_AXES),
    Case("TP, SP x EP x FSDP2", 8, EXPERTS, OWN_TOKENS),
    Case("TP x zero2", 4, DENSE, TP, shares=ZERO2),
    Case("TP, SP x flat zero1", 4, DENSE, SP, shares=FLAT),
    Case("TP, SP x none", 4, DENSE, SP, shares={"sharding": "none"}),
    Case("EP x zero2", 4, EXPERTS, EP, shares=ZERO2),
    Case("EP, the same tokens x zero2", 4, EXPERTS, EP_SAME, shares=ZERO2),
    Case("PP x zero2", 4, DENSE, {"pp": 2}, shares=ZERO2),
    Case("TP x PP x flat zero1", 8, DENSE, {"tp": 2, "pp": 2}, shares=FLAT),
    Case("TP, SP x EP x zero2", 8, EXPERTS, OWN_TOKENS, shares=ZERO2),
    Case("TP, SP x EP x zero2, whole experts", 8, EXPERTS, WHOLE_EXPERTS, shares=ZERO2),
    Case("LoRA, TP, SP x FSDP2", 4, DENSE, SP, lora=True),
    Case("LoRA, TP x EP", 4, EXPERTS, {"tp": 2, "ep": 2}, lora=True),
    Case("LoRA, PP x FSDP2", 4, DENSE, {"pp": 2}, lora=True),
    Case("every kind of expert, EP x FSDP2", 4, KINDS, EP),
    Case("every kind of expert, TP, SP x EP, recomputed", 4, KINDS, OWN_TOKENS, recompute=True),
    Case("every kind of expert, EP x PP, recomputed", 4, KINDS, EP_PP, recompute=True),
    Case("TP, SP x PP, recomputed", 4, DENSE, SP_PP, recompute=True),
    Case("TP, SP x FSDP2, compiled", 4, DENSE, SP, compile=True),
    Case("TP, SP x PP, compiled", 4, DENSE, SP_PP, compile=True),
    Case("grouped experts, TP, SP x FSDP2, compiled", 4, GROUPED, SP, compile=True),
    Case("TP, SP x EP, compiled", 4, ROOMY, OWN_TOKENS, compile=True),
    Case("lane, 4 ranks", 4, LANE, SAME_TOKENS, 2),
    Case("lane, 4 ranks, own tokens", 4, ROOMY_LANE, OWN_TOKENS, 2),
    Case("lane, 4 ranks, own tokens, compiled", 4, ROOMY_LANE, OWN_TOKENS, 2, compile=True),
    Case("lane, 8 ranks", 8, LANE, SAME_TOKENS, 2),
    Case("lane, 8 ranks, own tokens", 8, ROOMY_LANE, OWN_TOKENS, 4),
)
# Rows that go on, until copies of each kind have had time to drift apart: of tensor parallel, with
# and without a part of the sequence each, of data parallel, of both and experts. As lanes do.
LONG = {"TP", "TP, SP", "HSDP", "TP, SP x EP"}


@dataclass(frozen=True)
class Options:
    """Compare layouts of the example GPT with one process, and write the table."""

    only: Annotated[str, "rows to run, as in a shell"] = "*"
    missing: Annotated[bool, "only those that the receipt does not have"] = False
    steps: Annotated[int, "after which copies are compared; the first 20 with one process"] = 100
    lane_steps: Annotated[int, "the same for the lanes of 16 layers"] = 20
    table: Annotated[Path, "the table to write"] = Path("out/hybrid_table.md")
    receipt: Annotated[Path, "the receipt to write"] = Path("receipts/hybrid.json")
    timeout: Annotated[float, "seconds that a row may take"] = 1800.0


def cases(options: Options) -> Iterator[Case]:
    for case in ROWS:
        is_lane = case.model.layers == LANE.layers and not case.compile
        steps = options.lane_steps if is_lane else options.steps if case.name in LONG else 0
        yield replace(case, more=max(0, steps - case.steps))


def run(options: Options) -> int:
    """Run the requested rows; the exit status says whether all are within bounds."""
    torch.set_num_threads(1)  # forked ranks inherit it
    known = json.loads(options.receipt.read_text())["rows"] if options.receipt.exists() else {}
    order = [case.name for case in cases(options)]
    bad = 0
    for case in cases(options):
        if not fnmatchcase(case.name, options.only) or (options.missing and case.name in known):
            continue
        row = _run(case, options.timeout)
        bad += row["verdict"] != "pass"
        sys.stdout.write(f"{case.name}: {row['verdict']}\n")
        sys.stdout.flush()
        known[case.name] = row
        rows = {name: known[name] for name in order if name in known}
        write_files(options.receipt.parent, {options.receipt.name: _receipt(rows)})
        write_files(options.table.parent, {options.table.name: table(rows).encode()})
    return 1 if bad else 0


def _run(case: Case, timeout: float) -> dict[str, Any]:
    # What the gates say of compiling: rows that are compiled open all of them.
    facts = CompileFacts(bool(case.model.experts), bool(case.model.capacity))
    gates = [gate.name for gate in GATES]
    degrees = Degrees(case.ranks, **case.mesh)
    decision = decide(bool(case.compile), degrees, facts, open_gates=gates, environment={})
    keys = ("ranks", "mesh", "model", "sequences", "lora", "recompute")
    asked = {key: asdict(case)[key] for key in keys} | {"compile": decision.receipt()}
    try:
        # Stages compile one after the other, and the others wait in a collective.
        limits: dict[str, Any] = {"timeout": timeout, "collective_timeout": timeout}
        outcomes = run_forked(case.ranks, run_rank, case, reference(case), **limits)
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


def _receipt(rows: Mapping[str, Any]) -> bytes:
    content = {
        "kind": "samestep hybrid",
        "command": "python -m samestep.lab.stress.matrix",
        "thresholds": THRESHOLDS,
        "gradients_compared_in_steps": [step + 1 for step in COMPARED],
        "versions": versions(),
        "rows": dict(rows),
        "verdict": "pass" if all(row["verdict"] == "pass" for row in rows.values()) else "fail",
    }
    return (json.dumps(content, indent=1) + "\n").encode()


HEAD = """# Layouts that equal one process

Made by `python -m samestep.lab.stress.matrix`, which also writes `receipts/hybrid.json`.

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
Every kind of expert: one shared and two null ones beside eight to choose from, three choices per
token, grouped products, and both losses of routers, which are compared too (bound {router:g}); in a
pipeline one process has the same micro-batches. Recomputed: blocks run again in backward.

The lanes have 16 layers of width 128 with heads of 32, 2 key and value heads, sequences of 128 and
8 experts of size 64, of which a token uses 2; tp 2 with sequence parallel, ep 2, FSDP2; 256 tokens
per step (512 on 8 ranks with tokens of their own). Ranks along the expert axis see the same tokens,
or tokens of their own; then experts have a fixed capacity. With the same tokens on 4 ranks nothing
is left for FSDP2 to shard over.
"""


def table(rows: Mapping[str, Any]) -> str:
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
    return text + LANES.format(**THRESHOLDS)


if __name__ == "__main__":
    sys.exit(run(parse_flags(Options, sys.argv[1:], "python -m samestep.lab.stress.matrix")))
