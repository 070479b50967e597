"""Groups, state and plans of an optimizer: everything but the step."""

import hashlib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from samestep.comm.groups import GroupReduction, RankGroup, rank_group, registry
from samestep.groups.distribution import Distribution
from samestep.groups.group_checks import GroupChecks
from samestep.groups.group_keys import refuse_lost_keys
from samestep.groups.mistakes import (
    TrainingWatch,
    has_process_group,
    refuse_flat_parameter,
    refuse_late_group,
    warn_of_ddp,
    warn_of_lost_updates,
    warn_of_missing_group,
)
from samestep.groups.param_groups import (
    Group,
    blocks_of_group,
    complete,
    listed,
    naming_group,
    parameter_names,
    refuse_repeated,
    rule_of,
)
from samestep.groups.routing import routable
from samestep.groups.table import table
from samestep.kernels.choice import missing as missing_kernels
from samestep.kernels.choice import missing_products
from samestep.layout.blocks import Block
from samestep.optimizer import assumptions
from samestep.optimizer.loading import PART, StateDict, check_part, load_state
from samestep.placements.local import KnownGroup, LocalParameters, plain
from samestep.placements.placement import Placement
from samestep.placements.planner import Planner
from samestep.placements.registry import mesh_of
from samestep.placements.whole.in_flight import ParametersInFlight, wait_for_anyone
from samestep.placements.whole.replicated import ReplicatedParameters
from samestep.rules import checks
from samestep.rules.state import MASTER, State, initial_state, needs_master
from samestep.update.compiled import CompiledRules
from samestep.update.metrics import Outliers, UpdateSizes
from samestep.update.plain import StepScalars, UpdateFunction, run_rule

if TYPE_CHECKING:
    from samestep.optimizer.recorded_step import RecordedStep
    from samestep.placements.parts.sharded import ShardedParameters
    from samestep.update.triton import KernelPlan

Params = (
    nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
)  # a model, parameters, named parameters, or groups


class GroupOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose groups each follow a rule; `RuleOptimizer` adds the step.

    `rule_options` holds, per rule, the keys a group takes when it does not set them itself.
    `order_of_use` are parameters in the order in which forward uses them, where that is known.
    """

    _recorded: "RecordedStep | None"

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        rule_options: Mapping[str, Mapping[str, Any]],
        *,
        master_weights: bool | None,
        compile: bool | str,
        cuda_graph: bool | None = None,
        batch_elements: int | None = None,
        max_grad_norm: float | None,
        update_rms: bool,
        distribution: Distribution,
        model: nn.Module | None = None,
        order_of_use: Iterable[Tensor] = (),
    ) -> None:
        if max_grad_norm is not None:
            checks.limit("max_grad_norm", max_grad_norm)
        checks.boolean("update_rms", update_rms)
        if cuda_graph is not None:
            checks.boolean("cuda_graph", cuda_graph)
        if batch_elements is not None:
            checks.count("batch_elements", batch_elements)
        self._max_grad_norm = max_grad_norm
        self._update_rms = update_rms
        self._distribution = distribution
        self._rank_group = rank_group(distribution.process_group)
        # Without one, whoever averages elsewhere says grads="reduced".
        self._expects_no_group = not has_process_group() and distribution.grads == "local"
        if self._expects_no_group:
            warn_of_missing_group()
        self._outer_group = None
        if distribution.outer_group is not None:
            self._outer_group = registry.of(distribution.outer_group)
            if self._rank_group is None:
                raise ValueError(
                    "process_group has one rank, so there is nothing to share inside it: leave it "
                    "and outer_group out"
                )
        self._stage_group = None
        if distribution.stage_group is not None:
            self._stage_group = registry.of(distribution.stage_group)
        self._placed: list[Placement] = []  # with other ranks
        self._constructed = False
        self._reductions: dict[int, GroupReduction] = {}
        self._rule_options = rule_options
        self._master_weights = bool(master_weights)
        self._masters_unsaid = master_weights is None
        self._compile = compile
        self._cuda_graph = cuda_graph
        self._batch_elements = batch_elements
        self._reset_derived()
        self._reset_runner()
        self._in_flight = ParametersInFlight()
        self._planner = self._new_planner(order_of_use)
        model = params if isinstance(params, nn.Module) else model
        self._watch = TrainingWatch(model)
        if distribution.overlap_param_gather:
            if model is None:
                raise ValueError(
                    "overlap_param_gather makes modules wait for their parameters: give the model "
                    "instead of parameters or groups (groups= can sort its parameters)"
                )
            self._in_flight.watch(model)
        if isinstance(params, nn.Module):
            params = [(name, param) for name, param, _ in routable(params).parameters]
        super().__init__(params, defaults)
        self._share(range(len(self.param_groups)))
        self._constructed = True
        self._refuse_cuda_graph()
        self._warn_of_lost_updates(range(len(self.param_groups)))

    def _new_planner(self, order_of_use: Iterable[Tensor]) -> Planner:
        alike = ("master_weights", "max_grad_norm", "update_rms")
        return Planner(
            self._rank_group,
            self._outer_group,
            self._distribution,
            self._in_flight,
            order_of_use,
            owner=type(self).__name__,
            master_weights=self._master_weights,
            lines=[f"{key} = {getattr(self, f'_{key}')}" for key in alike],
        )

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.param_groups[0]["params"][0].device
        return device

    def _check_groups(self) -> None:
        """Raise before anything changes if a group or a gradient cannot be used."""
        if self._expects_no_group and has_process_group():
            refuse_late_group()
            self._expects_no_group = False  # a group of this process alone
        if self._watch.is_due():
            self._watch.look_at_model(self.param_groups, self.defaults.get("rule"))
            if self._watch.at_first_step and self._distribution.grads == "local":
                for shared in self.shared_parameters:
                    names = (spec.name for spec in shared.plan.params)
                    if warn_of_ddp(zip(names, shared.params, strict=True)):
                        shared.expect_edits()
        for index, group in enumerate(self.param_groups):
            self._checks.check(index, group)
        if self._rank_group is None:
            for index, group in enumerate(self.param_groups):
                self._know(index, group)

    def _know(self, index: int, group: Group) -> None:
        """Look whether anything of a group was replaced, and whether its state is all there."""
        known = self._known_groups.get(index)
        if known is None or not known.is_still(group, self.state):
            for param in plain(group):
                self._keep_state_beside(param, group)
            self._known_groups[index] = KnownGroup(group, self.state, self._blocks)

    def _keep_state_beside(self, param: Tensor, group: Group) -> None:
        """State follows a parameter to its device; cleared state starts afresh."""
        state, device = self.state[param], param.device
        if not state or (needs_master(param, self._master_weights) and MASTER not in state):
            fresh = initial_state(
                rule_of(group), param, self._blocks[param], group, self._master_weights
            )
            self.state[param] = state = {**fresh, **state}
        for key, tensor in state.items():
            if tensor.device != device:
                state[key] = tensor.to(device)

    def _share(self, indices: Iterable[int]) -> None:
        """Plan how ranks share the parameters of some groups, and make their state."""
        wanted = list(indices)
        self._settle_products(wanted)
        planned = self._planner.plans(self.param_groups, wanted, self._blocks, self._reductions)
        made: dict[Tensor, State] = {}
        for placement in planned:  # nothing is made before all are agreed on
            made |= placement.make_state(self.param_groups, self._master_weights)
        for index in wanted:
            for param in self.param_groups[index]["params"]:
                if param in made:
                    self.state[param] = made[param]
        for placement in planned:
            placement.activate()
        # Parts last, whichever group came last.
        self._placed = sorted([*self._placed, *planned], key=lambda placed: placed.holds_parts)

    def _settle_products(self, indices: Iterable[int]) -> None:
        """How Muon's products are computed on a GPU; the same on all ranks, so it is collective."""
        halves = (None, torch.bfloat16, torch.float16)
        groups = [self.param_groups[index] for index in indices]
        params = [p for g in groups if g.get("compute_dtype") in halves for p in g["params"]]
        if not params or missing_products(params[0].device) is not None:
            return
        from samestep.update.measure import settle

        shapes = {block.shape for param in params for block in self._blocks[param] or ()}
        settle(shapes, params[0].device, self._rank_group)

    def _all_placements(self) -> list[Placement]:
        """Everything a step is about."""
        placements = list(self._placed)
        if not self.shared_parameters and (self._rank_group is None or not placements):
            known = self._known_groups
            placements.append(LocalParameters([known[index] for index in sorted(known)]))
        return placements

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, complete it and make its state; on an error nothing has changed."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        default_rule = {"rule": self.defaults["rule"]} if "rule" in self.defaults else {}
        with naming_group(len(self.param_groups)):
            refuse_lost_keys({**default_rule, **param_group})
            group = complete({**default_rule, **param_group}, self._rule_options)
        for key in group.keys() - param_group.keys():
            # Not shared: schedulers write into learning-rate tensors, group by group.
            group[key] = deepcopy(group[key])
        own_keys = {*group, "params", "param_names"}
        group["params"] = listed(group.get("params"), len(self.param_groups))
        refuse_repeated(group, self.param_groups)
        index = len(self.param_groups)
        reduction = self._own_reduction(index, group)
        super().add_param_group(group)
        wait_for_anyone(group["params"])
        for key in self.defaults:
            if key not in own_keys:  # torch fills in every default, of either rule
                del group[key]
        try:
            self._refuse_unsupported(index, group)
            self._plan(index, group)
            if reduction is not None:
                self._reductions[index] = reduction
            if self._constructed:  # those of the constructor go together
                self._share([index])
                self._warn_of_lost_updates([index])
        except Exception:
            self.param_groups.pop()
            self._checks.forget(index, group["params"])
            self._reductions.pop(index, None)
            for param in group["params"]:
                self._blocks.pop(param, None)
            raise
        if self._rank_group is None:
            for param in group["params"]:
                if mesh_of(param) is None:
                    self.state[param] = initial_state(
                        rule_of(group), param, self._blocks[param], group, self._master_weights
                    )

    def _own_reduction(self, index: int, group: Group) -> GroupReduction | None:
        """Take a process group and divisor of its own out of a group: they are not saved."""
        process_group, divisor = group.pop("process_group", None), group.pop("divisor", None)
        if process_group is None and divisor is None:
            return None
        with naming_group(index):
            if self._rank_group is None:
                raise ValueError("process_group and divisor need other ranks, and there are none")
            if self._outer_group is not None:
                raise ValueError("process_group and divisor of a group exclude outer_group")
            if divisor is not None:
                checks.positive("divisor", divisor)
            if self._distribution.grads == "reduced":
                raise ValueError('process_group and divisor do nothing with grads="reduced"')
            own = self._rank_group if process_group is None else registry.of(process_group)
        return GroupReduction(own, divisor)

    def _refuse_unsupported(self, index: int, group: Group) -> None:
        """Only real floating parameters, and the fused kernel only where it is."""
        if group.get("fused") and self._compile:
            raise ValueError("fused=True and compile exclude each other: leave one of them out")
        for name, param in zip(parameter_names(group, index), group["params"], strict=True):
            refuse_flat_parameter(name, param)
            if not param.is_floating_point():
                raise ValueError(
                    f"parameter {name!r} has dtype {param.dtype}: rule {group['rule']!r} does not "
                    f"support {'complex' if param.is_complex() else 'integer or boolean'} "
                    "parameters; leave it out or freeze it"
                )
            if group.get("fused") and param.device.type != "cpu":
                raise ValueError(
                    f"fused=True is for parameters on CPU, and {name!r} is on {param.device.type}: "
                    "compile=True does the same there"
                )

    def _warn_of_lost_updates(self, indices: Iterable[int]) -> None:
        """Of 16-bit parameters in some groups, unless the user has said what is wanted."""
        if self._masters_unsaid:
            groups = [(index, self.param_groups[index]) for index in indices]
            named = [
                pair
                for index, group in groups
                for pair in zip(parameter_names(group, index), group["params"], strict=True)
            ]
            narrow = [(name, param) for name, param in named if needs_master(param, True)]
            warn_of_lost_updates(narrow, of=len(named))

    def _refuse_cuda_graph(self) -> None:
        """Raise where a step cannot be one graph."""
        if not self._cuda_graph:
            return
        if self._compile:
            raise ValueError(
                "cuda_graph=True and compile exclude each other: leave one of them out"
            )
        if self._rank_group is not None or self._placed:
            raise ValueError(
                "cuda_graph=True is for one process: what ranks send depends on who has which "
                "gradients, which a graph cannot; leave it out"
            )

    def _recording(self) -> "RecordedStep | None":
        """What records steps and replays them: asked for, or where it is legal and pays."""
        if self._recorded is None and self._cuda_graph is None and self._can_be_recorded():
            self._recorded = _new_recorded_step(asked_for=False)
        return self._recorded

    def _can_be_recorded(self) -> bool:
        alone = self._rank_group is None and self._stage_group is None and not self._placed
        return alone and not self._compile and missing_kernels(self._device) is None

    def _plan(self, index: int, group: Group) -> None:
        """Cut the parameters of a group into blocks and remember what that depended on."""
        cut = blocks_of_group(group, parameter_names(group, index))
        self._blocks.update(zip(group["params"], cut, strict=True))
        self._checks.plan(index, group)
        grad_dtype = self._distribution.grad_dtype
        for param in group["params"]:
            if grad_dtype is not None and param.grad_dtype != grad_dtype:
                param.grad_dtype = grad_dtype

    def _reset_derived(self) -> None:
        """Forget what is derived from the groups: it is never saved or copied."""
        self._blocks: dict[Tensor, list[Block] | None] = {}
        self._checks = GroupChecks()
        self._known_groups: dict[int, KnownGroup] = {}  # of the last step, in one process
        self._kernel_plans: dict[object, KernelPlan] = {}  # by group and device
        self._known_keys: dict[str, tuple[str, ...]] = {}  # options that rules read, by their name

    def _reset_runner(self) -> None:
        """Make what runs rules and holds their graphs; loading a state keeps it."""
        self._scalars = StepScalars()
        self._grad_norm: Tensor | None = None
        self._sizes: UpdateSizes | None = None
        self._placements: list[Placement] = []
        backend = "inductor" if self._compile is True else self._compile
        self._run: UpdateFunction = CompiledRules(backend) if backend else run_rule
        self._outliers = Outliers()
        self._recorded = _new_recorded_step(asked_for=True) if self._cuda_graph else None

    def state_dict(self) -> StateDict:
        """What torch's optimizers give. Of an optimizer on several ranks it is this rank's part.

        Such a part says whose it is, and loads only there.
        """
        saved = super().state_dict()
        part = self._part()
        if part is not None and self.sharded_parameters:
            raise RuntimeError(
                "plain parameters beside DTensors keep only a part of their state on each rank, "
                "which torch's checkpoints of DTensors would lose: build the optimizer with "
                'sharding="none", which concerns the plain ones alone'
            )
        return saved if part is None else {**saved, PART: part}

    def _part(self) -> dict[str, Any] | None:
        """Which part of the whole state this rank has; None: all of it."""
        shared = self.shared_parameters
        if not shared or self._rank_group is None:
            return None
        if self.sharded_parameters and all(plan.keeps_all for plan in shared):
            return None
        ranks = self._rank_group
        return {"rank": ranks.rank, "ranks": ranks.size, "plan": self.fingerprint()}

    def fingerprint(self) -> str:
        """A digest of who owns and sends what; equal on ranks that hold the same parameters.

        Of one process it is "".
        """
        if not self._placed:
            return ""
        text = "\n".join(line for placement in self._placed for line in placement.lines())
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def ranks(self) -> RankGroup | None:
        """The ranks that hold replicas; None in one process."""
        return self._rank_group

    @property
    def shared_parameters(self) -> tuple[ReplicatedParameters, ...]:
        """What ranks hold whole, plan by plan; in one process nothing."""
        return tuple(p for p in self._placed if isinstance(p, ReplicatedParameters))

    @property
    def sharded_parameters(self) -> "tuple[ShardedParameters, ...]":
        """DTensors, mesh by mesh."""
        held = [placement for placement in self._placed if placement.holds_parts]
        return cast("tuple[ShardedParameters, ...]", tuple(held))

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load state without changing its dtype; on an error nothing has changed.

        Takes what `state_dict()` gave here, also before a first step, and the files of
        torch.optim.AdamW and torch.optim.Muon for groups of the same rule. Where both sides
        have parameter names, these decide, not the order.
        """
        check_part(state_dict, self._part())
        self.wait_for_parameters()
        load_state(self, super().load_state_dict, state_dict)
        for placement in self._placed:
            placement.mend_replicas()

    def wait_for_parameters(self) -> None:
        """Return when all parameters have arrived that the last step sent on their way.

        Before reading or changing parameters between a step and the next forward, where
        `overlap_param_gather` is on; modules, `model.state_dict()` and `model.load_state_dict()`
        wait by themselves. Not collective.
        """
        self._in_flight.wait_for_all()

    def table(self) -> str:
        """Every parameter with its rule, blocks and learning rate, and the totals, as text."""
        return table(self.param_groups, self._blocks)

    def explain(self) -> str:
        """What is taken for granted of other ranks and of whoever makes gradients, as text.

        With who averages what, which check holds each assumption and when it runs, and what
        nobody checks. Not collective.
        """
        return assumptions.explain(self._facts())

    def _facts(self) -> assumptions.Facts:
        return assumptions.Facts(
            type(self).__name__,
            self._rank_group,
            self._outer_group,
            self._stage_group,
            self._distribution,
            self.shared_parameters,
            self.sharded_parameters,
            tuple(self.param_groups),
            self._max_grad_norm,
        )

    def __getstate__(self) -> dict[str, Any]:
        if self._placed or self._stage_group is not None:
            raise TypeError(
                "an optimizer that shares its work between ranks cannot be copied or pickled: "
                "build a new one on every rank and load its state_dict"
            )
        mine = (
            "_rule_options", "_master_weights", "_compile", "_cuda_graph", "_batch_elements",
            "_max_grad_norm", "_update_rms", "_distribution", "_masters_unsaid",
        )  # fmt: skip
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in mine}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset_derived()
        if "_compile" in state:  # a copy; when loading, torch passes only state and groups
            self._reset_runner()
            self._rank_group, self._placed, self._reductions = None, [], {}
            self._constructed = True
            self._outer_group = self._stage_group = None
            self._expects_no_group = not has_process_group()
            self._watch = TrainingWatch(None)
            self._in_flight = ParametersInFlight()
            self._planner = self._new_planner(())
        for index, group in enumerate(self.param_groups):
            self._plan(index, group)


def _new_recorded_step(*, asked_for: bool) -> "RecordedStep":
    reason = missing_kernels(torch.device("cuda"))
    if reason is not None:
        raise ValueError(f"cuda_graph=True needs kernels, and there are none: {reason}")
    from samestep.optimizer.recorded_step import RecordedStep

    return RecordedStep(asked_for=asked_for)
