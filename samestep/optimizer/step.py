"""The step of every optimizer here: presence -> reduce -> check, clip -> rule -> gather."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast  # 0.5 us when nobody profiles, not 60

from samestep.comm.collectives import CollectiveError, gather_segments, maximum, total
from samestep.comm.diagnosis import watch
from samestep.comm.groups import RankGroup
from samestep.comm.presence import RankFailure
from samestep.groups.param_groups import Group
from samestep.groups.step_options import StepOptions
from samestep.kernels.choice import missing as missing_kernels
from samestep.optimizer.norm_ahead import NormAhead
from samestep.optimizer.optimizer_plan import OptimizerPlan
from samestep.optimizer.rule_runner import ClipDecision, RuleRunner
from samestep.optimizer.step_agreement import StepAgreement
from samestep.plan.schedule import (
    Agree,
    Average,
    Clip,
    Measure,
    OfBucket,
    OfChunk,
    OfWindow,
    Operation,
    Reduce,
    Schedule,
    Update,
    describe_operation,
    staging_bytes,
    step_schedule,
)
from samestep.rules.state import State
from samestep.shards.local import LocalParameters
from samestep.shards.placement import Placement
from samestep.update.metrics import (
    StepNumbers,
    UpdateSizes,
    clip_factor,
    present_counts,
    square_sum,
)
from samestep.update.offload import Staging
from samestep.update.plain import run_rule

if TYPE_CHECKING:
    from samestep.optimizer.recorded_step import RecordedStep

_step_schedule = lru_cache(maxsize=64)(step_schedule)  # the same in every step
_staging_bytes = lru_cache(maxsize=64)(staging_bytes)
Handlers = Mapping[type[Operation], Callable[[Any], None]]


class StepRunner:
    """Runs the steps of an optimizer: the operations of its schedule, one after the other.

    rules: runs the rules on what an operation updates.
    agreement: what ranks tell each other before anything changes.
    """

    def __init__(self, plan: OptimizerPlan, options: StepOptions) -> None:
        self._plan = plan  # its ranks may be found later, and its plans follow parameters
        self._options = options
        self.rules = RuleRunner(options)
        self.agreement = StepAgreement(plan)
        self._recorded = _new_recorded_step(asked_for=True) if options.cuda_graph else None
        self._norm_ahead = NormAhead()
        # Of the last step:
        self._placements: Sequence[Placement] = ()
        self.grad_norm: Tensor | None = None
        self.grad_norms: dict[str, Tensor] = {}  # of rules that have a limit of their own
        self.staging: Staging | None = None  # of state that stays on the host

    def norm_begun(self, groups: Sequence[Group], *, scaled: bool) -> AbstractContextManager[None]:
        """Context in which the device sums squares of gradients early."""
        plan = self._plan
        alone = plan.ranks is None and not plan.placed and plan.stages is None
        alone = alone and len(groups) == plan.group_count  # or nobody has looked at them yet
        needed = scaled or self._options.max_grad_norm is not None
        if alone and needed and not self._options.clipped_rules:
            return self._norm_ahead.started(groups, as_graph=self._options.cuda_graph is not False)
        return nullcontext()

    def run(
        self,
        groups: Sequence[Group],
        state: Mapping[Tensor, State],
        problem: RankFailure | None = None,
        inverse_scale: Tensor | None = None,
    ) -> None:
        """One step; `inverse_scale` undoes the scale of a GradScaler."""
        if inverse_scale is not None:
            self._plan.refuse_norm_of_a_part("the scale of a GradScaler")
        self._inverse_scale = inverse_scale
        with self._begun(groups, state, problem):
            recorded = self._recorded
            if recorded is None and missing_kernels(self._device) is None:
                recorded = self._recording()
            self._execute() if recorded is None else self._execute_recorded(recorded)
        for placement in self._placements:
            placement.finish_step()
        if self.staging is not None:  # whoever reads state from now on finds it
            self.staging.finish()

    @contextmanager
    def _begun(
        self,
        groups: Sequence[Group],
        state: Mapping[Tensor, State],
        problem: RankFailure | None,
        call: str | None = None,
    ) -> Iterator[None]:
        """Context of a step, which drops gradients if it fails."""
        self._groups = groups
        self._placements = placements = self._plan.placements
        self._device: torch.device = groups[0]["params"][0].device
        self.rules.begin(groups, placements)
        watching = watch.start()
        if watching is not None:
            watching.step_begun()
        self.rules.sizes = UpdateSizes(len(groups)) if self._options.update_rms else None
        if self._plan.distribution.offload is not None and self.staging is None:
            self.staging = Staging(self._device)
        for placement in placements:
            placement.staging = self.staging
            placement.begin_step(state, problem)
        try:
            self.agreement.begin(groups, problem, self._inverse_scale, call)
            yield
        except CollectiveError:
            # Ranks are gone: there is nobody to start afresh with, and a device may wait for them.
            raise
        except BaseException as error:
            if watching is not None:  # over NCCL the others would wait without knowing for what
                watching.problem(error)
            if self.staging is not None:
                self.staging.break_off()
            for placement in placements:
                placement.abandon_step()
            raise
        if watching is not None and self._device.type == "cuda":
            watching.step_ended(self._device)

    def clip(
        self,
        groups: Sequence[Group],
        state: Mapping[Tensor, State],
        max_norm: float,
        problem: RankFailure | None = None,
    ) -> Tensor:
        """Average and clip gradients before the step; returns their norm, ()."""
        self._plan.refuse_norm_of_a_part("clip_grad_norm_()")
        self._inverse_scale = None
        with self._begun(groups, state, problem, f"clip_grad_norm_({max_norm!r})"):
            for placement in self._placements:
                placement.begin_look()
            schedule = self._schedule(clip=True)
            begun = [each for each in schedule if isinstance(each, Reduce | Agree | Average)]
            self._run_operations(begun)
            squares = self._squares_of_norms()
            if squares is None:
                squares = torch.zeros(1, dtype=torch.float64, device=self._device)
            norm = squares[0].sqrt()
            factor = clip_factor(norm, max_norm)
            for placement in self._placements:
                placement.scale_gradients(factor)
        for placement in self._placements:
            placement.end_look()
        return norm

    def _recording(self) -> "RecordedStep | None":
        """The recorder of CUDA graphs, if steps are recorded."""
        alone = (
            self._plan.ranks is None and self._plan.stages is None and len(self._placements) == 1
        )
        if (
            self._recorded is None
            and self._options.cuda_graph is None
            and not self._options.clipped_rules
            and self.staging is None
            and alone
            and isinstance(self._placements[0], LocalParameters)
            and self.rules.run is run_rule
        ):
            self._recorded = _new_recorded_step(asked_for=False)
        return self._recorded

    def _execute(self) -> None:
        """The operations of a step, one after the other."""
        schedule = self._schedule()
        if self.staging is not None:
            self.staging.make_room(_staging_bytes(schedule))
        self._run_operations(schedule)

    def _run_operations(self, schedule: Sequence[Operation]) -> None:
        """Run operations one after the other."""
        handlers: Handlers = {  # not kept: a dropped optimizer is freed at once
            **dict.fromkeys(get_args(OfWindow), self._of_window),
            **dict.fromkeys(get_args(OfBucket), self._of_bucket),
            **dict.fromkeys(get_args(OfChunk), self._of_chunk),
            Agree: self.agreement.agree,
            Clip: self._clip,
            Update: self.rules.update,
            Measure: self._measure,
        }
        execute(schedule, handlers)

    def _execute_recorded(self, recorded: "RecordedStep") -> None:
        """Run the operations as one CUDA graph."""
        maths = [self.rules.math(index, self._device) for index in range(len(self._groups))]
        local = self._placements[0]
        assert isinstance(local, LocalParameters)
        if self._inverse_scale is not None:
            self._inverse_scale = recorded.own_scale(self._inverse_scale)

        def all_operations() -> StepNumbers:
            self._execute()
            return StepNumbers(self.grad_norm, self.rules.sizes)

        scaled = self._inverse_scale is not None
        has_norm = self._norm_ahead.sum_of(local.gradients()) is not None
        self.grad_norm, self.rules.sizes = recorded.run(
            local.known, maths, scaled, has_norm, self.rules.kernel_plans, all_operations
        )

    def _schedule(self, *, clip: bool = False) -> Schedule:
        return _step_schedule(
            tuple(placement.shape for placement in self._placements),
            waves=self._plan.distribution.waves,
            clip=clip or self._inverse_scale is not None or self._options.max_grad_norm is not None,
            measure=self.rules.sizes is not None,
            chunks_ahead=self._plan.distribution.chunks_ahead,
        )

    def schedule_lines(self) -> tuple[str, ...]:
        """The operations of a step in order, as text, once there was one."""
        return tuple(map(describe_operation, self._schedule())) if self._placements else ()

    def _clip(self, _: Clip) -> None:
        """Decide by the joint norm: how gradients are scaled, and whether the step is skipped.

        On CPU the step is skipped right here; elsewhere a flag stays on the device, so that
        nothing waits for it.
        """
        rules, limit = self._options.clipped_rules, self._options.max_grad_norm
        squares = self._squares_of_norms(rules)
        if squares is None:
            return
        norm = (squares.sum() if rules else squares[0]).sqrt()
        norms: Sequence[Tensor] = squares[1:].sqrt().unbind() if rules else ()
        scale = self._inverse_scale
        if scale is not None:
            norm, *norms = (each * scale.to(norm) for each in (norm, *norms))
        self.grad_norm, self.grad_norms = norm, dict(zip(rules, norms, strict=True))
        by_rule = limit if isinstance(limit, Mapping) else {}
        factor = self._factor(norm, None if isinstance(limit, Mapping) else limit)
        of_rules = {rule: self._factor(own, by_rule[rule]) for rule, own in self.grad_norms.items()}
        if norm.device.type == "cpu":
            skip = not norm.isfinite()
            everyone = self._plan.participants
            if everyone is not None:  # or those with another copy of it would go on alone
                skip = _anywhere(skip, everyone)
            if self._plan.stages is not None:
                skip = _anywhere(skip, self._plan.stages)
            self.rules.decide(ClipDecision(factor, of_rules, skip=skip))
        else:
            self.rules.decide(ClipDecision(factor, of_rules, only_if=norm.isfinite()))

    def _factor(self, norm: Tensor, most: float | None) -> Tensor | None:
        """The factor that unscales gradients and clips them to a norm; None: it is 1."""
        factor = None if self._inverse_scale is None else self._inverse_scale.to(norm)
        if most is not None:
            clip = clip_factor(norm, most)
            factor = clip if factor is None else factor * clip
        on_cpu = factor is not None and factor.device.type == "cpu"
        return None if on_cpu and float(factor) == 1.0 else factor  # type: ignore[arg-type]

    def _squares_of_norms(self, rules: Sequence[str] = ()) -> Tensor | None:
        """The sums of squares of averaged gradients: of all but these rules, and of each rule.

        (1 + rules,); None if there are no gradients.

        DTensors are summed over their own mesh: ranks outside of it hold copies, or other models.
        """
        together: dict[RankGroup | None, list[Placement]] = {}
        for placement in self._placements:
            ranks = placement.sums_over or self._plan.ranks
            together.setdefault(ranks, []).append(placement)
        squares = []
        for ranks, placements in together.items():
            square = self._squares_here(placements, rules)
            if ranks is not None:
                own = torch.zeros(1 + len(rules), dtype=torch.float64, device=self._device)
                own = own if square is None else square
                square = total("gradient norm", own, ranks).wait()
            if square is not None and self._plan.counts_in_norm(ranks):
                squares.append(square)
        square = torch.stack(squares).sum(0) if len(squares) > 1 else next(iter(squares), None)
        if self._plan.stages is None:
            return square
        if square is None:
            square = torch.zeros(1 + len(rules), dtype=torch.float64, device=self._device)
        # In the order of the stages: the same bits on every rank.
        sizes = [len(square)] * self._plan.stages.size
        parts = gather_segments("norm of stages", square, sizes, self._plan.stages)
        return torch.stack(parts.wait()).sum(0)

    def _squares_here(self, placements: Sequence[Placement], rules: Sequence[str]) -> Tensor | None:
        """This rank's sums of squares."""
        if not rules:
            grads = list(chain.from_iterable(p.gradients() for p in placements))
            square = self._norm_ahead.sum_of(grads)
            square = square_sum(grads) if square is None else square
            return None if square is None else square.reshape(1)
        places = {rule: place for place, rule in enumerate(rules, 1)}
        by_place: list[list[Tensor]] = [[] for _ in range(1 + len(rules))]
        for index, grad in chain.from_iterable(p.grouped_gradients() for p in placements):
            by_place[places.get(self._groups[index]["rule"], 0)].append(grad)
        found = torch.zeros(len(by_place), dtype=torch.float64, device=self._device)
        for place, grads in enumerate(by_place):
            square = square_sum(grads)
            if square is not None:
                found[place] = square
        return found

    def _of_window(self, operation: OfWindow) -> None:
        """Fetch or return a window, unless the step is skipped."""
        if not self.rules.decision.skip:
            self._placements[operation.window.bucket.placement].travel(operation)

    def _of_bucket(self, operation: OfBucket) -> None:
        """Run an operation in the placement of its bucket."""
        placement = self._placements[operation.bucket.placement]
        placement.run(operation, self.rules.math)

    def _of_chunk(self, operation: OfChunk) -> None:
        """Run an operation on a chunk, unless the step is skipped."""
        if not self.rules.decision.skip:
            self._of_bucket(operation)

    def _measure(self, _: Measure) -> None:
        assert self.rules.sizes is not None
        self.rules.sizes.combine(self._plan.ranks, self._device, self._plan.groups_of_stages)

    def metrics(self, groups: int) -> dict[str, Tensor]:
        """Numbers of the last step."""
        found = {}
        if self.grad_norm is not None:
            # A graph writes the next one into the same tensor.
            found["grad_norm"] = self.grad_norm.clone() if self._recorded else self.grad_norm
        found |= {f"grad_norm/{rule}": norm for rule, norm in self.grad_norms.items()}
        found["outliers"] = self.rules.outliers.counts(groups)
        found["present"] = present_counts(groups, self.present())
        rms = None if self.rules.sizes is None else self.rules.sizes.rms()
        return found if rms is None else {**found, "update_rms": rms}

    def present(self) -> list[tuple[int, bool | Tensor]]:
        """The group of each parameter, and whether it was present in the last step."""
        return [flag for placement in self._placements for flag in placement.present()]


def _anywhere(flag: bool, ranks: RankGroup) -> bool:
    """Whether a flag is set on any rank; waits."""
    return bool(maximum("not finite", torch.tensor([flag], dtype=torch.int64), ranks).wait())


def _new_recorded_step(*, asked_for: bool) -> "RecordedStep":
    reason = missing_kernels(torch.device("cuda"))
    if reason is not None:
        raise ValueError(
            f"cuda_graph=True needs samestep's Triton kernels, which cannot run: {reason}"
        )
    from samestep.optimizer.recorded_step import RecordedStep

    return RecordedStep(asked_for=asked_for)


def execute(schedule: Sequence[Operation], handlers: Handlers) -> None:
    """Run the operations one after the other; what they start may go on in the background."""
    for kind, alike in groupby(schedule, type):  # one range for neighbours
        handle = handlers[kind]
        with _range(kind):
            for operation in alike:
                handle(operation)


@cache
def _range(kind: type) -> _RecordFunctionFast:
    return _RecordFunctionFast(f"samestep.{kind.__name__.lower()}")
