"""The step of every optimizer here: presence -> reduce -> check, clip -> rule -> gather."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast  # 0.5 us when nobody profiles, not 60

from samestep.comm.collectives import CollectiveError, gather_segments, maximum, total
from samestep.comm.diagnosis import watch
from samestep.comm.groups import RankGroup
from samestep.comm.presence import (
    AllSwapped,
    Call,
    JointCall,
    RankFailure,
    RankProblemError,
    any_problem,
    sent_from,
)
from samestep.groups.param_groups import LAYOUT_KEYS, Group
from samestep.groups.step_options import StepOptions
from samestep.kernels.call import on_device_of
from samestep.kernels.choice import missing as missing_kernels
from samestep.optimizer.norm_ahead import NormAhead
from samestep.optimizer.optimizer_plan import OptimizerPlan
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
from samestep.rules import RULES
from samestep.rules.rule import Rule
from samestep.rules.state import State
from samestep.shards.local import LocalParameters
from samestep.shards.placement import Placement
from samestep.update.compiled import CompiledRules
from samestep.update.metrics import (
    Outliers,
    StepNumbers,
    UpdateSizes,
    clip_factor,
    present_counts,
    square_sum,
)
from samestep.update.offload import Staging
from samestep.update.plain import (
    GroupMath,
    GroupMaths,
    Operand,
    StepScalars,
    UpdateFunction,
    is_bounded,
    run_rule,
    stacks,
    update_blocks,
    update_elementwise,
    update_together,
)

if TYPE_CHECKING:
    from samestep.optimizer.recorded_step import RecordedStep
    from samestep.update.triton import KernelPlan

_step_schedule = lru_cache(maxsize=64)(step_schedule)  # the same in every step
_staging_bytes = lru_cache(maxsize=64)(staging_bytes)
Handlers = Mapping[type[Operation], Callable[[Any], None]]


class ClipDecision(NamedTuple):
    """What the norm of a step has decided."""

    factor: Tensor | None = None  # gradients are multiplied with it
    only_if: Tensor | None = None  # a flag on the device: False leaves all as it is
    skip: bool = False


class StepRunner:
    """Runs the steps of an optimizer; keeps what they share: scalars, compiled rules, a graph."""

    def __init__(self, plan: OptimizerPlan, options: StepOptions) -> None:
        self._plan = plan  # its ranks may be found later, and its plans follow parameters
        self._options = options
        backend = "inductor" if options.compile is True else options.compile
        self._run: UpdateFunction = CompiledRules(backend) if backend else run_rule
        self._recorded = _new_recorded_step(asked_for=True) if options.cuda_graph else None
        self._norm_ahead = NormAhead()
        self._scalars = StepScalars()
        self.outliers = Outliers()
        self._known_keys: dict[str, tuple[str, ...]] = {}  # options that rules read, by their name
        self.forget_plans()
        # Of the last step:
        self._placements: Sequence[Placement] = ()
        self.grad_norm: Tensor | None = None
        self._sizes: UpdateSizes | None = None
        self.staging: Staging | None = None  # of state that stays on the host

    def forget_plans(self) -> None:
        """Parameters or their state were replaced."""
        self._kernel_plans: dict[object, KernelPlan] = {}  # by group and device

    def norm_begun(self, groups: Sequence[Group], *, scaled: bool) -> AbstractContextManager[None]:
        """Inside, the device sums up gradients while the host looks at groups: before `run`."""
        plan = self._plan
        alone = plan.ranks is None and not plan.placed and plan.stages is None
        alone = alone and len(groups) == plan.group_count  # or nobody has looked at them yet
        if alone and self._needs_norm(scaled):
            return self._norm_ahead.started(groups, as_graph=self._options.cuda_graph is not False)
        return nullcontext()

    def _needs_norm(self, scaled: bool) -> bool:
        return self._options.max_grad_norm is not None or scaled

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
        """Operations of a step run inside; if they fail, all gradients are forgotten."""
        self._groups = groups
        self._placements = placements = self._plan.placements
        self._device: torch.device = groups[0]["params"][0].device
        self._decision = ClipDecision()
        watching = watch.start()
        if watching is not None:
            watching.step_begun()
        self._sizes = UpdateSizes(len(groups)) if self._options.update_rms else None
        self._have_staging()
        for placement in placements:
            placement.staging = self.staging
            placement.begin_step(state, problem)
        try:
            self._begin_agreement(problem, call)
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
        if watching is not None:
            watching.step_ended(self._device)

    def clip(
        self,
        groups: Sequence[Group],
        state: Mapping[Tensor, State],
        max_norm: float,
        problem: RankFailure | None = None,
    ) -> Tensor:
        """Average gradients before the step, and clip them; gives their joint norm before, ()."""
        self._plan.refuse_norm_of_a_part("clip_grad_norm_()")
        self._inverse_scale = None
        with self._begun(groups, state, problem, f"clip_grad_norm_({max_norm!r})"):
            for placement in self._placements:
                placement.begin_look()
            schedule = self._schedule(clip=True)
            begun = [each for each in schedule if isinstance(each, Reduce | Agree | Average)]
            self._run_operations(begun)
            square = self._square_of_norm()
            if square is None:
                square = torch.zeros((), dtype=torch.float64, device=self._device)
            norm = square.sqrt()
            factor = clip_factor(norm, max_norm)
            for placement in self._placements:
                placement.scale_gradients(factor)
        for placement in self._placements:
            placement.end_look()
        return norm

    def bring_state_home(self) -> None:
        """What a step has left on its way whose ranks were gone: before state is touched again."""
        if self.staging is not None:
            self.staging.break_off()

    def _have_staging(self) -> None:
        if self._plan.distribution.offload is not None and self.staging is None:
            self.staging = Staging(self._device)

    def _recording(self) -> "RecordedStep | None":
        """What records steps and replays them: asked for, or where it is legal and pays."""
        alone = (
            self._plan.ranks is None and self._plan.stages is None and len(self._placements) == 1
        )
        if (
            self._recorded is None
            and self._options.cuda_graph is None
            and self.staging is None
            and alone
            and isinstance(self._placements[0], LocalParameters)
            and self._run is run_rule
            and missing_kernels(self._device) is None
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
        execute(
            schedule,
            {
                **dict.fromkeys(get_args(OfWindow), self._of_window),
                **dict.fromkeys(get_args(OfBucket), self._of_bucket),
                **dict.fromkeys(get_args(OfChunk), self._of_chunk),
                Agree: self._agree,
                Clip: self._clip,
                Update: self._update,
                Measure: self._measure,
            },
        )

    def _execute_recorded(self, recorded: "RecordedStep") -> None:
        """The same as one CUDA graph."""
        maths = [self._math(index, self._device) for index in range(len(self._groups))]
        local = self._placements[0]
        assert isinstance(local, LocalParameters)
        if self._inverse_scale is not None:
            self._inverse_scale = recorded.own_scale(self._inverse_scale)

        def all_operations() -> StepNumbers:
            self._execute()
            return StepNumbers(self.grad_norm, self._sizes)

        scaled = self._inverse_scale is not None
        has_norm = self._norm_ahead.sum_of(local.gradients()) is not None
        self.grad_norm, self._sizes = recorded.run(
            local.known, maths, scaled, has_norm, self._kernel_plans, all_operations
        )

    def _schedule(self, *, clip: bool = False) -> Schedule:
        return _step_schedule(
            tuple(placement.shape for placement in self._placements),
            waves=self._plan.distribution.waves,
            clip=clip or self._needs_norm(self._inverse_scale is not None),
            measure=self._sizes is not None,
            chunks_ahead=self._plan.distribution.chunks_ahead,
        )

    def schedule_lines(self) -> tuple[str, ...]:
        """The operations of a step in order, as text, once there was one."""
        return tuple(map(describe_operation, self._schedule())) if self._placements else ()

    def together(self, name: str, only: Sequence[Placement] | None = None) -> JointCall:
        """A call that all ranks of some placements make together, between steps.

        only: None: of all placements, so that ranks without any of these parameters hear of it too.
        """
        return JointCall(lambda problem: self._meet(Call(name), problem, only))

    def _meet(
        self, call: Call, problem: RankFailure | None, only: Sequence[Placement] | None
    ) -> None:
        self._placements = self._plan.placements
        for placement in self._placements if only is None else only:
            if placement.shape.agrees:
                try:
                    placement.meet(call, problem)
                except CollectiveError:
                    raise
                except Exception as error:  # which those of the next one have to know
                    problem = problem or RankFailure(error)
        everyone = self._all_participants() if only is None else None
        if everyone is not None:
            device = sent_from(everyone, self._placements[0].device)
            problem = any_problem(problem, everyone, device, call)
        if problem is not None:
            raise problem.error

    def _begin_agreement(self, problem: RankFailure | None, call: str | None) -> None:
        """What this rank is about to do, for the ranks that it agrees with."""
        self._problem = problem
        self._found: Exception | None = None  # by the ranks of a placement, in this step
        agreeing = [n for n, placed in enumerate(self._placements) if placed.shape.agrees]
        self._last_to_agree = agreeing[-1] if agreeing else None
        read = self._plan.checks.hyperparameters.read
        for number in agreeing if problem is None else ():
            own = self._placements[number]
            intent = read(self._groups, own.group_indices, self._inverse_scale)
            own.intent = intent if call is None else intent.of_call(call)
        if not agreeing:
            self._hear_others()

    def _agree(self, operation: Agree) -> None:
        """Presence, and problems of any placement; what its ranks find reaches all other ranks.

        What was found with the ranks of one placement is told to those of the next, so that none
        of these goes on alone, and after the last one to everyone.
        """
        own = self._placements[operation.placement]
        problem = self._problem_of_any(own)
        if self._device.type != "cpu":  # which nobody waits for
            own.agree(problem)
            return
        try:
            own.agree(problem)
        except CollectiveError:
            raise
        except Exception as error:  # its own, or that of another rank
            if self._found is None or isinstance(self._found, AllSwapped):
                self._found = error
        if operation.placement == self._last_to_agree:
            self._hear_others()

    def _problem_of_any(self, own: Placement | None = None) -> RankFailure | None:
        """What is known so far to keep ranks from taking the step."""
        if self._found is not None and not isinstance(self._found, AllSwapped):
            return RankFailure(self._found)
        if own is not None and own.problem is not None:
            return own.problem
        known = [*(placement.problem for placement in self._placements), self._problem]
        return next((p._replace(param=None) for p in known if p is not None), None)

    def _hear_others(self) -> None:
        """Raise if any rank has a problem: also one with other parameters, or of another stage.

        All ranks of a placement know the same by now, and tell it. A GPU is not waited for: who has
        a problem raises it.
        """
        problem = self._problem_of_any()
        for ranks in self._all_participants(), self._plan.stages:
            if ranks is None or self._device.type != "cpu":
                continue
            try:
                problem = any_problem(problem, ranks)
            except AllSwapped as error:
                self._found = error
            except RankProblemError as error:  # it is not so on all of them
                problem = RankFailure(error)
        if problem is None:
            return
        if problem.swapped and self._found is not None:
            raise self._found
        raise problem.error

    def _all_participants(self) -> RankGroup | None:
        """All ranks that take part, where no placement has all of them; None: not needed."""
        held_by = [placement.held_by for placement in self._placements]
        groups = {group.members: group for group in held_by if group is not None}
        if len(groups) < 2:
            return None
        members = {rank for group in groups for rank in group}
        return next((g for g in groups.values() if members == set(g.members)), self._plan.ranks)

    def _clip(self, _: Clip) -> None:
        """Decide by the joint norm: how gradients are scaled, and whether the step is skipped.

        On CPU the step is skipped right here; elsewhere a flag stays on the device, so that
        nothing waits for it.
        """
        square = self._square_of_norm()
        if square is None:
            return
        norm = square.sqrt()
        scale = self._inverse_scale
        if scale is not None:
            norm = norm * scale.to(norm)
        self.grad_norm = norm
        factor = None if scale is None else scale.to(norm)
        if self._options.max_grad_norm is not None:
            clip = clip_factor(norm, self._options.max_grad_norm)
            factor = clip if factor is None else factor * clip
        if norm.device.type == "cpu":
            unchanged = factor is not None and float(factor) == 1.0
            skip = not norm.isfinite()
            everyone = self._all_participants()
            if everyone is not None:  # or those with another copy of it would go on alone
                skip = _anywhere(skip, everyone)
            if self._plan.stages is not None:
                skip = _anywhere(skip, self._plan.stages)
            self._decision = ClipDecision(factor=None if unchanged else factor, skip=skip)
        else:
            self._decision = ClipDecision(factor=factor, only_if=norm.isfinite())

    def _square_of_norm(self) -> Tensor | None:
        """The sum of squares of all averaged gradients, (); None if there are none.

        DTensors are summed over their own mesh: ranks outside of it hold copies, or other models.
        """
        together: dict[RankGroup | None, list[Placement]] = {}
        for placement in self._placements:
            ranks = placement.sums_over or self._plan.ranks
            together.setdefault(ranks, []).append(placement)
        squares = []
        for ranks, placements in together.items():
            grads = list(chain.from_iterable(p.gradients() for p in placements))
            square = self._norm_ahead.sum_of(grads)
            square = square_sum(grads) if square is None else square
            if ranks is not None:
                own = torch.zeros((), dtype=torch.float64, device=self._device)
                own = own if square is None else square
                square = total("gradient norm", own.reshape(1), ranks).wait()[0]
            if square is not None:
                squares.append(square)
        square = torch.stack(squares).sum() if len(squares) > 1 else next(iter(squares), None)
        return square if self._plan.stages is None else self._over_stages(square)

    def _over_stages(self, square: Tensor | None) -> Tensor:
        """The sum over pipeline stages, (), in their order: the same bits on every rank."""
        assert self._plan.stages is not None
        if square is None:
            square = torch.zeros((), dtype=torch.float64, device=self._device)
        sizes = [1] * self._plan.stages.size
        parts = gather_segments("norm of stages", square.reshape(1), sizes, self._plan.stages)
        return torch.cat(parts.wait()).sum()

    def _update(self, operation: Update) -> None:
        """Run the rules on a wave, group by group."""
        by_group: dict[int, list[Operand]] = {}
        skip = self._decision.skip
        for placement, bucket in operation.buckets:
            # What stays on the host has not come for a step that is skipped.
            if not (skip and operation.window is not None):
                found = self._placements[placement].operands(bucket, operation.window)
                for index, operand in found:
                    by_group.setdefault(index, []).append(operand)
            if operation.is_last:
                self._placements[placement].drop_gradients(bucket)
        if not skip:
            # Elementwise groups first: few launches, during which the host prepares the others.
            for index in sorted(by_group, key=lambda i: RULES[self._groups[i]["rule"]].kind):
                self._update_group(index, by_group[index])

    def _update_group(self, index: int, operands: list[Operand]) -> None:
        """Run the group's rule on its present operands, device by device."""
        for device, members in _by_device(operands).items():
            with on_device_of(members[0].param):
                self._update_on(device, index, members)

    def _update_on(self, device: torch.device, index: int, members: list[Operand]) -> None:
        """Run the group's rule on operands of one device."""
        math = self._math(index, device)
        rule = math.rule
        if self._run is run_rule and missing_kernels(device) is None:
            from samestep.update.triton import update_with_kernels

            members = update_with_kernels(
                math, index, members, self._kernel_plans, self._options.batch_elements
            )
            if not members:
                return
        seen = members
        if math.factor is not None or math.maximize:
            seen = [operand._replace(grad=math.gradient(operand.grad)) for operand in members]
        measure = self._sizes is not None or is_bounded(rule)
        run = self._run
        if device.type == "xla":
            from samestep.update.spmd import run_spmd_rule as run
        arguments = math.scalars, math.options, run, math.only_if, measure
        if rule.kind == "matrix":
            for stack in stacks(seen, self._options.batch_elements):
                squares = update_blocks(rule, stack, *arguments)
                self._count(index, stack, squares)
                if is_bounded(rule) and squares is not None:
                    largest = rule.largest_norm(stack[0].matrix, math.options)
                    self.outliers.look_at(index, squares, largest, math.only_if)
        elif not update_together(rule, seen, math, run):
            for operand in seen:
                self._count(index, [operand], update_elementwise(rule, operand, *arguments))

    def _math(self, index: int, device: torch.device) -> GroupMath:
        """How the rule of a group is run in this step."""
        group, decision = self._groups[index], self._decision
        rule = RULES[group["rule"]]  # a group without one has not come here
        return GroupMath(
            rule,
            self._scalars.refill(index, device, rule.scalars(group)),
            {key: group[key] for key in self._constant_keys(rule)},
            None if decision.factor is None else decision.factor.to(device),
            group["maximize"],
            None if decision.only_if is None else decision.only_if.to(device),
            self._sizes,
            self.outliers,
        )

    def _constant_keys(self, rule: Rule) -> tuple[str, ...]:
        """The options that a rule reads as they are: no scalars, and nothing of the layout."""
        known = self._known_keys.get(rule.name)
        if known is None:
            changing = rule.schedulable | LAYOUT_KEYS
            known = tuple(key for key in rule.defaults if key not in changing)
            self._known_keys[rule.name] = known
        return known

    def _of_window(self, operation: OfWindow) -> None:
        """State does not travel for a step that is skipped, once that is known."""
        if not self._decision.skip:
            self._placements[operation.window.bucket.placement].travel(operation)

    def _of_bucket(self, operation: OfBucket) -> None:
        """What the placement does that has the bucket or chunk."""
        placement = self._placements[operation.bucket.placement]
        placement.run(operation, self._maths(placement))

    def _of_chunk(self, operation: OfChunk) -> None:
        """Blocks do not travel for a step that is skipped."""
        if not self._decision.skip:
            self._of_bucket(operation)

    def _maths(self, placement: Placement) -> GroupMaths:
        """`_math` by index, for blocks that are spread over ranks."""
        known: dict[int, GroupMath] = {}

        def of_group(index: int) -> GroupMath:
            if index not in known:
                known[index] = self._math(index, placement.device)
            return known[index]

        return of_group

    def _count(self, index: int, operands: list[Operand], squares: Tensor | None) -> None:
        if self._sizes is not None and squares is not None:
            self._sizes.add(index, operands, squares)

    def _measure(self, _: Measure) -> None:
        assert self._sizes is not None
        self._sizes.combine(self._plan.ranks, self._device)

    def metrics(self, groups: int) -> dict[str, Tensor]:
        """See `RuleOptimizer.metrics`."""
        found = {}
        if self.grad_norm is not None:
            # A graph writes the next one into the same tensor.
            found["grad_norm"] = self.grad_norm.clone() if self._recorded else self.grad_norm
        found["outliers"] = self.outliers.counts(groups)
        found["present"] = present_counts(groups, self.present())
        rms = None if self._sizes is None else self._sizes.rms()
        return found if rms is None else {**found, "update_rms": rms}

    def present(self) -> list[tuple[int, bool | Tensor]]:
        """The group of each parameter, and whether it was present in the last step."""
        return [flag for placement in self._placements for flag in placement.present()]


def _by_device(operands: list[Operand]) -> dict[torch.device, list[Operand]]:
    devices = [operand.param.device for operand in operands]
    if devices.count(devices[0]) == len(devices):
        return {devices[0]: operands}
    found: dict[torch.device, list[Operand]] = {}
    for device, operand in zip(devices, operands, strict=True):
        found.setdefault(device, []).append(operand)
    return found


def _anywhere(flag: bool, ranks: RankGroup) -> bool:
    """Whether it is true on any rank; waits for them."""
    return bool(maximum("not finite", torch.tensor([flag], dtype=torch.int64), ranks).wait())


def _new_recorded_step(*, asked_for: bool) -> "RecordedStep":
    reason = missing_kernels(torch.device("cuda"))
    if reason is not None:
        raise ValueError(f"cuda_graph=True needs kernels, and there are none: {reason}")
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
