"""Promises of the documentation, tried in every layout and with every option that matters to them.

    python -m tests.promises            # tries all, and writes out/promises.md
    python -m tests.promises --only mistakes.md --layout "flat zero2"

A promise is a sentence of a page and a function that does on a rank what the sentence is about: it
breaks a rule and hears the error or the warning, or trains and compares with one process. Gradients
are small multiples of 1/8, so that their sums, means and squares are exact in any order: wherever
something works, it has the bits of one process.
"""

from __future__ import annotations

import argparse
import copy
import gc
import io
import json
import math
import pickle
import re
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import samestep
from samestep.fsdp import skip, take_part
from samestep.stress import check
from tests.limits import HANG, limit
from tests.ranks import RanksFailed, run_forked

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "out" / "promises.md"

# --- layouts and options -------------------------------------------------------------------------

# What MuonAdamW gets, and on how many ranks; two data ranks in each.
LAYOUTS: dict[str, tuple[int, dict[str, str]]] = {
    "none": (2, {"sharding": "none"}),
    "zero1": (2, {"sharding": "zero1"}),
    "zero2": (2, {"sharding": "zero2"}),
    "flat zero1": (2, {"buffers": "flat", "sharding": "zero1"}),
    "flat zero2": (2, {"buffers": "flat", "sharding": "zero2"}),
    "FSDP2": (2, {}),
    "TP": (4, {}),
    "stages": (4, {}),
}
WHOLE = ("none", "zero1", "zero2")
FLAT = ("flat zero1", "flat zero2")
PLAIN = (*WHOLE, *FLAT)
SHARED = ("zero1", "zero2", *FLAT)  # ranks share the state
# Reduced gradients leave no memory behind, or sums in it.
GIVES_BACK = ("zero2", *FLAT, "TP", "stages")

NORM = 0.75  # to which gradients are clipped, always
OPTIONS: dict[str, dict[str, object]] = {
    "": {},
    "overlap_grad_reduce": {"overlap_grad_reduce": True},
    "overlap_param_gather": {"overlap_param_gather": True, "overlap_grad_reduce": True},
    "no_sync": {"overlap_grad_reduce": True},
    "synchronize": {"overlap_grad_reduce": True},
    "max_grad_norm": {"max_grad_norm": NORM},
    "clip_grad_norm_": {},
    "clip_grad_norm_, overlap": {"overlap_grad_reduce": True},
    "GradScaler": {},
    "GradScaler, overlap": {"overlap_grad_reduce": True},
    "master_weights": {"master_weights": True},
    "8 bits": {"state_dtypes": "8bit"},
    "offload": {"offload": "state"},
    "cuda_graph": {"cuda_graph": True},
}
ACCUMULATED = ("no_sync", "synchronize")
OVERLAPS = ("", "overlap_grad_reduce", "overlap_param_gather")
EVERY = tuple(OPTIONS)
ONE_PROCESS = ("max_grad_norm", "master_weights", "state_dtypes")  # what it has of them


def never(layout: str, option: str) -> str | None:
    """Why an option is not there in a layout, whatever is promised."""
    options = OPTIONS[option]
    if option == "cuda_graph":
        return "graphs need a GPU: `tests/test_cuda.py`, `make test-gpu`"
    if layout == "FSDP2":
        if options.get("overlap_grad_reduce"):
            return "FSDP2 itself reduces inside backward, and keeps sums of its own"
    elif "overlap_param_gather" in options and layout in WHOLE:
        return '`overlap_param_gather` needs `buffers="flat"`, and is refused'
    return None


class Layer(nn.Linear):
    """A matrix and a vector, whose gradients are what it is called with, and its rounded values."""

    def forward(self, total: torch.Tensor, wanted: dict[str, torch.Tensor]) -> torch.Tensor:
        for name, grad in wanted.items():
            param = getattr(self, name)
            if isinstance(param, DTensor):
                placed = param.device_mesh, param.placements
                grad = distribute_tensor(grad, *placed, src_data_rank=None).to_local()
                param = param.to_local()
            rounded = (param.detach().float() * 8).round() / 8
            total = total + (param * (grad + rounded).to(param.dtype)).float().sum()
        return total


SIZES = {"first": (8, 12), "second": (12, 8)}


class Net(nn.Module):
    """Two layers, or those of one stage."""

    def __init__(self, layers: Iterable[str] = SIZES, seed: int = 0):
        super().__init__()
        for number, (name, (wide, tall)) in enumerate(SIZES.items()):
            torch.manual_seed(seed + number)
            if name in layers:
                setattr(self, name, Layer(wide, tall))

    def forward(self, wanted: dict[str, torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for name, layer in self.named_children():
            own = {key.split(".")[-1]: grad for key, grad in wanted.items() if f"{name}." in key}
            if own:
                total = layer(total, own)
            elif isinstance(layer, _sharded()):
                total = skip(layer, total)
        return total


def _sharded() -> type:
    from torch.distributed.fsdp import FSDPModule

    return FSDPModule


NAMES = tuple(Net().state_dict())


def gradient(name: str, step: int, micro: int, data: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + 10 * data)
    shape = Net().get_parameter(name).shape
    return torch.randint(-8, 9, shape, generator=generator) / 8


@dataclass
class Ranks:
    """What one rank has for all of its trials: groups are made once, by all ranks alike."""

    rank: int
    world: int

    def __post_init__(self) -> None:
        self.alone = [dist.new_group([rank]) for rank in range(self.world)][self.rank]
        self.told = dist.new_group(list(range(self.world)))  # of outcomes
        if self.world == 4:
            self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
            made = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
            self.stage, self.pipe = made[self.rank // 2], made[2 + self.rank % 2]
        else:
            self.mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))


@dataclass
class Trial:
    """A layout with an option, on this rank."""

    ranks: Ranks
    layout: str
    option: str

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def data(self) -> int:
        """Which data it sees: 0 or 1."""
        return self.rank // 2 if self.layout == "TP" else self.rank % 2

    @property
    def kept_layers(self) -> tuple[str, ...]:
        everything = tuple(SIZES)
        return everything[self.rank // 2 :][:1] if self.layout == "stages" else everything

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in NAMES if name.startswith(self.kept_layers))

    def place(self, model: nn.Module) -> nn.Module:
        """Cut as the layout has it."""
        if self.layout == "FSDP2":
            for layer in model.children():
                fully_shard(layer, mesh=self.ranks.mesh)
            fully_shard(model, mesh=self.ranks.mesh)
            take_part(model)
        if self.layout == "TP":
            for name, layer in model.named_children():
                dim = {"first": 0, "second": 0 if "8bit" in str(self.options) else 1}[name]
                for own, param in list(layer.named_parameters()):
                    cut = Shard(dim) if param.ndim > 1 else Replicate()
                    placed = distribute_tensor(param.data, self.ranks.mesh["model"], [cut])
                    setattr(layer, own, nn.Parameter(placed))
        return model

    @property
    def options(self) -> dict[str, object]:
        own: dict[str, object] = dict(LAYOUTS[self.layout][1])
        chosen = OPTIONS[self.option]
        if self.layout == "stages":
            own |= {"process_group": self.ranks.stage, "stage_group": self.ranks.pipe}
        if self.layout in ("TP", "stages") and "overlap_param_gather" in chosen:
            own |= {"buffers": "flat"}
        return own | chosen

    def model(self, seed: int = 0) -> nn.Module:
        model = Net(self.kept_layers, seed)
        if self.option == "master_weights":
            model = model.bfloat16()
        return self.place(model)

    def optimizer(self, model: object, kind: object = samestep.MuonAdamW, **options: object):
        given = {"lr": 0.1, "weight_decay": 0.1, "crossover": 4} | self.options | options
        return kind(model, **given)

    def run(self, **options: object) -> Run:
        model = self.model()
        return Run(self, model, self.optimizer(model, **options))

    def plain(self, **options: object) -> Run:
        """One process with the same gradients."""
        model = Net(SIZES)
        if self.option == "master_weights":
            model = model.bfloat16()
        kept = {key: value for key, value in self.options.items() if key in ONE_PROCESS}
        if self.option.startswith("clip_grad_norm_"):
            kept["max_grad_norm"] = NORM
        alone = {"process_group": self.ranks.alone, "stage_group": "none", "sharding": "none"}
        given = {"lr": 0.1, "weight_decay": 0.1} | alone | kept | options
        return Run(self, model, samestep.MuonAdamW(model, **given), plain=True)


@dataclass
class Run:
    """A model and its optimizer, trained as the option of the trial says."""

    trial: Trial
    model: nn.Module
    opt: torch.optim.Optimizer
    plain: bool = False
    scaler: object = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.trial.option.startswith("GradScaler") and not self.plain:
            self.scaler = samestep.GradScaler("cpu", init_scale=8.0)

    def backward(
        self,
        step: int,
        lacks: Iterable[str] = (),
        lacking: int | None = None,
        bad: float | None = None,
        micros: int = 2,
    ) -> None:
        """Gradients of a step. `lacks` names those that data rank `lacking`, or all, do not have."""
        if self.plain:
            self._backward_of_all(step, lacks, lacking, bad, micros)
            return
        kind = self.trial.option
        if kind not in ACCUMULATED:
            micros = 1
        for micro in range(micros):
            last = micro == micros - 1
            with self.opt.no_sync() if kind == "no_sync" and not last else nullcontext():
                self._backward(step, micro, lacks, lacking, bad)
            if kind == "synchronize" and not last:
                self.opt.synchronize()

    def _wanted(self, step, micro, data, lacks, lacking, bad) -> dict[str, torch.Tensor]:
        wanted = {}
        for name in self.trial.names if not self.plain else NAMES:
            if name in lacks and lacking in (None, data):
                continue
            wanted[name] = gradient(name, step, micro, data)
            if bad is not None and name == "first.weight" and data == 1:
                wanted[name][0, 0] = bad
        return wanted

    def _backward(self, step, micro, lacks, lacking, bad) -> None:
        wanted = self._wanted(step, micro, self.trial.data, lacks, lacking, bad)
        loss = self.model(wanted)
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if loss.requires_grad:
            loss.backward()

    def _backward_of_all(self, step, lacks, lacking, bad, micros) -> None:
        if self.trial.option not in ACCUMULATED:
            micros = 1
        for micro in range(micros):
            for data in range(2):
                wanted = self._wanted(step, micro, data, lacks, lacking, bad)
                if wanted:
                    (self.model(wanted) / 2).backward()

    def step(self) -> None:
        if self.trial.option.startswith("clip_grad_norm_") and not self.plain:
            self.opt.clip_grad_norm_(NORM)
        if self.scaler is not None:
            self.scaler.step(self.opt)
            self.scaler.update()
        else:
            self.opt.step()

    def train(self, *steps: int, **how: object) -> Run:
        for step in steps:
            self.backward(step, **how)
            self.step()
            self.opt.zero_grad()
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole values of the parameters of this rank's stage."""
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in self.model.named_parameters()
            if name in self.trial.names
        }

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        return {k: v for k, v in self.opt.whole_state().items() if k in self.trial.names}


