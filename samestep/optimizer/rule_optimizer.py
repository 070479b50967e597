"""An optimizer: its groups, state and plans, and what users ask of it; `step.py` has the step."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from samestep.comm.groups import RankGroup
from samestep.comm.presence import JointCall
from samestep.groups.distribution import Distribution
from samestep.groups.group_keys import refuse_lost_keys
from samestep.groups.mistakes import (
    averages_with_ddp,
    refuse_flat_parameters,
    refuse_second_clipping,
    warn_of_lost_updates,
    warn_of_outliers,
)
from samestep.groups.param_groups import (
    ParamGroup,
    complete,
    listed,
    naming_group,
    refuse_lost_formats,
    refuse_unsupported,
    without_repeated,
)
from samestep.groups.routing import routable, warn_of_fused_members
from samestep.groups.step_options import StepOptions, clips, limit_text
from samestep.groups.table import state_lines, table
from samestep.groups.tied import refuse_replaced, tied_apart
from samestep.kernels.call import on_device_of
from samestep.layout.boxes import HeldState, mesh_of
from samestep.optimizer import assumptions
from samestep.optimizer.adoption import Adoption
from samestep.optimizer.full_values import FullValues
from samestep.optimizer.loading import PART, StateDict, with_plain_options
from samestep.optimizer.optimizer_plan import OptimizerPlan, joint_call
from samestep.optimizer.saved_state import SavedState
from samestep.optimizer.step import StepRunner
from samestep.plan.schedule import reductions_in_order
from samestep.rules import checks
from samestep.rules.state import State
from samestep.shards.local import plain
from samestep.shards.replicated.awaited import ParametersInFlight, wait_for_anyone
from samestep.shards.replicated.replicated import ReplicatedShards

if TYPE_CHECKING:
    from samestep.shards.dtensor.sharded import ShardedParameters

Init = TypeVar("Init", bound=Callable[..., None])
Params = (
    nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
)  # a model, parameters, named parameters, or groups


class RuleOptimizer(torch.optim.Optimizer):
    """A torch optimizer that applies to each parameter the rule of its group.

    `rule_options` holds, per rule, the keys a group takes when it does not set them itself.
    `order_of_use` are parameters in the order in which forward uses them, where that is known.
    `plan` has what was decided for its groups: ranks, blocks, plans and placements.
    """

    _construction: JointCall | None = None  # while it is built with other ranks
    _reasons: Mapping[str, str] = {}  # why parameters that were routed have their rule, by name

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        rule_options: Mapping[str, Mapping[str, Any]],
        steps: StepOptions,
        distribution: Distribution,
        *,
        model: nn.Module | None = None,
        order_of_use: Iterable[Tensor] = (),
    ) -> None:
        self._steps = steps
        self._constructed = False
        self._clipped = False  # by hand, since the last step
        self._rule_options = rule_options
        self._in_flight = ParametersInFlight()
        model = params if isinstance(params, nn.Module) else model
        if isinstance(params, nn.Module):
            params = [(name, param) for name, param, _ in routable(params).parameters]
        if model is not None:
            refuse_replaced(model)
        sorted_apart: Any = tied_apart(params)
        self.plan = OptimizerPlan(
            distribution,
            steps,
            self._in_flight,
            order_of_use,
            owner=type(self).__name__,
            tied=sorted_apart is not params,
        )
        refuse_second_clipping(model, steps.max_grad_norm)
        self._compose(model, defaults.get("rule"))
        if distribution.overlap_param_gather:
            if model is None:
                raise ValueError(
                    "overlap_param_gather makes modules wait for their parameters: give the model "
                    "instead of parameters or groups (groups= can sort its parameters)"
                )
            self._in_flight.watch(model)
        super().__init__(sorted_apart, defaults)
        if not self.plan.is_deferred:
            if self._construction is not None:
                self._construction.ready()
            self.plan.share(range(len(self.param_groups)), self.param_groups, self.state)
        self._constructed = True
        self.plan.refuse_cuda_graph()
        if steps.master_weights is None:
            warn_of_lost_updates(self.param_groups)

    def _compose(
        self, model: nn.Module | None, default_rule: str | None, *, as_built: bool = True
    ) -> None:
        """Make the objects that work on the plan: the step, adoption and saved state."""
        self._runner = StepRunner(self.plan, self._steps)
        self._adoption = Adoption(self.plan, self._runner, model, default_rule)
        self._saved = SavedState(self.plan, as_built=as_built)

    def _adopt_swapped(self, *, to_save: bool = False) -> None:
        """Take in parameters that a wrapper has put in the places of others. Collective.

        Before state is looked at or changed: it is at home then.
        """
        self.plan.check_list(self.param_groups, to_save=to_save)
        self._runner.bring_state_home()
        if self._adoption.adopted(self.param_groups, self.state):
            self._saved.drop()

    def adopt(self, model: nn.Module) -> None:
        """Take the parameters of `model` in the places of those that are here, by their names.

        For a model that was sharded, wrapped or rebuilt after the optimizer was built
        (`fully_shard`, `to_empty`, `load_state_dict(assign=True)`). Shapes must agree; state and
        plans follow, and the parameters' values are those of `model`. A wrapper that puts its
        parameters into `param_groups` itself, as accelerate does, needs no call. Collective: every
        rank calls it. On an error nothing has changed.
        """
        self._runner.bring_state_home()
        if self._adoption.adopt(model, self.param_groups, self.state):
            self._saved.drop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, complete it and make its state; on an error nothing has changed."""
        if not self._constructed or self.plan.is_deferred:
            self._add_group(param_group, lambda: None)
            return
        name = "add_param_group()"
        call = self._runner.agreement.together(name)
        if isinstance(param_group, dict) and param_group.get("process_group") is not None:
            call = joint_call(name, [param_group], vars(self.plan.distribution))  # of its ranks
        with call:
            self._add_group(param_group, call.ready)

    def _add_group(self, param_group: dict[str, Any], ready: Callable[[], None]) -> None:
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        default_rule = {"rule": self.defaults["rule"]} if "rule" in self.defaults else {}
        with naming_group(len(self.param_groups)):
            refuse_lost_keys({**default_rule, **param_group})
            group = ParamGroup(complete({**default_rule, **param_group}, self._rule_options))
            refuse_lost_formats(group, self._rule_options)
        for key in group.keys() - param_group.keys():
            # Not shared: schedulers write into learning-rate tensors, group by group.
            group[key] = deepcopy(group[key])
        own_keys = {*group, "params", "param_names"}
        group["params"] = listed(group.get("params"), len(self.param_groups))
        group["params"] = without_repeated(group, self.param_groups)
        index = len(self.param_groups)
        self._saved.drop()
        plan = self.plan
        reduction = plan.planner.own_reduction(index, group)
        super().add_param_group(group)
        wait_for_anyone(group["params"])
        for key in self.defaults:
            if key not in own_keys:  # torch fills in every default, of either rule
                del group[key]
        try:
            refuse_flat_parameters(index, group)
            refuse_unsupported(
                index,
                group,
                compiled=bool(self._steps.compile),
                ranks=self._rank_count,
                masters=plan.masters,
            )
            plan.plan_group(index, group)
            plan.group_count = index + 1
            if reduction is not None:
                plan.reductions[index] = reduction
            if self._constructed and not plan.is_deferred:  # those of the constructor go together
                ready()
                plan.share([index], self.param_groups, self.state)
                if self._steps.master_weights is None:
                    warn_of_lost_updates([group], index)
                warn_of_fused_members([group])
        except Exception:
            self.param_groups.pop()
            plan.group_count = index
            plan.unplan(index, group["params"])
            raise
        if plan.ranks is None and not plan.is_deferred:
            plan.local.keep_state(plain(group), group, self.state)

    @property
    def _rank_count(self) -> int:
        return 1 if self.plan.ranks is None else self.plan.ranks.size

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

    def fingerprint(self) -> str:
        """A digest of who owns and sends what; equal on ranks that hold the same parameters.

        Of one process it is "".
        """
        return self.plan.fingerprint()

    @property
    def ranks(self) -> RankGroup | None:
        """The ranks that hold replicas; None in one process."""
        return self.plan.ranks

    @property
    def rank_groups(self) -> tuple[RankGroup, ...]:
        """Groups that, one after the other, reach every rank with other data; () in one process."""
        return tuple(g for g in (self.plan.ranks, self.plan.outer) if g is not None)

    @property
    def shared_parameters(self) -> tuple[ReplicatedShards, ...]:
        """The placements of copies, plan by plan; none in one process."""
        return self.plan.shared

    @property
    def sharded_parameters(self) -> "tuple[ShardedParameters, ...]":
        """DTensors, mesh by mesh."""
        return self.plan.sharded

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

    def wait_for_parameters(self) -> None:
        """Return when all parameters have arrived that the last step sent on their way.

        Where `overlap_param_gather` is on. Whoever reads or changes a parameter waits for it
        without this call; C++ code that is given a parameter, and whoever has kept a view of its
        memory (`param.data`) since before the step, do not. Not collective.
        """
        if self._in_flight.arrivals:
            self._in_flight.wait_for_all()

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

    def _plan_blocks_anew(self) -> None:
        self.plan.forget()
        self._runner.rules.forget_kernels()
        for index, group in enumerate(self.param_groups):
            self.plan.plan_group(index, group)

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

    # --- the step ----------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; the others are untouched, bit for bit."""
        if torch.compiler.is_dynamo_compiling():
            return _outside_of_compilers(self, closure)
        return self._step(closure)

    def _step(self, closure: Callable[[], float] | None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_torch_scaler()
        self._run_step()
        return loss

    @torch.no_grad()
    def scaled_step(self, inverse_scale: Tensor) -> Tensor:
        """The step of a GradScaler: (), whether the gradients of all ranks were finite."""
        self._run_step(inverse_scale)
        assert self._runner.grad_norm is not None
        return self._runner.grad_norm.isfinite()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Multiply gradients before the step so that their joint norm is at most `max_norm`.

        In place of torch.nn.utils.clip_grad_norm_, after the last backward of a step: gradients are
        averaged over ranks first, where they are averaged here, and the norm is that of the whole
        model. Gives the norm before, (), which nobody has waited for; math.inf changes nothing. As
        torch's it does not ask whether gradients are finite. Collective.
        """
        if isinstance(max_norm, Tensor):
            max_norm = float(max_norm)
        if isinstance(max_norm, Mapping):
            raise TypeError(
                f"clip_grad_norm_ takes one limit for all gradients, got {dict(max_norm)}: to clip "
                "by rule in every step, build the optimizer with these as max_grad_norm="
            )
        checks.limit("max_norm", max_norm)
        limit = self._steps.max_grad_norm
        if clips(limit):
            raise ValueError(
                f"gradients would be clipped twice, by {limit_text(limit)} in every step and "
                f"by clip_grad_norm_({max_norm:g}): leave one of them out. max_grad_norm=math.inf "
                "only skips steps whose gradients are not finite"
            )
        self._prepare_step()
        with on_device_of(self.param_groups[0]["params"][0]):
            problem = self._adoption.problem(self.param_groups, self.state)
            norm = self._runner.clip(self.param_groups, self.state, max_norm, problem)
        self._clipped = True
        return norm

    def _prepare_step(self) -> None:
        if not self.param_groups:
            self.plan.check_list(self.param_groups)
        if self.plan.is_deferred:
            self.plan.settle(self.param_groups, self.state)
        self.wait_for_parameters()
        self._runner.bring_state_home()

    def _run_step(self, inverse_scale: Tensor | None = None) -> None:
        if self._clipped and inverse_scale is not None:
            raise RuntimeError(
                "clip_grad_norm_ was called before a GradScaler had its scale taken out of the "
                "gradients, which happens in the step: pass max_grad_norm= to the optimizer"
            )
        self._clipped = False
        self._prepare_step()
        if self._saved.is_known:
            self._saved.changes()
        with (
            on_device_of(self.param_groups[0]["params"][0]),
            self._runner.norm_begun(self.param_groups, scaled=inverse_scale is not None),
        ):
            problem = self._adoption.problem(self.param_groups, self.state)
            self._runner.run(self.param_groups, self.state, problem, inverse_scale)
        watch = self._adoption.watch
        if watch.waits:
            flags = [flag for _, flag in self._runner.present()]
            watch.look_at_gradients(flags, self.param_groups, self._rank_count)
        outlier = self._runner.rules.outliers.new()
        if outlier is not None:
            warn_of_outliers(outlier, self.param_groups[outlier])

    @property
    def averages_gradients(self) -> bool:
        """Whether gradients are averaged, or judged with those of other stages, in the step."""
        plan = self.plan
        averages = plan.ranks is not None and plan.distribution.grads == "local"
        if plan.is_deferred and averages_with_ddp(self.param_groups):  # as the first step will see
            averages = False
        return averages or plan.stages is not None

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

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those that were reduced already: they do not count in the step.

        As `model.zero_grad()` does. Where gradients were reduced (inside backward, or by
        `synchronize()`), all ranks drop them, or the step raises on every rank. Not collective.
        """
        if not set_to_none:
            for placement in self.plan.placed:
                placement.drop_reduced()
        super().zero_grad(set_to_none)

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
        for placement in self.plan.placed:
            placement.pause(paused)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Reduce the gradients so far, and keep only this rank's part of their sum.

        For accumulating without full gradients: call it on every rank after each micro-batch
        but the last, of which `step()` takes care. It costs the bytes of a reduction each time.
        Gradients are then gone from `.grad`. Without other ranks it does nothing.
        """
        # All plans stage by stage: their launches share one order.
        placed = self.plan.placed
        for placement in placed:
            placement.end_round()
        for bucket in reductions_in_order([placement.shape for placement in placed]):
            placed[bucket.placement].launch(bucket.bucket)
        for placement in placed:
            placement.keep_sums()

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
        self._runner.bring_state_home()
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

    # --- who has what ------------------------------------------------------------------------

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

    # --- copies ------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        plan = self.plan
        deferred = plan.is_deferred and plan.ranks is not None
        if plan.placed or plan.stages is not None or deferred:
            raise TypeError(
                "an optimizer that shares its work between ranks cannot be copied or pickled: "
                "build a new one on every rank and load its state_dict"
            )
        mine = {"_rule_options": self._rule_options, "_steps": self._steps}
        return {**super().__getstate__(), **mine, "_distribution": plan.distribution}

    def __setstate__(self, state: dict[str, Any]) -> None:
        distribution = state.pop("_distribution", None)
        super().__setstate__(state)
        if distribution is not None:  # a copy; when loading, torch passes only state and groups
            self._constructed = True
            self._clipped = False
            self._in_flight = ParametersInFlight()
            self.plan = OptimizerPlan(
                distribution, self._steps, self._in_flight, owner=type(self).__name__, alone=True
            )
            self._compose(None, self.defaults.get("rule"), as_built=False)
            self.plan.group_count = len(self.param_groups)
        self._plan_blocks_anew()


def built_together(init: Init) -> Init:
    """A constructor whose errors on one rank are raised by all of them."""

    @wraps(init)
    def build(self: Any, params: Params, *args: Any, **options: Any) -> None:
        if self._construction is not None:
            init(self, params, *args, **options)
            return
        params = list(params) if isinstance(params, Iterator) else params
        name = f"the construction of {type(self).__name__}"
        self._construction = joint_call(name, params, options)
        try:
            with self._construction:
                init(self, params, *args, **options)
        finally:
            self._construction = None

    return cast("Init", build)


def _outside_of_compilers(
    optimizer: RuleOptimizer, closure: Callable[[], float] | None
) -> float | None:
    """The step, uncompiled: torch.compile stops before it, and goes on behind it."""
    disable: Any = torch.compiler.disable
    found: float | None = disable(optimizer._step)(closure)
    return found


# As torch.compiler.disable, which would import all of torch._dynamo where most never compile.
_outside_of_compilers._torchdynamo_disable = True  # type: ignore[attr-defined]
_outside_of_compilers._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "a step of samestep asks other ranks and checks on the host, which is no graph: leave "
    "torch.compile(opt.step) out, and give the optimizer compile=True, which compiles its math"
)
