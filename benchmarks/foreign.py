"""Optimizers of others in the harness: `python -m benchmarks.foreign --peers FOLDER`.

FOLDER has checkouts of microsoft/dion and karpathy/nanochat, by these names. Writes the receipt
that a table of docs/prove.md is made of. Each factory below is also what
`samestep stress --optimizer` takes:

    SAMESTEP_PEERS=FOLDER samestep stress --optimizer benchmarks/foreign.py:nanochat --grads local

Their code is run as it is, but without torch.compile, and nanochat's with collectives that give
futures: those of gloo do not.
"""

import json
import os
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW, Muon, Optimizer

import samestep
from benchmarks import run_script
from samestep.lab.common.provenance import machine
from samestep.lab.stress.foreign import FOREIGN, WORLDS, ForeignCase, Grads, run_case
from samestep.tooling.request import BadRequestError

RATE, DECAY = 2**-7, 0.1


HERE: dict[str, Any] = {}  # modules of peers, imported in the process that forks ranks


def use_checkouts(folder: Path) -> None:
    """Import what there is of dion and nanochat in a folder of checkouts."""
    for name, module in (("dion", "dion"), ("nanochat", "nanochat.optim")):
        if (folder / name).is_dir():
            sys.path.append(str(folder / name))
            HERE[name] = import_module(module)


if os.environ.get("SAMESTEP_PEERS"):
    use_checkouts(Path(os.environ["SAMESTEP_PEERS"]))


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


def _run_eagerly() -> None:
    """Called by factories, so in ranks alone: nothing is compiled there."""
    torch.compiler.set_stance("force_eager")
    warnings.filterwarnings("ignore", category=FutureWarning)  # of collectives with new names


def _of_dion(name: str, model: nn.Module, **options: Any) -> Optimizer:
    _run_eagerly()
    muon, adamw = _split(model)
    groups = [{"params": muon}, {"params": adamw, "algorithm": "adamw"}]
    made: Optimizer = getattr(HERE["dion"], name)(groups, lr=RATE, weight_decay=DECAY, **options)
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


def dion_dion2_fsdp2_global(model: nn.Module) -> Optimizer:
    options = {"distributed_mesh": _mesh(model), "selection_scope": "global"}
    return _of_dion("Dion2", model, **options)


def nanochat(model: nn.Module) -> Optimizer:
    """One group for each shape, as nanochat makes them."""
    _run_eagerly()
    muon, adamw = _split(model)
    groups: list[dict[str, Any]] = [
        {"params": adamw, "kind": "adamw", "lr": RATE, "betas": (0.8, 0.95), "eps": 1e-10,
         "weight_decay": DECAY},
    ]  # fmt: skip
    for shape in sorted({tuple(param.shape) for param in muon}):
        alike = [param for param in muon if tuple(param.shape) == shape]
        groups.append({"params": alike, "kind": "muon", "lr": RATE, "momentum": 0.95,
                       "ns_steps": 5, "beta2": 0.9, "weight_decay": DECAY})  # fmt: skip
    theirs = HERE["nanochat"]
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


# --- the table -----------------------------------------------------------------------------------


class Row(NamedTuple):
    """An optimizer as people set it up: its factory, and how gradients reach it."""

    label: str
    factory: str
    grads: Grads
    checkout: str = ""


ROWS = (
    Row("torch AdamW, DDP", "torch_adamw", "ddp"),
    Row("torch Muon and AdamW, DDP", "torch_muon", "ddp"),
    Row("torch Muon and AdamW, FSDP2", "torch_muon_fsdp2", "reduced"),
    Row("ZeroRedundancyOptimizer of AdamW, DDP", "zero_adamw", "ddp"),
    Row("ZeroRedundancyOptimizer of torch Muon, DDP", "zero_muon", "ddp"),
    Row("dion Muon, DDP", "dion_muon", "ddp", "dion"),
    Row("dion NorMuon, DDP", "dion_normuon", "ddp", "dion"),
    Row("dion Dion2, DDP", "dion_dion2", "ddp", "dion"),
    Row("dion Dion, which averages", "dion_dion", "local", "dion"),
    Row("dion Muon, FSDP2", "dion_muon_fsdp2", "reduced", "dion"),
    Row("dion NorMuon, FSDP2", "dion_normuon_fsdp2", "reduced", "dion"),
    Row("dion Dion2, FSDP2", "dion_dion2_fsdp2", "reduced", "dion"),
    Row("dion Dion2, FSDP2, selection_scope=global", "dion_dion2_fsdp2_global", "reduced", "dion"),
    Row("nanochat MuonAdamW", "nanochat", "local", "nanochat"),
    Row("samestep MuonAdamW", "ours", "local"),
    Row("samestep MuonAdamW, FSDP2", "ours_fsdp2", "reduced"),
)


@dataclass(frozen=True)
class Options:
    """Run optimizers of others through the harness; write the receipt."""

    peers: Annotated[Path, "folder with checkouts dion and nanochat"] = Path("peers")
    only: Annotated[str, "a part of the labels of rows to run; the receipt keeps the others"] = ""
    receipt: Annotated[Path, "the receipt to write"] = Path("receipts/foreign.json")


def main(options: Options) -> None:
    torch.set_num_threads(1)
    use_checkouts(options.peers)
    missing = {row.checkout for row in ROWS if row.checkout} - HERE.keys()
    if missing:
        raise BadRequestError(
            f"--peers {options.peers} has no checkout of {' and '.join(sorted(missing))}"
        )
    known = json.loads(options.receipt.read_text())["rows"] if options.only else {}
    for row in ROWS:
        if options.only in row.label:
            known[row.label] = {"factory": row.factory, "grads": row.grads, "cases": _run(row)}
    content = {
        "kind": "samestep foreign table",
        "command": "python -m benchmarks.foreign --peers FOLDER",
        "checkouts": {name: _commit(options.peers / name) for name in sorted(HERE)},
        "ran": machine(),
        "rows": {row.label: known[row.label] for row in ROWS if row.label in known},
    }
    options.receipt.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def _run(row: Row) -> list[dict[str, Any]]:
    cases = []
    for name in FOREIGN:
        for world in WORLDS:
            result = run_case(ForeignCase(name, world, row.grads), globals()[row.factory])
            print(f"{row.label}: {name} on {world}: {result.status} {result.message}", flush=True)
            cases.append(asdict(result))
    return cases


def _commit(checkout: Path) -> str:
    """What a checkout is of: its commit, or what a file COMMIT in it says."""
    if (checkout / "COMMIT").exists():
        return (checkout / "COMMIT").read_text().strip()
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    run_script(main, Options)