# --- what functions of promises ask --------------------------------------------------------------


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """The same bits by name."""
    assert found.keys() == wanted.keys(), (sorted(found), sorted(wanted))
    for name, value in wanted.items():
        own = found[name]
        if not torch.equal(own, value):
            far = (own.double() - value.double()).abs().max().item()
            raise AssertionError(f"{name} is not that of one process: {far:.2g} away")


def same_state(found: dict, wanted: dict) -> None:
    for name, own in wanted.items():
        same(found[name], own)


def refused(action: Callable[[], object], *texts: str) -> str:
    """The error of an action, which has these texts."""
    try:
        action()
    except (ValueError, RuntimeError, TypeError, ArithmeticError) as error:
        kind, said = type(error).__name__, " ".join(str(error).split())
    else:
        raise AssertionError(f"nothing was raised; promised was {texts}")
    missing = [text for text in texts if not re.search(text, said)]
    assert not missing, f"the error has no {missing}: {kind}: {said}"
    return said


def heard(action: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [" ".join(str(warning.message).split()) for warning in caught]


def warned(action: Callable[[], object], *texts: str) -> None:
    """An action warns with these texts, once."""
    said = heard(action)
    fitting = [told for told in said if all(re.search(text, told) for text in texts)]
    assert len(fitting) == len(said) == 1, f"promised was one warning with {texts}, heard: {said}"


def unchanged(run: Run, action: Callable[[], object]) -> None:
    """Weights and state are those of before, bit for bit."""
    weights, state = run.weights(), run.state()
    action()
    same(run.weights(), weights)
    same_state(run.state(), state)


# --- promises ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Promise:
    """A sentence of a page, and how it is tried."""

    page: str
    sentence: str
    kind: str
    action: Callable[[Trial], None]
    options: tuple[str, ...]
    layouts: tuple[str, ...]
    but: dict[object, str]

    @property
    def name(self) -> str:
        return self.action.__name__

    @property
    def tried(self) -> str:
        return " ".join((self.action.__doc__ or "").split()).rstrip(".")

    def why_not(self, layout: str, option: str) -> str | None:
        """Why it says nothing about a layout with an option."""
        if layout not in self.layouts and layout not in self.but:
            return "this is of other layouts"
        found = never(layout, option)
        for key in ((layout, option), option, layout):
            found = found or self.but.get(key)
        return found


PROMISES: list[Promise] = []


def promise(
    page: str,
    sentence: str,
    kind: str,
    options: tuple[str, ...] = ("",),
    layouts: tuple[str, ...] = tuple(LAYOUTS),
    but: dict[object, str] | None = None,
):
    """Puts a function on the list; its docstring says how the sentence is tried."""
    assert kind in ("raises", "warns", "works")

    def listed(action: Callable[[Trial], None]) -> Callable[[Trial], None]:
        PROMISES.append(Promise(page, sentence, kind, action, options, layouts, but or {}))
        return action

    return listed


MISTAKES, DISTRIBUTED = "mistakes.md", "distributed.md"
FLAT_PAGE, TROUBLE = "flat.md", "troubleshooting.md"
BY_FSDP = "FSDP2 averages gradients inside backward itself"


# Mistakes.


@promise(
    MISTAKES,
    "Views beside each other in one buffer, as of a flat model, are fine.",
    "works",
    OVERLAPS,
    layouts=(*PLAIN, "stages"),
    but={"FSDP2": "FSDP2 moves its parameters", "TP": "cut parameters have memory of their own"},
)
def neighbours_in_one_buffer(trial: Trial) -> None:
    """The model's parameters are views of one tensor"""
    model = trial.model()
    buffer = torch.cat([p.detach().flatten() for p in model.parameters()])
    begin = 0
    for param in model.parameters():
        param.data = buffer[begin : begin + param.numel()].view(param.shape)
        begin += param.numel()
    run = Run(trial, model, trial.optimizer(model)).train(0, 1)
    same(
        run.weights(),
        {k: v for k, v in trial.plain().train(0, 1).weights().items() if k in trial.names},
    )


@promise(
    MISTAKES,
    "here it is refused, in one process and in every layout, on every rank (found when the optimizer is built, "
    "and before steps 1, 2, 4, 8, ...)",
    "raises",
    OVERLAPS,
    but={"FSDP2": "FSDP2 gives each parameter memory of its own"},
)
def shared_memory(trial: Trial) -> None:
    """A second parameter of the same memory, also transposed, at construction"""
    model = trial.model()
    layer = next(model.children())
    for name, value in (("again", layer.weight.data), ("turned", layer.weight.data.T)):
        if isinstance(value, DTensor) and name == "turned":
            continue
        layer.register_parameter(name, nn.Parameter(value))
        refused(lambda: trial.optimizer(model), "lie in the same memory", "weight", name)
        del layer._parameters[name]


@promise(
    MISTAKES,
    'With `buffers="flat"` a parameter that shares memory with a frozen one, or with a buffer of the model, is refused as well',
    "raises",
    OVERLAPS,
    layouts=FLAT,
)
def shared_with_frozen(trial: Trial) -> None:
    """A frozen parameter, then a buffer, in the memory of a trained one"""
    for kind in ("frozen", "buffer"):
        model = trial.model()
        if kind == "frozen":
            model.first.register_parameter(
                "other", nn.Parameter(model.first.weight.data, requires_grad=False)
            )
        else:
            model.first.register_buffer("other", model.first.weight.data)
        refused(lambda model=model: trial.optimizer(model), "memory", "first.weight")


@promise(
    MISTAKES,
    "Each stage would clip by a norm of its own.",
    "raises",
    ("max_grad_norm", "GradScaler"),
    layouts=(*PLAIN, "FSDP2", "stages"),
    but={"TP": "its meshes have all ranks"},
)
def norm_of_a_stage(trial: Trial) -> None:
    """Groups that leave out ranks, without stage_group"""
    model = Net()
    groups: dict[str, object] = {"process_group": trial.ranks.alone}
    if trial.layout == "stages":
        groups, model = {"process_group": trial.ranks.stage, "stage_group": None}, trial.model()
    if trial.layout == "FSDP2":
        groups = {}
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("others", "own"))["own"]
        model = nn.Sequential(*[nn.Identity()] * trial.rank, nn.Linear(4, 4))  # other names on each
        fully_shard(model, mesh=mesh)
    if trial.option == "max_grad_norm":
        refused(lambda: trial.optimizer(model, **groups), "whole model", "stage_group")
        return
    opt = trial.optimizer(model, **groups)
    loss = sum(
        p.sum() for p in (q.to_local() if isinstance(q, DTensor) else q for q in model.parameters())
    )
    scaler = samestep.GradScaler("cpu")
    scaler.scale(loss).backward()
    refused(lambda: scaler.step(opt), "the scale of a GradScaler", "whole model", "stage_group")


