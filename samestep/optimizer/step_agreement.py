"""Agreement of ranks on a step: which gradients are present, and whether all can take it.

The ranks of a placement agree on presence, and tell each other why they cannot take the step. What
was found with the ranks of one placement is told to those of the next, so that none of these goes
on alone, and after the last one to everyone: also to ranks with other parameters, or of another
pipeline stage.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.comm.collectives import CollectiveError
from samestep.comm.joint_call import JointCall, sent_from
from samestep.comm.presence import (
    AllSwapped,
    Call,
    RankFailure,
    RankProblemError,
    any_problem,
)
from samestep.groups.param_groups import Group
from samestep.optimizer.optimizer_plan import OptimizerPlan
from samestep.plan.schedule import Agree
from samestep.shards.placement import Placement


class StepAgreement:
    """Agreement in each step, over all placements."""

    def __init__(self, plan: OptimizerPlan) -> None:
        self._plan = plan
        self._placements: Sequence[Placement] = ()

    def begin(
        self,
        groups: Sequence[Group],
        problem: RankFailure | None,
        inverse_scale: Tensor | None,
        call: str | None,
    ) -> None:
        """Announce the step to the ranks of each placement.

        problem: Why this rank cannot do it. call: None for a step.
        """
        self._placements = placements = self._plan.placements
        self._device: torch.device = groups[0]["params"][0].device
        self._problem = problem
        self._found: Exception | None = None  # by the ranks of a placement, in this step
        agreeing = [n for n, placed in enumerate(placements) if placed.shape.agrees]
        self._last_to_agree = agreeing[-1] if agreeing else None
        read = self._plan.checks.hyperparameters.read
        for number in agreeing if problem is None else ():
            own = placements[number]
            intent = read(groups, own.group_indices, inverse_scale)
            own.intent = intent if call is None else intent.of_call(call)
        if not agreeing:
            self._hear_others()

    def agree(self, operation: Agree) -> None:
        """Agree with the ranks of one placement; raises on all of them if any has a problem."""
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
        """The first reason that is known so far for not taking the step."""
        if self._found is not None and not isinstance(self._found, AllSwapped):
            return RankFailure(self._found)
        if own is not None and own.problem is not None:
            return own.problem
        known = [*(placement.problem for placement in self._placements), self._problem]
        return next((p._replace(param=None) for p in known if p is not None), None)

    def _hear_others(self) -> None:
        """Raise if another rank has an error.

        All ranks of a placement know the same by now, and tell it. A GPU is not waited for: who has
        a problem raises it.
        """
        problem = self._problem_of_any()
        for ranks in self._plan.participants, self._plan.stages:
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

    # --- calls between steps -----------------------------------------------------------------

    def together(self, name: str, only: Sequence[Placement] | None = None) -> JointCall:
        """Make another call together, between steps.

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
        everyone = self._plan.participants if only is None else None
        if everyone is not None:
            device = sent_from(everyone, self._placements[0].device)
            problem = any_problem(problem, everyone, device, call)
        if problem is not None:
            raise problem.error
