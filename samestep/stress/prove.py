"""One layout of the example GPT against the same model in one process.

Both see the same tokens, in the order of their places. Gradients are compared before the
optimizer, whole, parameter by parameter; then losses, and parameters after the last step.
"""

import copy
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch._dynamo  # compiled graphs are counted nowhere else
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import samestep
from samestep.comm.collectives import total
from samestep.comm.groups import registry
from samestep.mesh import Mesh, build
from samestep.models.balance import balance_experts
from samestep.models.gpt import GPT, GPTConfig
from samestep.models.gpt_plan import gpt_plan
from samestep.parallel.experts import capacity_errors
from samestep.parallel.lora import add_lora, lora_layers
from samestep.parallel.replicas import check_replicas
from samestep.parallel.stack import Stack
from samestep.placements.parts.gradients import combine_gradients

COMPARED = (0, 1, 9, 19)  # steps whose gradients are compared
THRESHOLDS = {"gradient": 1e-5, "loss": 1e-4, "adamw": 2e-5, "muon": 3e-4}
LEARNING_RATE = 1e-3
# Of an outcome: the largest of all ranks counts.
WORST = "largest_gradient", "loss", "norm", "adamw", "muon", "seconds", "graphs", "recompiled"


@dataclass(frozen=True)
class Case:
    """A layout to be proven.

    sequences: Per step, of all ranks together.
    steps: That are compared with one process.
    more: Steps afterwards, before copies are compared.
    """

    name: str
    ranks: int
    model: GPTConfig
    mesh: Mapping[str, Any]
    sequences: int = 8
    steps: int = 20
    more: int = 0
    micro_batches: int = 0
    schedule: str = "1f1b"
    lora: bool = False
    compile: bool | str = False
    seed: int = 0

    @property
    def max_grad_norm(self) -> float:
        """Below what norms are: gradients are clipped in every step. Factors have small ones."""
        return 0.001 if self.lora else 0.1


class Reference(NamedTuple):
    """What one process has: losses by step, gradients of some steps, parameters at the end."""

    start: GPT
    losses: list[float]
    norms: list[float]
    gradients: dict[int, dict[str, Tensor]]
    parameters: dict[str, Tensor]


@dataclass
class Outcome:
    """How far a layout is from one process; the largest of everything, over all ranks."""

    gradient: float = 0.0
    gradient_of: str = ""
    largest_gradient: float = 0.0  # of the reference: what the difference is to be seen beside
    loss: float = 0.0
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

    def merged(self, other: "Outcome") -> "Outcome":
        """The worse of two ranks."""
        worse = self if self.gradient >= other.gradient else other
        both = {key: max(getattr(self, key), getattr(other, key)) for key in WORST}
        clipped = min(self.clipped, other.clipped)
        return Outcome(**{**vars(worse), **both, "clipped": clipped, "trace": self.trace})

    def failures(self) -> list[str]:
        """What is beyond its threshold."""
        found = [
            f"{key} {getattr(self, key):.1e} > {most:.0e}"
            for key, most in THRESHOLDS.items()
            if not getattr(self, key) <= most
        ]
        return found + [f"{self.overflow} tokens found no room"] * bool(self.overflow)


def tokens_of(case: Case, step: int) -> Tensor:
    """The sequences of a step, (sequences, context + 1): a rule with some noise, to be learnt."""
    size = case.model.vocab_size
    random = torch.Generator().manual_seed(1000 * case.seed + step)
    shape = (case.sequences, case.model.context + 1)
    noise = torch.randint(0, 3, shape, generator=random)
    tokens = torch.randint(0, size, shape, generator=random)
    for place in range(1, shape[1]):
        tokens[:, place] = (3 * tokens[:, place - 1] + noise[:, place]) % size
    return tokens


def new_model(case: Case) -> GPT:
    """The model that every process begins with; no vector is all ones."""
    torch.manual_seed(case.seed)
    model = GPT(case.model)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(0.1 * torch.randn_like(param))
    return model


def optimizer_keywords(case: Case) -> dict[str, Any]:
    """Of the optimizer; with rules that names and shapes do not tell."""
    rules: dict[Any, dict[str, Any]] = {}
    if case.lora:
        rules = {"*.q.lora_*": {"rule": "muon"}}  # and AdamW for the others
    elif case.model.experts:
        rules = {"*.experts.*": {"rule": "muon"}, "*.router.weight": {"rule": "adamw"}}
    return {"lr": LEARNING_RATE, "max_grad_norm": case.max_grad_norm, "overrides": rules}


def adapt(model: nn.Module, case: Case, mesh: Mesh | None = None) -> None:
    """Factors for all matrices of attention. None is zero: so both of a pair have a gradient."""
    add_lora(model, ["*.attention.[qkv]", "*.attention.out"], rank=4, mesh=mesh)
    for _, layer in lora_layers(model):
        with torch.no_grad():
            layer.lora_B.fill_(0.01)