@promise(
    MISTAKES,
    "An optimizer has the parameters that existed when it was built.",
    "warns",
    OVERLAPS,
    but={"FSDP2": "a parameter that was frozen when FSDP2 cut the model stays out of its sums"},
)
def unfrozen_later(trial: Trial) -> None:
    """A parameter that is unfrozen after construction; once added it trains"""
    model = trial.model()
    layer = next(model.children())
    layer.bias.requires_grad_(False)
    opt = trial.optimizer(model)
    run = Run(trial, model, opt)
    before = run.weights()
    layer.bias.requires_grad_(True)
    name = next(name for name in trial.names if "bias" in name)
    warned(lambda: run.train(0), f"{name} has gradients, but the optimizer does not have it")
    opt.add_param_group({"params": [(name, layer.bias)], "rule": "adamw"})
    run.train(1)
    assert not torch.equal(run.weights()[name], before[name]), "it was not trained"


@promise(
    MISTAKES,
    "call opt.adopt(model) on every rank right after it, where names and shapes are the same",
    "raises",
    OVERLAPS,
)
def replaced_parameters(trial: Trial) -> None:
    """All parameters are replaced by copies"""
    run = trial.run()
    other = trial.model()
    for name, layer in other.named_children():
        if trial.layout == "FSDP2":
            for own, param in layer.named_parameters():
                setattr(getattr(run.model, name), own, nn.Parameter(param.detach()))
        else:
            setattr(run.model, name, layer)
    if trial.layout == "FSDP2":
        take_part(run.model)
    run.backward(0)
    refused(
        run.opt.step,
        "no parameter that this optimizer has is in its model any more|could not take the step",
    )


@promise(
    MISTAKES,
    "Without a rule there is an error",
    "raises",
)
def group_without_rule(trial: Trial) -> None:
    """add_param_group without a rule"""
    run = trial.run()
    late = nn.Parameter(torch.ones(4, 4))
    refused(
        lambda: run.opt.add_param_group({"params": [("late", late)]}),
        "a parameter group has no rule",
    )
    unused = heard(lambda: run.train(0))
    assert not unused


@promise(
    MISTAKES,
    "no parameter had a gradient in the first 3 steps, so nothing was trained",
    "warns",
    (
        "",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "no_sync",
        "max_grad_norm",
        "GradScaler",
        "offload",
    ),
)
def steps_without_gradients(trial: Trial) -> None:
    """zero_grad() between backward and step, four times"""
    run = trial.run()

    def wrong_order() -> None:
        for step in range(4):
            run.backward(step)
            run.opt.zero_grad()
            run.step()

    warned(wrong_order, "no parameter had a gradient in the first 3 steps")
    same(run.weights(), Run(trial, fresh := trial.model(), trial.optimizer(fresh)).weights())


@promise(
    MISTAKES,
    "A single step without gradients, or a rank without them, is no mistake: parameters without a gradient are left alone, "
    "and nothing is said.",
    "works",
    EVERY,
)
def few_steps_without_gradients(trial: Trial) -> None:
    """Two steps without backward, between others"""
    run = trial.run().train(0)
    unchanged(run, run.opt.step)
    unchanged(run, run.opt.step)
    run.train(1)
    plain = trial.plain().train(0, 1)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    MISTAKES,
    "updates smaller than their last bit are lost, at small learning rates most of them",
    "warns",
    OVERLAPS,
)
def sixteen_bit_weights(trial: Trial) -> None:
    """bfloat16 parameters without a word on master_weights"""
    model = trial.place(Net(trial.kept_layers).bfloat16())
    warned(lambda: trial.optimizer(model), "are bfloat16", "master_weights")
    assert not heard(lambda: trial.optimizer(model, master_weights=False))


@promise(
    MISTAKES,
    "all gradients were changed between backward() and step(), before they were averaged over ranks.",
    "warns",
    layouts=(*PLAIN, "TP", "stages"),
    but={
        "FSDP2": "its gradients are averaged already, and clipping them is right",
    },
)
def clipping_by_hand(trial: Trial) -> None:
    """torch's clip_grad_norm_ before averaging"""
    run = trial.run()

    def clip() -> None:
        for step in range(2):
            run.backward(step)
            nn.utils.clip_grad_norm_(run.model.parameters(), NORM)
            run.opt.step()
            run.opt.zero_grad()

    warned(clip, "changed between backward\\(\\) and step\\(\\)", "max_grad_norm=")


@promise(
    MISTAKES,
    "`.grad` has a tensor without memory in their place, which raises as soon as anybody computes with it",
    "raises",
    ("overlap_grad_reduce", "overlap_param_gather", "no_sync", "GradScaler, overlap"),
    layouts=GIVES_BACK,
    but={
        **dict.fromkeys(("none", "zero1"), "gradients stay: see the next row"),
        "FSDP2": "gradients stay",
    },
)
def clipping_what_was_given_back(trial: Trial) -> None:
    """torch's clip_grad_norm_, get_total_norm and clip_grad_value_ after overlapped backward"""
    run = trial.run()
    run.backward(0)
    how = "opt.clip_grad_norm_\\(max_norm\\)"
    for act in (
        lambda: nn.utils.clip_grad_norm_(run.model.parameters(), NORM),
        lambda: nn.utils.get_total_norm([p.grad for p in run.model.parameters()]),
        lambda: nn.utils.clip_grad_value_(run.model.parameters(), 1.0),
    ):
        refused(act, "was reduced \\(averaged over ranks\\) and given back", how)


@promise(
    MISTAKES,
    "In the other layouts gradients stay, and editing them raises on every rank in the step",
    "raises",
    ("overlap_grad_reduce", "overlap_param_gather", "no_sync"),
    layouts=("none", "zero1"),
    but={
        **dict.fromkeys(GIVES_BACK, "gradients are given back: see the row above"),
        "FSDP2": "gradients stay, and editing them is right",
    },
)
def editing_what_was_reduced(trial: Trial) -> None:
    """One rank scales a gradient after overlapped backward"""
    run = trial.run()
    run.backward(0)
    if trial.rank == 1:
        run.model.first.weight.grad.mul_(0.5)
    unchanged(
        run,
        lambda: refused(
            run.opt.step, "was changed on rank 1|rank 1 could not take the step", "first.weight"
        ),
    )


@promise(
    MISTAKES,
    "Or, before the step, by the same norm in every layout, with DDP and FSDP2 too",
    "works",
    ("clip_grad_norm_", "clip_grad_norm_, overlap"),
)
def norm_before_the_step(trial: Trial) -> None:
    """The norm that opt.clip_grad_norm_ gives, and that of one process"""
    run, plain = trial.run(), trial.plain()
    for step in range(3):
        run.backward(step)
        norm = run.opt.clip_grad_norm_(NORM)
        run.opt.step()
        run.opt.zero_grad()
        plain.train(step)
        assert torch.equal(norm.cpu().float(), plain.opt.metrics()["grad_norm"].float()), step
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    MISTAKES,
    "Under DDP or FSDP2, `clip_grad_norm_` is right and nothing is said.",
    "works",
    layouts=("none", "zero1", "zero2", "flat zero1", "flat zero2", "FSDP2"),
    but={
        "TP": "DDP takes no DTensors",
        "stages": "a norm of a stage is not that of the model",
        **dict.fromkeys(FLAT, 'flat buffers refuse `grads="reduced"`'),
    },
)
def clipping_by_hand_where_it_is_right(trial: Trial) -> None:
    """torch's clip_grad_norm_ with DDP around the model, or FSDP2"""
    model = trial.model()
    wrapped = model if trial.layout == "FSDP2" else DistributedDataParallel(model)
    run = Run(trial, wrapped, trial.optimizer(wrapped))
    plain = trial.plain(max_grad_norm=NORM)
    for step in range(3):
        run.backward(step)
        nn.utils.clip_grad_norm_(wrapped.parameters(), NORM)
        run.opt.step()
        run.opt.zero_grad()
        plain.train(step)
    for (name, value), own in zip(plain.weights().items(), model.parameters(), strict=True):
        whole = own.full_tensor() if isinstance(own, DTensor) else own.detach()
        torch.testing.assert_close(whole, value, rtol=0, atol=1e-6, msg=name)


DROPS: dict[str, Callable[[Run], None]] = {
    "opt.zero_grad()": lambda run: run.opt.zero_grad(),
    "model.zero_grad()": lambda run: run.model.zero_grad(),
    "opt.zero_grad(set_to_none=False)": lambda run: run.opt.zero_grad(set_to_none=False),
}


