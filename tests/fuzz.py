"""Random trainings on real ranks, against a float64 reference and against one process.

A seed makes a `Case`: a model with odd and empty shapes, group keys, keywords, a layout, which rank
has a gradient of which parameter when, infinities, schedules, and a new start in the middle. Ranks
play it; then it is judged:

    replicas                bit for bit, after every step
    absent parameters       bit for bit as before the step; all of them after a step that is skipped
    one process             bit for bit, without the new start: parameters and state at the end
    the reference           within the limits of the design, where rounding has limits
    errors                  on every rank, of samestep's own or naming an option of the case

    python -m tests.fuzz                        # 1,000 seeds; goes on where it was
    python -m tests.fuzz --first 7 --count 1    # one of them
    python -m tests.fuzz --case FILE            # a case as a failure prints it, maybe edited
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import json
import math
import random
import sys
import tempfile
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import samestep
from samestep.fsdp import take_part, use_ordered_reduction
from samestep.lab.stress.reference import NORM_FACTORS, Reference
from samestep.launch import RanksFailed
from tests.limits import limit
from tests.ranks import run_forked

SHAPES_MATRIX = [
    (1, 1), (1, 7), (7, 1), (5, 3), (3, 5), (8, 8), (13, 6), (4, 17), (12, 12), (0, 4), (4, 0),
    (2, 5, 3), (3, 4, 4), (1, 3, 2), (0, 3, 3), (3, 0, 2),
]  # fmt: skip
SHAPES_OTHER = [(), (1,), (5,), (37,), (0,), (3, 5), (9, 4), (2, 3, 4), (0, 2), (2, 0), (1, 1)]
PATTERNS = ("always", "always", "random", "random", "one copy", "odd steps", "never")
OWN_ERRORS = ("CheckpointError", "RanksDisagreeError", "RankProblemError")
SCALE = 2.0**6
SHORT = ("bfloat16", "float16")
# Relative to the way that a parameter has gone, and to the largest its state has been.
LIMITS = {"adamw": 2e-5, "muon": 3e-4, "adamuon": 1e-3}
NOISE, MAGNIFIED = 3e-7, 4.0
STATE_LIMITS = {"variance": 1e-3, "second_moment": 1e-3}  # squares of updates; others: 2e-5


@dataclass(frozen=True)
class Layout:
    """Where parameters are: plain | reduced | fsdp2 | hsdp | tp; of tp how many copies."""

    kind: str = "plain"
    copies: int = 1
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Param:
    """One parameter. cut: how tensor parallel holds it, rows | columns | whole | plain."""

    name: str
    shape: tuple[int, ...]
    group: int
    dtype: str = "float32"
    pattern: str = "always"
    cut: str = "plain"


@dataclass(frozen=True)
class Case:
    """A training, as plain data."""

    seed: int
    world: int
    layout: Layout
    params: tuple[Param, ...]
    groups: tuple[dict[str, Any], ...]
    options: dict[str, Any]  # keywords that concern every layout
    steps: int = 3
    micros: int = 1
    accumulate: str = "no_sync"  # | synchronize | plain
    gradients: str = "normal"  # | whole: sums of which are exact
    scaler: bool = False
    infinities: tuple[tuple[int, int, str], ...] = ()  # step, copy, parameter
    edits: tuple[tuple[int, int, str, Any], ...] = ()  # step, group, key, value
    reload: tuple[int, str] | None = None  # before which step; state_dict | whole | file
    then: Layout | None = None  # the layout after that; None: the same

    @property
    def copies(self) -> int:
        """How many different gradients are averaged."""
        return self.layout.copies if self.layout.kind == "tp" else self.world

    @property
    def skips(self) -> bool:
        return self.scaler or self.options.get("max_grad_norm") is not None

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def case_from(text: str) -> Case:
    given = json.loads(text)
    for key in ("layout", "then"):
        given[key] = None if given[key] is None else Layout(**given[key])
    given["params"] = tuple(Param(**{**p, "shape": tuple(p["shape"])}) for p in given["params"])
    for key in ("groups", "infinities", "edits"):
        given[key] = tuple(tuple(x) if isinstance(x, list) else x for x in given[key])
    given["reload"] = given["reload"] and tuple(given["reload"])
    return Case(**given)


# --- a case from a seed --------------------------------------------------------------------------


def case_of(seed: int, world: int | None = None) -> Case:
    """The case of a seed; the number of ranks may be chosen."""
    draw = random.Random(seed)
    ranks = draw.choice((1, 2, 2, 3, 4))
    kind = draw.choice(("plain",) * 6 + ("reduced", "fsdp2", "fsdp2", "hsdp", "tp", "tp"))
    world = world or (4 if kind == "hsdp" else ranks)
    kind = "fsdp2" if kind == "hsdp" and world != 4 else kind
    copies = draw.choice([n for n in (1, 2) if world % n == 0]) if kind == "tp" else world
    groups, params = _model(draw, kind, world // copies)
    options = _drawn(
        draw,
        {
            "max_grad_norm": (0.4, [math.inf, 1.0, 0.01]),
            "master_weights": (0.0, [True]),
            "batch_elements": (0.2, [1, 40]),
            "update_rms": (0.2, [True]),
            "check_gradients": (0.0, [True]),
        },
    )
    if any(p.dtype in SHORT for p in params):
        options["master_weights"] = draw.random() < 0.7
    few = [p for p in params if p.dtype in SHORT]
    scaler = draw.random() < 0.15 and not any(p.dtype == "float16" for p in params)
    if scaler:  # torch's own raises where there is no gradient at all
        params = (replace(params[0], pattern="always"), *params[1:])
    steps = draw.randint(2, 5)
    micros = draw.choice((1, 1, 2, 3))
    layout = Layout(kind, copies, _distribution(draw, kind))
    accumulate = draw.choice(("no_sync", "synchronize", "plain"))
    if kind != "plain":
        accumulate = "plain" if kind in ("fsdp2", "hsdp", "reduced") else "no_sync"
    reload, then = None, None
    if steps > 2 and draw.random() < 0.5:
        reload = draw.randint(1, steps - 1), draw.choice(("state_dict", "whole", "file", "file"))
        if reload[1] == "file" and draw.random() < 0.6:
            elsewhere = kind if kind == "tp" else draw.choice(("plain", "reduced", "fsdp2"))
            if few and elsewhere == "fsdp2":
                elsewhere = "plain"
            if elsewhere != "fsdp2" or all(p.shape and math.prod(p.shape) for p in params):
                then = Layout(elsewhere, copies, _distribution(draw, elsewhere))
    everyone = (layout, then or layout)
    if accumulate == "plain" and any(e.options.get("overlap_grad_reduce") for e in everyone):
        accumulate = "no_sync"
    if accumulate != "plain" and any(e.kind not in ("plain", "tp") for e in everyone):
        accumulate = "no_sync"
    skips = scaler or "max_grad_norm" in options
    infinities = ()
    if skips and draw.random() < 0.5:
        infinities = tuple(
            (draw.randrange(steps), draw.randrange(copies), draw.choice(params).name)
            for _ in range(draw.randint(1, 2))
        )
    edits = tuple(
        _edit(draw, step, number, group)
        for step in range(1, steps)
        for number, group in enumerate(groups)
        if draw.random() < 0.25
    )
    whole = bool(few) or draw.random() < 0.5
    return Case(
        seed, world, layout, params, groups, options, steps, micros, accumulate,
        "whole" if whole else "normal", scaler, infinities, edits, reload, then,
    )  # fmt: skip


def _drawn(draw: random.Random, table: dict[str, tuple[float, list[Any]]]) -> dict[str, Any]:
    return {key: draw.choice(of) for key, (share, of) in table.items() if draw.random() < share}


def _edit(draw: random.Random, step: int, number: int, group: dict[str, Any]) -> tuple[Any, ...]:
    own = "betas" if group["rule"] == "adamw" else "momentum"
    key = draw.choice(("lr", "lr", "weight_decay", own))
    value = {
        "lr": draw.choice((0.0, 0.003, 0.05)),
        "weight_decay": draw.choice((0.0, 0.3)),
        "betas": (0.8, 0.9),
        "momentum": 0.7,
    }[key]
    return step, number, key, value


def _distribution(draw: random.Random, kind: str) -> dict[str, Any]:
    """Keywords of one layout, nearly always such as go together."""
    options = _drawn(
        draw,
        {
            "reduction": (0.6, ["ordered"]),
            "crossover": (0.8, [1, 1, 8, 30, 5000]),
            "bucket_size": (0.7, [1, 7, 40, 300]),
            "waves": (0.3, [1, 2]),
            "check_gradients": (0.05, [True]),
            "strict": (0.1, [True]),
            "offload": (0.0, ["state"]),
        },
    )
    if kind in ("fsdp2", "hsdp", "tp"):
        more = {
            "muon_schedule": (0.4, ["gather"]),
            "chunk_size": (0.4, [1, 30, 200]),
            "chunks_ahead": (0.3, [0, 2]),
        }
        options |= _drawn(draw, more)
    if kind == "reduced":
        options["grads"] = "reduced"
        options.pop("check_gradients", None)  # refused
    if kind in ("plain", "reduced", "tp"):
        options["sharding"] = draw.choice(("auto", "none", "zero1", "zero2", "zero1", "zero2"))
    if kind in ("plain", "tp"):
        if options["sharding"] != "none" and draw.random() < (0.4 if kind == "plain" else 0.2):
            options["buffers"] = "flat"
        if draw.random() < 0.4:
            options["overlap_grad_reduce"] = True
        if "buffers" in options and draw.random() < 0.4:
            options["overlap_param_gather"] = True
            options["poison_early_reads"] = draw.random() < 0.7
        if "buffers" not in options:
            more = {
                "owners": (0.2, ["cyclic"]),
                "max_state_ratio": (0.2, [1.0, 1.5]),
                "deferred": (0.1, [True]),
                "ranks_per_host": (0.2, [1, 2]),
            }
            options |= _drawn(draw, more)
            if "overlap_grad_reduce" in options:
                options.pop("deferred", None)
    return options


def _model(
    draw: random.Random, kind: str, parts: int
) -> tuple[tuple[dict[str, Any], ...], tuple[Param, ...]]:
    groups, params = [], []
    count = 0
    few = draw.random() < 0.2 and kind in ("plain", "reduced")
    for number in range(draw.randint(1, 4)):
        rule = draw.choice(("muon", "muon", "adamw", "adamw", "adamuon"))
        group = {"rule": rule, **(_adamw(draw) if rule == "adamw" else _muon(draw, rule))}
        shapes = SHAPES_OTHER if rule == "adamw" else SHAPES_MATRIX
        if kind in ("fsdp2", "hsdp"):  # which has no scalars, and no gradients of nothing
            shapes = [shape for shape in shapes if shape and math.prod(shape)]
        own = [draw.choice(shapes) for _ in range(draw.randint(1, 4))]
        if rule != "adamw" and draw.random() < 0.3:
            split, rows = draw.choice(
                (
                    ([3, 5], 8),
                    ("halves", 6),
                    ("heads:3", 9),
                    ("interleaved:3x2", 12),
                    ([1, 1, 4], 6),
                )
            )
            group["split_sizes"] = split
            own = [draw.choice(((rows, 3), (rows, 10), (2, rows, 4)))] * draw.randint(1, 2)
        elif rule != "adamw" and draw.random() < 0.15:
            group["transposed"] = True
        elif rule != "adamw" and draw.random() < 0.15:
            group["flatten"] = True
            own = [draw.choice(((3, 2, 2, 2), (5, 3), (4, 3, 1))) for _ in own]
        for shape in own:
            dtype = draw.choice(("bfloat16", "bfloat16", "float16")) if few else "float32"
            dtype = "float32" if draw.random() < 0.4 else dtype
            cut = draw.choice(("rows", "columns", "whole", "plain")) if kind == "tp" else "plain"
            if cut in ("rows", "columns") and not shape:
                cut = "plain"
            pattern = draw.choice(PATTERNS)
            params.append(Param(f"p{count}", shape, number, dtype, pattern, cut))
            count += 1
        groups.append(group)
    return tuple(groups), tuple(params)


def _adamw(draw: random.Random) -> dict[str, Any]:
    options = {"lr": draw.choice((0.01, 0.1)), **_drawn(draw, {
        "weight_decay": (0.7, [0.0, 0.1, 0.5]),
        "betas": (0.5, [(0.9, 0.95), (0.0, 0.9), (0.5, 0.5)]),
        "eps": (0.3, [1e-8, 1e-3]),
        "amsgrad": (0.3, [True]),
        "eps_hat": (0.2, [True]),
        "cautious": (0.2, [True]),
        "decay_form": (0.3, ["independent", "l2"]),
        "maximize": (0.2, [True]),
        "state_dtypes": (0.15, ["8bit", "bf16_stochastic"]),
    })}  # fmt: skip
    if options.get("decay_form") == "l2":
        options.pop("cautious", None)
    if not options.keys() & {"eps_hat", "cautious", "decay_form", "state_dtypes"}:
        options |= _drawn(draw, {"fused": (0.3, [True])})
    return options


def _muon(draw: random.Random, rule: str) -> dict[str, Any]:
    both = {
        "weight_decay": (0.7, [0.0, 0.1, 0.5]),
        "momentum": (0.5, [0.0, 0.5, 0.95]),
        "nesterov": (0.4, [True, False]),
        "momentum_form": (0.3, ["sum", "ema"]),
        "orthogonalize": (
            0.5,
            ["newton-schulz", "quintic", "cans", "aol", "cubic", "polar-express-3"],
        ),
        "ns_steps": (0.15, [3, 7]),
        "ns_start": (0.2, ["gram", "aol"]),
        "execution": (0.3, ["standard", "gram"]),
        "eps": (0.2, [1e-3]),
        "eps_form": (0.2, ["add"]),
        "adjust_lr": (0.4, ["original", "unit_rms_norm", "sqrt_max", None]),
        "update_scale": (0.2, [0.5]),
        "cautious": (0.25, [True]),
        "scale_decay": (0.2, [True]),
        "decay_form": (0.2, ["independent"]),
        "maximize": (0.15, [True]),
        "state_dtypes": (0.15, ["8bit", "bf16_stochastic"]),
    }
    own = {
        "equilibrate": (0.15, [True]),
        "renormalize": (0.2, [True]),
        "variance_beta2": (0.3, [0.9]),
        "variance_axis": (0.2, ["rows"]),
        "variance_eps_form": (0.2, ["add"]),
    }
    table = both | (own if rule == "muon" else {"sign": (0.5, [False])})
    return {"lr": draw.choice((0.01, 0.1)), **_drawn(draw, table)}


# --- gradients -----------------------------------------------------------------------------------


def _number(*words: Any) -> int:
    return zlib.crc32(repr(words).encode())


def _values(case: Case, param: Param, *where: Any) -> Tensor:
    """Of a place in a case, always the same, in float32; exact in 16 bits where it has to be."""
    generator = torch.Generator().manual_seed(_number(case.seed, param.name, *where))
    if case.gradients == "whole" and where[0] != "start":
        return torch.randint(-5, 6, param.shape, generator=generator).float() / 8
    value = torch.randn(param.shape, generator=generator)
    return value.to(getattr(torch, param.dtype)).float()


def gradient(case: Case, param: Param, step: int, micro: int, which: int) -> Tensor | None:
    """What one of the copies gives in one micro-batch."""
    has = {
        "always": True,
        "never": False,
        "odd steps": step % 2 == 1,
        "one copy": which == _number(case.seed, param.name) % case.copies,
        "random": _number(case.seed, param.name, step, micro, which) % 3 == 0,
    }[param.pattern]
    if not has:
        return None
    value = _values(case, param, "gradient", step, micro, which)
    draw = _number(case.seed, param.name, step, micro, which, "kind") % 12
    if draw == 0:
        value.zero_()
    if draw == 1 and value.numel() and value.dim():
        value[1:] = 0
    if (step, which, param.name) in case.infinities and value.numel():
        value.view(-1)[-1] = math.inf
    return value.to(getattr(torch, param.dtype))


def gradients_of(case: Case, step: int) -> dict[str, list[Tensor | None]]:
    """Of every parameter what each copy has added up over the micro-batches."""
    found: dict[str, list[Tensor | None]] = {}
    for param in case.params:
        found[param.name] = []
        for which in range(case.copies):
            given = [gradient(case, param, step, micro, which) for micro in range(case.micros)]
            found[param.name].append(_sum(given))
    return found


def _sum(given: Iterable[Tensor | None]) -> Tensor | None:
    """In order; None if there is nothing."""
    found = [grad for grad in given if grad is not None]
    return reduce(torch.add, found) if found else None


def mean_of(case: Case, param: Param, step: int) -> Tensor | None:
    """The mean over copies, added in their order in fp32; None if none has a gradient."""
    rounds = [range(case.micros)]
    if case.accumulate == "synchronize":
        rounds = [range(micro, micro + 1) for micro in range(case.micros)]
    sums = []
    for micros in rounds:
        of_copies = [
            _sum(gradient(case, param, step, micro, which) for micro in micros)
            for which in range(case.copies)
        ]
        sums.append(_sum(grad if grad is None else grad.float() for grad in of_copies))
    total = _sum(sums)
    return None if total is None else (total / case.copies).to(getattr(torch, param.dtype))


def present(case: Case, step: int) -> set[str]:
    return {name for name, of in gradients_of(case, step).items() if any(g is not None for g in of)}


def is_skipped(case: Case, step: int) -> bool:
    """Whether an infinity is really given in this step."""
    if not case.skips:
        return False
    of = gradients_of(case, step)
    return any(g is not None and not g.isfinite().all() for grads in of.values() for g in grads)


# --- one rank plays a case -----------------------------------------------------------------------


class Model(nn.Module):
    """Parameters; forward gives a loss whose gradients are those that it is handed."""

    def __init__(self, params: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in params.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        loss = torch.zeros((), requires_grad=True) * 1.0
        for name, grad in grads.items():
            loss = loss + (getattr(self, name) * grad).sum()
        return loss


def _options(of: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if key == "betas" else v for key, v in of.items()}


class Training:
    """A model and an optimizer in one layout. rank -1: one process without others."""

    def __init__(self, case: Case, layout: Layout, rank: int, start: str) -> None:
        self.case, self.layout, self.rank = case, layout, rank
        values = {}
        for param in case.params:
            values[param.name] = _values(case, param, start).to(getattr(torch, param.dtype))
        self.model = Model(values)
        self.params = {param.name: param for param in case.params}
        self.parts = case.world // layout.copies if layout.kind == "tp" else 1
        self._place(values)
        options = {"state_dict_form": "part", **case.options, **layout.options}
        if case.reload and case.reload[1] == "whole":
            del options["state_dict_form"]
        self.opt = samestep.MuonAdamW(self.model, groups=self._groups(), **options)
        self.scaler = samestep.GradScaler(
            "cpu", init_scale=SCALE, growth_interval=2, enabled=case.scaler
        )

    def _groups(self) -> list[dict[str, Any]]:
        names = [
            [p.name for p in self.case.params if p.group == n] for n in range(len(self.case.groups))
        ]
        return [
            {"params": own, **_options(group)}
            for own, group in zip(names, self.case.groups, strict=True)
            if own
        ]

    def group(self, number: int) -> dict[str, Any] | None:
        """The optimizer's group of the case's; None if it has no parameters."""
        names = {p.name for p in self.case.params if p.group == number}
        found = (g for g in self.opt.param_groups if names & set(g["param_names"]))
        return next(found, None)

    def _place(self, values: dict[str, Tensor]) -> None:
        kind, world = self.layout.kind, self.case.world
        if kind in ("fsdp2", "hsdp"):
            shape = (2, world // 2) if kind == "hsdp" else (world,)
            names = ("replicate", "shard") if kind == "hsdp" else ("shard",)
            mesh = _mesh(shape, names)
            fully_shard(self.model, mesh=mesh)
            if self.layout.options.get("reduction") == "ordered":
                use_ordered_reduction(self.model)
            take_part(self.model)
        elif kind == "tp":
            mesh = _mesh((self.layout.copies, self.parts), ("data", "model"))["model"]
            for name, param in self.params.items():
                if param.cut != "plain":
                    how = {"rows": Shard(0), "columns": Shard(len(param.shape) - 1)}
                    placed = distribute_tensor(
                        values[name], mesh, [how.get(param.cut, Replicate())]
                    )
                    setattr(self.model, name, nn.Parameter(placed))

    def micro(self, step: int, micro: int) -> None:
        """One backward pass."""
        which = self.rank // self.parts
        grads = {}
        for name, param in self.params.items():
            grad = gradient(self.case, param, step, micro, which)
            if grad is not None:
                grads[name] = grad * self._scale()
        if self.layout.kind in ("fsdp2", "hsdp"):
            last = micro == self.case.micros - 1
            self.model.set_requires_gradient_sync(last)
            self.model(grads).backward()
            return
        roots, given = [], []
        for name, grad in grads.items():
            param = getattr(self.model, name)
            if isinstance(param, DTensor):
                roots.append(param.to_local(grad_placements=param.placements))
                given.append(self._part(name, grad))
            elif self.parts != 2 or self.rank % 2 == 0:
                roots.append(param.view_as(param))
                given.append(grad * 2 if self.parts == 2 else grad)
        if roots:
            turn = _number(self.case.seed, self.rank, step) % len(roots)
            roots, given = roots[turn:] + roots[:turn], given[turn:] + given[:turn]
            torch.autograd.backward(roots, given)

    def _scale(self) -> float:
        return self.scaler.get_scale() if self.case.scaler else 1.0

    def _part(self, name: str, whole: Tensor) -> Tensor:
        cut = self.params[name].cut
        if cut == "whole":
            return whole
        dim = 0 if cut == "rows" else whole.dim() - 1
        chunks = torch.chunk(whole, self.parts, dim) if whole.shape[dim] else ()
        here = self.rank % self.parts
        return chunks[here] if here < len(chunks) else whole.narrow(dim, 0, 0)

    def step(self, step: int) -> None:
        """All micro-batches and the step."""
        if self.scaler.is_enabled():
            self.scaler.scale(torch.zeros(()))  # makes the scale
        if self.layout.kind in ("one", "reduced"):
            for name, param in self.params.items():
                grad = mean_of(self.case, param, step)
                getattr(self.model, name).grad = None if grad is None else grad * self._scale()
        else:
            for micro in range(self.case.micros):
                waits = micro < self.case.micros - 1
                paused = waits and self.case.accumulate == "no_sync"
                with self.opt.no_sync() if paused else nullcontext():
                    self.micro(step, micro)
                if waits and self.case.accumulate == "synchronize":
                    self.opt.synchronize()
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()

    def edit(self, step: int) -> None:
        for when, number, key, value in self.case.edits:
            group = self.group(number) if when == step else None
            if group is not None:
                group[key] = tuple(value) if key == "betas" else value

    def held(self) -> dict[str, Tensor]:
        """What this rank has of every parameter, copied."""
        self.opt.wait_for_parameters()
        found = {}
        for name in self.params:
            param = getattr(self.model, name).detach()
            found[name] = (param.to_local() if isinstance(param, DTensor) else param).clone()
        return found

    def whole(self) -> dict[str, Tensor]:
        """All parameters, whole; collective."""
        found = {}
        for name in self.params:
            param = getattr(self.model, name).detach()
            found[name] = param.full_tensor() if isinstance(param, DTensor) else param.clone()
        return found


_meshes: dict[tuple[Any, ...], Any] = {}


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """Made once for a set of ranks."""
    if (shape, names) not in _meshes:
        _meshes[shape, names] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[shape, names]


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*bits)


def same_values(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, but for the sign of zeros.

    Where a moment is zero because its beta is, torch's lerp gives it another sign in the vectorized
    part of a tensor than in its tail, and layouts have other tails. No update depends on it.
    """
    if not (one.is_floating_point() and other.is_floating_point()):
        return same_bits(one, other)
    return same_bits(one + 0.0, other + 0.0)


