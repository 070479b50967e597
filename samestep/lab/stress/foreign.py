"""`samestep stress --optimizer`: runs another package's distributed optimizer on ranks of its own.

Each case is a scenario on a number of ranks. Its ranks are forked for it alone, with a time-out, so
that an optimizer which hangs, raises or kills its process costs a row of the table and no more.
Beside it the same factory runs in a process group of one rank, which is given the mean of all
ranks' gradients. A case asks four questions:

    replicas    do all ranks hold the same bits of every parameter after every step?
    alone       are the parameters those of the single process, as near as rounding lets them?
    untouched   is a parameter for which no rank has a gradient left as it is, to the bit?
    state_dict  does loading what was saved give a state dict that is equal to the saved one?
"""

import hashlib
import io
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from samestep.comm.messages import gather_everywhere
from samestep.lab.stress.models import Matrices, named_params
from samestep.lab.stress.ranks import Note
from samestep.lab.stress.scenario import GradientScenario, MakeModel, Wanted
from samestep.lab.stress.training import mean_gradients, without_onednn
from samestep.launch import RanksFailed
from samestep.launch.forked import run_forked
from samestep.tooling.request import BadRequestError

Factory = Callable[[nn.Module], Optimizer]
Grads = Literal["reduced", "local", "ddp"]
Status = Literal["held", "differs", "raised", "hang", "died", "does_not_apply"]

WORLDS = (2, 3, 4)
STEPS = 8
TOLERANCE = 0.02  # of the way: products in bfloat16 stay below, and every bug known is above
START = 60.0  # seconds that a case has beside its collectives: an optimizer may compile its step

# --- scenarios -----------------------------------------------------------------------------------

# Every size is a multiple of 2, 3 and 4; AdamW's matrix is large enough to be shared out.
EVEN: dict[str, tuple[int, ...]] = {
    "adam": (48, 26), "adam_vector": (12,),
    "muon_a_0": (24, 12), "muon_a_1": (24, 12), "muon_a_2": (24, 12),
    "muon_b_0": (12, 36), "muon_b_1": (12, 36),
}  # fmt: skip
# None of these is; the gate has fewer rows than there may be ranks.
ODD: dict[str, tuple[int, ...]] = {
    "adam": (47, 23), "adam_vector": (7,),
    "muon_a_0": (25, 11), "muon_a_1": (25, 11), "muon_a_2": (25, 11),
    "muon_b_0": (11, 35), "muon_gate": (3, 20),
}  # fmt: skip


class ForeignScenario(GradientScenario):
    """Gradients given to each rank, and what happens between steps.

    The docstring of a scenario is its story.
    """

    shapes: ClassVar[Mapping[str, tuple[int, ...]]] = EVEN
    takes_any_model = True
    lacks: ClassVar[bool] = False  # gradients
    about_ranks: ClassVar[bool] = False  # nothing is left of it once gradients are averaged

    def __init_subclass__(cls) -> None:
        cls.story = (cls.__doc__ or "").rstrip(".")

    def own_model(self) -> nn.Module:
        return Matrices(dict(self.shapes))

    def gradient(self, of: Wanted) -> Tensor | None:
        return self.drawn(of)

    def rate(self, step: int) -> float:
        """Return the factor of every group's learning rate."""
        return 1.0

    def resumes(self, step: int) -> bool:
        """Whether the run is saved before a step and continued with a new model and optimizer."""
        return False


class Dense(ForeignScenario):
    """Every parameter has a gradient on every rank."""

    name = "dense"


class OddShapes(ForeignScenario):
    """Dense gradients of shapes that no number of ranks divides, one with fewer rows than ranks."""

    name = "odd_shapes"
    shapes = ODD
    takes_any_model = False


class AbsentSomewhere(ForeignScenario):
    """Every parameter lacks its gradient on one rank, which changes from step to step."""

    name = "absent_somewhere"
    about_ranks = True
    lacks = True

    def gradient(self, of: Wanted) -> Tensor | None:
        return None if (of.step + of.place) % self.world == of.rank else self.drawn(of)