@promise(
    MISTAKES,
    "the batch does not count, and `backward(); zero_grad(); backward(); step()` takes the second one",
    "works",
    EVERY,
)
def dropped_batch(trial: Trial) -> None:
    """Batches that opt.zero_grad() and model.zero_grad() drop, before others"""
    run, plain = trial.run(), trial.plain()
    for step, drop in enumerate(DROPS.values()):
        run.train(step)
        run.backward(10 + step)
        drop(run)
        run.train(20 + step)
        plain.train(step, 20 + step)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    MISTAKES,
    "A gradient that one rank drops alone is in the sum of all, so that every rank raises",
    "raises",
    ("overlap_grad_reduce", "overlap_param_gather", "no_sync", "synchronize"),
    layouts=(*PLAIN, "TP", "stages"),
    but={"FSDP2": BY_FSDP},
)
def dropped_on_one_rank(trial: Trial) -> None:
    """zero_grad() on data rank 1 after reduction; nothing changes, and the next step trains"""
    run = trial.run().train(0)
    run.backward(1)
    if trial.option == "synchronize":
        run.opt.synchronize()
    if trial.data == 1:
        run.opt.zero_grad()
    unchanged(run, lambda: refused(run.opt.step, "was dropped on rank"))
    run.opt.zero_grad()
    run.train(2)
    plain = trial.plain().train(0, 2)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    MISTAKES,
    "With overlap_grad_reduce=False, and before synchronize() and clip_grad_norm_(), a rank may drop its own",
    "works",
    ("", "max_grad_norm", "GradScaler", "master_weights", "8 bits", "offload"),
    layouts=(*PLAIN, "TP", "stages"),
    but={"FSDP2": BY_FSDP},
)
def dropped_on_one_rank_before_reduction(trial: Trial) -> None:
    """zero_grad() on data rank 1 before the step counts as zeros"""
    run = trial.run()
    run.backward(0)
    if trial.data == 1:
        run.opt.zero_grad()
    run.step()
    plain = trial.plain()
    plain.backward(0, lacks=NAMES, lacking=1)
    plain.step()
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    MISTAKES,
    "`model.zero_grad(set_to_none=False)` before another backward is refused as an edit: `opt.zero_grad(set_to_none=False)` is not.",
    "raises",
    ("overlap_grad_reduce",),
    layouts=("none", "zero1"),
    but={**dict.fromkeys(GIVES_BACK, "gradients are given back, and dropped"), "FSDP2": BY_FSDP},
)
def zeros_by_the_model(trial: Trial) -> None:
    """model.zero_grad(set_to_none=False) and another backward"""
    run = trial.run()
    run.backward(0)
    run.model.zero_grad(set_to_none=False)

    def again() -> None:
        run.backward(1)
        run.opt.step()

    refused(again, "changed|reduced")


@promise(
    MISTAKES,
    "these parameters belong to a DistributedDataParallel model, which averages their gradients, and this optimizer "
    "averages them once more.",
    "warns",
    layouts=(*PLAIN, "stages"),
    but={
        "FSDP2": "DDP takes no DTensors",
        "TP": "DDP takes no DTensors",
        "stages": "as the layout inside of the stage",
    },
)
def averaged_twice(trial: Trial) -> None:
    """The model is wrapped in DDP after the optimizer was built; the training is right"""
    run = trial.run()
    inner, run.model = run.model, DistributedDataParallel(run.model)
    warned(lambda: run.train(0, 1), "belong to a DistributedDataParallel model", 'grads="reduced"')
    run.model = inner
    same(run.weights(), trial.plain().train(0, 1).weights())


@promise(
    MISTAKES,
    "A model wrapped in DDP, also a compiled one, tells the optimizer that gradients come averaged",
    "works",
    ("", "max_grad_norm", "clip_grad_norm_", "GradScaler", "8 bits", "offload"),
    layouts=WHOLE,
    but={
        **dict.fromkeys(FLAT, 'flat buffers refuse `grads="reduced"`'),
        "FSDP2": "DDP takes no DTensors",
        "TP": "DDP takes no DTensors",
        "stages": "as the layout inside of the stage",
    },
)
def given_ddp(trial: Trial) -> None:
    """MuonAdamW(ddp_model), in silence"""
    model = trial.model()
    wrapped = DistributedDataParallel(model)
    run = Run(trial, wrapped, trial.optimizer(wrapped)).train(0, 1, 2)
    run.model = model
    same(run.weights(), trial.plain().train(0, 1, 2).weights())


@promise(
    MISTAKES,
    "The same holds for `overrides=`, for keywords, for keys that are set in `param_groups` later, where the next step raises, "
    "and for groups that are loaded.",
    "raises",
)
def keys_that_do_nothing(trial: Trial) -> None:
    """A key of another rule, dion's spelling, a keyword in a group, capturable: given, and set later"""
    keys = {"momentum": 0.9, "mu": 0.9, "max_grad_norm": 1.0, "capturable": True, "kind": "adamw"}
    for key, value in keys.items():
        model = trial.model()
        named = [(name, p) for name, p in model.named_parameters() if p.ndim == 1]
        group = {"params": named, "rule": "adamw", key: value}
        refused(lambda group=group: trial.optimizer([group]), key)
        opt = trial.optimizer([{"params": named, "rule": "adamw"}])
        for _, param in named:
            param.grad = torch.ones_like(param)
        opt.param_groups[0][key] = value
        said = refused(opt.step, key)
        assert "param_groups[0]" in said, said


@promise(
    MISTAKES,
    "Groups that are put into `opt.param_groups` by hand, or taken out of it, are an error at the next step",
    "raises",
    OVERLAPS,
)
def groups_by_hand(trial: Trial) -> None:
    """param_groups.append, and pop"""
    for edit in (lambda groups: groups.append(dict(groups[0])), lambda groups: groups.pop()):
        run = trial.run()
        run.backward(0)
        edit(run.opt.param_groups)
        refused(run.opt.step, "param_groups had|was put into the list")


@promise(
    MISTAKES,
    "Unknown keys are kept, since trainers and schedulers store their own",
    "works",
    OVERLAPS,
)
def unknown_keys(trial: Trial) -> None:
    """A key of a trainer stays in its group, and nothing is said"""
    run = trial.run()
    for group in run.opt.param_groups:
        group["lr_scale"] = 0.5
    run.train(0, 1)
    assert all(group["lr_scale"] == 0.5 for group in run.opt.param_groups)
    plain = trial.plain().train(0, 1)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    MISTAKES,
    "one that looks like a typo of an option gets a warning",
    "warns",
)
def typos(trial: Trial) -> None:
    """A typo in a group, and in overrides, where it is an error"""
    model = trial.model()
    named = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
    group = {"params": named, "rule": "muon", "momentun": 0.9}
    warned(lambda: trial.optimizer([group]), "'momentun' is not known", "'momentum'")
    refused(
        lambda: trial.optimizer(model, overrides={named[0][0]: {"momentun": 0.9}}),
        "momentun",
        "'momentum'",
    )


@promise(
    MISTAKES,
    "FSDP1 replaces parameters by one flat vector per module, cut into shards.",
    "raises",
    layouts=(*PLAIN,),
    but=dict.fromkeys(("FSDP2", "TP", "stages"), "another way to cut the model"),
)
def fsdp1(trial: Trial) -> None:
    """FullyShardedDataParallel around the model"""
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    refused(lambda: trial.optimizer(model), "belongs to FullyShardedDataParallel", "FSDP2")


# On several ranks.


@promise(
    DISTRIBUTED,
    '**With `reduction="ordered"` the layout does not show**',
    "works",
    EVERY,
)
def bits_of_one_process(trial: Trial) -> None:
    """Five steps: weights and state, bit for bit, and the ranks compared"""
    ordered = {} if trial.layout == "FSDP2" else {"reduction": "ordered"}
    run, plain = trial.run(**ordered), trial.plain()
    run.train(*range(5))
    plain.train(*range(5))
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})
    assert check(run.model, run.opt) == []
    same_state(run.state(), {k: v for k, v in plain.state().items() if k in trial.names})


@promise(
    DISTRIBUTED,
    "With overlap, a second backward pass outside of `no_sync()` is an error that names the parameter",
    "raises",
    ("overlap_grad_reduce", "overlap_param_gather"),
    layouts=(*PLAIN, "TP", "stages"),
    but={"FSDP2": BY_FSDP},
)
def second_backward(trial: Trial) -> None:
    """Two backward passes without no_sync()"""
    run = trial.run()
    run.backward(0)
    refused(
        lambda: run.backward(1),
        "no_sync\\(\\)",
        "first.weight|second.weight|first.bias|second.bias",
    )


