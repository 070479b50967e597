"""Runs rules on operands, by group and device.

Kernels take what they can, where there are any; the rest is run as plain or compiled torch, or as
one program of XLA (`rules.executions` has a line for each kind of device).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from samestep.groups.param_groups import LAYOUT_KEYS, Group
from samestep.groups.step_options import StepOptions
from samestep.plan.schedule import Update
from samestep.rules import RULES
from samestep.rules.executions import executions_on, prepare_on
from samestep.rules.rule import BoundedRule, Rule, follows
from samestep.shards.placement import Placement
from samestep.update.compiled import CompiledRules
from samestep.update.metrics import Outliers, UpdateSizes
from samestep.update.plain import (
    GroupMath,
    Operand,
    StepScalars,
    UpdateFunction,
    run_rule,
    stacks,
    update_blocks,
    update_elementwise,
    update_together,
)

if TYPE_CHECKING:
    from samestep.update.triton import KernelPlan


class ClipDecision(NamedTuple):
    """Result of the gradient norm: scale, and whether to skip the step."""

    factor: Tensor | None = None  # gradients are multiplied with it
    of_rules: Mapping[str, Tensor | None] = {}  # those of some rules with their own
    only_if: Tensor | None = None  # a flag on the device: False leaves all as it is
    skip: bool = False


class RuleRunner:
    """Runs the rules of the groups; keeps what steps share: scalars, compiled rules, kernels.

    run: updates one stack of blocks, or one elementwise operand.
    sizes: squares of the updates of this step, where they are asked for.
    outliers: blocks whose update was larger than any can be, since construction.
    """

    def __init__(self, options: StepOptions) -> None:
        self._options = options
        backend = "inductor" if options.compile is True else options.compile
        self.run: UpdateFunction = CompiledRules(backend) if backend else run_rule
        self._scalars = StepScalars()
        self.outliers = Outliers()
        self.sizes: UpdateSizes | None = None
        # In this step, by group and device, until the norm leads to a decision:
        self._maths: dict[tuple[int, torch.device], GroupMath] = {}
        self._known_keys: dict[str, tuple[str, ...]] = {}  # options that rules read, by their name
        self.forget_kernels()

    def forget_kernels(self) -> None:
        """Drop kernel plans after tensors were replaced."""
        self.kernel_plans: dict[object, KernelPlan] = {}  # by group and device
        self._prepared: set[tuple[tuple[int, int, int], ...]] = set()  # groups and their operands

    def begin(self, groups: Sequence[Group], placements: Sequence[Placement]) -> None:
        """Begin a step."""
        self._groups, self._placements = groups, placements
        self.decision, self._maths = ClipDecision(), {}

    def decide(self, decision: ClipDecision) -> None:
        """Use a clip decision in this step."""
        self.decision, self._maths = decision, {}

    def update(self, operation: Update) -> None:
        """Run the rules on some buckets, group by group, and let go of their gradients."""
        placements, skip = self._placements, self.decision.skip
        by_group: dict[int, list[Operand]] = {}
        for placement, bucket in operation.buckets:
            # What stays on the host has not come for a step that is skipped.
            if not (skip and operation.window is not None):
                found = placements[placement].operands(bucket, operation.window)
                for index, operand in found:
                    by_group.setdefault(index, []).append(operand)
            if operation.is_last:
                placements[placement].drop_gradients(bucket)
        if not skip:
            first = next(iter(by_group.values()), None)
            if first and first[0].param.device.type != "cpu" and self.run is run_rule:
                self._prepare(by_group)
            # Elementwise groups first: few launches, during which the host prepares the others.
            for index in sorted(by_group, key=lambda i: RULES[self._groups[i]["rule"]].kind):
                for device, members in _by_device(by_group[index]).items():
                    with torch.cuda.device_of(members[0].param):  # type: ignore[no-untyped-call]
                        self._update_on(device, index, members)

    def _prepare(self, by_group: Mapping[int, list[Operand]]) -> None:
        """Compile kernels of new groups together."""
        signature = tuple((i, len(found), id(found[0].state)) for i, found in by_group.items())
        if signature in self._prepared:
            return
        self._prepared.add(signature)
        by_device: dict[torch.device, list[tuple[GroupMath, int, list[Operand]]]] = {}
        for index, operands in by_group.items():
            for device, members in _by_device(operands).items():
                if prepare_on(device) is not None:
                    of_group = self.math(index, device), index, members
                    by_device.setdefault(device, []).append(of_group)
        for device, groups in by_device.items():
            with torch.cuda.device_of(groups[0][2][0].param):  # type: ignore[no-untyped-call]
                prepare_on(device)(groups, self.kernel_plans, self._options.batch_elements)

    def _update_on(self, device: torch.device, index: int, members: list[Operand]) -> None:
        """Run the group's rule on operands of one device."""
        math = self.math(index, device)
        rule = math.rule
        with_kernels, run_here = executions_on(device)
        if with_kernels is not None and self.run is run_rule:
            most = self._options.batch_elements
            members = with_kernels(math, index, members, self.kernel_plans, most)
            if not members:
                return
        seen = members
        if math.factor is not None or math.maximize:
            seen = [operand._replace(grad=math.gradient(operand.grad)) for operand in members]
        bounded = follows(type(rule), BoundedRule)
        measure = self.sizes is not None or bounded
        run = run_here or self.run
        arguments = math.scalars, math.options, run, math.only_if, measure
        if rule.kind == "matrix":
            for stack in stacks(seen, self._options.batch_elements):
                squares = update_blocks(rule, stack, *arguments)
                if squares is None:
                    continue
                if self.sizes is not None:
                    self.sizes.add(index, stack, squares)
                if bounded:
                    largest = cast("BoundedRule", rule).largest_norm(stack[0].matrix, math.options)
                    self.outliers.look_at(index, squares, largest, math.only_if)
        elif not update_together(rule, seen, math, run):
            for operand in seen:
                square = update_elementwise(rule, operand, *arguments)
                if self.sizes is not None and square is not None:
                    self.sizes.add(index, [operand], square)

    def math(self, index: int, device: torch.device) -> GroupMath:
        """The rule of a group, with the options and numbers of this step."""
        known = self._maths.get((index, device))
        if known is not None:
            return known
        group, decision = self._groups[index], self.decision
        factor = decision.of_rules.get(group["rule"], decision.factor)
        rule = RULES[group["rule"]]  # a group without one has not come here
        keys = self._known_keys.get(rule.name) or self._constant_keys(rule)
        self._maths[index, device] = found = GroupMath(
            rule,
            self._scalars.refill(index, device, rule.scalars(group)),
            {key: group[key] for key in keys},
            None if factor is None else factor.to(device),
            group["maximize"],
            None if decision.only_if is None else decision.only_if.to(device),
            self.sizes,
            self.outliers,
        )
        return found

    def _constant_keys(self, rule: Rule) -> tuple[str, ...]:
        """Option keys of a rule that are constants."""
        changing = rule.schedulable | LAYOUT_KEYS
        known = tuple(key for key in rule.defaults if key not in changing)
        self._known_keys[rule.name] = known
        return known


def _by_device(operands: list[Operand]) -> dict[torch.device, list[Operand]]:
    devices = [operand.param.device for operand in operands]
    if devices.count(devices[0]) == len(devices):
        return {devices[0]: operands}
    found: dict[torch.device, list[Operand]] = {}
    for device, operand in zip(devices, operands, strict=True):
        found.setdefault(device, []).append(operand)
    return found
