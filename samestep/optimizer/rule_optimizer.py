"""Base of all optimizers: construction, groups and steps.

`step.py` runs the step; `state_access.py` has what users read and write between steps.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from samestep.comm.groups import RankGroup
from samestep.comm.joint_call import JointCall
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
from samestep.groups.tied import refuse_replaced, tied_apart
from samestep.optimizer.adoption import Adoption
from samestep.optimizer.optimizer_plan import OptimizerPlan, joint_call
from samestep.optimizer.saved_state import SavedState
from samestep.optimizer.state_access import StateAccess
from samestep.optimizer.step import StepRunner
from samestep.plan.schedule import reductions_in_order
from samestep.rules import checks
from samestep.shards.local import plain
from samestep.shards.replicated.awaited import ParametersInFlight, wait_for_anyone
from samestep.shards.replicated.replicated import ReplicatedShards

if TYPE_CHECKING:
    from samestep.shards.dtensor.sharded import ShardedParameters

Init = TypeVar("Init", bound=Callable[..., None])
Params = (
    nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
)  # a model, parameters, named parameters, or groups


SCALER_KEYS = {"grad_scale", "found_inf"}  # attributes that torch's GradScaler sets


class RuleOptimizer(StateAccess):
    """A torch optimizer that applies to each parameter the rule of its group.

    `rule_options` holds, per rule, the keys a group takes when it does not set them itself.
    `order_of_use` are parameters in the order in which forward uses them, where that is known.
    `plan` has what was decided for its groups: ranks, blocks, plans and placements.
    """

    _construction: JointCall | None = None  # while it is built with other ranks

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
                    "overlap_param_gather needs the modules, which wait for their "
                    "parameters: give the model instead of parameters or groups "
                    "(groups= can sort its parameters)"
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
        """Create the objects that run steps and saved state."""
        self._runner = StepRunner(self.plan, self._steps)
        self._adoption = Adoption(self.plan, self._runner, model, default_rule)
        self._saved = SavedState(self.plan, as_built=as_built)

    def _adopt_swapped(self, *, to_save: bool = False) -> None:
        """Take in parameters that a wrapper has put in the places of others. Collective.

        Before state is looked at or changed: it is at home then.
        """
        self.plan.check_list(self.param_groups, to_save=to_save)
        if self._runner.staging is not None:  # a step that failed has left state on its way
            self._runner.staging.break_off()
        if self._adoption.adopted(self.param_groups, self.state):
            self._saved.drop()

    def adopt(self, model: nn.Module) -> None:
        """Replace parameters by those of `model` with the same names.

        For a model that was sharded, wrapped or rebuilt after the optimizer was built
        (`fully_shard`, `to_empty`, `load_state_dict(assign=True)`). Shapes must agree; state and
        plans follow, and the parameters' values are those of `model`. A wrapper that puts its
        parameters into `param_groups` itself, as accelerate does, needs no call. Collective: every
        rank calls it. On an error nothing has changed.
        """
        if self._runner.staging is not None:  # a step that failed has left state on its way
            self._runner.staging.break_off()
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
        """Process groups that together reach every rank with other data."""
        return tuple(g for g in (self.plan.ranks, self.plan.outer) if g is not None)

    @property
    def shared_parameters(self) -> tuple[ReplicatedShards, ...]:
        """The placements of copies, plan by plan; none in one process."""
        return self.plan.shared

    @property
    def sharded_parameters(self) -> "tuple[ShardedParameters, ...]":
        """DTensors, mesh by mesh."""
        return self.plan.sharded

    def wait_for_parameters(self) -> None:
        """Return when all parameters have arrived that the last step sent on their way.

        Where `overlap_param_gather` is on. Whoever reads or changes a parameter waits for it
        without this call; C++ code that is given a parameter, and whoever has kept a view of its
        memory (`param.data`) since before the step, do not. Not collective.
        """
        if self._in_flight.arrivals:
            self._in_flight.wait_for_all()

    def _plan_blocks_anew(self) -> None:
        self.plan.forget()
        self._runner.rules.forget_kernels()
        for index, group in enumerate(self.param_groups):
            self.plan.plan_group(index, group)

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
        return self._run_step(closure)

    @torch.no_grad()
    def scaled_step(self, inverse_scale: Tensor) -> Tensor:
        """The step of a GradScaler: (), whether the gradients of all ranks were finite."""
        self._run_step(inverse_scale=inverse_scale)
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
        with torch.cuda.device_of(self.param_groups[0]["params"][0]):  # type: ignore[no-untyped-call]
            problem = self._adoption.problem(self.param_groups, self.state)
            norm = self._runner.clip(self.param_groups, self.state, max_norm, problem)
        self._clipped = True
        return norm

    def _prepare_step(self) -> None:
        first = self.param_groups[0].get("params") if self.param_groups else None
        if not first or not isinstance(first, list | tuple):  # the first parameter is read below
            self.plan.check_list(self.param_groups)
        if self.plan.is_deferred:
            self.plan.settle(self.param_groups, self.state)
        if self._in_flight.arrivals:
            self._in_flight.wait_for_all()
        if self._runner.staging is not None:  # a step that failed has left state on its way
            self._runner.staging.break_off()

    def _run_step(
        self, closure: Callable[[], float] | None = None, inverse_scale: Tensor | None = None
    ) -> float | None:
        """Check groups and gradients, and run the step.

        inverse_scale: 1 / scale of a GradScaler.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.__dict__.keys() & SCALER_KEYS:
            self._refuse_torch_scaler()
        if self._clipped and inverse_scale is not None:
            raise RuntimeError(
                "clip_grad_norm_ was called on gradients that are still scaled by a "
                "GradScaler, which are unscaled inside step(): pass max_grad_norm= to "
                "the optimizer instead"
            )
        self._clipped = False
        self._prepare_step()
        if self._saved.is_known:
            self._saved.changes()
        with (
            torch.cuda.device_of(self.param_groups[0]["params"][0]),  # type: ignore[no-untyped-call]
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
        return loss

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
        handed_over = [self.__dict__.pop(key, None) for key in SCALER_KEYS]
        if any(value is not None for value in handed_over):
            raise RuntimeError(
                "torch.amp.GradScaler decides by each rank's own gradients, so that "
                "ranks would use different scales: use samestep.GradScaler, which "
                "takes the same arguments"
            )

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

    # --- copies ------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        plan = self.plan
        deferred = plan.is_deferred and plan.ranks is not None
        if plan.placed or plan.stages is not None or deferred:
            raise TypeError(
                "an optimizer that is sharded over ranks cannot be copied or pickled: "
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
    """Make a constructor raise on all ranks if it fails on one."""

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
    """Exclude the step from torch.compile."""
    disable: Any = torch.compiler.disable
    found: float | None = disable(optimizer._run_step)(closure)
    return found


# As torch.compiler.disable, which would import all of torch._dynamo where most never compile.
_outside_of_compilers._torchdynamo_disable = True  # type: ignore[attr-defined]
_outside_of_compilers._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "a step of samestep asks other ranks and checks on the host, which is no graph: leave "
    "torch.compile(opt.step) out, and give the optimizer compile=True, which compiles its math"
)