def _digest(tensor: Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


@dataclass
class Played:
    """What one rank has to tell. digests: per step and parameter, of what it holds."""

    problems: list[str] = field(default_factory=list)
    digests: list[dict[str, str]] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    error: tuple[str, str, str] | None = None  # type, text, stack


def play(case: Case, rank: int, folder: Path | None = None) -> Played:
    """One rank's part in a case; rank -1: one process that is given means, and never reloads."""
    played = Played()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _play(case, rank, folder, played)
        except Exception as error:  # judged with the others
            played.error = type(error).__name__, str(error), traceback.format_exc()
    return played


def _play(case: Case, rank: int, folder: Path | None, played: Played) -> None:
    alone = rank < 0
    layout = Layout("one", 1, {"grads": "reduced", "sharding": "none"}) if alone else case.layout
    training = Training(case, layout, rank, "start")
    for step in range(case.steps):
        if case.reload and case.reload[0] == step and not alone:
            training = reloaded(training, case, folder)
        training.edit(step)
        before = {} if alone else training.held()
        training.step(step)
        if not alone:
            after, has = training.held(), present(case, step)
            untouched = set(after) if is_skipped(case, step) else set(after) - has
            for name in sorted(untouched):
                if not same_bits(before[name], after[name]):
                    why = "the step is skipped" if is_skipped(case, step) else "it is absent"
                    played.problems.append(f"step {step}: {name} has changed, and {why}")
            played.digests.append({name: _digest(value) for name, value in after.items()})
    played.params = training.whole()
    played.state = training.opt.whole_state()


def reloaded(training: Training, case: Case, folder: Path | None) -> Training:
    """A new model with other values and a new optimizer, which go on from what was saved."""
    assert case.reload is not None
    how = case.reload[1]
    scaler = training.scaler.state_dict()
    if how == "file":
        assert folder is not None
        samestep.save(folder / "checkpoint", training.model, training.opt)
    else:
        if how == "whole":
            training.opt.consolidate_state_dict(to=None)
        file = io.BytesIO()
        torch.save((training.held(), training.opt.state_dict()), file)
        file.seek(0)
        values, state = torch.load(file, weights_only=True)
    new = Training(case, case.then or training.layout, training.rank, "start again")
    if how == "file":
        samestep.load(folder / "checkpoint", new.model, new.opt)
    else:
        for name, value in new.params.items():
            param = getattr(new.model, value.name).detach()
            with torch.no_grad():
                (param.to_local() if isinstance(param, DTensor) else param).copy_(values[name])
        new.opt.load_state_dict(state)
    if case.scaler:
        new.scaler.load_state_dict(scaler)
    return new


# --- judgement -----------------------------------------------------------------------------------


def judge(case: Case, ranks: Sequence[Played]) -> list[str]:
    """All that is wrong; nothing if it is right. An error that is clear is a refusal, and right."""
    errors = [played.error for played in ranks]
    if any(errors):
        return _judge_errors(case, errors)
    found = [f"rank {rank}: {text}" for rank, p in enumerate(ranks) for text in p.problems]
    found += _replicas(case, ranks)
    if found:
        return found
    twin = play(case, -1)
    if twin.error is not None:
        return [f"one process: {twin.error[0]}: {twin.error[1]}\n{twin.error[2]}"]
    if is_exact(case):
        found += _against_twin(ranks[0], twin)
    return found + _against_reference(case, ranks[0])


def refusal(ranks: Sequence[Played]) -> str | None:
    errors = [played.error for played in ranks]
    return None if not all(errors) else f"{errors[0][0]}: {errors[0][1]}"  # type: ignore[index]


def _judge_errors(case: Case, errors: Sequence[tuple[str, str, str] | None]) -> list[str]:
    without = [rank for rank, error in enumerate(errors) if error is None]
    of = [f"rank {rank}: {e[0]}: {e[1]}\n{e[2]}" for rank, e in enumerate(errors) if e is not None]
    if without:
        return [f"ranks {without} have no error, but there are:", *of]
    words = {key for group in case.groups for key in group} | set(case.options)
    words |= {key for layout in (case.layout, case.then) if layout for key in layout.options}
    for error in errors:
        assert error is not None
        kind, text, stack = error
        own = kind == "RuntimeError" and "/samestep/" in stack.rpartition('  File "')[2]
        own = own or kind in ("ValueError", "TypeError")
        told = own and any(word in text for word in words)
        if not told and kind not in OWN_ERRORS:
            return ["an error that is not clear:", *of]
    return []


def _replicas(case: Case, ranks: Sequence[Played]) -> list[str]:
    """Who holds the same must have the same bits."""
    found = []
    for step in range(case.steps):
        after = bool(case.then and case.reload and step >= case.reload[0])
        layout = case.then if after else case.layout
        assert layout is not None
        for param in case.params:
            of_places: dict[int, set[str]] = {}
            for rank, played in enumerate(ranks):
                place = 0
                if layout.kind in ("fsdp2", "hsdp"):
                    place = rank % (case.world // 2) if layout.kind == "hsdp" else rank
                elif layout.kind == "tp" and param.cut in ("rows", "columns"):
                    place = rank % (case.world // layout.copies)
                of_places.setdefault(place, set()).add(played.digests[step][param.name])
            if any(len(digests) > 1 for digests in of_places.values()):
                found.append(f"step {step}: replicas of {param.name} differ")
    for rank, played in enumerate(ranks[1:], 1):
        for name, value in played.params.items():
            if not same_bits(value, ranks[0].params[name]):
                found.append(f"the whole {name} differs between ranks 0 and {rank}")
        for name, state in played.state.items():
            for key, value in state.items():
                if not same_bits(value, ranks[0].state[name][key]):
                    found.append(f"the whole state {name}.{key} differs on ranks 0 and {rank}")
    return found


def is_exact(case: Case) -> bool:
    """Whether all layouts must give the bits of one process.

    Sums must have the same order, or be exact; a joint norm is added up as each layout has it.
    """
    layouts = [layout for layout in (case.layout, case.then) if layout is not None]
    ordered = all(layout.options.get("reduction") == "ordered" for layout in layouts)
    if any(p.dtype in SHORT for p in case.params) and case.copies == 3:
        return False  # the mean is rounded to 16 bits, here after and there before it is used
    if case.layout.kind == "tp" and case.world // case.copies == 3:
        ordered = False  # plain parameters get (g + g + g) / 3
    clips = case.options.get("max_grad_norm", math.inf) != math.inf
    return (ordered or case.gradients == "whole") and not clips


def _against_twin(played: Played, twin: Played) -> list[str]:
    found = [
        f"{name} has other bits than in one process, by {_most(played.params[name], value):.2e}"
        for name, value in twin.params.items()
        if not same_bits(value, played.params[name])
    ]
    for name, state in twin.state.items():
        if state.keys() != played.state[name].keys():
            found.append(f"{name} has state {sorted(played.state[name])}, not {sorted(state)}")
            continue
        for key, value in state.items():
            if not same_values(value, played.state[name][key]):
                most = _most(played.state[name][key], value)
                found.append(f"{name}.{key} has other bits than in one process, by {most:.2e}")
    return found


def _most(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return math.inf
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def has_reference(case: Case, param: Param) -> bool:
    """Not where values or state have few bits, or signs are taken of sums that rounding moves."""
    group = case.groups[param.group]
    signs = group["rule"] == "adamuon" and group.get("sign", True)
    rounded = "state_dtypes" in group or param.dtype in SHORT
    clips = case.options.get("max_grad_norm", math.inf) != math.inf
    if clips and case.copies == 3:  # a norm of means that are rounded
        rounded = rounded or any(p.dtype in SHORT for p in case.params)
    return not (signs or rounded)


@dataclass
class Expected:
    """What the reference comes to, and how far it has moved.

    way: of every parameter the sum over steps of the largest change. largest: of its state, ever.
    gates: by how much cautious decay may differ, element by element.
    """

    reference: Reference
    way: dict[str, float]
    largest: dict[tuple[str, str], float]
    gates: dict[str, Tensor]


def expected(case: Case, noise: float = 0.0) -> Expected:
    """Train the reference. noise: of gradients, relative to their largest elements."""
    start = {p.name: _values(case, p, "start") for p in case.params}
    groups = []
    for number, group in enumerate(case.groups):
        names = [p.name for p in case.params if p.group == number]
        usual = {"weight_decay": 0.1, "betas": (0.9, 0.95)}
        groups.append({**usual, **_options(group), "param_names": names})
        if noise and group["rule"] != "adamw":
            table = group.get("orthogonalize", "polar-express" if group["rule"] == "muon" else "")
            groups[-1]["norm_factor"] = NORM_FACTORS.get(table, 1.0) * (1 + noise)
    reference = Reference(start, groups)
    way = dict.fromkeys(start, 0.0)
    largest: dict[tuple[str, str], float] = {}
    gates = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()}
    for step in range(case.steps):
        for when, number, key, value in case.edits:
            if when == step:
                reference.groups[number][key] = tuple(value) if key == "betas" else value
        if is_skipped(case, step):
            continue
        before, grads = dict(reference.params), gradients_of(case, step)
        norm = case.options.get("max_grad_norm")
        if noise:
            grads = {
                n: [g if g is None else _noisy(g, noise) for g in of] for n, of in grads.items()
            }
        reference.step(grads, divisor=case.copies, max_grad_norm=norm)
        for param in case.params:
            name, group = param.name, reference.groups[param.group]
            change = (reference.params[name] - before[name]).abs()
            way[name] += float(change.max()) if change.numel() else 0.0
            if group["cautious"] and name in present(case, step):
                gates[name] += before[name].abs() * _decay(group, param)
            for key, value in reference.state[name].items():
                size = float(value.abs().max()) if value.numel() else 0.0
                largest[name, key] = max(size, largest.get((name, key), 0.0))
    return Expected(reference, way, largest, gates)


def _noisy(grad: Tensor, noise: float) -> Tensor:
    if not grad.numel():
        return grad
    generator = torch.Generator().manual_seed(grad.numel())
    signs = torch.rand(grad.shape, generator=generator, dtype=torch.float64) * 2 - 1
    wide = grad.double()
    # Zeros stay: a row that has no gradient has none.
    return wide + signs * (wide != 0) * float(wide.abs().max()) * noise


def _against_reference(case: Case, played: Played) -> list[str]:
    """Where that finds something, once more with what rounding of gradients moves the reference by.

    The polynomials magnify it where a block is as small as a number, or has a rank too few.
    """
    usual = expected(case)
    found = _off(case, played, usual, None)
    return found and _off(case, played, usual, expected(case, NOISE))


def _off(case: Case, played: Played, usual: Expected, noisy: Expected | None) -> list[str]:
    reference, found = usual.reference, []
    for param in case.params:
        if not has_reference(case, param):
            continue
        name, group = param.name, case.groups[param.group]
        value, way = reference.params[name], usual.way[name]
        error = (played.params[name].double() - value).abs()
        size = float(_values(case, param, "start").abs().max()) if error.numel() else 0.0
        allowed = LIMITS[group["rule"]] * way + 3e-7 * case.steps * (size + way)
        if noisy is not None:
            allowed += MAGNIFIED * _most(noisy.reference.params[name], value)
        over = error > allowed
        # A gate of cautious decay may fall the other way where an update is next to zero.
        gated = over & (error <= allowed + 1.01 * usual.gates[name])
        if bool((~error.isfinite()).any()) or int((over & ~gated).sum()) or int(gated.sum()) > 2:
            worst = float(error.max())
            found.append(f"{name} is off the reference by {worst:.2e}, allowed {allowed:.2e}")
        for key, value in reference.state[name].items():
            actual = played.state[name].get(key)
            if actual is None or actual.numel() != value.numel():
                found.append(f"{name} has no state {key} of {value.numel()} elements")
                continue
            worst = _most(actual.reshape(-1), value.reshape(-1))
            most = STATE_LIMITS.get(key, 2e-5) * usual.largest.get((name, key), 0.0) + 1e-12
            if noisy is not None:
                most += MAGNIFIED * _most(noisy.reference.state[name][key], value)
            if not worst <= most:
                found.append(f"state {name}.{key} is off by {worst:.2e}, allowed {most:.2e}")
    return found


def _decay(group: dict[str, Any], param: Param) -> float:
    """More than the share that a step's decay takes."""
    factor = 1.0 + math.sqrt(max((*param.shape, 1))) if group.get("scale_decay") else 1.0
    rate = 1.0 if group["decay_form"] == "independent" else float(group["lr"]) * factor
    return rate * float(group["weight_decay"])


# --- many cases ----------------------------------------------------------------------------------


def play_all(
    cases: Sequence[Case], timeout: float = limit(20.0)
) -> Iterator[tuple[Case, list[Played] | str]]:
    """Play cases of one number of ranks, in one fork as long as nothing breaks.

    Gives what the ranks tell of each, or how they have failed.
    """
    rest = list(cases)
    while rest:
        world = rest[0].world
        with tempfile.TemporaryDirectory(prefix="fuzz_") as path:
            folder = Path(path)

            def job(rank: int, own: list[Case] = rest, folder: Path = folder) -> None:
                for number, case in enumerate(own):
                    place = folder / str(number)
                    place.mkdir(exist_ok=True)
                    played = play(case, rank, place)
                    torch.save(dataclasses.astuple(played), folder / f"{number}.{rank}")
                    dist.barrier()
                    (folder / f"{number}.{rank}.met").touch()

            failure = None
            try:
                run_forked(world, job, collective_timeout=timeout, timeout=30 * timeout)
            except RanksFailed as failed:
                failure = str(failed)
            done = 0
            for number, case in enumerate(rest):
                files = [folder / f"{number}.{rank}" for rank in range(world)]
                if not all(Path(f"{file}.met").exists() for file in files):
                    failure = "\n".join([f"{failure}", *_errors_in(files)])
                    break
                yield case, [Played(*torch.load(file, weights_only=False)) for file in files]
                done += 1
            rest = rest[done:]
            if rest:
                yield rest.pop(0), str(failure)


def _errors_in(files: Iterable[Path]) -> list[str]:
    """What ranks told that have not met the others any more."""
    told = []
    for file in files:
        error = Played(*torch.load(file, weights_only=False)).error if file.exists() else None
        told.append(f"{file.suffix}: {'not written' if not file.exists() else error and error[2]}")
    return told


def findings(cases: Sequence[Case]) -> Iterator[tuple[Case, list[str], str | None]]:
    """Of every case what is wrong, and why it was refused if it was."""
    for world in sorted({case.world for case in cases}):
        for case, result in play_all([case for case in cases if case.world == world]):
            if isinstance(result, str):
                yield case, ["ranks have failed:", result], None
            else:
                yield case, judge(case, result), refusal(result)


def is_wrong(case: Case) -> bool:
    return any(problems for _, problems, _ in findings([case]))


def shrunk(case: Case, tries: int = 60) -> Case:
    """A smaller case that fails as well: parameters, options and events are left out one by one."""
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(case):
            if tries == 0:
                return case
            tries -= 1
            if is_wrong(smaller):
                case, progress = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    for param in case.params if len(case.params) > 1 else ():
        left = tuple(p for p in case.params if p is not param)
        yield replace(case, params=left)
    if case.reload:
        yield replace(case, reload=None, then=None)
    for what in ("infinities", "edits"):
        if getattr(case, what):
            yield replace(case, **{what: ()})
    if case.scaler:
        yield replace(case, scaler=False)
    if case.micros > 1:
        yield replace(case, micros=1)
    if case.steps > 1:
        reload = case.reload if case.reload and case.reload[0] < case.steps - 1 else None
        yield replace(case, steps=case.steps - 1, reload=reload, then=case.then if reload else None)
    for key in case.options:
        yield replace(case, options={k: v for k, v in case.options.items() if k != key})
    for key in case.layout.options:
        left = {k: v for k, v in case.layout.options.items() if k != key}
        yield replace(case, layout=replace(case.layout, options=left))
    used = {p.group for p in case.params}
    for number, group in enumerate(case.groups):
        for key in group if number in used else ():
            if key not in ("rule", "lr"):
                own = {k: v for k, v in group.items() if k != key}
                groups = (*case.groups[:number], own, *case.groups[number + 1 :])
                yield replace(case, groups=groups)


def script(case: Case) -> str:
    """What plays a case again."""
    return (
        "python - <<'END'\nfrom tests.fuzz import case_from, findings\n"
        f"case = case_from({case.text()!r})\n"
        "print(*next(findings([case]))[1], sep='\\n')\nEND"
    )


def _tell(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000, help="how many seeds")
    parser.add_argument("--at-once", type=int, default=50, help="seeds between two lines of --out")
    parser.add_argument("--out", type=Path, help="remember here which seeds were fine, and go on")
    parser.add_argument("--case", type=Path, help="a file with a case instead")
    parser.add_argument("--shrink", action="store_true", help="make cases that fail smaller")
    asked = parser.parse_args(words)
    fine: set[int] = set()
    if asked.out is not None and asked.out.exists():
        fine = {int(line) for line in asked.out.read_text().split()}
    if asked.case is not None:
        todo = [case_from(asked.case.read_text())]
    else:
        seeds = range(asked.first, asked.first + asked.count)
        todo = [case_of(seed) for seed in seeds if seed not in fine]
    wrong, refused, count = 0, Counter[str](), 0
    for begin in range(0, len(todo), asked.at_once):
        good = []
        for case, problems, why in findings(todo[begin : begin + asked.at_once]):
            count += 1
            if why is not None and not problems:
                refused[why[:150]] += 1
            if not problems:
                good.append(case.seed)
                continue
            wrong += 1
            if asked.shrink:
                case = shrunk(case)
            _tell(
                f"\nseed {case.seed}, {case.world} ranks, {case.layout}:", *problems, script(case)
            )
        if asked.out is not None and asked.case is None:
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            with asked.out.open("a") as file:
                file.write("".join(f"{seed}\n" for seed in good))
        _tell(f"{count} cases, {wrong} wrong, {refused.total()} refused")
    for why, times in refused.most_common():
        _tell(f"{times:5d} x {why}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