@promise(
    DISTRIBUTED,
    "Ranks without one add zeros; a parameter without a gradient on every rank is untouched, bit for bit.",
    "works",
    EVERY,
)
def missing_gradients(trial: Trial) -> None:
    """A parameter that one rank lacks, then one that all lack, then a whole batch on one rank"""
    run, plain = trial.run().train(0), trial.plain().train(0)
    hows = (
        {"lacks": ("first.weight",), "lacking": 1},
        {"lacks": ("second.bias", "first.bias"), "lacking": None},
        {"lacks": ("second.weight", "second.bias"), "lacking": None},
        {"lacks": NAMES, "lacking": 0},
    )
    for step, how in enumerate(hows, 1):
        before, state = run.weights(), run.state()
        run.train(step, **how)
        plain.train(step, **how)
        if how["lacking"] is None:
            left = [name for name in how["lacks"] if name in trial.names]
            same({k: run.weights()[k] for k in left}, {k: before[k] for k in left})
            same_state(run.state(), {k: state[k] for k in left if k in state})
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    DISTRIBUTED,
    'With `grads="reduced"` there is nothing to add zeros to: a rank without a gradient that others have is an error on every rank.',
    "raises",
    ("", "max_grad_norm", "offload"),
    layouts=WHOLE,
    but={
        **dict.fromkeys(FLAT, 'flat buffers refuse `grads="reduced"`'),
        "FSDP2": "a rank that lacks a gradient is in FSDP2's hands: `take_part`",
        "TP": "as in the layout over copies",
        "stages": "as the layout inside of the stage",
    },
)
def missing_where_reduced(trial: Trial) -> None:
    """One rank lacks a gradient that comes reduced"""
    run = trial.run(grads="reduced")
    for name, param in run.model.named_parameters():
        if trial.rank == 0 or name != "first.weight":
            param.grad = gradient(name, 0, 0, 0)
    unchanged(run, lambda: refused(run.opt.step, "first.weight"))


@promise(
    DISTRIBUTED,
    "compared at construction and for every added group; a difference raises on every rank and is named.",
    "raises",
    OVERLAPS,
)
def other_plans(trial: Trial) -> None:
    """Another bucket_size on one rank"""
    model = trial.model()
    kind = partial(trial.optimizer, model)
    refused(lambda: kind(bucket_size=64 + trial.data), "bucket|disagree|differ")


@promise(
    DISTRIBUTED,
    "So does an error that only one rank has: a learning rate that is no number, an edited gradient. No rank takes that step.",
    "raises",
    (
        "",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "max_grad_norm",
        "GradScaler",
        "master_weights",
        "8 bits",
        "offload",
    ),
)
def error_of_one_rank(trial: Trial) -> None:
    """lr that is no number on rank 1"""
    run = trial.run().train(0)
    run.backward(1)
    if trial.rank == 1:
        for group in run.opt.param_groups:
            group["lr"] = "fast"
    unchanged(run, lambda: refused(run.step, "lr|rank 1 could not"))


@promise(
    DISTRIBUTED,
    "where ranks differ, as with `ReduceLROnPlateau` on each rank's own loss, every rank raises before anything has changed",
    "raises",
    EVERY,
)
def other_hyperparameters(trial: Trial) -> None:
    """Another lr on one rank; with the old one the step trains"""
    run = trial.run().train(0)
    run.backward(1)
    if trial.data == 1:
        for group in run.opt.param_groups:
            group["lr"] = 0.2
    unchanged(
        run,
        lambda: refused(
            run.step, "lr of param_groups\\[0\\] is", "0.2", "0.1", "no rank took the step"
        ),
    )
    for group in run.opt.param_groups:
        group["lr"] = 0.1
    run.opt.zero_grad()
    run.__post_init__()  # a scaler that has seen no step
    run.train(2)
    plain = trial.plain().train(0, 2)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    DISTRIBUTED,
    "where they differ, rank 0's values are taken with a warning that names them.",
    "warns",
    OVERLAPS,
    layouts=(*PLAIN, "TP", "stages"),
    but={"FSDP2": "each rank begins with a part of its own"},
)
def other_replicas(trial: Trial) -> None:
    """A weight that differs on data rank 1 at construction; strict=True raises"""
    for strict in (True, False):
        model = trial.model()
        with torch.no_grad():
            if trial.data == 1:
                param = next(model.parameters())
                (param.to_local() if isinstance(param, DTensor) else param).add_(1)
        if strict:
            refused(lambda model=model: trial.optimizer(model, strict=True), "weight")
        else:
            warned(lambda model=model: trial.optimizer(model), "weight")
            same(Run(trial, model, None).weights(), Run(trial, trial.model(), None).weights())


def checking(trial: Trial) -> dict[str, float]:
    """opt.clip_grad_norm_ does not ask whether gradients are finite, as torch's does not."""
    return {"max_grad_norm": math.inf} if trial.option.startswith("clip_grad_norm_") else {}


@promise(
    DISTRIBUTED,
    "If it is not finite, the step is skipped on every rank and nothing changes.",
    "works",
    (
        "max_grad_norm",
        "clip_grad_norm_",
        "clip_grad_norm_, overlap",
        "GradScaler",
        "GradScaler, overlap",
    ),
)
def skipped_steps(trial: Trial) -> None:
    """NaN and infinity in one gradient of data rank 1; scales stay equal"""
    run, plain = trial.run(**checking(trial)).train(0), trial.plain().train(0)
    for step, bad in enumerate((math.nan, math.inf, -math.inf), 1):

        def skip_it(step: int = step, bad: float = bad) -> None:
            run.backward(step, bad=bad)
            run.step()
            run.opt.zero_grad()

        unchanged(run, skip_it)
    if run.scaler is not None:
        assert run.scaler.get_scale() == 1.0, run.scaler.get_scale()
    run.train(5)
    plain.train(5)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    DISTRIBUTED,
    "`max_grad_norm=math.inf` is only that check.",
    "works",
    ("", *OVERLAPS[1:], "no_sync", "synchronize", "master_weights", "8 bits", "offload"),
)
def only_the_check(trial: Trial) -> None:
    """max_grad_norm=math.inf with a NaN, and with the bits of no clipping"""
    run, plain = trial.run(max_grad_norm=math.inf).train(0, 1), trial.plain().train(0, 1)

    def skip_it() -> None:
        run.backward(2, bad=math.nan)
        run.step()
        run.opt.zero_grad()

    unchanged(run, skip_it)
    run.train(3)
    plain.train(3)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    DISTRIBUTED,
    "which may be freed by then and differs between ranks: it is refused, except under DDP.",
    "raises",
    ("", "overlap_grad_reduce", "overlap_param_gather"),
)
def torchs_scaler(trial: Trial) -> None:
    """torch.amp.GradScaler"""
    run = trial.run()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    wanted = run._wanted(0, 0, trial.data, (), None, None)
    scaler.scale(run.model(wanted)).backward()

    def act() -> None:
        scaler.step(run.opt)
        scaler.update()

    refused(act, "GradScaler|was reduced .* and given back")


@promise(
    DISTRIBUTED,
    "`present` (parameters per group that had a gradient on any rank)",
    "works",
    ("", *OVERLAPS[1:], "no_sync", "max_grad_norm", "8 bits", "offload"),
)
def metrics(trial: Trial) -> None:
    """metrics()["present"] and ["update_rms"]"""
    run = trial.run(update_rms=True)
    run.train(0, lacks=("first.bias", "second.bias"), lacking=1)
    found = run.opt.metrics()
    count = int(sum(torch.as_tensor(n).sum().item() for n in found["present"]))
    assert count == len(trial.names), found
    assert found["update_rms"].isfinite().all(), found
    run.train(1, lacks=("first.bias", "second.bias"))
    found = run.opt.metrics()
    count = int(sum(torch.as_tensor(n).sum().item() for n in found["present"]))
    assert count == len(trial.names) // 2, found


@promise(
    DISTRIBUTED,
    "launch in their steps, in the order in which these are called",
    "works",
    ("overlap_grad_reduce", "overlap_param_gather"),
    layouts=(*PLAIN, "TP"),
    but={"FSDP2": BY_FSDP, "stages": "a layer for each stage: nothing to divide"},
)
def two_optimizers(trial: Trial) -> None:
    """An optimizer for each layer, whose backward is one; each rank is told once"""
    model = trial.model()
    layers = [trial.optimizer(layer) for layer in model.children()]
    run, plain = Run(trial, model, layers[0]), trial.plain()

    def train() -> None:
        for step in range(3):
            lacks = ("second.weight",) if step == 1 else ()
            run.backward(step, lacks=lacks, lacking=trial.data)
            plain.train(step, lacks=lacks)
            for opt in layers:
                opt.step()
                opt.zero_grad()

    said = heard(train)
    assert all("MuonAdamW" in told or "overlap" in told for told in said), said
    same(run.weights(), plain.weights())


