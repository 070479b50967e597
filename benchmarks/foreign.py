"""Optimizers of others in the harness: `python -m benchmarks.foreign --peers FOLDER`.

FOLDER has checkouts of microsoft/dion and karpathy/nanochat, by these names. Writes a receipt, and
the table of docs/foreign.md. Each factory below is also what `samestep stress --optimizer` takes:

    SAMESTEP_PEERS=FOLDER samestep stress --optimizer benchmarks/foreign.py:nanochat --grads local

Their code is run as it is, but without torch.compile, and nanochat's with collectives that give
futures: those of gloo do not.
"""

import os
import sys
import warnings
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW, Muon, Optimizer

import samestep

RATE, DECAY = 2**-7, 0.1
torch.compiler.set_stance("force_eager")
warnings.filterwarnings("ignore", category=FutureWarning)  # of collectives that have new names


def _imported(name: str, checkout: str) -> Any:
    """A module of a checkout in the folder of peers."""
    folder = os.path.join(os.environ.get("SAMESTEP_PEERS", ""), checkout)
    if folder not in sys.path:
        sys.path.append(folder)
    return import_module(name)


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Muon's parameters and AdamW's."""
    named = list(model.named_parameters())
    muon = [param for name, param in named if param.dim() == 2 and not name.startswith("adam")]
    return muon, [param for _, param in named if all(param is not each for each in muon)]


class Both(Optimizer):
    """Two optimizers as one, as trainers chain torch's Muon and AdamW."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(number): part.state_dict() for number, part in enumerate(self.parts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for number, part in enumerate(self.parts):
            part.load_state_dict(state_dict[str(number)])


def torch_adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)


def torch_muon(model: nn.Module) -> Optimizer:
    muon, adamw = _split(model)
    return Both(Muon(muon, lr=RATE), AdamW(adamw, lr=RATE, weight_decay=DECAY))


def torch_muon_fsdp2(model: nn.Module) -> Optimizer:
    fully_shard(model)
    return torch_muon(model)


def zero_adamw(model: nn.Module) -> Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=RATE, weight_decay=DECAY)


def zero_muon(model: nn.Module) -> Optimizer:
    """The matrices of Muon alone; all others have no optimizer, and stay as they are."""
    muon, _ = _split(model)
    return ZeroRedundancyOptimizer(muon, Muon, lr=RATE)


def _of_dion(name: str, model: nn.Module, **options: Any) -> Optimizer:
    muon, adamw = _split(model)
    groups = [{"params": muon}, {"params": adamw, "algorithm": "adamw"}]
    made: Optimizer = getattr(_imported("dion", "dion"), name)(
        groups, lr=RATE, weight_decay=DECAY, **options
    )
    return made


def dion_muon(model: nn.Module) -> Optimizer:
    return _of_dion("Muon", model, distributed_mesh=dist.group.WORLD)


def dion_normuon(model: nn.Module) -> Optimizer:
    return _of_dion("NorMuon", model, distributed_mesh=dist.group.WORLD)


def dion_dion2(model: nn.Module) -> Optimizer:
    return _of_dion("Dion2", model, distributed_mesh=dist.group.WORLD)


def dion_dion(model: nn.Module) -> Optimizer:
    """Dion averages by itself, compressed."""
    return _of_dion("Dion", model, replicate_mesh=dist.group.WORLD)


def _mesh(model: nn.Module) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    return mesh


def dion_muon_fsdp2(model: nn.Module) -> Optimizer:
    return _of_dion("Muon", model, distributed_mesh=_mesh(model))


def dion_normuon_fsdp2(model: nn.Module) -> Optimizer:
    return _of_dion("NorMuon", model, distributed_mesh=_mesh(model))


def dion_dion2_fsdp2(model: nn.Module) -> Optimizer:
    return _of_dion("Dion2", model, distributed_mesh=_mesh(model))


def dion_dion_fsdp2(model: nn.Module) -> Optimizer:
    return _of_dion("Dion", model, outer_shard_mesh=_mesh(model))


def nanochat(model: nn.Module) -> Optimizer:
    """One group for each shape, as nanochat makes them."""
    muon, adamw = _split(model)
    groups: list[dict[str, Any]] = [
        {"params": adamw, "kind": "adamw", "lr": RATE, "betas": (0.8, 0.95), "eps": 1e-10,
         "weight_decay": DECAY},
    ]  # fmt: skip
    for shape in sorted({tuple(param.shape) for param in muon}):
        alike = [param for param in muon if tuple(param.shape) == shape]
        groups.append({"params": alike, "kind": "muon", "lr": RATE, "momentum": 0.95,
                       "ns_steps": 5, "beta2": 0.9, "weight_decay": DECAY})  # fmt: skip
    theirs = _imported("nanochat.optim", "nanochat")
    theirs.dist = Futures()
    made: Optimizer = theirs.MuonAdamW(groups)
    return made


class Futures:
    """torch.distributed, whose collectives of gloo have a future, too: their Work itself."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(dist, name)
        if name not in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"):
            return function

        def launch(*tensors: Any, **options: Any) -> Any:
            return Launched(function(*tensors, **options))

        return launch


class Launched:
    """A collective that was launched."""

    def __init__(self, work: dist.Work) -> None:
        self.work = work

    def get_future(self) -> dist.Work:
        return self.work


def ours(model: nn.Module) -> Optimizer:
    return samestep.MuonAdamW(model, lr=RATE, weight_decay=DECAY)


def ours_fsdp2(model: nn.Module) -> Optimizer:
    fully_shard(model)
    return ours(model)
