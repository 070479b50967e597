"""Compares replicas with each other, and a layout with the reference and with another layout.

The module has the reference's run of a scenario, with which every layout is compared, and pure
functions of samples. A check that fails gives a finding; the checks are

    replicas    parameters and state that every rank has must be the same, bit for bit
    reference   parameters near those of the float64 reference
    state       optimizer state near the reference's
    layouts     with ordered reduction the same bits as the first layout, else near it
    collectives all ranks launched the same collectives in the same order
    plan        all ranks have the same plan, and run the code that their degrees say
    contract    nothing is cut that has to stay whole, and no ranks have two groups
    promise     what the scenario itself promises
    hang        a collective did not come to its end: waited for in vain, or torn down because
                ranks had launched different ones
    error       anything else that kept a rank from its end, or a sample from being taken

and of one XLA program for all devices

    programs    no more were compiled than there are kinds of steps: who is present, in which groups
    host_reads  nothing was read from a device inside a step
    memory      no device holds much more state than an even part
"""

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

import samestep
from samestep.lab.stress.models import named_params
from samestep.lab.stress.rank import Ending, Sample, Work
from samestep.lab.stress.reference import Reference
from samestep.lab.stress.scenario import (
    CLOSED_LOOP_STEPS,
    AddGroup,
    Edit,
    Gradients,
    Scenario,
    SetOptions,
    Train,
)
from samestep.lab.stress.training import SCALER, added, rank_gradients, without_onednn

PRESENCE_STEPS = 64  # how many the presence map shows


@dataclass
class Expected:
    """The samples of the reference run.

    samples: by number of steps taken.
    families: per parameter "adam", "mu_a" (the first group of Muon's) or "mu_b" (all others).
    presence: per parameter and step the number of ranks that have a gradient.
    gradients: [step][rank], where the scenario is to be replayed.
    """

    samples: dict[int, Sample] = field(default_factory=dict)
    families: dict[str, str] = field(default_factory=dict)
    presence: dict[str, list[int]] = field(default_factory=dict)
    gradients: list[list[Gradients]] = field(default_factory=list)


