"""Options of `samestep stress`, and checks whether this machine can run them."""

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import samestep
from samestep.comm.nccl import sharing_problem
from samestep.groups.distribution import Reduction
from samestep.lab.stress.delays import Delays, check_delays
from samestep.lab.stress.faults import LAYOUTS as FAULT_LAYOUTS
from samestep.lab.stress.foreign import (
    FOREIGN,
    STEPS,
    TOLERANCE,
    WORLDS,
    Factory,
    ForeignCase,
    Grads,
)
from samestep.lab.stress.layouts import EVERY_LAYOUT, LAYOUT_SETS, require_layouts
from samestep.lab.stress.models import gpt, named_params
from samestep.lab.stress.mutants import MUTANTS, STREAM_MUTANTS, XLA_MUTANTS, Mutant
from samestep.lab.stress.scenario import RATES, MakeModel, seeded
from samestep.lab.stress.scenarios import EVERY_SCENARIO, SCENARIOS
from samestep.launch import TorchrunRank, torchrun_rank
from samestep.launch.forked import nccl_devices
from samestep.tooling.request import (
    BadRequestError,
    Flag,
    in_one_line,
    named_function,
    number_of_ranks,
    spelled,
)
from samestep.xla import runtime

Backend = Literal["gloo", "nccl"]
Carrier = Literal["gloo", "nccl", "xla"]  # what carries the data in the end
Device = Literal["cpu", "cuda", "xla"]
# Gradients that come and go, experts, all that a rule can do, a step that must not be taken, and a
# new start; in whole parameters, in flat buffers with both overlaps, and in DTensors.
QUICK: dict[str, Any] = {
    "scenario": "dist_adamw_muon_random,conditional_compute,normuon_cautious,not_finite,"
    "clipped,fused_qkv_groups,resume",
    "layout": "quick",
    "steps": 20,
    "sample_every": 10,
    "lanes": 2,
    "watchdog": 60.0,  # who tries it may have a busy machine
}
MOST_ELEMENTS = 4_000_000  # the reference computes singular values of every matrix at every step


