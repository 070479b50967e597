"""A model in a layout, its optimizer, and a training with gradients whose sums are exact."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import samestep
from samestep.fsdp import skip, take_part
from tests.promises.layouts import ACCUMULATED, LAYOUTS, NORM, ONE_PROCESS, OPTIONS


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


def checking(trial: Trial) -> dict[str, float]:
    """opt.clip_grad_norm_ does not ask whether gradients are finite, as torch's does not."""
    return {"max_grad_norm": math.inf} if trial.option.startswith("clip_grad_norm_") else {}
