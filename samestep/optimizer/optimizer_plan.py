"""Ranks, blocks and placements of an optimizer.

`RuleOptimizer` has what users ask for; here is what was decided for the groups at hand, and how it
follows when parameters come later or are swapped. Groups and state stay with the optimizer, as
torch wants it, and are handed in.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from samestep.comm.collectives import maximum
from samestep.comm.diagnosis import watch
from samestep.comm.groups import GroupReduction, RankGroup, rank_group, ranks_text, registry
from samestep.comm.integrity.agreement import gather_rows
from samestep.comm.joint_call import JointCall, agree_among
from samestep.comm.presence import Call, RankFailure
from samestep.groups.distribution import Distribution
from samestep.groups.group_checks import GroupChecks, in_several_places
from samestep.groups.mistakes import averages_with_ddp, has_process_group, warn_of_missing_group
from samestep.groups.param_groups import Group, blocks_of_group, members, parameter_names
from samestep.groups.pipelines import WAY_OF_STAGES, PipelineStages
from samestep.groups.step_options import StepOptions, limit_text
from samestep.layout.blocks import Block
from samestep.layout.boxes import local_of, mesh_of
from samestep.layout.memory import overlap
from samestep.optimizer.full_values import FullValues
from samestep.rules.converted import from_other_master, other_master
from samestep.rules.state import MASTER, State
from samestep.shards.copies import refuse_kinds_of_some_ranks
from samestep.shards.local import LocalParameters
from samestep.shards.placement import Placement
from samestep.shards.planner import Planner
from samestep.shards.registry import kind_of
from samestep.shards.replicated.awaited import ParametersInFlight
from samestep.shards.replicated.replicated import ReplicatedShards

if TYPE_CHECKING:
    from samestep.shards.dtensor.sharded import ShardedParameters

States = dict[Tensor, State]


class OptimizerPlan:
    """The ranks, blocks and placements of one optimizer.

    ranks: those that share its work; None: this process alone. outer: ranks that hold copies of
    all that; stages: one rank of every pipeline stage.
    group_count: groups that came through `add_param_group`.
    blocks: of every parameter what its matrix rule is run on; None where the rule is elementwise.
    placed: placements with other ranks, those of parts last.
    placements: everything a step is about.
    is_deferred: there are no plans and no state yet.
    """

    def __init__(
        self,
        distribution: Distribution,
        steps: StepOptions,
        in_flight: ParametersInFlight,
        order_of_use: Iterable[Tensor] = (),
        *,
        owner: str,
        alone: bool = False,
        tied: bool = False,
    ) -> None:
        _refuse_offload(steps, distribution)
        self.distribution = distribution
        self._tied = tied
        self.masters = bool(steps.master_weights)
        self.is_deferred = distribution.deferred and not alone
        self.placed: list[Placement] = []
        self.reductions: dict[int, GroupReduction] = {}
        self.group_count = 0
        self._steps, self._in_flight, self._owner = steps, in_flight, owner
        self._order_of_use = list(order_of_use)
        self.beside: Callable[[], Iterable[tuple[str, Tensor]]] = tuple  # tensors of the model
        self.ranks: RankGroup | None = None
        self.outer: RankGroup | None = None
        self.stages: RankGroup | None = None
        self.expects_no_group = not has_process_group()
        self._leaves_out: str | None = None  # parameters of the model that are not in a norm
        if alone:
            self._new_plans()
        else:
            self._find_ranks()

    def _find_ranks(self) -> None:
        """Find the ranks that share the work, and make the planner for them."""
        distribution = self.distribution
        self.ranks = rank_group(distribution.process_group)
        if self._tied and self.ranks is None and distribution.process_group is not None:
            # Ranks of other stages have copies: what lies beside them is planned alike.
            self.ranks = registry.of(distribution.process_group)
        watch.start()
        # Without one, whoever averages elsewhere says grads="reduced".
        self.expects_no_group = not has_process_group() and distribution.grads == "local"
        if self.expects_no_group and not self.is_deferred:
            warn_of_missing_group()
        if distribution.outer_group is not None:
            self.outer = registry.of(distribution.outer_group)
            if self.ranks is None:
                raise ValueError(
                    "outer_group was given, and process_group has one rank, so that "
                    "nothing is sharded inside it: leave both out"
                )
        stages = distribution.stage_group
        if stages is not None and not isinstance(stages, str):
            self.stages = registry.of(stages)
            _refuse_copies_as_stages(self.stages, self.ranks)
        self._new_plans()

    def _new_plans(self) -> None:
        self.forget()
        self.planner = Planner(
            self.ranks,
            self.outer,
            self.distribution,
            self._in_flight,
            self._order_of_use,
            owner=self._owner,
            master_weights=self.masters,
            lines=self._steps.lines(),
            stages=self.stages,
        )

    def forget(self) -> None:
        """Forget what is derived from the groups: it is never saved or copied."""
        self.blocks: dict[Tensor, list[Block] | None] = {}
        self.checks = GroupChecks()
        self.local = LocalParameters(self.blocks, self.masters, self.distribution)
        self._line_up()

    def _line_up(self) -> None:
        """Sort placements in the order of the step."""
        self.placements = list(self.placed)
        if self.ranks is None or not self.placed:
            self.placements.append(self.local)
        self.groups_of_stages: dict[RankGroup, list[int]] = {}
        for index, reduction in self.reductions.items():
            if reduction.stages > 1:
                self.groups_of_stages.setdefault(reduction.ranks, []).append(index)
        self.participants = self._all_participants()

    def _all_participants(self) -> RankGroup | None:
        """All ranks that take part, if no placement has them all.

        Without those of other stages, which hear of it over `stage_group`.
        """
        held_by = [placement.held_by for placement in self.placements]
        groups = {
            group.members: group
            for group in held_by
            if group is not None and group not in self.groups_of_stages
        }
        if len(groups) < 2:
            return None
        members = {rank for group in groups.values() for rank in group.members}
        return next((g for g in groups.values() if members == set(g.members)), self.ranks)

    # --- plans and state ---------------------------------------------------------------------

    def plan_group(self, index: int, group: Group) -> None:
        """Cut the parameters of a group into blocks and remember what that depended on."""
        cut = blocks_of_group(group, parameter_names(group, index))
        self.blocks.update(zip(group["params"], cut, strict=True))
        self.checks.plan(index, group)
        grad_dtype = self.distribution.grad_dtype
        for param in group["params"]:
            if grad_dtype is not None and param.grad_dtype != grad_dtype:
                param.grad_dtype = grad_dtype

    def check_list(self, groups: Sequence[Group], *, to_save: bool = False) -> None:
        """Raise unless groups are those that were added, with as many parameters each.

        `to_save`: a group that repeats parameters of others is saved as it is, as torch does.
        """
        if len(groups) < self.group_count:
            raise RuntimeError(
                f"param_groups had {self.group_count} groups and has {len(groups)} now: "
                "groups cannot be removed: call requires_grad_(False) on their "
                "parameters, or build a new optimizer"
            )
        for index, group in enumerate(groups[: self.group_count]):
            self.checks.counted(index, group)
        for index, group in enumerate(groups[self.group_count :], self.group_count):
            params = group.get("params", ()) if isinstance(group, dict) else ()
            if to_save and params and all(param in self.blocks for param in params):
                continue
            raise RuntimeError(
                f"param_groups[{index}] was put into the list directly, so that its "
                "parameters have no state: remove it, and call "
                f"opt.add_param_group({{...}}) on every rank, with parameters that no "
                "other group has"
            )

    def unplan(self, index: int, params: Iterable[Tensor]) -> None:
        """Undo the addition of a group."""
        params = list(params)
        self.checks.forget(index, params)
        self.reductions.pop(index, None)
        for param in params:
            self.blocks.pop(param, None)

    def share(self, indices: Iterable[int], groups: Sequence[Group], state: States) -> None:
        """Plan the sharding of some groups, and create their state."""
        wanted = list(indices)
        self._compare_kinds(groups, wanted)
        self._look_for_stages(groups)
        self.planner.problem = problem = self.shared_memory(groups)
        for index in wanted:
            if index in self.reductions:
                known = self.reductions[index]
                self.reductions[index] = self.planner.with_stages(known, groups[index])
        planned = self.planner.plans(groups, wanted, self.blocks, self.reductions)
        if problem is not None:
            raise ValueError(problem)
        made: States = {}
        for placement in planned:  # nothing is made before all are agreed on
            made |= placement.make_state(groups, self.masters)
        for param in (p for index in wanted for p in groups[index]["params"]):
            if param in made:  # in the order of the groups, which is that of a state dict
                state[param] = made[param]
        for placement in planned:
            placement.activate()
        # Parts last, whichever group came last.
        self.placed = sorted([*self.placed, *planned], key=lambda placed: placed.holds_parts)
        self._line_up()

    def _compare_kinds(self, groups: Sequence[Group], wanted: Sequence[int]) -> None:
        """Raise on every rank if some have plain parameters or DTensors where others have none."""
        shared = [index for index in wanted if index not in self.reductions]
        of_groups = chain.from_iterable(members([groups[index]], index) for index in shared)
        named = [(name, param) for _, name, param in of_groups]
        dtensors = any(mesh_of(param) is not None for _, param in named)
        if not named or (self.distribution.grads == "reduced" and dtensors):
            return  # DTensors whose gradients come reduced are compared on their mesh alone
        for ranks in (self.ranks, self.outer):
            if ranks is not None:
                refuse_kinds_of_some_ranks(named, ranks)

    def shared_memory(self, groups: Sequence[Group]) -> str | None:
        """Error text if two parameters share memory."""
        named = [(name, param) for _, name, param in members(groups)]
        problem = in_several_places(named)
        if problem is not None:
            return problem
        pair = overlap(named)
        if pair is not None:
            return (
                f"parameters {pair[0]!r} and {pair[1]!r} lie in the same memory, and are two for "
                "an optimizer: a step would update that memory twice, each time with a gradient, "
                "momentum and weight decay of its own, and ranks that update one of them each "
                "would drift apart. Make them one parameter (head.weight = embedding.weight, or a "
                "view of it in forward), whose gradients autograd adds up, or give one of them "
                "memory of its own: parameter.data = parameter.data.clone()"
            )
        if self.distribution.buffers != "flat":
            return None
        mine = {param for _, param in named}
        others = [(name, tensor) for name, tensor in self.beside() if tensor not in mine]
        pair = overlap(named, others)
        if pair is None:
            return None
        return (
            f"parameter {pair[0]!r} lies in the same memory as {pair[1]!r}, which is not trained, "
            "and flat buffers would part them: make them one parameter (tied weights), or take "
            'buffers="per_parameter"'
        )

    def _look_for_stages(self, groups: Sequence[Group]) -> None:
        """Raise if the model is one of several pipeline stages without process_group."""
        if self.distribution.stage_group is not None or not has_process_group():
            return
        self.refuse_unnamed_stages(groups)
        clips = self._steps.max_grad_norm is not None
        if self.distribution.process_group is not None:
            self._leaves_out = ranks_outside(groups, self.ranks, self.outer)
        elif self.ranks is not None and (clips or self.distribution.grads == "local"):
            self._leaves_out = parameters_elsewhere(groups, self.ranks)
        if clips:
            self.refuse_norm_of_a_part(limit_text(self._steps.max_grad_norm))

    def refuse_unnamed_stages(self, groups: Sequence[Group]) -> None:
        """Raise if torch pipelining has other stages of the model and no stage_group was given."""
        if self.distribution.stage_group is not None or not has_process_group():
            return
        alone = self.distribution.process_group is not None
        if alone and self._steps.max_grad_norm is None:
            return
        params = [param for group in groups for param in group["params"]]
        stage = PipelineStages(params).beside()
        if stage is None or (not alone and all(mesh_of(param) is not None for param in params)):
            return
        raise ValueError(
            f"this optimizer has parameters of stage {stage.stage_index} of a pipeline "
            f"of {stage.num_stages}, and no process_group= and stage_group=, so that it "
            f"would take them for the whole model. {WAY_OF_STAGES}"
        )

    def refuse_norm_of_a_part(self, what: str) -> None:
        """Raise if the gradient norm would leave out other stages."""
        if self._leaves_out is not None:
            raise ValueError(
                f"{what} needs the norm of the whole model, and {self._leaves_out}. "
                f"{WAY_OF_STAGES}. If they train another model, or hold copies of these "
                'parameters, say stage_group="none"'
            )

    def _plan_all(
        self, groups: Sequence[Group], state: States, ready: Callable[[], None] = lambda: None
    ) -> None:
        for index, group in enumerate(groups):
            self.plan_group(index, group)
        ready()
        self.share(range(len(groups)), groups, state)
        if self.ranks is None:
            self.local.make_missing_state(groups, state)

    def settle(self, groups: Sequence[Group], state: States) -> None:
        """Make deferred plans and state. Collective."""
        own = {index: reduction.ranks.handle for index, reduction in self.reductions.items()}
        of_groups = [
            {"params": group.get("params"), "process_group": own.get(index)}
            for index, group in enumerate(groups)
            if isinstance(group, dict)  # anything else is refused below
        ]
        options = vars(self.distribution) | {"deferred": False}
        call = joint_call("the first step", of_groups, options)
        with call:
            self.check_list(groups)
            self.checks.swapped(groups)  # raises if shapes have changed
            self.is_deferred = False
            if self.distribution.grads == "local" and averages_with_ddp(groups):
                self.distribution = replace(self.distribution, grads="reduced")
            self._find_ranks()
            self._plan_all(groups, state, call.ready)
            self.refuse_cuda_graph()

    def refuse_cuda_graph(self) -> None:
        """Raise if a step cannot be a CUDA graph."""
        if self._steps.cuda_graph and (self.ranks is not None or self.placed):
            raise ValueError(
                "cuda_graph=True works in one process only, because what ranks send "
                "depends on which gradients exist in a step: leave it out"
            )

    def refuse_lost_gradients(self) -> None:
        """Raise if new plans would lose reduced gradients."""
        for placement in self.shared:
            name = placement.reductions.sent.only_here()
            if name is not None:
                raise RuntimeError(
                    "parameters of the optimizer were replaced, and the gradient of "
                    f"{name!r} on rank {placement.group.members[placement.group.rank]} "
                    "was already reduced for the old ones: call opt.adopt(model) on "
                    "every rank right after replacing parameters, before backward and "
                    "synchronize()"
                )

    def follow(
        self, swapped: Mapping[Tensor, Tensor], groups: Sequence[Group], state: States
    ) -> None:
        """Plan again for replaced parameters.

        `swapped`: the new one of each. State that is not zero is brought over. Collective.
        """
        whole: dict[str, State] = {}
        if self._has_state(state):
            before = groups_before(swapped, groups)
            whole = FullValues(before, state, self.placements).whole_state()
        self.placed = []
        self._order_of_use = [swapped.get(param, param) for param in self._order_of_use]
        state.clear()
        self._new_plans()
        self._plan_all(groups, state)
        named = FullValues(groups, state, ()).by_name()
        for name, own in whole.items():
            self.put_whole(named[name], state[named[name]], own)

    def _has_state(self, state: States) -> bool:
        """Whether any rank has state from steps. Collective."""
        here = has_state(state)
        if self.ranks is None:
            return here
        device = next((param.device for param in state), torch.device("cpu"))
        flag = torch.tensor([here], dtype=torch.int64, device=device)
        return bool(maximum("state to bring over", flag, self.ranks).wait())

    @torch.no_grad()
    def put_whole(self, param: Tensor, state: State, whole: Mapping[str, Tensor]) -> None:
        """Copy local parts out of a parameter's whole state."""
        holder = next((placed for placed in self.placements if placed.holds(param)), None)
        for key in whole:
            assert holder is not None
            own = other_master(key)
            if key in state or own not in state:
                holder.values.put_state({param: state}, param, key, whole)
                continue
            # Both lie as this state does, so one is made of the other where it lies.
            lie_alike = {own: torch.empty_like(state[own], dtype=whole[key].dtype)}
            holder.values.put_state({param: lie_alike}, param, own, {own: whole[key]})
            values = torch.empty_like(state[own], dtype=param.dtype)
            holder.values.put_parameter(param, own, values)
            into = local_of(state[own])
            into.copy_(from_other_master(own, local_of(values), local_of(lie_alike[own])))

    def refresh_masters(self, state: Mapping[Tensor, State]) -> None:
        """Set main parameters from parameters."""
        for placement in self.placements:
            placement.values.refresh_masters(state)

    # --- who has what ------------------------------------------------------------------------

    def counts_in_norm(self, ranks: RankGroup | None) -> bool:
        """Whether this stage counts a tied parameter in the norm."""
        if ranks is None or self.stages is None:
            return True
        holders = [rank for rank in self.stages.members if rank in ranks.members]
        return holders[:1] in ([], [self.stages.members[self.stages.rank]])

    def who_works_on(self, param: Tensor) -> tuple[str, str]:
        """Which ranks average and update a parameter, as text."""
        held = next((placed for placed in self.placed if placed.holds(param)), Placement())
        return held.averaged_by(param), held.updated_by(param)

    @property
    def shared(self) -> tuple[ReplicatedShards, ...]:
        """Placements of replicated parameters."""
        return tuple(p for p in self.placed if isinstance(p, ReplicatedShards))

    @property
    def sharded(self) -> "tuple[ShardedParameters, ...]":
        """Placements of DTensors."""
        held = [p for p in self.placed if p.holds_parts and kind_of(p.params[0]).name == "dtensor"]
        return cast("tuple[ShardedParameters, ...]", tuple(held))

    def part(self) -> dict[str, Any] | None:
        """Which part of the state this rank has; None: all."""
        if self.ranks is None or not self.placed:
            return None
        keeps_all = all(placed.values.keeps_all for placed in self.placed)
        if keeps_all and (self.are_alike() or self.sharded):
            return None
        return {"rank": self.ranks.rank, "ranks": self.ranks.size, "plan": self.fingerprint()}

    def are_alike(self) -> bool:
        """Whether a name means the same parameter on all ranks."""
        members = None if self.ranks is None else self.ranks.members
        return self.stages is None and all(
            p.held_by is not None and p.held_by.members == members
            for p in self.placed
            if not p.holds_parts
        )

    def fingerprint(self) -> str:
        """Digest of the plan; "" in one process."""
        if not self.placed:
            return ""
        text = "\n".join(line for placement in self.placed for line in placement.lines())
        return hashlib.sha256(text.encode()).hexdigest()


