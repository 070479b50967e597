"""The step of every optimizer here: presence -> reduce -> check, clip -> rule -> gather."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, overload

import torch
from torch import Tensor

from samestep.comm.collectives import CollectiveError, gather_segments, maximum, total
from samestep.comm.executor import execute
from samestep.comm.groups import RankGroup
from samestep.comm.presence import Problem, any_problem, tell_problem
from samestep.groups.param_groups import LAYOUT_KEYS, parameter_names, rule_of
from samestep.kernels.choice import missing as missing_kernels
from samestep.optimizer.full_values import FullValues
from samestep.placements.placement import Placement
from samestep.plan.schedule import (
    Agree,
    Apply,
    Average,
    Clip,
    Collect,
    Gather,
    GiveBack,
    Measure,
    OfBucket,
    Place,
    Reduce,
    Schedule,
    Transform,
    Update,
    line_of,
    step_schedule,
)
from samestep.rules.rule import Rule
from samestep.tooling.warn import warn_user
from samestep.update.metrics import (
    StepNumbers,
    UpdateSizes,
    clip_factor,
    present_counts,
    square_sum,
)
from samestep.update.plain import (
    GroupMath,
    GroupMaths,
    Operand,
    is_bounded,
    run_rule,
    stacks,
    update_blocks,
    update_elementwise,
    update_together,
)

if TYPE_CHECKING:
    from samestep.optimizer.recorded_step import RecordedStep

_step_schedule = lru_cache(maxsize=64)(step_schedule)  # the same in every step


class Verdict(NamedTuple):
    """What the norm of a step has decided."""

    factor: Tensor | None = None  # gradients are multiplied with it
    only_if: Tensor | None = None  # a flag on the device: False leaves all as it is
    skip: bool = False


class RuleOptimizer(FullValues):
    """Applies to each parameter the rule of its group."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; the others are untouched, bit for bit."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_torch_scaler()
        self._run_step()
        return loss

    @property
    def averages_gradients(self) -> bool:
        """Whether gradients are averaged, or judged with those of other stages, in the step."""
        averages = self._rank_group is not None and self._distribution.grads == "local"
        return averages or self._stage_group is not None

    @torch.no_grad()
    def scaled_step(self, inverse_scale: Tensor) -> Tensor:
        """The step of a GradScaler: (), whether the gradients of all ranks were finite."""
        self._run_step(inverse_scale)
        assert self._grad_norm is not None
        return self._grad_norm.isfinite()

    def _run_step(self, inverse_scale: Tensor | None = None) -> None:
        """One step; `inverse_scale` undoes the scale of a GradScaler."""
        self._inverse_scale = inverse_scale
        self._verdict = Verdict()
        self.wait_for_parameters()
        self._sizes = UpdateSizes(len(self.param_groups)) if self._update_rms else None
        problem = self._find_problem()
        self._placements = self._all_placements()
        for placement in self._placements:
            placement.begin_step(self.state, problem)
        try:
            self._problem = self._heard_from_stages(problem)
            recorded = self._recording()
            self._execute() if recorded is None else self._execute_recorded(recorded)
        except CollectiveError:
            raise  # ranks are gone: there is nobody to start afresh with
        except BaseException:
            for placement in self._placements:
                placement.abandon_step()
            raise
        for placement in self._placements:
            placement.finish_step()
        if self._watch.waits:
            flags = [flag for placement in self._placements for _, flag in placement.present()]
            ranks = 1 if self._rank_group is None else self._rank_group.size
            self._watch.look_at_gradients(flags, self.param_groups, ranks)
        self._tell_outliers()

    def _tell_outliers(self) -> None:
        """Warn, once, of an update that no orthogonalization gives."""
        group = self._outliers.new()
        if group is not None:
            names = parameter_names(self.param_groups[group], group)
            warn_user(
                f"an update in param_groups[{group}] ({names[0]!r} and others) was not finite, or "
                "larger than its orthogonalization can make it, and was written: look for "
                "gradients that are not finite (max_grad_norm=math.inf skips their steps) and load "
                "a checkpoint from before; metrics()['outliers'] counts such blocks"
            )

    def _execute(self) -> None:
        """The operations of a step, one after the other."""
        execute(
            self._schedule(),
            {
                Agree: self._agree,
                Reduce: self._of_bucket,
                Average: self._of_bucket,
                Clip: self._clip,
                Update: self._update,
                Gather: self._of_bucket,
                Place: self._of_bucket,
                Collect: self._of_chunk,
                Transform: self._of_chunk,
                GiveBack: self._of_chunk,
                Apply: self._of_chunk,
                Measure: self._measure,
            },
        )

    def _execute_recorded(self, recorded: "RecordedStep") -> None:
        """The same as one CUDA graph."""
        maths = [self._math(index, self._device) for index in range(len(self.param_groups))]
        known = [self._known_groups[index] for index in range(len(maths))]
        if self._inverse_scale is not None:
            self._inverse_scale = recorded.own_scale(self._inverse_scale)

        def all_operations() -> StepNumbers:
            self._execute()
            return StepNumbers(self._grad_norm, self._sizes)

        scaled = self._inverse_scale is not None
        self._grad_norm, self._sizes = recorded.run(
            known, maths, scaled, self._kernel_plans, all_operations
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by torch's GradScaler, which then hands over its scale instead of unscaling."""
        return self.averages_gradients

    def _refuse_torch_scaler(self) -> None:
        handed_over = [self.__dict__.pop(key, None) for key in ("grad_scale", "found_inf")]
        if any(value is not None for value in handed_over):
            raise RuntimeError(
                "torch.amp.GradScaler looks at each rank's own gradients, so that its scale would "
                "differ between ranks: use samestep.GradScaler, which takes the same arguments"
            )

    def _schedule(self) -> Schedule:
        return _step_schedule(
            tuple(placement.shape for placement in self._placements),
            waves=self._distribution.waves,
            clip=self._max_grad_norm is not None or self._inverse_scale is not None,
            measure=self._sizes is not None,
            chunks_ahead=self._distribution.chunks_ahead,
        )

    def schedule_lines(self) -> tuple[str, ...]:
        """The operations of a step in order, as text, once there was one."""
        return tuple(map(line_of, self._schedule())) if self._placements else ()

    def _find_problem(self) -> Problem | None:
        """What keeps this rank from the step: an error here, or something to tell all ranks."""
        try:
            self._check_groups()
        except Exception as error:
            if self._rank_group is None and self._stage_group is None:
                raise
            return Problem(error)
        return None

    def _heard_from_stages(self, problem: Problem | None) -> Problem | None:
        """This rank's problem, or one of another stage. Not from a GPU.

        The other ranks of this stage hear of it with presence.
        """
        if self._stage_group is None:
            return None
        known = [problem, *(placement.problem for placement in self._placements)]
        found = next((one for one in known if one is not None), None)
        if self._device.type == "cpu":
            found = any_problem(found, self._stage_group)
        if found is not None and not any(p.shape.agrees for p in self._placements):
            raise found.error
        return found

    def _agree(self, operation: Agree) -> None:
        """Presence, and the problems of any placement: the first one reaches every rank."""
        own = self._placements[operation.placement]
        problems = [*(placement.problem for placement in self._placements), self._problem]
        other = next((Problem(p.error) for p in problems if p is not None), None)
        if operation.placement == 0:
            self._tell_everyone(own.problem or other)
        own.agree(own.problem or other)

    def _everyone(self) -> RankGroup | None:
        """All ranks that take part, where no placement has all of them; None: not needed."""
        held_by = [placement.held_by for placement in self._placements]
        groups = {group.members: group for group in held_by if group is not None}
        if len(groups) < 2:
            return None
        members = {rank for group in groups for rank in group}
        return next((g for g in groups.values() if members == set(g.members)), self._rank_group)

    def _tell_everyone(self, problem: Problem | None) -> None:
        """A problem of one rank, told to ranks that share no parameter with it. Not on a GPU."""
        everyone = self._everyone()
        if everyone is not None and self._device.type == "cpu":
            tell_problem(problem, everyone)

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
        self._grad_norm = norm
        factor = None if scale is None else scale.to(norm)
        if self._max_grad_norm is not None:
            clip = clip_factor(norm, self._max_grad_norm)
            factor = clip if factor is None else factor * clip
        if norm.device.type == "cpu":
            unchanged = factor is not None and float(factor) == 1.0
            skip = not norm.isfinite()
            everyone = self._everyone()
            if everyone is not None:  # or those with another copy of it would go on alone
                skip = _anywhere(skip, everyone)
            if self._stage_group is not None:
                skip = _anywhere(skip, self._stage_group)
            self._verdict = Verdict(factor=None if unchanged else factor, skip=skip)
        else:
            self._verdict = Verdict(factor=factor, only_if=norm.isfinite())

    def _square_of_norm(self) -> Tensor | None:
        """The sum of squares of all averaged gradients, (); None if there are none.

        DTensors are summed over their own mesh: ranks outside of it hold copies, or other models.
        """
        together: dict[RankGroup | None, list[Placement]] = {}
        for placement in self._placements:
            ranks = placement.sums_over or self._rank_group
            together.setdefault(ranks, []).append(placement)
        squares = []
        for ranks, placements in together.items():
            square = square_sum(chain.from_iterable(p.gradients() for p in placements))
            if ranks is not None:
                own = torch.zeros((), dtype=torch.float64, device=self._device)
                own = own if square is None else square
                square = total("gradient norm", own.reshape(1), ranks).wait()[0]
            if square is not None:
                squares.append(square)
        square = torch.stack(squares).sum() if len(squares) > 1 else next(iter(squares), None)
        return square if self._stage_group is None else self._over_stages(square)

    def _over_stages(self, square: Tensor | None) -> Tensor:
        """The sum over pipeline stages, (), in their order: the same bits on every rank."""
        assert self._stage_group is not None
        if square is None:
            square = torch.zeros((), dtype=torch.float64, device=self._device)
        sizes = [1] * self._stage_group.size
        parts = gather_segments("norm of stages", square.reshape(1), sizes, self._stage_group)
        return torch.cat(parts.wait()).sum()

    def _update(self, operation: Update) -> None:
        """Run the rules on a wave, group by group."""
        by_group: dict[int, list[Operand]] = {}
        for placement, bucket in operation.buckets:
            for index, operand in self._placements[placement].operands(bucket):
                by_group.setdefault(index, []).append(operand)
            self._placements[placement].drop_gradients(bucket)
        if not self._verdict.skip:
            # Elementwise groups first: few launches, during which the host prepares the others.
            for index in sorted(by_group, key=lambda i: rule_of(self.param_groups[i]).kind):
                self._update_group(index, by_group[index])

    def _update_group(self, index: int, operands: list[Operand]) -> None:
        """Run the group's rule on its present operands, device by device."""
        for device, members in _by_device(operands).items():
            math = self._math(index, device)
            rule = math.rule
            if self._run is run_rule and missing_kernels(device) is None:
                from samestep.update.triton import update_with_kernels

                members = update_with_kernels(
                    math, index, members, self._kernel_plans, self._batch_elements
                )
                if not members:
                    continue
            seen = members
            if math.factor is not None or math.maximize:
                seen = [operand._replace(grad=math.gradient(operand.grad)) for operand in members]
            measure = self._sizes is not None or is_bounded(rule)
            arguments = math.scalars, math.options, self._run, math.only_if, measure
            if rule.kind == "matrix":
                for stack in stacks(seen, self._batch_elements):
                    squares = update_blocks(rule, stack, *arguments)
                    self._count(index, stack, squares)
                    if is_bounded(rule) and squares is not None:
                        largest = rule.largest_norm(tuple(stack[0].param.shape), math.options)
                        self._outliers.look_at(index, squares, largest, math.only_if)
            elif not update_together(rule, seen, math, self._run):
                for operand in seen:
                    self._count(index, [operand], update_elementwise(rule, operand, *arguments))

    def _math(self, index: int, device: torch.device) -> GroupMath:
        """How the rule of a group is run in this step."""
        group = self.param_groups[index]
        rule = rule_of(group)
        return GroupMath(
            rule,
            self._scalars.refill(index, device, rule.scalars(group)),
            {key: group[key] for key in self._constant_keys(rule)},
            self._verdict.factor,
            group["maximize"],
            self._verdict.only_if,
            self._sizes,
            self._outliers,
        )

    def _constant_keys(self, rule: Rule) -> tuple[str, ...]:
        """The options that a rule reads as they are: no scalars, and nothing of the layout."""
        known = self._known_keys.get(rule.name)
        if known is None:
            changing = rule.schedulable | LAYOUT_KEYS
            known = tuple(key for key in rule.defaults if key not in changing)
            self._known_keys[rule.name] = known
        return known

    def _of_bucket(self, operation: OfBucket) -> None:
        """What the placement does that has the bucket or chunk."""
        placement = self._placements[operation.bucket.placement]
        placement.run(operation, self._maths(placement))

    def _of_chunk(self, operation: OfBucket) -> None:
        """Blocks do not travel for a step that is skipped."""
        if not self._verdict.skip:
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
        self._sizes.combine(self._rank_group, self._device)

    def metrics(self) -> dict[str, Tensor]:
        """Numbers of the last step, as tensors that nobody has waited for.

        grad_norm: (), the joint norm of the averaged gradients before clipping, where
            `max_grad_norm` or a GradScaler is in use. If it is not finite, the step has changed
            nothing.
        present: (groups,), how many parameters of each group had a gradient on any rank.
        outliers: (groups,), how many blocks of each group have, since construction, had an update
            that was not finite or larger than an orthogonalization can make it. 0, unless
            gradients were not finite.
        update_rms: (groups,), sqrt(mean(u^2)) of what the learning rate was multiplied with, over
            all ranks, where `update_rms=True`. NaN for a group without gradients.
        """
        found = {}
        if self._grad_norm is not None:
            # A graph writes the next one into the same tensor.
            found["grad_norm"] = self._grad_norm.clone() if self._recorded else self._grad_norm
        found["outliers"] = self._outliers.counts(len(self.param_groups))
        flags = [flag for placement in self._placements for flag in placement.present()]
        found["present"] = present_counts(len(self.param_groups), flags)
        rms = None if self._sizes is None else self._sizes.rms()
        return found if rms is None else {**found, "update_rms": rms}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local: for all micro-batches of a step but the last.

        With `overlap_grad_reduce` a backward pass outside of it reduces; gradients that were
        accumulated inside are part of that.
        """
        self._pause_reductions(True)
        try:
            yield
        finally:
            self._pause_reductions(False)

    def _pause_reductions(self, paused: bool) -> None:
        for placement in self._placed:
            placement.pause(paused)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Reduce the gradients so far, and keep only this rank's part of their sum.

        For accumulating without full gradients: call it on every rank after each micro-batch
        but the last, of which `step()` takes care. It costs the bytes of a reduction each time.
        Gradients are then gone from `.grad`. Without other ranks it does nothing.
        """
        # All plans stage by stage: their launches share one order.
        for placement in self._placed:
            placement.end_round()
        for placement in self._placed:
            placement.launch_all()
        for placement in self._placed:
            placement.keep_sums()


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