@promise(
    DISTRIBUTED,
    "**float16 gradients do not overflow when they are averaged.**",
    "works",
    layouts=(*PLAIN, "TP", "stages"),
    but={"FSDP2": BY_FSDP},
)
def float16_averages(trial: Trial) -> None:
    """40,000 on both data ranks"""
    model = trial.place(Net(trial.kept_layers).half())
    opt = trial.optimizer(model, master_weights=True)
    for param in model.parameters():
        param.grad = torch.full_like(param, 40_000.0)
    name = trial.names[0]
    mean = opt.full_gradient(name)
    assert (mean == 40_000.0).all(), mean.flatten()[:3]


@promise(
    DISTRIBUTED,
    "compares what ranks should have alike, bit for bit: all parameters of the model (frozen ones too)",
    "raises",
    OVERLAPS,
    but={"FSDP2": "ranks have parts, and no copies"},
)
def drift(trial: Trial) -> None:
    """One element that differs on data rank 1: samestep.stress.check names it on every rank"""
    run = trial.run().train(0)
    run.opt.wait_for_parameters() if hasattr(run.opt, "wait_for_parameters") else None
    assert check(run.model, run.opt) == []
    param = next(run.model.parameters())
    with torch.no_grad():
        if trial.data == 1:
            (param.to_local() if isinstance(param, DTensor) else param).view(-1)[3] += 1
    refused(lambda: check(run.model, run.opt), "replicas have drifted apart", "weight")


@promise(
    DISTRIBUTED,
    "`opt.whole_state()` gives every rank the state of every parameter by name, as one process would keep it, bit for bit",
    "works",
    EVERY,
)
def whole_state(trial: Trial) -> None:
    """whole_state() after three steps"""
    run, plain = trial.run().train(0, 1, 2), trial.plain().train(0, 1, 2)
    found = run.opt.whole_state()
    wanted = {k: v for k, v in plain.opt.whole_state().items() if k in trial.names}
    assert set(wanted) <= set(found)
    same_state(found, wanted)


@promise(
    DISTRIBUTED,
    "an optimizer's do, whatever gradients they lack",
    "works",
    ("", *OVERLAPS[1:], "no_sync", "max_grad_norm", "offload"),
    layouts=PLAIN,
    but={
        "FSDP2": "FSDP2's own collectives are between",
        **dict.fromkeys(
            ("TP", "stages"), "ranks are in several groups, whose operations differ by their ranks"
        ),
    },
)
def flight_digest(trial: Trial) -> None:
    """FlightRecorder's digest on ranks with other gradients"""
    run = trial.run().train(0)
    with samestep.FlightRecorder() as recorder:
        run.train(1, lacks=("first.weight", "second.bias"), lacking=1)
        run.train(2, lacks=NAMES, lacking=0)
        run.opt.wait_for_parameters()
        mine = (recorder.count, recorder.digest)
    found: list[object] = [None] * trial.ranks.world
    dist.all_gather_object(found, mine, group=trial.ranks.told)
    assert mine[0] > 0, "nothing was recorded"
    assert set(found) == {mine}, found


@promise(
    DISTRIBUTED,
    "report a gradient that is not finite, with parameter and rank, before it is averaged with others.",
    "raises",
    ("", "overlap_grad_reduce", "overlap_param_gather", "max_grad_norm"),
    layouts=(*PLAIN, "TP", "stages"),
    but={"FSDP2": "FSDP2 has averaged them already"},
)
def checked_gradients(trial: Trial) -> None:
    """check_gradients=True and a NaN on data rank 1"""
    run = trial.run(check_gradients=True)

    def act() -> None:
        run.backward(0, bad=math.nan)
        run.opt.step()

    if trial.layout == "stages" and trial.rank > 1:
        refused(act, "rank")
    else:
        refused(act, "first.weight", "rank")


@promise(
    DISTRIBUTED,
    "A parameter that only some ranks hold names them, and what its gradients are divided by",
    "works",
    ("", "overlap_grad_reduce", "max_grad_norm", "8 bits", "offload"),
    layouts=PLAIN,
    but={
        "FSDP2": "DTensors have a mesh instead",
        "TP": "DTensors have a mesh instead",
        "stages": "groups of stages are those of the optimizer",
    },
)
def experts(trial: Trial) -> None:
    """The first layer is an expert of each rank alone, divided by 2"""
    model = trial.model()
    named = dict(model.named_parameters())
    own = {"process_group": trial.ranks.alone, "divisor": 2}
    groups = [
        {"params": [("first.weight", named["first.weight"])], "rule": "muon", **own},
        {"params": [("first.bias", named["first.bias"])], "rule": "adamw", **own},
        {"params": [("second.weight", named["second.weight"])], "rule": "muon"},
        {"params": [("second.bias", named["second.bias"])], "rule": "adamw"},
    ]
    options = {"max_grad_norm": 1e6} if trial.option == "max_grad_norm" else {}
    run = Run(trial, model, trial.optimizer(groups, **options)).train(0, 1)
    plain = trial.plain(**options)
    for step in range(2):
        for name, param in plain.model.named_parameters():
            grads = []
            for data in range(2):
                rounded = (param.detach() * 8).round() / 8
                grads.append(gradient(name, step, 0, data) + rounded)
            both = sum(grads) / 2
            param.grad = grads[trial.data] / 2 if name.startswith("first") else both
        plain.opt.step()
    same(run.weights(), plain.weights())


@promise(
    DISTRIBUTED,
    "it loads only on the same rank of the same plan",
    "raises",
    layouts=(*SHARED, "stages", "TP"),
    but={"none": "every rank has all of it", "FSDP2": "its state dict has DTensors"},
)
def part_of_a_state_dict(trial: Trial) -> None:
    """A part of rank 0 in another rank; copy and pickle are refused"""
    run = trial.run(state_dict_form="part").train(0)
    told: list[object] = [None] * trial.ranks.world
    dist.all_gather_object(told, pickle.dumps(run.opt.state_dict()), group=trial.ranks.told)
    other = pickle.loads(told[(trial.rank + 1) % trial.ranks.world])
    refused(lambda: run.opt.load_state_dict(other), "rank|part|plan")
    run.opt.load_state_dict(pickle.loads(told[trial.rank]))
    refused(lambda: copy.deepcopy(run.opt), "copied|pickled|copy")
    refused(lambda: pickle.dumps(run.opt), "copied|pickled|pickle")


@promise(
    DISTRIBUTED,
    "says for this run what the optimizer takes for granted of the world around it",
    "works",
    OVERLAPS,
)
def explained(trial: Trial) -> None:
    """explain() before and after a step"""
    run = trial.run()
    assert "averages" in str(run.opt.explain())
    run.train(0)
    assert "Checked" in str(run.opt.explain())


# Flat buffers.


@promise(
    FLAT_PAGE,
    "**After `step()` gradients are gone**",
    "works",
    ("", *OVERLAPS[1:], "no_sync", "max_grad_norm", "offload"),
    layouts=FLAT,
)
def gradients_are_gone(trial: Trial) -> None:
    """.grad after a step, and a gradient that is assigned"""
    run, plain = trial.run(), trial.plain()
    for step in range(3):
        run.backward(step)
        run.step()
        assert all(p.grad is None for p in run.model.parameters())
        plain.train(step)
    for param in run.model.parameters():
        param.grad = torch.full_like(param, 0.5 + trial.data)
    for param in plain.model.parameters():
        param.grad = torch.full_like(param, 1.0)
    run.step()
    plain.step()
    same(run.weights(), plain.weights())


@promise(
    FLAT_PAGE,
    "waits for them and needs to call nothing: EMA (`AveragedModel`), clamping, printing, `deepcopy`, `pickle`, `state_dict`, "
    "a module that computes with the weights of another.",
    "works",
    ("overlap_param_gather",),
    layouts=(*FLAT, "TP", "stages"),
    but={"FSDP2": "FSDP2 gathers parameters itself"},
)
def early_reads(trial: Trial) -> None:
    """An AveragedModel, clamping, deepcopy, pickle and state_dict right after step()"""
    run, plain = trial.run(), trial.plain()
    average, wanted = AveragedModel(run.model), AveragedModel(plain.model)
    for step in range(3):
        for each, ema in ((run, average), (plain, wanted)):
            each.train(step)
            ema.update_parameters(each.model)
            with torch.no_grad():
                for param in each.model.parameters():
                    param.clamp_(-0.25, 0.25)
    run.train(3)
    plain.train(3)
    copied = copy.deepcopy(run.model)
    run.train(4)
    states = dict(run.model.state_dict())
    plain_copy = copy.deepcopy(plain.model)
    plain.train(4)

    def whole(params: dict) -> dict:
        return {
            k: (v.full_tensor() if isinstance(v, DTensor) else v).detach()
            for k, v in params.items()
            if k in trial.names
        }

    same(whole(states), whole(plain.model.state_dict()))
    same(whole(dict(copied.named_parameters())), whole(dict(plain_copy.named_parameters())))
    same(
        whole(dict(average.module.named_parameters())),
        whole(dict(wanted.module.named_parameters())),
    )
    if trial.layout != "TP":
        run.train(5)
        plain.train(5)
        again = torch.load(_saved(run.model.state_dict()))
        same(whole(again), whole(plain.model.state_dict()))