def reference(case: Case) -> Reference:
    """Train in this process alone."""
    start = new_model(case)
    model = copy.deepcopy(start)
    if case.lora:
        adapt(model, case)
    optimizer = samestep.MuonAdamW(model, **optimizer_keywords(case))
    found = Reference(start, [], [], {}, {})
    for step in range(case.steps):
        tokens = tokens_of(case, step)
        loss = mean_loss(model(tokens[:, :-1]), tokens[:, 1:])
        torch.autograd.backward(loss)
        if step in COMPARED:
            found.gradients[step] = {
                name: param.grad.clone()
                for name, param in model.named_parameters()
                if param.grad is not None
            }
        optimizer.step()
        optimizer.zero_grad()
        balance_experts(model, case.model.layers)
        found.losses.append(loss.item())
        found.norms.append(float(optimizer.metrics()["grad_norm"]))
    found.parameters.update({n: p.detach().clone() for n, p in model.named_parameters()})
    return found


def mean_loss(logits: Any, targets: Tensor) -> Tensor:
    """Cross-entropy, ()."""
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def run_rank(rank: int, case: Case, expected: Reference) -> Outcome:
    """Train on this rank as one of `case.ranks`."""
    torch.set_num_threads(1)
    model = copy.deepcopy(expected.start)
    mesh = build(**case.mesh)
    stack = Stack(
        model,
        gpt_plan(case.model),
        mesh,
        loss=mean_loss,
        micro_batches=case.micro_batches,
        schedule=case.schedule,
        adapt=(lambda part: adapt(part, case, mesh)) if case.lora else None,
        compile=case.compile,
    )
    optimizer = stack.optimizer(**optimizer_keywords(case))
    outcome = Outcome(trace=stack.trace(tell=lambda _: None), steps=case.steps + case.more)
    rows = case.sequences // mesh.degrees.batch_ranks
    start = time.perf_counter()
    for step in range(case.steps + case.more):
        tokens = tokens_of(case, step)[rows * stack.batch_place :][:rows]
        loss = stack.backward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        if step in expected.gradients:
            combine_gradients(model.parameters())
            _compare_gradients(model, expected.gradients[step], outcome)
        optimizer.step()
        optimizer.zero_grad()
        balance_experts(model, case.model.layers, stack.token_copies)
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if step == 0:
            outcome.graphs = compiled
        outcome.recompiled = compiled - outcome.graphs
        if step < case.steps:
            _compare_scalars(loss, optimizer, expected, step, outcome)
            norm = float(optimizer.metrics()["grad_norm"])
            outcome.clipped += norm > case.max_grad_norm
        if step == case.steps - 1:
            _compare_parameters(model, optimizer, expected, outcome)
    outcome.seconds = (time.perf_counter() - start) / outcome.steps
    outcome.overflow = capacity_errors(model)
    outcome.copies = check_replicas(model)
    return outcome


def _compare_gradients(model: nn.Module, expected: Mapping[str, Tensor], outcome: Outcome) -> None:
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        whole = expected[name]
        found = math.inf if param.grad is None else _distance(param.grad, whole)
        outcome.largest_gradient = max(outcome.largest_gradient, float(whole.abs().max()))
        if not found <= outcome.gradient:
            outcome.gradient, outcome.gradient_of = found, name


def _compare_scalars(
    loss: Tensor, optimizer: samestep.MuonAdamW, expected: Reference, step: int, outcome: Outcome
) -> None:
    ranks = registry.of()
    mean = total("loss", loss.detach().double().reshape(1), ranks).wait() / ranks.size
    norm = float(optimizer.metrics()["grad_norm"])
    outcome.loss = max(outcome.loss, _number(abs(float(mean) - expected.losses[step])))
    outcome.norm = max(outcome.norm, _number(abs(norm - expected.norms[step])))


def _compare_parameters(
    model: nn.Module, optimizer: samestep.MuonAdamW, expected: Reference, outcome: Outcome
) -> None:
    rules = {
        name: group["rule"] for group in optimizer.param_groups for name in group["param_names"]
    }
    for name, param in model.named_parameters():
        rule = rules.get(name, "adamw")  # a frozen one does not move at all
        found = _distance(param.detach(), expected.parameters[name])
        setattr(outcome, rule, max(getattr(outcome, rule), found))


def _distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference of a whole tensor; collective for a DTensor."""
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    return _number(float((whole - expected).abs().max()))


def _number(distance: float) -> float:
    """NaN as infinity: it is larger than any bound."""
    return math.inf if math.isnan(distance) else distance
