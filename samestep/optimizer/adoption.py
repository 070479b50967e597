"""Follows parameters that were replaced after the optimizer was built.

Plans may have been put off until the first step. A wrapper that shards a model puts other
parameters into the groups and tells nobody: they are noticed where groups are looked at, before a
step and before state is saved or loaded. Or somebody says so, with `adopt`.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from samestep.comm.collectives import CollectiveError
from samestep.comm.presence import AllSwapped, RankFailure, RankProblemError, any_problem
from samestep.groups.group_checks import UnknownParameterError
from samestep.groups.mistakes import (
    TrainingWatch,
    has_process_group,
    is_ddp,
    refuse_late_group,
    warn_of_ddp,
    warn_of_reductions_in_step,
)
from samestep.groups.param_groups import Group, members
from samestep.layout.fused_rows import without_wrappers
from samestep.optimizer.optimizer_plan import OptimizerPlan, States, groups_before
from samestep.optimizer.step import StepRunner
from samestep.tooling.warn import some


class Adoption:
    """Looks at the groups of an optimizer before they are used; they and state are handed in.

    watch: whether the model and its gradients are what they look like.
    default_rule: of groups that name none.
    """

    def __init__(
        self,
        plan: OptimizerPlan,
        runner: StepRunner,
        model: nn.Module | None,
        default_rule: str | None,
    ) -> None:
        self._plan, self._runner, self._default_rule = plan, runner, default_rule
        self.watch = TrainingWatch(model)
        plan.beside = self.watch.tensors_of_model

    def problem(self, groups: Sequence[Group], state: States) -> RankFailure | None:
        """An error that keeps this rank from a step, where other ranks have to hear of it.

        Without other ranks it is raised.
        """
        plan, watch = self._plan, self.watch
        watch.steps += 1
        try:
            looks = watch.steps == watch.next_look
            if looks or len(groups) != plan.group_count or plan.expects_no_group:
                self._look_around(groups)
            try:
                plan.checks.check(groups)
            except UnknownParameterError:
                if not self.adopted(groups, state):
                    raise
                plan.checks.check(groups)
            if plan.ranks is None:
                plan.local.look_at(groups, state)
        except (CollectiveError, RankProblemError):
            raise  # which all ranks have heard of
        except Exception as error:
            if plan.ranks is None and plan.stages is None:
                raise
            return RankFailure(error)
        return None

    def _look_around(self, groups: Sequence[Group]) -> None:
        """Raise if the list of groups or the model has changed.

        A look at the model is long beside a step: it is taken before the 1st, 2nd, 4th, ... step.
        """
        plan, watch = self._plan, self.watch
        if plan.expects_no_group and has_process_group():
            refuse_late_group()
            plan.expects_no_group = False  # a group of this process alone
        plan.check_list(groups)
        if watch.steps == watch.next_look:
            watch.look_at_model(groups, self._default_rule)
            shared_memory = plan.shared_memory(groups)
            if shared_memory is not None:
                raise RuntimeError(shared_memory)
            if watch.steps == 1:
                plan.refuse_unnamed_stages(groups)  # which may be younger than the optimizer
                overlaps = plan.distribution.overlap_grad_reduce
                if overlaps and any(
                    shared.reductions.hooks is not None and shared.reductions.hooks.unannounced
                    for shared in plan.shared
                ):
                    warn_of_reductions_in_step()
            if watch.steps == 1 and plan.distribution.grads == "local":
                for shared in plan.shared:
                    names = (spec.name for spec in shared.plan.params)
                    if warn_of_ddp(zip(names, shared.params, strict=True)):
                        shared.expect_edits()

    @torch.no_grad()
    def adopted(self, groups: Sequence[Group], state: States) -> bool:
        """Adopt parameters that a wrapper has replaced; returns False if there are none.

        Plans and state are made anew, and state that is not zero is brought over. Collective.
        """
        plan = self._plan
        if plan.is_deferred:
            plan.settle(groups, state)
            return True
        swapped = plan.checks.swapped(groups)
        if swapped is None:
            return False
        if plan.distribution.overlap_param_gather:
            raise RuntimeError(
                "parameters of the optimizer were replaced, and with "
                "overlap_param_gather modules still wait for the old ones: build the "
                "optimizer after wrapping the model"
            )
        plan.refuse_lost_gradients()
        self._hear_of_swap(swapped, groups, state)
        plan.follow(swapped, groups, state)
        self._runner.rules.forget_kernels()
        return True

    def _hear_of_swap(
        self, swapped: Mapping[Tensor, Tensor], groups: Sequence[Group], state: States
    ) -> None:
        """Raise on every rank unless all ranks replaced parameters.

        Told as a problem of a step with those before: ranks without a swap are in such a step, or
        come to one.
        """
        if not self._plan.placed:
            return
        before = groups_before(swapped, groups)
        names = tuple(name for _, name, param in members(before) if swapped[param] is not param)
        problem = RankFailure(RuntimeError(f"{names[0]!r} was replaced"), swapped=names)
        with suppress(AllSwapped):
            self._runner.run(before, state, problem)

    def adopt(self, model: nn.Module, groups: Sequence[Group], state: States) -> bool:
        """Replace parameters in groups by those of a model with the same names.

        Gives whether plans were made anew. On an error of any rank nothing has changed. Collective.
        """
        plan = self._plan
        own = [group["params"] for group in groups]
        problem = None
        try:
            for group, params in zip(groups, params_by_name(groups, model), strict=True):
                group["params"] = params
            if plan.checks.swapped(groups) is not None:
                plan.refuse_lost_gradients()
        except (RuntimeError, ValueError) as error:
            problem = RankFailure(error)
        if plan.ranks is not None and not plan.is_deferred:
            device = next((param.device for param in model.parameters()), None)
            problem = any_problem(problem, plan.ranks, device)
        if problem is not None:
            for group, params in zip(groups, own, strict=True):
                group["params"] = params
            raise problem.error
        follows = not plan.is_deferred and self.adopted(groups, state)
        self.watch = TrainingWatch(model)
        plan.beside = self.watch.tensors_of_model
        return follows


def params_by_name(groups: Sequence[Group], model: nn.Module) -> list[list[Tensor]]:
    """For each group the parameters of `model` that have the names of its own.

    Names count without what DDP, torch.compile and checkpointing put in. Raises if a group has no
    names, or a name is not there.
    """
    while is_ddp(model):
        model = getattr(model, "module", None) or model.get_submodule("_orig_mod")
    there: dict[str, Tensor] = {
        without_wrappers(name): param
        for name, param in model.named_parameters(remove_duplicate=False)
    }
    found = []
    for index, group in enumerate(groups):
        names = group.get("param_names")
        if names is None:
            raise ValueError(
                f"param_groups[{index}] has parameters without names, so that adopt() "
                "cannot find their replacements: build the optimizer from a model, or "
                "from (name, parameter) pairs"
            )
        missing = [name for name in names if without_wrappers(name) not in there]
        if missing:
            raise ValueError(
                f"the model has no {some(missing)}, which the optimizer has in "
                f"param_groups[{index}]; it has {some(list(there))}: give adopt() the "
                "model that the optimizer was built for, or build a new optimizer"
            )
        found.append([there[without_wrappers(name)] for name in names])
    return found