def _refuse_copies_as_stages(stages: RankGroup, ranks: RankGroup | None) -> None:
    """Raise if several ranks of one stage are among those of which each counts in a norm."""
    both = set() if ranks is None else set(stages.members) & set(ranks.members)
    if len(both) > 1:
        raise ValueError(
            f"stage_group has {ranks_text(sorted(both))}, which process_group says hold "
            "the same stage, so that the gradient norm would count that stage several "
            "times: give stage_group= one rank of each stage"
        )


def ranks_outside(
    groups: Sequence[Group], ranks: RankGroup | None, outer: RankGroup | None
) -> str | None:
    """Ranks that hold neither these parameters nor other shards of them.

    Told as what may be missing in a norm; None: there are none. Ranks are taken to lie in a grid,
    of which process groups and meshes of DTensors are axes. Nothing travels.
    """
    world = registry.of()
    mine = {world.members[world.rank]} if ranks is None else set(ranks.members)
    known = len(mine) * (1 if outer is None else outer.size)
    meshes = {mesh_of(param) for group in groups for param in group["params"]} - {None}
    beside = [known]
    for mesh in meshes:
        assert mesh is not None
        held = set(mesh.mesh.flatten().tolist())
        beside.append(known * len(held) // max(1, len(held & mine)))
    if max(beside) >= world.size:
        return None
    return (
        f"process_group has {ranks_text(sorted(mine))} of {world.size}: the others may hold other "
        "parameters"
    )


def parameters_elsewhere(groups: Sequence[Group], ranks: RankGroup) -> str | None:
    """Text on DTensors that other ranks hold and this one does not.

    Collective, unless a mesh has all ranks: then nothing travels.
    """
    named = [(name, param) for _, name, param in members(groups) if mesh_of(param) is not None]
    meshes = {mesh_of(param) for _, param in named}
    if not named or any(set(m.mesh.flatten().tolist()) >= set(ranks.members) for m in meshes if m):
        return None
    lines = sorted(f"{name}: {tuple(param.shape)}" for name, param in named)
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    row = torch.tensor(list(digest), dtype=torch.uint8, device=local_of(named[0][1]).device)
    rows = [
        bytes(row.tolist()) for row in gather_rows("comparison of who holds DTensors", row, ranks)
    ]
    other = [rank for rank, row in zip(ranks.members, rows, strict=True) if row != digest]
    return f"{ranks_text(other)} hold other parameters" if other else None


def joint_call(name: str, params: Any, options: Mapping[str, Any]) -> JointCall:
    """A call in which ranks make their plans; `options`: keywords of the optimizer.

    Ranks that share nothing wait for nobody: groups with a `process_group` of their own concern its
    ranks alone, DTensors whose gradients come reduced are compared on their mesh alone, and plans
    that are put off come later.
    """
    own = list(_tensors_of(params))
    alone = options.get("grads") == "reduced" and any(mesh_of(param) is not None for param in own)
    device = own[0].device if own else torch.device("cpu")

    def agree(problem: RankFailure | None) -> None:
        shares = not alone and options.get("deferred") is not True  # any other value is an error
        found = _ranks_of_plans(params, options) if shares else []
        agree_among(found, Call(name), problem, device)

    return JointCall(agree)


def _ranks_of_plans(params: Any, options: Mapping[str, Any]) -> list[RankGroup]:
    """The ranks that make plans for any of these parameters, in the order of the plans."""
    listed = params if isinstance(params, list | tuple) and params else [params]
    handles = [each.get("process_group") if isinstance(each, Mapping) else None for each in listed]
    if any(handle is None for handle in handles):  # the others are of some of these ranks
        handles = [options.get("process_group")]
        if options.get("outer_group") is not None:
            handles.append(options["outer_group"])
    found: list[RankGroup] = []
    for handle in handles:
        try:
            ranks = rank_group(handle)
        except (RuntimeError, TypeError, ValueError, AttributeError):  # raised where it is used
            continue
        if ranks is not None and ranks not in found:
            found.append(ranks)
    return found


def _tensors_of(params: Any) -> Iterator[Tensor]:
    """The tensors in a model, in parameters, pairs or groups; no iterator is used up."""
    if isinstance(params, Tensor):
        yield params
    elif isinstance(params, nn.Module):
        yield from params.parameters()
    elif isinstance(params, Mapping):
        yield from _tensors_of(params.get("params"))
    elif isinstance(params, list | tuple):
        for each in params:
            yield from _tensors_of(each)


def groups_before(swapped: Mapping[Tensor, Tensor], groups: Sequence[Group]) -> list[Group]:
    """Groups with the parameters before they were replaced."""
    old_of = {new: old for old, new in swapped.items()}
    return [{**group, "params": [old_of[param] for param in group["params"]]} for group in groups]


def has_state(state: Mapping[Tensor, State]) -> bool:
    """Whether any state differs from its initial value."""
    tensors = (t for own in state.values() for key, t in own.items() if key != MASTER)
    return any(bool(getattr(tensor, "_local_tensor", tensor).any()) for tensor in tensors)


def _refuse_offload(steps: StepOptions, distribution: Distribution) -> None:
    """Raise for options that cannot be combined with offload."""
    for keyword in ("cuda_graph", "compile"):
        if distribution.offload is not None and getattr(steps, keyword):
            raise ValueError(
                f"offload={distribution.offload!r} and {keyword} cannot be combined, "
                "because state moves between host and device during the step: leave "
                "one of them out"
            )
