"""What users read and write of an optimizer between steps: state dicts, whole values, reports."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from samestep.groups.step_options import StepOptions
from samestep.groups.table import state_lines, table
from samestep.layout.boxes import HeldState, mesh_of
from samestep.optimizer import assumptions
from samestep.optimizer.full_values import FullValues
from samestep.optimizer.loading import PART, StateDict, with_plain_options
from samestep.optimizer.optimizer_plan import OptimizerPlan
from samestep.optimizer.saved_state import SavedState
from samestep.optimizer.step import StepRunner
from samestep.rules.state import State


class StateAccess(torch.optim.Optimizer):
    """The part of an optimizer that is used between its steps.

    plan: what was decided for its groups: ranks, blocks, plans and placements.
    """

    plan: OptimizerPlan
    _steps: StepOptions
    _runner: StepRunner
    _saved: SavedState
    _reasons: Mapping[str, str] = {}  # why parameters that were routed have their rule, by name

    def _adopt_swapped(self, *, to_save: bool = False) -> None:
        """Take in parameters that a wrapper has put in the places of others. Collective."""
        raise NotImplementedError

    def _plan_blocks_anew(self) -> None:
        """Cut all parameters into blocks again."""
        raise NotImplementedError

    def wait_for_parameters(self) -> None:
        """Return when all parameters have arrived that the last step sent on their way."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Reduce the gradients that are there now."""
        raise NotImplementedError

    # --- state dicts -------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """All of the state, in the shapes of one process, as torch's optimizers give it.

        Where ranks share the state, all of them call `consolidate_state_dict()` first, or it
        raises; with `state_dict_form="part"` it is this rank's part, says so, and loads only there.
        Not collective, so that whoever saves may call it on one rank; but where a wrapper has just
        swapped parameters, all ranks take them in together.
        """
        if self.plan.is_deferred:
            # Nobody has any state, as with torch's before a first step.
            self.plan.check_list(self.param_groups, to_save=True)
            return with_plain_options(super().state_dict())
        self._adopt_swapped(to_save=True)
        given = self._saved.given(self.param_groups, self.state)
        # What torch makes of another state, so that whoever has hooked into it sees that.
        own, self.state = self.state, given.state
        try:
            found = super().state_dict()
        finally:
            self.state = own
        found = with_plain_options(found)
        return found if given.part is None else {**found, PART: given.part}

    @torch.no_grad()
    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gather the whole state, where ranks share it, for the `state_dict()` of rank `to`.

        Until the state changes, `state_dict()` is then whole on that rank (with None on all of
        them), in the host's memory, and loads into every layout; on the others it is empty and says
        so. Where every rank has all of the state, and of DTensors, it does nothing. The name and
        meaning are those of torch's ZeroRedundancyOptimizer: Lightning calls it by itself.
        Collective.
        """
        self._adopt_swapped()
        self._saved.consolidate(to, self._values)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load state without changing its dtype; on an error nothing has changed.

        Takes what `state_dict()` gave here, also before a first step; the whole state of one
        process, of which every rank takes what it keeps; and the files of torch.optim.AdamW and
        torch.optim.Muon for groups of the same rule. Where both sides have parameter names, these
        decide, not the order. On several ranks all of them call it.
        """
        torch_load = super().load_state_dict
        with self._runner.agreement.together("load_state_dict()") as call:
            self.plan.check_list(self.param_groups)
            if not self._saved.needs_no_plans(state_dict):
                self._adopt_swapped()
                self.wait_for_parameters()
            self._saved.load(self, torch_load, state_dict, call.ready)

    # --- whole values ------------------------------------------------------------------------
    #
    # By the parameter's name, as one process would have them. Collective: every rank calls them,
    # in the same order, between backward and step or between steps. Each rank gets copies of its
    # own. A setter takes the value of the first rank, whatever the others give.

    def _values(self) -> FullValues:
        self._adopt_swapped()
        self.wait_for_parameters()
        return FullValues(self.param_groups, self.state, self.plan.placements)

    def _values_of(
        self,
        call: str,
        name: str,
        key: str | None = None,
        *,
        what: str = "",
        value: Tensor | None = None,
    ) -> FullValues:
        """The values, once all ranks that hold a parameter ask for the same of it."""
        values = self._values()
        param = values.by_name().get(name)
        holders = self.plan.placed[:1] if param is None else [values.holder(param)]
        with self._runner.agreement.together(f"{call}({name!r})", holders) as joint:
            values.check(name, key, what, value)
            joint.ready()
        return values

    @torch.no_grad()
    def whole_state(self) -> dict[str, State]:
        """The state of every parameter by name, as one process would keep it, on every rank.

        Put together from the pieces of all ranks; what every rank has does not travel and is this
        rank's own. For a moment about three times the whole state is in memory: for checks and
        small models, not for saving large ones.
        """
        values = self._values()
        if self.plan.ranks is None:
            self.plan.local.make_missing_state(self.param_groups, self.state)
        return values.whole_state()

    def full_state(self, name: str, key: str) -> Tensor:
        """One state tensor, such as "exp_avg" or "momentum_buffer".

        What is kept in 8 bits is given as the 32-bit numbers that it stands for, and of a master
        copy kept as a remainder the whole copy, "master_weight".
        """
        return self._values_of("full_state", name, key).value(name, key)

    @torch.no_grad()
    def set_full_state(self, name: str, key: str, value: Tensor) -> None:
        """Replace one state tensor; what is kept in fewer bits is rounded to the nearest."""
        self._saved.changes()
        self._values_of("set_full_state", name, key).set_state(name, key, value)

    @torch.no_grad()
    def full_parameter(self, name: str) -> Tensor:
        """A parameter in 32 bits or more, as a step takes it: its master copy where there is one.

        An element that was edited since counts instead of its copy.
        """
        return self._values_of("full_parameter", name).parameter(name)

    @torch.no_grad()
    def set_full_parameter(self, name: str, value: Tensor) -> None:
        """Replace a parameter, and its master copy with it."""
        self._saved.changes()
        self._values_of("set_full_parameter", name, what=name, value=value).set_parameter(
            name, value
        )

    @torch.no_grad()
    def scale_parameters(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply parameters by factors, by name, and their master copies with them.

        A factor broadcasts to its parameter's shape, such as (rows, 1), and is the same on every
        rank. Each rank multiplies what it has; only master copies travel, where ranks share them.
        Other state, such as momentum, stays as it is.
        """
        self._saved.changes()
        self._values().scale(factors)

    @torch.no_grad()
    def full_gradient(self, name: str) -> Tensor | None:
        """The mean gradient over ranks, before clipping; None if no rank has one.

        Between backward and step. It calls `synchronize()`: gradients that are averaged here are
        reduced now, are gone from `.grad`, and the step reduces what may come after.
        """
        values = self._values_of("full_gradient", name)  # raises before anything is reduced
        self.synchronize()
        return values.gradient(name)

    @torch.no_grad()
    def set_full_gradient(self, name: str, value: Tensor) -> None:
        """Replace the mean gradient over ranks; the parameter is then present.

        As `full_gradient`. What the step uses is value * ranks / ranks, rounded.
        """
        values = self._values_of("set_full_gradient", name, what=f"gradient of {name}", value=value)
        value = values.gradient_from_first(name, value)
        self.synchronize()
        values.set_gradient(name, value)

    @torch.no_grad()
    def refresh_master_weights(self) -> None:
        """Take the parameters' present values for their master copies, on every rank.

        After weights were changed from outside (loaded, clipped, averaged), where
        `master_weights` is on. Without this call a step, `full_parameter` and `samestep.save` take
        an edited element for what it is, unless the edit is smaller than the parameter's rounding;
        `full_state` and state dicts have the copies as they are.
        """
        self.wait_for_parameters()
        if self._runner.staging is not None:  # a step that failed has left state on its way
            self._runner.staging.break_off()
        self._saved.changes()
        self.plan.refresh_masters(self.state)

    def held_state(self) -> Iterator[tuple[str, HeldState]]:
        """The boxes of every state tensor that this rank holds, in the tensors of one process.

        Views, by the parameter's name, for whoever saves and loads. Every rank tells of every
        parameter. Not collective.
        """
        self._adopt_swapped()
        self._saved.changes()
        if self.plan.ranks is None:
            self.plan.local.make_missing_state(self.param_groups, self.state)
        placements = self.plan.placements
        by_name = FullValues(self.param_groups, self.state, placements).by_name()
        names = {param: name for name, param in by_name.items()}
        for placement in placements:
            for part in placement.values.held_state(self.state):
                yield names[part.param], part

    # --- reports -----------------------------------------------------------------------------

    def owners(self) -> dict[str, tuple[int, ...]]:
        """By name the ranks that have a plain parameter; ranks beyond have others, or none."""
        if self.plan.outer is not None:  # what others have is a copy
            return {}
        values = FullValues(self.param_groups, self.state, self.plan.placements)
        return {
            name: held_by.members
            for name, param in values.by_name().items()
            if mesh_of(param) is None and (held_by := values.holder(param).held_by) is not None
        }

    @property
    def is_stage(self) -> bool:
        """Whether ranks of other pipeline stages have parameters that are not here."""
        return self.plan.stages is not None

    @property
    def leads_stage(self) -> bool:
        """Whether this rank is the first of its pipeline stage; False without stages."""
        return self.is_stage and (self.plan.ranks is None or self.plan.ranks.rank == 0)

    def layout_lines(self) -> list[str]:
        """The layout of work and state, as lines of text."""
        return self.plan.distribution.lines()

    def table(self) -> str:
        """Every parameter with its rule, blocks and learning rate, and the totals, as text.

        On several ranks also who averages its gradients and who updates it; how state is kept and
        where, if `state_dtypes` or `offload` was given. Not collective.
        """
        plan = self.plan
        plan.check_list(self.param_groups)
        if plan.is_deferred:  # parameters may have been swapped
            self._plan_blocks_anew()
        ranks = plan.who_works_on if plan.placed else None
        return table(
            self.param_groups,
            plan.blocks,
            self._reasons,
            ranks,
            master_weights=plan.masters,
            offload=plan.distribution.offload,
        )

    def explain(self) -> str:
        """The assumptions about other ranks and about whoever makes gradients, as text.

        With who averages what, which check holds each assumption and when it runs, what nobody
        checks, and how state is kept where that was chosen. Not collective.
        """
        plan = self.plan
        kept = state_lines(
            self.param_groups,
            plan.blocks,
            master_weights=plan.masters,
            offload=plan.distribution.offload,
        )
        kind, limit = type(self).__name__, self._steps.max_grad_norm
        facts = assumptions.ModelFacts(kind, plan, self.param_groups, limit, kept)
        return assumptions.explain(facts)

    def schedule_lines(self) -> tuple[str, ...]:
        """The operations of a step in order, as text, once there was one."""
        return self._runner.schedule_lines()

    def metrics(self) -> dict[str, Tensor]:
        """Numbers of the last step, as tensors that nobody has waited for.

        grad_norm: (), the joint norm of the averaged gradients before clipping, where
            `max_grad_norm` or a GradScaler is in use. If it is not finite, the step has changed
            nothing.
        grad_norm/RULE: the same of the parameters of a rule that `max_grad_norm` names.
        present: (groups,), how many parameters of each group had a gradient on any rank.
        outliers: (groups,), how many blocks of each group have, since construction, had an update
            that was not finite or larger than an orthogonalization can make it. 0, unless
            gradients were not finite.
        update_rms: (groups,), sqrt(mean(u^2)) of what the learning rate was multiplied with, over
            all ranks, where `update_rms=True`. NaN for a group without gradients.
        """
        return self._runner.metrics(len(self.param_groups))