class AbsentEverywhere(ForeignScenario):
    """In one step of three a parameter has no gradient on any rank and must not change."""

    name = "absent_everywhere"
    lacks = True

    def gradient(self, of: Wanted) -> Tensor | None:
        return None if (of.step + of.place) % 3 == 2 else self.drawn(of)


class Zeros(ForeignScenario):
    """In one step of three a gradient is zero, and momentum must continue."""

    name = "zeros"

    def gradient(self, of: Wanted) -> Tensor | None:
        return torch.zeros_like(of.param) if (of.step + of.place) % 3 == 2 else self.drawn(of)


class Rates(ForeignScenario):
    """Every group has another learning rate in every step."""

    name = "rates"

    def rate(self, step: int) -> float:
        """Return a factor that rises, then falls along a cosine, and never reaches zero."""
        return 0.55 + 0.45 * math.cos(0.9 * step)


class Accumulation(ForeignScenario):
    """Three micro-batches are summed in .grad before each step."""

    name = "accumulation"
    about_ranks = True

    def micro_batches(self, step: int) -> int:
        return 3

    def gradient(self, of: Wanted) -> Tensor | None:
        return self.random(of.param.shape, of.place, of.step, of.rank, of.micro)


class Resumed(ForeignScenario):
    """Saved by state_dict() in the middle, loaded into a new model and optimizer."""

    name = "resume"

    def resumes(self, step: int) -> bool:
        return step == 4


FOREIGN: dict[str, type[ForeignScenario]] = {
    each.name: each
    for each in (
        Dense, OddShapes, AbsentSomewhere, AbsentEverywhere, Zeros, Rates, Accumulation, Resumed,
    )
}  # fmt: skip


# --- what is asked, and what came of it ----------------------------------------------------------


class ForeignCase(NamedTuple):
    """One scenario on a number of ranks, and how their gradients reach the optimizer.

    grads: "reduced": every rank is given the mean, as DDP leaves it. "local": its own gradient,
        which the optimizer has to average. "ddp": through torch's DistributedDataParallel.
    """

    scenario: str
    world: int
    grads: Grads = "reduced"
    steps: int = STEPS
    seed: int = 0

    def reason_against(self, make_model: MakeModel | None = None) -> str | None:
        """Return why the case would test nothing; None if it applies."""
        kind = FOREIGN[self.scenario]
        if self.grads == "reduced" and kind.about_ranks:
            return "gradients come averaged: all ranks are given the same"
        if make_model is not None and not kind.takes_any_model:
            return "it has a model of its own"
        return None


@dataclass(frozen=True)
class ForeignResult:
    """The findings of a case; None: not checked, or no rank was left to check.

    alone: the largest distance of a parameter from the single process, relative to the distance by
        which the parameter moved there.
    message: what went wrong first, with the parameter, step and rank.
    """

    scenario: str
    world: int
    status: Status
    replicas: bool | None = None
    alone: float | None = None
    untouched: bool | None = None
    state_dict: bool | None = None
    message: str = ""
    seconds: float = 0.0


class RankReport(NamedTuple):
    """The run of one rank. digests: of every parameter after each step."""

    start: dict[str, Tensor]
    end: dict[str, Tensor]
    digests: list[dict[str, str]]
    touched: str | None  # the first parameter that changed although nobody had a gradient
    state_dict: str | None  # where the loaded state dict differs from the saved one; "" if nowhere


# --- one rank ------------------------------------------------------------------------------------


class _Gradients(nn.Module):
    """A module whose backward yields the gradients of a scenario, for DDP to wrap."""

    def __init__(self, model: nn.Module, scenario: ForeignScenario, rank: int) -> None:
        super().__init__()
        self.model, self.scenario, self.rank = model, scenario, rank

    def forward(self, step: int, micro: int) -> Tensor:
        loss = self.scenario.loss(self.model, step, self.rank, micro)
        return torch.zeros((), requires_grad=True) if loss is None else loss