def _saved(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@promise(
    FLAT_PAGE,
    "**Parameters may be edited and loaded in place.**",
    "works",
    ("", *OVERLAPS[1:], "no_sync", "master_weights", "8 bits", "offload"),
)
def edited_weights(trial: Trial) -> None:
    """Weights are scaled in place between steps, and loaded"""
    run, plain = trial.run(), trial.plain()
    for step in range(3):
        for each in (run, plain):
            each.train(step)
            with torch.no_grad():
                for param in each.model.parameters():
                    param.mul_(0.5)
            if trial.option == "master_weights":
                each.opt.refresh_master_weights()
    run.train(3)
    plain.train(3)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    FLAT_PAGE,
    "A parameter whose `.data` was replaced is brought back into the buffer; one of another dtype is refused.",
    "works",
    ("", *OVERLAPS[1:], "no_sync", "offload"),
    layouts=FLAT,
)
def replaced_data(trial: Trial) -> None:
    """.data is replaced between steps"""
    run, plain = trial.run().train(0), trial.plain().train(0)
    for each in (run, plain):
        each.model.first.weight.data = torch.full((12, 8), 0.5)
    for each in (run, plain):
        each.train(1)
    same(run.weights(), plain.weights())
    run.model.first.weight.data = run.model.first.weight.data.double()

    def act() -> None:
        run.backward(2)
        run.step()

    refused(act, "first.weight|dtype|Double|double")


@promise(
    FLAT_PAGE,
    'expanded ones, `sharding="none"`, `grads="reduced"`, `owners="cyclic"`, `max_state_ratio`.',
    "raises",
    layouts=FLAT,
)
def refused_by_flat(trial: Trial) -> None:
    """Each of these keywords, and an expanded parameter"""
    for key, value in {
        "sharding": "none",
        "grads": "reduced",
        "owners": "cyclic",
        "max_state_ratio": 1.5,
    }.items():
        refused(
            lambda key=key, value=value: trial.optimizer(trial.model(), **{key: value}), key, "flat"
        )
    model = trial.model()
    model.first.register_parameter("wide", nn.Parameter(torch.ones(1).expand(6, 6)))
    refused(lambda: trial.optimizer(model), "first.wide")


@promise(
    FLAT_PAGE,
    "Parameters with other strides (`channels_last`) become contiguous; in the other layouts they keep their strides.",
    "works",
    ("", *OVERLAPS[1:], "offload"),
    layouts=(*PLAIN, "stages"),
    but={"FSDP2": "torch's shards are contiguous", "TP": "torch's shards are contiguous"},
)
def other_strides(trial: Trial) -> None:
    """A transposed weight trains as a contiguous one"""
    model = trial.model()
    layer = next(model.children())
    layer.weight.data = layer.weight.data.T.contiguous().T
    run = Run(trial, model, trial.optimizer(model)).train(0, 1, 2)
    contiguous = trial.options.get("buffers") == "flat"
    assert layer.weight.is_contiguous() == contiguous, layer.weight.stride()
    plain = trial.plain().train(0, 1, 2)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    FLAT_PAGE,
    "Collective, by name, on every rank; a setter takes the first rank's value. On all layouts, also DTensors.",
    "works",
    EVERY,
)
def whole_values(trial: Trial) -> None:
    """full_parameter, full_state, full_gradient and their setters, then two more steps"""
    run, plain = trial.run().train(0), trial.plain().train(0)
    matrix = next(name for name in trial.names if "weight" in name)
    state = "momentum_buffer"
    for each in (run, plain):
        assert each.opt.full_state(matrix, state).shape == each.opt.full_parameter(matrix).shape
    same({"p": run.opt.full_parameter(matrix)}, {"p": plain.opt.full_parameter(matrix)})
    same({"s": run.opt.full_state(matrix, state)}, {"s": plain.opt.full_state(matrix, state)})
    for each in (run, plain):
        for name in (
            own for own in NAMES if "weight" in own and (each.plain or own in trial.names)
        ):
            each.opt.set_full_parameter(name, each.opt.full_parameter(name) * 0.5)
            each.opt.set_full_state(name, state, each.opt.full_state(name, state) * 0.5)
        each.train(1)
        each.backward(2)
    scale = run.scaler.get_scale() if run.scaler is not None else 1
    same({"g": run.opt.full_gradient(matrix) / scale}, {"g": plain.opt.full_gradient(matrix)})
    for each in (run, plain):
        each.step()
        each.opt.zero_grad()
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    FLAT_PAGE,
    "Several model chunks under one optimizer: `MuonAdamW(nn.ModuleList(chunks), ...)`.",
    "works",
    OVERLAPS,
    layouts=FLAT,
)
def chunks(trial: Trial) -> None:
    """The two layers as chunks of a ModuleList"""
    model = trial.model()
    run = Run(trial, model, trial.optimizer(nn.ModuleList([model.first, model.second]))).train(
        0, 1, 2
    )
    same(run.weights(), trial.plain().train(0, 1, 2).weights())


@promise(
    FLAT_PAGE,
    "parameters that are on their way are NaN until they are waited for",
    "works",
    ("overlap_param_gather",),
    layouts=(*FLAT, "TP", "stages"),
    but={"FSDP2": "FSDP2 gathers parameters itself"},
)
def poisoned(trial: Trial) -> None:
    """poison_early_reads=True trains to the same bits"""
    run, plain = trial.run(poison_early_reads=True).train(0, 1, 2), trial.plain().train(0, 1, 2)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    FLAT_PAGE,
    "gradients are accumulated and reduced in it",
    "works",
    ("", *OVERLAPS[1:], "no_sync", "max_grad_norm", "GradScaler", "offload"),
    layouts=(*PLAIN, "stages"),
    but={
        "FSDP2": "FSDP2's `MixedPrecisionPolicy(reduce_dtype=)`",
        "TP": "of DTensors autograd keeps their dtype",
    },
)
def wide_gradients(trial: Trial) -> None:
    """bfloat16 parameters with grad_dtype=torch.float32 and main parameters"""
    model = Net(trial.kept_layers).bfloat16()
    options = {"grad_dtype": torch.float32, "master_weights": True}
    run = Run(trial, model, trial.optimizer(model, **options))
    narrow = Net().bfloat16()
    alone = {
        "process_group": trial.ranks.alone,
        "stage_group": "none",
        "sharding": "none",
        "master_weights": True,
    }
    alone |= {"max_grad_norm": NORM} if trial.option == "max_grad_norm" else {}
    opt = samestep.MuonAdamW(narrow, lr=0.1, weight_decay=0.1, **alone)
    plain = Run(trial, narrow, opt, plain=True)
    run.train(0, 1, 2)
    plain.train(0, 1, 2)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


# Troubleshooting.


@promise(
    TROUBLE,
    "Plans are compared there, and a difference raises",
    "raises",
    OVERLAPS,
)
def other_models(trial: Trial) -> None:
    """A parameter more on one rank; the next optimizer is built as ever"""
    model = trial.model()
    if trial.rank == 1:
        model.register_parameter("extra", nn.Parameter(torch.ones(5)))
    if trial.layout == "stages" and trial.rank > 1:
        trial.optimizer(model)  # of another stage, whose ranks are not asked
    else:
        refused(lambda: trial.optimizer(model), "extra|plan differs between ranks")
    trial.run().train(0)


@promise(
    TROUBLE,
    "`state_dict()` of an optimizer whose ranks share the state raises until all of them have called `consolidate_state_dict()`; "
    "then it is whole on rank 0 and loads on any number of them",
    "works",
    ("", *OVERLAPS[1:], "master_weights", "8 bits", "offload"),
    layouts=(*PLAIN,),
    but={
        "FSDP2": "its state dict has DTensors",
        "TP": "as of FSDP2",
        "stages": "as the layout inside of the stage",
    },
)
def consolidated(trial: Trial) -> None:
    """state_dict() raises, is whole after consolidation, and loads into one process"""
    run, plain = trial.run().train(0, 1), trial.plain().train(0, 1)
    if trial.layout != "none":
        refused(run.opt.state_dict, "consolidate_state_dict")
    run.opt.consolidate_state_dict()
    told = [run.opt.state_dict()] if trial.rank == 0 else [None]
    dist.broadcast_object_list(told, group=trial.ranks.told)
    fresh = trial.plain()
    fresh.model.load_state_dict(run.model.state_dict())
    fresh.opt.load_state_dict(told[0])
    fresh.train(2)
    plain.train(2)
    run.train(2)
    same(run.weights(), plain.weights())
    same(fresh.weights(), plain.weights())