@dataclass(frozen=True)
class Options:
    """Look for drift between ranks, layouts and a reference, and prove that it would be found.

    Every scenario (a pattern of gradients) runs in every layout on real ranks. Replicas and layouts
    must agree bit for bit, and with a float64 reference within tolerances. Ranks are started here,
    or joined if torchrun has started them.

        samestep stress --quick                     # half a minute
        samestep stress --scenario dist_adamw_muon --world-size 4
        samestep stress --continue                  # after Ctrl-C, or a crash
        samestep stress --mutants                   # is every known bug found?
        samestep stress --faults                    # is a dead rank named?
        samestep stress --optimizer mine.py:make    # check your own optimizer
        samestep stress --compare A.json B.json     # compare two receipts

    The result is a receipt: receipt.json, the record of what was asked, run and measured.

    Exit status: 0, clean; 1, drift, divergence or a hang; 2, refused, and the error says why.
    """

    SECTIONS: ClassVar[Mapping[str, str]] = {
        "quick": "what is run",
        "world_size": "ranks and devices",
        "steps": "steps and comparisons",
        "lanes": "the run",
        "mutants": "other runs instead",
        "optimizer": "an optimizer other than samestep's",
        "compare": "reports, without a run",
    }

    quick: Annotated[
        bool, "run a short selection of scenarios and layouts; other options still apply"
    ] = False
    scenario: Annotated[
        str, Flag("scenarios, or all; --list shows them", metavar="NAME,...|all")
    ] = "all"
    layout: Annotated[
        str,
        Flag(
            "the layout, or all; copies: the layouts of DTensors that are replicated on an axis; "
            "--list shows them",
            metavar="NAME|all|copies",
        ),
    ] = "all"
    model: Annotated[
        str,
        Flag(
            "model of the scenarios that take any: tiny, gpt, or a function that returns one",
            metavar="tiny|gpt|PATH:FACTORY",
        ),
    ] = "tiny"
    seed: Annotated[int, "seed of models and gradients"] = 0

    world_size: Annotated[int | None, Flag("number of ranks", default="2, or torchrun's")] = None
    backend: Annotated[
        Backend | None,
        Flag(
            "backend of torch.distributed; nccl needs a CUDA device per rank, or --share-gpus",
            default="nccl under torchrun with a GPU per rank, else gloo",
        ),
    ] = None
    share_gpus: Annotated[
        bool, "with nccl: several ranks may share a GPU, which tests correctness and not speed"
    ] = False
    device: Annotated[
        Device | None,
        Flag(
            "where ranks compute; with gloo several may share a GPU; xla: one process for all "
            "devices",
            default="cuda with nccl, else cpu",
        ),
    ] = None

    steps: Annotated[int, "optimizer steps of every case (a scenario in a layout)"] = 1000
    other_steps: Annotated[
        int | None,
        Flag(
            "steps of all cases but dist_adamw_muon and dist_adamw_muon_random without flat "
            "buffers",
            default="as --steps",
        ),
    ] = None
    sample_every: Annotated[int, "steps between comparisons"] = 100
    reduction: Annotated[
        Reduction,
        "the optimizer's keyword; ordered sums are compared bit for bit, fast ones within limits",
    ] = "ordered"
    watchdog: Annotated[float, "seconds after which a collective counts as hanging"] = 10.0
    delays: Annotated[
        bool, "on GPUs: streams and one host are late at random, so that a missing wait shows"
    ] = False

    lanes: Annotated[int, "cases that run at the same time, each on ranks of its own"] = 1
    goes_on: Annotated[
        bool,
        Flag(
            "resume the unfinished run of the same request in --out, with the cases it lacks",
            name="continue",
        ),
    ] = False
    out: Annotated[Path, "folder for receipt.json and report.html; made if missing"] = Path(
        "out/stress"
    )

    mutants: Annotated[
        bool,
        "run known bugs: each is put into the optimizer, and the check that it names must fail",
    ] = False
    mutant: Annotated[
        str | None,
        Flag(
            "run only these known bugs; --list shows them",
            metavar="NAME,...",
            default="all of --mutants",
        ),
    ] = None
    faults: Annotated[
        bool, "kill, stop and mislead ranks: the other ranks must end in time and name them"
    ] = False

    optimizer: Annotated[
        str | None,
        Flag(
            "function that is given a model and returns its optimizer, to run on 2, 3 and 4 gloo "
            "ranks for 8 steps",
            metavar="PATH:FACTORY",
            default="samestep's own",
        ),
    ] = None
    grads: Annotated[
        Grads,
        "with --optimizer: its gradients are the mean of all ranks (reduced), each rank's own "
        "(local), or DDP's (ddp)",
    ] = "reduced"
    tolerance: Annotated[
        float,
        "with --optimizer: largest distance from a single process, relative to how far parameters "
        "moved",
    ] = TOLERANCE

    compare: Annotated[tuple[Path, Path] | None, "show what changed between two receipts"] = None
    list: Annotated[bool, "show all scenarios, layouts and known bugs"] = False

    def check(self) -> None:
        """Raise BadRequestError for requests that can never run."""
        for name in () if self.mutant is None else self.mutant.split(","):
            _known("--mutant", name, self._mutants_there_are())
        if self.optimizer is not None:
            self._check_foreign()
            return
        for name, usual in (("grads", "reduced"), ("tolerance", TOLERANCE)):
            if getattr(self, name) != usual:
                raise BadRequestError(
                    f"{spelled(name)} only works with --optimizer: give both, or neither"
                )
        for name in () if self.scenario == "all" else self.scenario.split(","):
            _known("--scenario", name, EVERY_SCENARIO)
        if self.faults:
            for name in () if self.layout == "all" else self.layout.split(","):
                _known("--layout", name, FAULT_LAYOUTS)
        elif self.layout != "all":
            _known("--layout", self.layout, {**EVERY_LAYOUT, **LAYOUT_SETS})
        else:
            try:
                require_layouts()
            except ValueError as error:
                raise BadRequestError(str(error)) from error
        for name in ("steps", "other_steps", "sample_every", "lanes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadRequestError(f"{spelled(name)} must be at least 1, got {value}")
        if not 0 < self.watchdog < math.inf:
            raise BadRequestError(f"--watchdog must be above 0 seconds, got {self.watchdog}")
        if not -(2**62) < self.seed < 2**62:
            raise BadRequestError(f"--seed must be within 62 bits, got {self.seed}")
        if self.mutants and (self.scenario != "all" or self.layout != "all" or self.world_size):
            raise BadRequestError(
                "--mutants choose their own scenarios, layouts and ranks: leave these options out"
            )
        if self.quick and (self.mutants or self.device == "xla" or self.model != "tiny"):
            raise BadRequestError(
                "--quick chooses its own scenarios and layouts: leave it out with "
                "--mutants, --device xla and --model"
            )
        if self.faults and (self.mutants or self.quick or self.goes_on or self.device == "xla"):
            raise BadRequestError(
                "--faults cannot be combined with --mutants, --quick, --continue and "
                "--device xla: leave these out"
            )
        if self.mutants and self.goes_on:
            raise BadRequestError("--continue does not work with --mutants: leave it out")
        self._check_xla()
        on_gpu = self.device == "cuda" and self.backend != "nccl"
        if self.mutants and (on_gpu or self.model != "tiny"):
            raise BadRequestError(
                "--mutants run on gloo and on CPU, those of streams with --backend nccl, and all "
                "on their own models"
            )
        if self.delays and (self.mutants or self.faults):
            raise BadRequestError(
                "--delays are for scenarios: leave them out with --mutants, which have their own, "
                "and with --faults"
            )

    def _check_foreign(self) -> None:
        """Check --optimizer, which has its own scenarios and ranks and no layouts."""
        for name in () if self.scenario == "all" else self.scenario.split(","):
            _known("--scenario", name, FOREIGN)
        fixed = (
            "quick", "layout", "device", "other_steps", "sample_every", "reduction", "lanes",
            "goes_on", "mutants", "mutant", "faults", "share_gpus", "delays",
        )  # fmt: skip
        usual = {field.name: field.default for field in fields(self)}
        given = [spelled(name) for name in fixed if getattr(self, name) != usual[name]]
        given += ["--backend nccl"] if self.backend == "nccl" else []
        given += ["torchrun"] if torchrun_rank() is not None else []
        if given:
            raise BadRequestError(
                f"--optimizer runs on gloo ranks that it starts, on CPU: leave out {given[0]}"
            )
        for name, value in (("steps", self.steps), ("world_size", self.world_size or 2)):
            if value < (2 if name == "world_size" else 1):
                raise BadRequestError(f"{spelled(name)} is too small for --optimizer: {value}")
        for name in ("watchdog", "tolerance"):
            if not 0 < getattr(self, name) < math.inf:
                raise BadRequestError(f"{spelled(name)} must be above 0, got {getattr(self, name)}")

    def known_bugs(self) -> Sequence[Mutant]:
        """The mutants to run: all of those for the device, or those that --mutant names."""
        known = self._mutants_there_are()
        return [known[name] for name in (known if self.mutant is None else self.mutant.split(","))]

    def _mutants_there_are(self) -> Mapping[str, Mutant]:
        if self.device == "xla":
            return XLA_MUTANTS
        return STREAM_MUTANTS if self.backend == "nccl" else MUTANTS

    def chosen_delays(self, device: Device) -> Delays | None:
        """The delays on the device that was chosen, if they were asked for."""
        if not self.delays:
            return None
        check_delays(device)
        return Delays(seed=self.seed)

    def foreign_cases(self) -> Sequence[ForeignCase]:
        """The cases of --optimizer, with few steps unless --steps is given."""
        asked = FOREIGN if self.scenario == "all" else self.scenario.split(",")
        worlds = WORLDS if self.world_size is None else (self.world_size,)
        steps = STEPS if self.steps == type(self).steps else self.steps
        return [
            ForeignCase(name, world, self.grads, steps, self.seed)
            for name in asked
            for world in worlds
        ]

    def foreign_factory(self) -> Factory:
        """The function that --optimizer names."""
        assert self.optimizer is not None
        if ":" not in self.optimizer:
            raise BadRequestError(
                f"--optimizer {self.optimizer!r} is not PATH:FACTORY, such as mine.py:make"
            )
        return cast("Factory", named_function(self.optimizer, "--optimizer"))

    def quickened(self) -> "Options":
        """Replace --quick by the options it stands for, which the receipt then shows."""
        if not self.quick:
            return self
        usual = {field.name: field.default for field in fields(self)}
        quick = {name: value for name, value in QUICK.items() if getattr(self, name) == usual[name]}
        return replace(self, **quick)

    def _check_xla(self) -> None:
        """Check --device xla, which has other layouts than ranks."""
        on_xla = self.device == "xla"
        sets = ("xla", "xla_hybrid")
        layouts = [name for each in sets for name in LAYOUT_SETS[each]]
        of_xla = self.layout in (*sets, *layouts)
        if of_xla and not on_xla:
            raise BadRequestError(f"--layout {self.layout} needs --device xla")
        if not on_xla:
            return
        if not of_xla and self.layout != "all":
            known = ", ".join((*sets, *layouts))
            raise BadRequestError(
                f"--layout {self.layout} is for ranks, and --device xla is one program "
                f"for all devices; choose from all, {known}"
            )
        if self.backend is not None:
            raise BadRequestError("--device xla has collectives of its own: leave out --backend")
        if self.lanes > 1:
            raise BadRequestError(
                "--device xla runs every case in a process of its own: leave out --lanes"
            )
        reason = runtime.missing()
        if reason is not None:
            raise BadRequestError(f"--device xla cannot run: {reason}")

    def chosen_backend(self, torchrun: TorchrunRank | None) -> tuple[Carrier, str | None]:
        """The backend, with the reason if nccl was not chosen by default."""
        if self.device == "xla":
            if torchrun is not None:
                raise BadRequestError("--device xla has one process: run it without torchrun")
            return "xla", None
        ranks = number_of_ranks(self.world_size, torchrun, least=1)
        reason = self._reason_against_nccl(ranks if torchrun is None else torchrun.local_world_size)
        if reason is None and (torchrun is not None or self.backend == "nccl"):
            return self.backend or "nccl", None
        if self.backend == "nccl":
            raise BadRequestError(f"--backend nccl cannot run: {reason}")
        if self.backend == "gloo":
            return "gloo", None
        return "gloo", reason or "ranks that are forked use gloo, unless --backend nccl is given"

    def _reason_against_nccl(self, ranks: int) -> str | None:
        """The reason why so many ranks on this machine cannot use NCCL, with the way out."""
        devices = nccl_devices()
        if devices >= ranks:
            return None
        text = f"{ranks} ranks, but {devices} CUDA devices here"
        if devices and self.share_gpus:
            return sharing_problem()
        return f"{text}; --share-gpus lets ranks share them" if devices else text

    def chosen_device(self, backend: Carrier) -> Device:
        device = self.device or ("cuda" if backend == "nccl" else "cpu")
        if device == "cpu" and backend == "nccl":
            raise BadRequestError("--device cpu needs --backend gloo: nccl is for CUDA")
        if device == "cuda" and torch.cuda.device_count() == 0:
            raise BadRequestError("--device is cuda, and torch sees no GPU here")
        return device

    def scenarios(self) -> tuple[str, ...]:
        """The requested scenarios; with --model only those that take any model."""
        if self.scenario != "all":
            return tuple(dict.fromkeys(self.scenario.split(",")))
        any_model = self.model == "tiny"
        known = [*SCENARIOS, *(("schedules_to_zero",) if self.device == "xla" else ())]
        return tuple(n for n in known if any_model or EVERY_SCENARIO[n].takes_any_model)

    def make_model(self) -> MakeModel | None:
        """The factory of the model, None for the scenarios' own."""
        if self.model == "tiny":
            return None
        for name in self.scenarios():
            if not EVERY_SCENARIO[name].takes_any_model:
                raise BadRequestError(f"scenario {name!r} uses its own model: leave out --model")
        return own_model(self.model, self.seed)


def _known(flag: str, name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise BadRequestError(f"{flag} {name!r} is unknown; choose from all, {', '.join(known)}")


# --- a model of the user's own: found, tried, and refused in one line if need be -----------------


def own_model(path: str, seed: int) -> MakeModel:
    """Return a function that builds the model of --model, after checking it.

    The factory runs twice, here and now: ranks get copies, so that a slow one holds up nobody.
    """
    where, _, name = path.rpartition(":")
    if path != "gpt" and not (where and name):
        raise BadRequestError(
            f"--model {path!r} is not tiny, gpt or PATH:FACTORY, such as mymodels:make_model"
        )
    make = gpt if path == "gpt" else named_function(path, "--model")
    first, second = _made(make, path, seed), _made(make, path, seed)
    _check(first, path)
    _compare(named_params(first), named_params(second), path)
    options: dict[str, Any] = dict(RATES)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samestep.MuonAdamW(copy.deepcopy(first), **options)
    except Exception as error:
        raise BadRequestError(f"--model {path}: {in_one_line(error)}") from error
    return lambda: copy.deepcopy(first)


def _made(make: MakeModel, path: str, seed: int) -> nn.Module:
    try:
        model: Any = seeded(make, seed)
    except (Exception, SystemExit) as error:
        raise BadRequestError(f"--model {path}: {in_one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise BadRequestError(f"--model {path} gave a {type(model).__name__}, not a torch module")
    return model


def _check(model: nn.Module, path: str) -> None:
    params = {n: p for n, p in named_params(model).items() if p.requires_grad}
    if not params:
        raise BadRequestError(f"--model {path} gave a module without trainable parameters")
    for name, param in params.items():
        problem = _problem(param)
        if problem is not None:
            raise BadRequestError(f"--model {path}: parameter {name!r} {problem}")
    count = sum(param.numel() for param in params.values())
    if count > MOST_ELEMENTS:
        raise BadRequestError(
            f"--model {path} has {count:,} trainable elements, and the float64 "
            f"reference takes at most {MOST_ELEMENTS:,}: give a smaller configuration"
        )


def _problem(param: Tensor) -> str | None:
    if is_lazy(param):
        return "is lazy: call the model once before it is returned"
    if param.device.type != "cpu":
        return f"is on {param.device.type!r}: the harness needs it on the CPU, with values"
    if param.dtype != torch.float32:
        return f"is {str(param.dtype).removeprefix('torch.')}: the harness needs float32 parameters"
    if param.layout != torch.strided:
        return f"is {str(param.layout).removeprefix('torch.')}: the harness needs dense parameters"
    if not param.is_contiguous():
        return "is not contiguous: give it as .contiguous()"
    return None


def _compare(first: dict[str, nn.Parameter], second: dict[str, nn.Parameter], path: str) -> None:
    """Check that two calls of the factory give the same initial values."""
    if first.keys() != second.keys():
        raise BadRequestError(
            f"--model {path} gave parameters with other names at its second call: it must "
            "build the same model each time"
        )
    for name, param in first.items():
        if not torch.equal(param, second[name]):
            raise BadRequestError(
                f"--model {path} gave another value of {name!r} at its second call "
                "under the same torch.manual_seed: use only torch's default generator "
                "for initial values"
            )