class ForeignTraining:
    """A model, the tested optimizer, and gradients as the case delivers them."""

    def __init__(
        self, scenario: ForeignScenario, factory: Factory, grads: Grads, rank: int
    ) -> None:
        self.scenario, self.factory, self.grads, self.rank = scenario, factory, grads, rank
        self._plain = scenario.model()  # says which gradients there are, whatever the factory does
        self._begin(scenario.model())

    def _begin(self, model: nn.Module) -> None:
        self.model = model
        forward = _Gradients(model, self.scenario, self.rank)
        self._ddp = (
            DistributedDataParallel(forward, find_unused_parameters=self.scenario.lacks)
            if self.grads == "ddp"
            else None
        )
        self.optimizer = self.factory(model)
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def values(self) -> dict[str, Tensor]:
        """Return all parameters as whole tensors; collective for DTensors."""
        named = named_params(self.model)
        return {name: _whole(param.detach()).clone() for name, param in named.items()}

    def absent(self, step: int) -> set[str]:
        """Return the parameters for which no rank has a gradient in a step."""
        return named_params(self._plain).keys() - self._means(step).keys()

    def step(self, number: int) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            _set_rate(group, rate * self.scenario.rate(number))
        if self.grads == "reduced":
            self._give_means(number)
        else:
            self._run_backward(number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.zero_grad(set_to_none=True)  # for optimizers that fill with zeros

    def resume(self) -> str:
        """Continue with a new model and optimizer; return where the state dict has changed."""
        values = self.values()
        saved = self._saved()
        model = self.scenario.model()
        with torch.no_grad():
            for name, param in named_params(model).items():
                param.copy_(values[name])
        self._begin(model)
        self.optimizer.load_state_dict(
            _unpacked(saved)
        )  # which may keep or change what it is given
        return _difference(_unpacked(saved), _unpacked(self._saved())) or ""

    def _saved(self) -> bytes:
        """Return the state dict through a file: each rank's own, or rank 0's if that is complete.

        ZeroRedundancyOptimizer saves on rank 0 alone. Collective.
        """
        consolidate = getattr(self.optimizer, "consolidate_state_dict", None)
        if any(isinstance(param, DTensor) for param in named_params(self.model).values()):
            consolidate = None  # their state is of DTensors, too, of which each rank has its part
        if consolidate is not None:
            consolidate(to=0)
        file = io.BytesIO()
        if consolidate is None or self.rank == 0:
            torch.save(self.optimizer.state_dict(), file)
        if consolidate is None or dist.group.WORLD is None:
            return file.getvalue()
        files: list[bytes] = gather_everywhere(file.getvalue(), dist.group.WORLD)
        return files[0]

    def _means(self, step: int) -> dict[str, Tensor]:
        return mean_gradients(self.scenario, self._plain, step)

    def _give_means(self, step: int) -> None:
        means = self._means(step)
        for name, param in named_params(self.model).items():
            grad = means.get(name)
            if grad is not None and isinstance(param, DTensor):
                place: Any = param.device_mesh, param.placements
                grad = distribute_tensor(grad, *place, src_data_rank=None)
            param.grad = grad

    def _run_backward(self, step: int) -> None:
        if any(isinstance(param, DTensor) for param in named_params(self.model).values()):
            raise BadRequestError(
                f"--grads {self.grads}: the factory has turned parameters into "
                "DTensors, whose gradients are reduced already: leave --grads out"
            )
        count = self.scenario.micro_batches(step)
        for micro in range(count):
            if self._ddp is None:
                loss = self.scenario.loss(self.model, step, self.rank, micro)
                if loss is not None:
                    torch.autograd.backward(loss)
                continue
            self._ddp.require_backward_grad_sync = micro == count - 1
            torch.autograd.backward(self._ddp(step, micro))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _unpacked(saved: bytes) -> Any:
    return torch.load(io.BytesIO(saved), weights_only=False)  # from ranks of this machine


def _difference(one: Any, other: Any, place: str = "") -> str | None:
    """Return the first place at which two nested state dicts are not equal."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            lacking = sorted(map(str, one.keys() ^ other.keys()))
            return f"{place or 'state_dict()'} has other keys: {', '.join(lacking[:3])}"
        pairs = [(f"{place}[{key!r}]", one[key], other[key]) for key in one]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return f"{place} has {len(other)} entries, not {len(one)}"
        pairs = [(f"{place}[{n}]", *pair) for n, pair in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, Tensor) and isinstance(other, Tensor):
        here, there = (each.to_local() if isinstance(each, DTensor) else each
                       for each in (one, other))  # fmt: skip
        if here.dtype != there.dtype:
            return f"{place} is {there.dtype}, and was {here.dtype}"
        same = here.shape == there.shape and torch.equal(here.cpu(), there.cpu())
        return None if same else f"{place} has other values"
    else:
        plain = isinstance(one, int | float | str | bool | None)
        return f"{place} is {other!r}, and was {one!r}" if plain and one != other else None
    found = (_difference(mine, theirs, where) for where, mine, theirs in pairs)
    return next((each for each in found if each is not None), None)


def _digest(values: Mapping[str, Tensor]) -> dict[str, str]:
    bits = {name: value.contiguous().view(-1).view(torch.uint8) for name, value in values.items()}
    return {name: hashlib.sha256(each.numpy().tobytes()).hexdigest() for name, each in bits.items()}


def _run_rank(
    rank: int,
    scenario: ForeignScenario,
    factory: Factory,
    case: ForeignCase,
    alone: bool,
    notes: Sequence[Note],
) -> RankReport:
    """Train and record the parameters after every step; `alone`: never save and resume."""
    torch.manual_seed(scenario.seed)  # what the optimizer draws is the same on all ranks
    note, touched, state_dict = notes[rank], None, None
    with without_onednn():
        note.write("the factory")
        training = ForeignTraining(scenario, factory, "reduced" if alone else case.grads, rank)
        start = end = training.values()
        digests = []
        for step in range(case.steps):
            if scenario.resumes(step) and not alone:
                note.write(f"the resume before step {step + 1}")
                state_dict = training.resume()
            note.write(f"step {step + 1}")
            before = training.values()
            training.step(step)
            end = training.values()
            for name in sorted(training.absent(step)):
                if touched is None and not torch.equal(before[name], end[name]):
                    away = float((before[name] - end[name]).abs().max())
                    touched = f"{name} moved by {away:.2g} in step {step + 1} without a gradient"
            digests.append(_digest(end))
    return RankReport(start, end, digests, touched, state_dict)


# --- all ranks of a case -------------------------------------------------------------------------


def try_factory(
    factory: Factory, path: str, *, make_model: MakeModel | None = None, watchdog: float = 10.0
) -> None:
    """Make the optimizer on one rank; raise BadRequestError if it cannot be made there."""

    def made(rank: int) -> str:
        optimizer = factory(Dense(0, 1, make_model).model())
        lacking = [each for each in ("step", "param_groups") if not hasattr(optimizer, each)]
        return f"a {type(optimizer).__name__} without {' and '.join(lacking)}" if lacking else ""

    try:
        (problem,) = run_forked(1, made, timeout=START, collective_timeout=watchdog)
    except RanksFailed as failed:
        raise BadRequestError(f"--optimizer {path}: {_error_of(failed.reports[0])}") from failed
    if problem:
        raise BadRequestError(f"--optimizer {path} returned {problem}: an optimizer needs both")


def run_case(
    case: ForeignCase,
    factory: Factory,
    *,
    make_model: MakeModel | None = None,
    watchdog: float = 10.0,
    tolerance: float = TOLERANCE,
) -> ForeignResult:
    """Run a case on forked ranks and on one process; a failure of ranks is a result."""
    place = case.scenario, case.world
    reason = case.reason_against(make_model)
    if reason is not None:
        return ForeignResult(*place, "does_not_apply", message=reason)
    began = time.monotonic()
    kind = FOREIGN[case.scenario]
    scenario = kind(case.seed, case.world, make_model if kind.takes_any_model else None)

    def run(*, alone: bool) -> list[RankReport]:
        world = 1 if alone else case.world
        notes = [Note() for _ in range(world)]
        limits: dict[str, Any] = {"timeout": START + 2 * watchdog, "collective_timeout": watchdog}
        arguments = scenario, factory, case, alone, notes
        try:
            return run_forked(world, _run_rank, *arguments, **limits)
        except RanksFailed as failed:
            raise _CaseFailedError(
                *_ending(failed.reports, [each.read() for each in notes])
            ) from None

    try:
        reports = run(alone=False)
    except _CaseFailedError as failed:
        seconds = time.monotonic() - began
        return ForeignResult(*place, failed.status, message=failed.said, seconds=seconds)
    try:
        alone: RankReport | str = run(alone=True)[0]
    except _CaseFailedError as failed:
        alone = f"alone: {failed.said}"
    result = _judged(case, kind, reports, alone, tolerance)
    return replace(result, seconds=time.monotonic() - began)


class _CaseFailedError(Exception):
    """An error of some ranks of a case."""

    def __init__(self, status: Status, said: str) -> None:
        super().__init__(said)
        self.status, self.said = status, said


HANGS = ("Timed out", "timed out", "had not finished", "Timeout", "timeout")
FOLLOWS = ("Connection closed", "Connection reset", "Broken pipe", "was still running", *HANGS)


def _ending(reports: Mapping[int, str], notes: Sequence[str]) -> tuple[Status, str]:
    """Describe the first failure of ranks, not those of ranks that waited for it."""
    where = {rank: f"rank {rank} in {notes[rank]}" for rank in reports}
    for rank, text in reports.items():
        if text.startswith("died of"):
            return "died", f"{where[rank]}: {text.splitlines()[0]}"
    for rank, text in reports.items():
        if not any(follows in text for follows in FOLLOWS):
            return "raised", f"{where[rank]}: {_error_of(text)}"
    places = ", ".join(f"rank {rank} in {note}" for rank, note in enumerate(notes))
    return "hang", f"no answer: {places}"


ERROR = re.compile(r"^[\w.]+(Error|Exception|Warning|Interrupt): ")


def _error_of(report: str) -> str:
    """Return the line of a traceback that names its error."""
    lines = report.strip().splitlines()
    return next((line for line in reversed(lines) if ERROR.match(line)), lines[-1])[:300]


def _judged(
    case: ForeignCase,
    kind: type[ForeignScenario],
    reports: Sequence[RankReport],
    alone: RankReport | str,
    tolerance: float,
) -> ForeignResult:
    first, said = reports[0], []
    replicas = True
    for step, digests in enumerate(zip(*(report.digests for report in reports), strict=True)):
        apart = [name for name in digests[0] if len({each[name] for each in digests}) > 1]
        if apart:
            replicas = False
            said.append(f"ranks differ in {apart[0]} after step {step + 1}")
            break
    away: float | None = None
    near = False
    if isinstance(alone, str):
        said.append(alone)
    else:
        name, away = _farthest(first, alone)
        near = away <= tolerance
        if not near:
            said.append(f"{name} is {away:.2g} of its way from the single process")
    touched = next((report.touched for report in reports if report.touched is not None), None)
    lost = next((report.state_dict for report in reports if report.state_dict), None)
    asked = any(report.state_dict is not None for report in reports)
    said += [each for each in (touched, lost) if each]
    held = replicas and near and touched is None and not lost
    return ForeignResult(
        case.scenario,
        case.world,
        "held" if held else "differs",
        replicas,
        away if away is not None and math.isfinite(away) else None,
        touched is None if kind is AbsentEverywhere else None,
        not lost if asked else None,
        "; ".join(said),
    )


def _farthest(found: RankReport, alone: RankReport) -> tuple[str, float]:
    """Return the parameter farthest from the single process, with its relative distance."""
    worst = "", 0.0
    for name, value in alone.end.items():
        way = float((value.double() - alone.start[name].double()).norm())
        away = float((found.end[name].double() - value.double()).norm())
        part = 0.0 if away == 0 else away / way if way else math.inf
        if not part <= worst[1]:  # a NaN is the worst of all
            worst = name, math.inf if math.isnan(part) else part
    return worst