def expected_run(
    scenario: Scenario, due: Collection[int], progress: Callable[[int], None] = lambda step: None
) -> Expected:
    """Run a scenario in float64, with the gradients of all ranks at the reference's parameters.

    The run goes on until the last step after which a sample is due.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in ranks; more would only slow down what is so small
    try:
        with without_onednn():
            return _run(scenario, due, progress)
    finally:
        torch.set_num_threads(threads)


def _run(scenario: Scenario, due: Collection[int], progress: Callable[[int], None]) -> Expected:
    model = scenario.model()
    options = scenario.options()
    # Alone on purpose, also where torchrun has started more: gradients are averaged by hand.
    optimizer = samestep.MuonAdamW(scenario.model(), grads="reduced", **options)
    reference = Reference(named_params(model), optimizer.param_groups)
    limit = float("inf") if scenario.scales else options.get("max_grad_norm")
    expected = Expected()
    scale = _Scale()
    for step in range(max(due)):
        _apply_events(scenario, step, model, reference)
        rounds = (rank_gradients(scenario, model, step, rank) for rank in range(scenario.world))
        by_rank = [reduce(added, of_rank) for of_rank in rounds]
        if scenario.loop == "recorded":
            expected.gradients.append(by_rank)
        names = [name for group in reference.groups for name in group["param_names"]]
        grads = {name: [rank.get(name) for rank in by_rank] for name in names}
        if step < PRESENCE_STEPS:
            for name, of_ranks in grads.items():
                row = expected.presence.setdefault(name, [0] * step)
                row.append(sum(grad is not None for grad in of_ranks))
        taken = reference.step(grads, divisor=scenario.world, max_grad_norm=limit)
        scale.update(taken)
        _copy_into(model, reference)
        if step + 1 in due:
            state = {name: dict(entries) for name, entries in reference.state.items()}
            if scenario.scales:
                state[SCALER] = {"scale": torch.tensor(scale.value, dtype=torch.float64)}
            expected.samples[step + 1] = Sample(step + 1, dict(reference.params), state)
        if (step + 1) % 10 == 0 or step + 1 in due:
            progress(step + 1)
    expected.families = _families(reference.groups)
    return expected


class _Scale:
    """The expected scale of a GradScaler: halved by each skipped step, doubled by five taken."""

    def __init__(self) -> None:
        self.value, self._taken = 2.0**10, 0

    def update(self, taken: bool) -> None:
        self._taken = self._taken + 1 if taken else 0
        if not taken:
            self.value /= 2
        elif self._taken == 5:
            self.value, self._taken = self.value * 2, 0


def _apply_events(scenario: Scenario, step: int, model: nn.Module, reference: Reference) -> None:
    """Apply the events before a step to the reference; resuming changes nothing."""
    params = named_params(model)
    for event in scenario.events(step):
        match event:
            case SetOptions(rule, options):
                for group in reference.groups:
                    if group["rule"] == rule:
                        group.update(options)
            case Train(names, wanted):
                for name in names:
                    params[name].requires_grad_(wanted)
            case AddGroup(names, options):
                for name in names:
                    params[name].requires_grad_(True)
                given = scenario.options()
                shared: dict[str, Any] = {
                    key: given[key] for key in ("lr", "weight_decay") if key in given
                }
                adamw = {"betas": (0.9, 0.95)}  # MuonAdamW's own default, and its decay of 0.1
                group = {"weight_decay": 0.1, **adamw, **shared, **options}
                reference.add_group({**group, "param_names": names})
            case Edit(name, value):
                reference.set_param(name, value)
    _copy_into(model, reference)


def _copy_into(model: nn.Module, reference: Reference) -> None:
    with torch.no_grad():
        for name, param in named_params(model).items():
            param.copy_(reference.params[name])


def _families(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    families = {}
    first_muon = next((g for g in groups if g["rule"] == "muon"), None)
    for group in groups:
        family = "adam" if group["rule"] == "adamw" else "mu_a" if group is first_muon else "mu_b"
        families.update(dict.fromkeys(group["param_names"], family))
    return families


LIMITS = {"adam": 2e-5, "mu_a": 3e-4, "mu_b": 3e-4}
STATE_LIMIT = 2e-5  # relative to its size where that is above 1
CHECKS = (
    "replicas", "reference", "state", "layouts", "collectives", "plan", "contract", "promise",
    "hang", "error",
)  # fmt: skip
PROGRAM_CHECKS = ("programs", "host_reads", "memory")  # of XLA's
PADDING = 1.3  # tiles of the harness' small, odd shapes have room to spare


@dataclass(frozen=True)
class Finding:
    """A failed check, with the number of steps and what was found."""

    check: str
    step: int
    message: str


@dataclass(frozen=True)
class Distance:
    """Largest absolute differences of parameters by family (None: no such family) and of state."""

    adam: float | None = None
    mu_a: float | None = None
    mu_b: float | None = None
    state: float = 0.0

    @property
    def params(self) -> float:
        return max((d for d in (self.adam, self.mu_a, self.mu_b) if d is not None), default=0.0)

    @property
    def largest(self) -> float:
        return max(self.params, self.state)


@dataclass(frozen=True)
class SampleVerdict:
    """The differences at one sample."""

    step: int
    replicas: Distance
    reference: Distance | None  # None: not to be compared
    layouts: Distance | None
    collectives: int
    same_collectives: bool
    bits: str  # digest of the parameters and state of all ranks


@dataclass
class Judge:
    """Judges the samples of all ranks as they arrive.

    base: another layout's samples by step, of the same scenario and world size.
    samples: of the first rank, by step.
    """

    work: Work
    expected: Expected
    base: Mapping[int, Sample]
    samples: dict[int, Sample] = field(default_factory=dict)
    verdicts: list[SampleVerdict] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def scenario(self) -> Scenario:
        return self.work.scenario

    @property
    def exact(self) -> bool:
        """Whether layouts must agree bit for bit."""
        # Sums inside a layer have another order when it is cut, and XLA chooses its own.
        anyhow = self.work.layout.parameters in ("hybrid", "spmd", "spmd_hybrid")
        return self.work.case.reduction == "ordered" and not anyhow

    def add(self, ranks: Sequence[Sample]) -> SampleVerdict:
        """Judge the samples that all ranks took after the same step."""
        first, step = ranks[0], ranks[0].step
        self.samples[step] = first
        comparable = self.scenario.loop != "closed" or step <= CLOSED_LOOP_STEPS
        replicas = self._largest([self._distance(other, first) for other in ranks[1:]])
        reference = None
        if comparable:
            known = self.expected.samples[step]
            if self.scenario.limits is not None:
                known = replace(known, state=first.state)
            reference = self._distance(first, known, relative=True)
            if not all(value.isfinite().all() for value in known.params.values()):
                self._find("reference", step, "the reference itself is not finite")
        layouts = None
        if step in self.base and (comparable or self.exact):
            layouts = self._distance(first, self.base[step])
        same = len({(sample.collectives, sample.digest) for sample in ranks}) == 1
        bits = fingerprint(ranks)
        verdict = SampleVerdict(step, replicas, reference, layouts, first.collectives, same, bits)
        self.verdicts.append(verdict)
        self._judge(verdict, first)
        return verdict

    def end(self, endings: Mapping[int, Ending]) -> None:
        """Judge how the ranks ended, and whether all samples were seen."""
        # A rank that fails leaves the others hanging: its own error is the one to tell.
        order = ("plan", "contract", "replicas", "state", "error", "hang")
        failed = [(order.index(e.kind), rank) for rank, e in endings.items() if e.kind is not None]
        if failed:
            place, rank = min(failed)
            lines = str(endings[rank].error).strip().split("\n")
            # Of a traceback the last one says what it was.
            first_line = f"raised {lines[-1]}" if lines[0] == "raised:" else lines[0]
            self._find(order[place], endings[rank].step, f"rank {rank}: {first_line}")
            return
        for rank in range(1 if self.work.layout.one_process else self.work.case.world):
            if rank not in endings:
                self._find("error", 0, f"rank {rank} has not told how it ended")
        for step in sorted(self.work.due - self.samples.keys()):
            self._find("error", step, f"there is no sample of all ranks after step {step}")
        if endings and (program := next(iter(endings.values())).program):
            self._judge_program(program, max(ending.step for ending in endings.values()))
        if len({ending.fingerprint for ending in endings.values()}) > 1:
            step = max(ending.step for ending in endings.values())
            self._find("plan", step, "the plans' fingerprints differ between ranks")

    def _judge_program(self, program: Mapping[str, int], step: int) -> None:
        compiled, kinds = program["programs"], program["kinds_of_step"]
        if compiled > kinds:
            message = f"{compiled} programs were compiled for {kinds} kinds of steps"
            self._find("programs", step, message)
        if program["host_reads"]:
            message = f"the host read from devices {program['host_reads']} times inside steps"
            self._find("host_reads", step, message)
        held, even = program["state_bytes"], program["even_state_bytes"]
        shared = self.work.layout.options.get("sharding") != "none"
        if shared and held > PADDING * even:
            message = f"a device holds {held} bytes of state, and {even} would be an even part"
            self._find("memory", step, message)

    @property
    def worst(self) -> float:
        """Return the largest difference so far between ranks and between layouts."""
        found = [verdict.replicas.largest for verdict in self.verdicts]
        found += [each.layouts.largest for each in self.verdicts if each.layouts is not None]
        return max(found, default=0.0)

    def status(self) -> str:
        """Return `failed`, `exact`, or `within_tolerance` (differences where zero is possible)."""
        if self.findings:
            return "failed"
        return "exact" if self.worst == 0.0 else "within_tolerance"

    def _judge(self, verdict: SampleVerdict, sample: Sample) -> None:
        step, replicas, reference = verdict.step, verdict.replicas, verdict.reference
        if replicas.largest > 0:
            self._find("replicas", step, f"ranks differ by {replicas.largest:.3g}")
        for family, away, limit in _beyond_limits(reference, self.scenario.limits):
            check, whose = ("state", "'s") if family == "state" else ("reference", "")
            message = f"{family} is {away:.3g} away from the reference{whose}, limit {limit}"
            self._find(check, step, message)
        layouts = verdict.layouts
        if not self.exact:
            for family, away, limit in _beyond_limits(layouts):
                self._find("layouts", step, f"{family} is {away:.3g} away, limit {limit}")
        elif layouts is not None and layouts.largest > 0:
            message = (
                f"{layouts.largest:.3g} away from the first layout, and ordered sums are exact"
            )
            self._find("layouts", step, message)
        if not verdict.same_collectives:
            self._find("collectives", step, "ranks launched different collectives")
        broken = self.scenario.broken_promise(sample.params)
        if broken is not None:
            self._find("promise", step, broken)

    def _find(self, check: str, step: int, message: str) -> None:
        if all(finding.check != check for finding in self.findings):  # the first of its kind
            self.findings.append(Finding(check, step, message))

    def _distance(self, one: Sample, other: Sample, relative: bool = False) -> Distance:
        by_family: dict[str, float] = {}
        for name, family in self.expected.families.items():
            if name in one.params:
                away = difference(one.params[name], other.params[name])
                by_family[family] = max(away, by_family.get(family, 0.0))
        return Distance(**by_family, state=_state_distance(one, other, relative))

    @staticmethod
    def _largest(distances: Sequence[Distance]) -> Distance:
        found: dict[str, float] = {}
        for key, value in (item for each in distances for item in vars(each).items()):
            if value is not None:
                found[key] = max(value, found.get(key, 0.0))
        return Distance(**found)


def _beyond_limits(
    distance: Distance | None, limits: Mapping[str, float] | None = None
) -> Iterator[tuple[str, float, float]]:
    """Yield (name, distance, limit) of distances that exceed their limit or are not a number."""
    for family, limit in {**(limits or LIMITS), "state": STATE_LIMIT}.items():
        away = getattr(distance, family, None)
        if away is not None and not away <= limit:
            yield family, away, limit


def fingerprint(ranks: Sequence[Sample]) -> str:
    """Return a digest of parameters and state; several digests if ranks hold different bits."""
    return " ".join(sorted({_digest(sample) for sample in ranks}))


def _digest(sample: Sample) -> str:
    """Return a digest of names, keys, dtypes, shapes and bits; 0.0 and -0.0 differ."""
    digest = hashlib.blake2b(digest_size=8)
    for name, entries in sorted({"": sample.params, **sample.state}.items()):
        for key, value in sorted(entries.items()):
            digest.update(f"{name}\0{key}\0{value.dtype}\0{tuple(value.shape)}\n".encode())
            bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(bits.numpy().tobytes())
    return digest.hexdigest()


def difference(one: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference: 0 for equal values, infinite for NaN and a number.

    Tensors of different shapes are infinitely far apart, too.
    """
    if one.shape != other.shape:
        return float("inf")
    if one.dtype == other.dtype and torch.equal(one, other):
        return 0.0
    one, other = one.to(torch.float64), other.to(torch.float64)
    both_nan = one.isnan() & other.isnan()
    away = (one - other).abs().masked_fill(both_nan | (one == other), 0.0)
    infinite = {"nan": float("inf"), "posinf": float("inf")}
    return float(away.nan_to_num(**infinite).max()) if away.numel() else 0.0


def _state_distance(one: Sample, other: Sample, relative: bool) -> float:
    """Return the largest difference of state; `relative`: divided by its size if above 1."""
    worst = 0.0
    for name in one.state.keys() | other.state.keys():
        mine, theirs = one.state.get(name), other.state.get(name)
        if mine is None or theirs is None or mine.keys() != theirs.keys():
            return float("inf")
        for key, value in mine.items():
            size = 1.0
            if relative and theirs[key].numel():
                size = max(1.0, float(theirs[key].abs().max()))
            worst = max(worst, difference(value, theirs[key]) / size)
    return worst
