"""What `samestep stress` can be asked, and what of it can run here."""

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import nn
from tyro.conf import arg

from samestep.command.ranks import nccl_devices, number_of_ranks
from samestep.command.request import BadRequestError
from samestep.distribution import Reduction
from samestep.launch import TorchrunRank
from samestep.stress.layouts import LAYOUTS
from samestep.stress.models import gpt
from samestep.stress.scenario import MakeModel
from samestep.stress.scenarios import SCENARIOS

Backend = Literal["gloo", "nccl"]
MOST_ELEMENTS = 4_000_000  # the reference computes singular values of every matrix at every step


@dataclass(frozen=True)
class Options:
    """Look for drift between ranks, layouts and a reference, and prove that it would be found.

    Every scenario runs in every layout on real ranks; replicas and layouts must agree to the bit,
    and with a float64 reference within tolerances. Ranks are started here, or joined if torchrun
    has started them. Exit status: 0, clean; 1, drift, divergence or a hang; 2, cannot be done.

        samestep stress --scenario dist_adamw_muon --world-size 4
        samestep stress --mutants                   # does it catch every known bug?
        samestep stress --compare A.json B.json     # what changed between two receipts?
    """

    scenario: Annotated[str, arg(metavar="NAME|all")] = "all"
    """What happens to the gradients; --list shows all."""
    layout: Annotated[str, arg(metavar="NAME|all")] = "all"
    """Where state and work live; --list shows all."""
    world_size: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: 2, or torchrun's)")
    ] = None
    """Number of ranks."""
    backend: Annotated[
        Backend | None,
        arg(metavar="{gloo,nccl}", help_behavior_hint="(default: nccl under torchrun if possible)"),
    ] = None
    """What carries the data; nccl needs torchrun and a CUDA device for every rank."""
    steps: int = 1000
    """Optimizer steps of every case."""
    other_steps: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: as --steps)")
    ] = None
    """Steps of all but dist_adamw_muon and megatron_conditional in none, zero1 and zero2."""
    sample_every: int = 100
    """Steps between comparisons."""
    reduction: Reduction = "ordered"
    """As the optimizer's keyword. Ordered sums must be exactly equal, fast ones within limits."""
    seed: int = 0
    """Of models and gradients."""
    model: Annotated[str, arg(metavar="tiny|gpt|PATH:FACTORY")] = "tiny"
    """For scenarios that take any model: mypackage.mymodule:make_model, or file.py:make_model."""
    watchdog: float = 10.0
    """Seconds that a collective may take before it counts as a hang."""
    out: Path = Path("out/stress")
    """Folder for receipt.json and report.html; made if missing."""
    mutants: bool = False
    """Run the known bugs instead: each must be caught by the check that its story names."""
    compare: tuple[Path, Path] | None = None
    """Say what changed between two receipts, and run nothing."""
    list: bool = False
    """Show the scenarios, layouts and mutants, and run nothing."""

    def check(self) -> None:
        """Raise BadRequestError for what can never run."""
        _known("--scenario", self.scenario, SCENARIOS)
        _known("--layout", self.layout, LAYOUTS)
        for name in ("steps", "other_steps", "sample_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = name.replace("_", "-")
                raise BadRequestError(f"--{flag} must be at least 1, got {value}")
        if not 0 < self.watchdog < math.inf:
            raise BadRequestError(f"--watchdog must be above 0 seconds, got {self.watchdog}")
        if not -(2**62) < self.seed < 2**62:
            raise BadRequestError(f"--seed must be within 62 bits, got {self.seed}")
        if self.mutants and (self.scenario != "all" or self.layout != "all" or self.world_size):
            raise BadRequestError(
                "--mutants have scenarios, layouts and ranks of their own: leave these options out"
            )
        if self.mutants and (self.backend == "nccl" or self.model != "tiny"):
            raise BadRequestError("--mutants run on gloo and on their own models")

    def ranks(self, torchrun: TorchrunRank | None) -> int:
        """The number of ranks."""
        return number_of_ranks(self.world_size, torchrun, least=1)

    def chosen_backend(self, torchrun: TorchrunRank | None) -> tuple[Backend, str | None]:
        """What carries the data, and why it is not nccl if nobody asked for gloo."""
        devices = nccl_devices()
        if torchrun is None:
            reason = "ranks are forked; nccl needs torchrun"
        elif devices < torchrun.local_world_size:
            reason = f"{torchrun.local_world_size} ranks, but {devices} CUDA devices here"
        else:
            return self.backend or "nccl", None
        if self.backend == "nccl":
            raise BadRequestError(f"--backend nccl cannot run: {reason}")
        return "gloo", None if self.backend == "gloo" else reason

    def make_model(self) -> MakeModel | None:
        """The factory of the model, None for the scenarios' own."""
        if self.model == "tiny":
            return None
        if self.scenario != "all" and not SCENARIOS[self.scenario].takes_any_model:
            raise BadRequestError(
                f"scenario {self.scenario!r} has a model of its own: leave out --model"
            )
        make: Callable[[], nn.Module] = gpt if self.model == "gpt" else _factory(self.model)
        _try(make, self.model)
        return make


def _known(flag: str, name: str, known: dict[str, Any]) -> None:
    if name != "all" and name not in known:
        raise BadRequestError(f"{flag} {name!r} is not known; there is: all, {', '.join(known)}")


def _factory(path: str) -> Callable[[], nn.Module]:
    """The function that `module:name` or `file.py:name` means."""
    where, colon, name = path.rpartition(":")
    if not colon or not where or not name:
        raise BadRequestError(
            f"--model {path!r} is not tiny, gpt or PATH:FACTORY, such as mymodels:make_model"
        )
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else _imported(where)
    except Exception as error:
        raise BadRequestError(
            f"--model: {where!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    make = getattr(module, name, None)
    if not callable(make):
        raise BadRequestError(f"--model: {where!r} has no function {name!r}")
    found: Callable[[], nn.Module] = make
    return found


def _imported(name: str) -> Any:
    if "" not in sys.path:  # as for `python -m`: the working folder counts
        sys.path.insert(0, "")
    return importlib.import_module(name)


def _from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _try(make: Callable[[], nn.Module], path: str) -> None:
    """Make one model, to see that it works."""
    try:
        model = make()
    except Exception as error:
        raise BadRequestError(f"--model {path}: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise BadRequestError(f"--model {path} gave a {type(model).__name__}, not a torch module")
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise BadRequestError(f"--model {path} gave a module without trainable parameters")
    if any(param.dtype != torch.float32 for param in params):
        raise BadRequestError(f"--model {path}: the harness needs float32 parameters")
    count = sum(param.numel() for param in params)
    if count > MOST_ELEMENTS:
        raise BadRequestError(
            f"--model {path} has {count:,} trainable elements, and the float64 reference is made "
            f"for {MOST_ELEMENTS:,} at most: give a smaller configuration of it"
        )