@promise(
    TROUBLE,
    "*Saved on another number of ranks or in another layout*: `samestep.load` takes it",
    "works",
    ("", *OVERLAPS[1:], "max_grad_norm", "master_weights", "8 bits", "offload"),
    but={"stages": "a checkpoint of stages: `tests/parallel/test_pipeline_checkpoint.py`"},
)
def checkpoints(trial: Trial) -> None:
    """Saved here, loaded into one process and back, and trained on"""
    run, plain = trial.run().train(0, 1), trial.plain().train(0, 1)
    told = [tempfile.mkdtemp() if trial.rank == 0 else None]
    dist.broadcast_object_list(told, group=trial.ranks.told)
    path = Path(told[0]) / "checkpoint"
    samestep.save(path, run.model, run.opt)
    other = trial.run()
    samestep.load(path, other.model, other.opt)
    for each in (run, plain, other):
        each.train(2)
    same(run.weights(), plain.weights())
    same(other.weights(), plain.weights())
    dist.barrier(group=trial.ranks.told)
    if trial.rank == 0:
        shutil.rmtree(told[0])


@promise(
    TROUBLE,
    "a step that is not finite is skipped, on all ranks",
    "works",
    ("max_grad_norm", "clip_grad_norm_, overlap", "GradScaler"),
)
def skipped_on_all(trial: Trial) -> None:
    """One step with a NaN on one rank between others"""
    run, plain = trial.run(**checking(trial)).train(0), trial.plain().train(0)
    run.train(1, bad=math.nan)
    run.train(2)
    plain.train(2)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    TROUBLE,
    "gradients are freed as buckets are reduced, and that happens inside backward only with `overlap_grad_reduce=True`",
    "works",
    ("", "overlap_grad_reduce"),
    layouts=("zero2", "flat zero2", "TP", "stages"),
    but={
        **dict.fromkeys(("none", "zero1", "flat zero1"), "gradients stay whole"),
        "FSDP2": "gradients are parts from the start",
    },
)
def freed_in_backward(trial: Trial) -> None:
    """Whether gradients have memory after backward"""
    run = trial.run()
    run.backward(0)
    for name, param in run.model.named_parameters():
        overlapped = trial.option == "overlap_grad_reduce"
        try:
            param.grad.norm()
            has = True
        except RuntimeError:
            has = False
        assert has != overlapped, name
    run.step()


COLLECTIVE = min(limit(20.0), 60.0)  # seconds for a rank that does not come

# --- trying them ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    promise: Promise
    layout: str
    option: str

    def __str__(self) -> str:
        return f"{self.promise.name} / {self.layout} / {self.option or 'as it is'}"


def cells(promises: Iterable[Promise] = PROMISES) -> list[Cell]:
    """All that something is promised of."""
    return [
        Cell(each, layout, option)
        for each in promises
        for option in each.options
        for layout in LAYOUTS
        if each.why_not(layout, option) is None
    ]


def _attempt(ranks: Ranks, cell: Cell) -> str | None:
    """None if the promise was kept on this rank, otherwise what was found."""
    gc.collect()  # optimizers of earlier trials would hold launches back beside this one's
    try:
        said = heard(lambda: cell.promise.action(Trial(ranks, cell.layout, cell.option)))
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    ours = [text for text in said if "torch." not in text.split(":")[0]]
    return f"warned of {ours}" if ours else None


def _work(rank: int, world: int, chosen: list[Cell], folder: Path) -> None:
    """Tries one cell after another. A rank that finds one broken ends all: they may have parted."""
    ranks = Ranks(rank, world)
    with (folder / f"rank_{rank}").open("a", buffering=1) as file:
        for number, cell in enumerate(chosen):
            found = _attempt(ranks, cell)
            file.write(json.dumps([number, found]) + "\n")
            if found:
                raise AssertionError(found)
            dist.barrier(group=ranks.told)


def _try_on(world: int, chosen: list[Cell], tell: Callable[[Cell, str | None], None]) -> None:
    while chosen:
        with tempfile.TemporaryDirectory() as folder:
            ended = ""
            try:
                run_forked(
                    world,
                    _work,
                    world,
                    chosen,
                    Path(folder),
                    timeout=HANG,
                    collective_timeout=COLLECTIVE,
                )
            except RanksFailed as failed:
                ended = str(failed)
            found = [
                [json.loads(line)[1] for line in path.read_text().splitlines()]
                for path in (Path(folder) / f"rank_{rank}" for rank in range(world))
                if path.exists()
            ]
        found += [[]] * (world - len(found))
        done = min(map(len, found))
        for number in range(done):
            said = {rank: own[number] for rank, own in enumerate(found) if own[number]}
            text = "; ".join(f"rank {rank}: {what}" for rank, what in said.items())
            tell(chosen[number], text or None)
        told = done and any(own[done - 1] for own in found)
        if ended and not told and done < len(chosen):
            said = {rank: own[done] for rank, own in enumerate(found) if len(own) > done}
            tell(chosen[done], f"did not end on every rank ({said}): {ended[-2000:]}")
            done += 1
        if not done:
            raise AssertionError(f"no cell was tried: {ended}")
        chosen = chosen[done:]


def try_cells(
    chosen: list[Cell], tell: Callable[[Cell, str | None], None] = lambda cell, found: None
) -> dict[Cell, str | None]:
    """What was found of each cell: None where the promise was kept on every rank."""
    outcome: dict[Cell, str | None] = {}

    def keep(cell: Cell, found: str | None) -> None:
        outcome[cell] = found
        tell(cell, found)

    for world in (2, 4):
        _try_on(world, [cell for cell in chosen if LAYOUTS[cell.layout][0] == world], keep)
    return outcome


# --- the page ------------------------------------------------------------------------------------

HEAD = """\
# Promises

Sentences of [mistakes.md](mistakes.md), [distributed.md](distributed.md), [flat.md](flat.md) and
[troubleshooting.md](troubleshooting.md) that say that something raises, warns or works, tried in every layout and with the
options that matter to them, on gloo ranks: two, and four for tensor parallel (TP, two copies of a model that is cut in two) and
stages (two stages of two data ranks). Made by `make promises` (`python -m tests.promises`), which writes this page only if nothing
is broken. `make test` tries a sample of it, `make soak` all.

Where something works, weights have the bits of one process that is given the mean of the same gradients, and so has the state
where it is asked for; gradients are small multiples of 1/8, whose sums are exact in any order. Where something raises, every rank raises.
"""


def render(outcome: dict[Cell, str | None]) -> str:
    """The page, of what was found."""
    kept, broken = (
        sum(v is None for v in outcome.values()),
        sum(v is not None for v in outcome.values()),
    )
    reasons: dict[str, int] = {}
    body = []
    for page in dict.fromkeys(each.page for each in PROMISES):
        body += ["", f"## {page}", "", f"| [{page}]({page}) | with | {' | '.join(LAYOUTS)} |"]
        body.append("|" + "---|" * (len(LAYOUTS) + 2))
        for each in (own for own in PROMISES if own.page == page):
            for number, option in enumerate(each.options):
                marks = []
                for layout in LAYOUTS:
                    reason = each.why_not(layout, option)
                    if reason is None:
                        cell = Cell(each, layout, option)
                        marks.append(
                            "?" if cell not in outcome else "broken" if outcome[cell] else "kept"
                        )
                    else:
                        marks.append(f"[{reasons.setdefault(reason, len(reasons) + 1)}]")
                said = f"**{each.kind}**: {each.tried}" if not number else ""
                body.append(f"| {said} | {f'`{option}`' if option else ''} | {' | '.join(marks)} |")
    notes = ["", "## Not applicable", ""]
    notes += [f"{number}. {reason}" for reason, number in reasons.items()]
    skipped = sum(
        each.why_not(layout, option) is not None
        for each in PROMISES
        for option in each.options
        for layout in LAYOUTS
    )
    count = f"\n{len(PROMISES)} promises in {kept + broken + skipped} cells: kept {kept}, broken {broken}, not applicable {skipped}.\n"
    return HEAD + count + "\n".join([*body, *notes]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of the name of a page or a promise")
    parser.add_argument("--layout", choices=LAYOUTS, nargs="*", default=list(LAYOUTS))
    parser.add_argument("--option", choices=[name or "none" for name in OPTIONS])
    args = parser.parse_args()
    chosen = [
        cell
        for cell in cells()
        if args.only in cell.promise.page + " " + cell.promise.name
        and cell.layout in args.layout
        and args.option in (None, cell.option or "none")
    ]

    def tell(cell: Cell, found: str | None) -> None:
        if found:
            print(f"broken: {cell}\n    {found}", flush=True)

    outcome = try_cells(chosen, tell)
    print(
        {
            "broken" if found else "kept": n
            for found, n in Counter(map(bool, outcome.values())).items()
        }
    )
    broken = any(outcome.values())
    if len(chosen) == len(cells()) and not broken:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(render(outcome))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
