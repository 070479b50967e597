"""DTensors whose gradients come reduced: FSDP2, HSDP and tensor parallel.

Elementwise rules run on the local parts; what matrix rules need is in `block_exchange`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from samestep.comm.groups import ranks_text
from samestep.comm.integrity.agreement import RanksDisagreeError, require_same_lines
from samestep.comm.meshes import mesh_group
from samestep.comm.presence import Call, PresenceAgreement, RankFailure
from samestep.groups.distribution import Distribution
from samestep.groups.param_groups import Group, rule_of
from samestep.kernels.choice import describe_kernels
from samestep.layout.blocks import Shape
from samestep.layout.boxes import Box, local_of, mesh_of
from samestep.plan.chunks import Key as BlockKey
from samestep.plan.layouts import Key
from samestep.plan.placement_plan import Topology, plan_placement
from samestep.plan.schedule import OfBucket, Stage, WindowId
from samestep.rules.state import (
    State,
    Stored,
    block_state_shapes,
    global_element_index,
    whole_shapes,
)
from samestep.shards.dtensor.block_exchange import BlockExchange
from samestep.shards.dtensor.checked_reduction import GradientCheck
from samestep.shards.dtensor.fsdp_units import managed_beside
from samestep.shards.dtensor.gradients import combine_gradients, fits, no_summand, summands
from samestep.shards.dtensor.local_shards import (
    LocalShards,
    placed_beside,
    refuse_unstaged,
)
from samestep.shards.dtensor.mesh_layout import MeshLayout
from samestep.shards.dtensor.values import DTensorValues
from samestep.shards.not_finite import is_finite, not_finite
from samestep.shards.placement import Placement, PlanMembers
from samestep.shards.replicated.local_tensors import LocalTensors
from samestep.shards.replicated.replicated import ReplicatedShards
from samestep.shards.state_store import Part
from samestep.shards.windows import OffloadSlice, OffloadUnit, StateDevice, state_device
from samestep.update.plain import GroupMaths, Operand

if TYPE_CHECKING:
    from samestep.shards.planner import Request


class ShardedParameters(Placement):
    """The DTensors of one mesh in one construction or added group.

    It has state, presence, gradients and whole values of what this rank holds; `exchange` brings
    blocks together that several ranks hold parts of.
    """

    holds_parts = True
    params: list[DTensor]

    def __init__(
        self, members: PlanMembers, mesh: DeviceMesh, distribution: Distribution, ranks: int
    ) -> None:
        self.params = [param for param in members.params if isinstance(param, DTensor)]
        self._tensors = LocalTensors(self.params, [spec.name for spec in members.specs])
        self.specs = members.specs
        self.group_indices = tuple(sorted({spec.group for spec in members.specs}))
        self.group = self.held_by = self.sums_over = mesh_group(mesh)
        self.device = self.params[0].to_local().device
        self._on_host = self.device.type == "cpu"
        self._distribution = distribution
        try:
            self.layout = MeshLayout(self.params, self.specs, mesh)
            topology = Topology(self.device, held=tuple(self.layout.held))
            plan = plan_placement(self.specs, distribution, topology)
        except ValueError as problem:
            self._tell(problem)
            raise
        # Other meshes of the same kind hold copies: of sums over all `ranks` this is its share.
        self.shards = LocalShards(
            self.specs,
            self.layout.held,
            self.group,
            self.device,
            [global_element_index(spec.name, spec.shape, spec.stored) for spec in self.specs],
            share=self.group.size / ranks,
        )
        self._sums: Mapping[Tensor, DTensor] = {}  # gradients of which others alone had summands
        of_rank = plan.on_rank(0, self.group.rank)
        assert of_rank.blocks is not None
        self.exchange, self.shape = BlockExchange(self.shards, of_rank.blocks.chunks), of_rank.shape
        lines = [
            *distribution.lines(),
            *self.lines(),
            *members.lines,
            describe_kernels(self.device),
        ]
        require_same_lines("plan", lines, self.group, self.device)
        if members.problem is not None:
            raise ValueError(members.problem)
        replicated = self.layout.replicated
        self.compares_copies = replicated is not None
        self._names = [spec.name for spec in self.specs]
        self._presence = PresenceAgreement(
            self._names,
            [self.group],
            self.device,
            replicated,
            waits=distribution.check_gradients,
        )
        self._summands = [0] * len(self.params)  # of any rank so far, where votes are on a GPU
        self._check: GradientCheck | None = None

    def _tell(self, problem: ValueError) -> None:
        """Report an error of this rank in the comparison of plans."""
        with suppress(RanksDisagreeError):
            require_same_lines("plan", [str(problem)], self.group, self.device)

    @classmethod
    def plans(cls, request: "Request") -> "list[Placement]":
        """One placement per mesh, and others for copies that the optimizer averages."""
        params = [p for index in request.indices for p in request.groups[index]["params"]]
        ranks = 1 if request.ranks is None else request.ranks.size
        found: list[Placement] = []
        for mesh in dict.fromkeys(map(mesh_of, params)):
            if mesh in request.copies:
                found += ReplicatedShards.of_mesh(request, mesh)
            elif mesh is not None:
                members = request.members(request.indices, partial(_is_on, mesh))
                found.append(cls(members, mesh, request.distribution, ranks))
        return found

    def lines(self) -> list[str]:
        mesh = self.layout.mesh
        lines = [f"mesh {tuple(mesh.shape)} of ranks {mesh.mesh.flatten().tolist()}"]
        for spec, param in zip(self.specs, self.params, strict=True):
            what = f"{spec.shape} {spec.dtype}, group {spec.group}, {spec.rule}"
            lines.append(f"{spec.name}: {what}, {param.placements}")
        return lines + self.exchange.lines(self.specs)

    def averaged_by(self, param: Tensor) -> str:
        managed = any(param is other for other in managed_beside([param]))
        return "FSDP2" if managed else "its layers"

    def updated_by(self, param: Tensor) -> str:
        """Owners of a parameter's blocks, or all holders if it has none."""
        index = self.values.index(param)
        blocks = (planned for chunk in self.exchange.chunks for planned in chunk.blocks)
        owners = {rank for planned in blocks if planned.param == index for rank in planned.owners}
        if self.specs[index].blocks is None:
            owners = {rank for rank, box in enumerate(self.layout.held[index].boxes) if box.numel}
        return ranks_text([self.group.members[rank] for rank in sorted(owners)])

    def activate(self) -> None:
        """Install the check before FSDP2 reduces gradients, if requested."""
        if self._distribution.check_gradients:
            self._check = GradientCheck(self.params, self._names, self._rank)

    @property
    def _rank(self) -> int:
        return self.group.members[self.group.rank]

    # --- state ---------------------------------------------------------------------------

    def make_state(self, groups: Sequence[Group], master_weights: bool) -> dict[Tensor, State]:
        """State of the parameter's shape is sharded like it, other state replicated."""
        self.shards.groups = groups
        home = state_device(self.device, self._distribution.offload)
        made: dict[Tensor, State] = {}
        whole: dict[Key, tuple[Shape, int | None]] = {}
        owned: dict[Key, Sequence[Sequence[Part]]] = {}
        owners = {
            block.key: block.owners for chunk in self.exchange.chunks for block in chunk.blocks
        }
        for index, (param, spec) in enumerate(zip(self.params, self.specs, strict=True)):
            group, shape = groups[spec.group], tuple(param.shape)
            refuse_unstaged(spec, group)
            shapes = whole_shapes(rule_of(group), shape, spec.blocks, group, spec.stored)
            made[param] = {}
            for key, how in spec.stored.items():
                whole[index, key] = shapes[key], how.per
                shape = shapes[key]
                if how.owned:
                    owned[index, key] = self._owned_parts(index, key, group, owners)
                    shape = (sum(part.box.numel for part in owned[index, key][self.group.rank]),)
                made[param][key] = self._zeros(param, shape, how, home)
        store = self.layout.store(whole, owned)
        self.values = DTensorValues(self.params, self.layout, store, self.group, self._summands)
        self.values.keeps_all = all(
            sum(part.box.numel for part in parts) == prod(whole[key][0])
            for key, by_rank in owned.items()
            for parts in by_rank
        )
        self.values.refresh_masters(made)
        self.exchange.prepare()
        return made

    def _owned_parts(
        self, index: int, key: str, group: Group, owners: Mapping[BlockKey, Sequence[int]]
    ) -> list[list[Part]]:
        """Per rank, the state of the blocks it owns, in one tensor of all blocks."""
        spec, rule, begin = self.specs[index], rule_of(group), 0
        found: list[list[Part]] = [[] for _ in range(self.group.size)]
        for number, block in enumerate(spec.blocks or ()):
            size = prod(block_state_shapes(rule, block, group, spec.stored)[key])
            for rank in owners[index, number]:
                cursor = sum(part.box.numel for part in found[rank])
                found[rank].append(Part(Box((begin,), (size,)), cursor))
            begin += size
        return found

    def _zeros(self, param: DTensor, shape: Shape, how: Stored, home: StateDevice) -> Tensor:
        if how.per is None:
            return home.zeros(shape, how.dtype)
        local = home.zeros(how.shape(tuple(param.to_local().shape)), how.dtype)
        return placed_beside(param, local, how.per)

    # --- the step ------------------------------------------------------------------------

    def begin_step(self, state: Mapping[Tensor, State], problem: RankFailure | None) -> None:
        changed = self._tensors.changed(self.group)
        self.problem = problem or changed or self._gradient_problem()
        values = [param.to_local() for param in self.params]
        self.shards.look_at(values, [state[param] for param in self.params])
        self.exchange.begin_step()
        if self._distribution.offload is not None:
            self._keep_windows((state[param] for param in self.params), self._units)

    def _units(self) -> dict[tuple[Stage, int], list[OffloadUnit]]:
        """Offload units: state of elementwise parameters, and of blocks."""
        found: dict[tuple[Stage, int], list[OffloadUnit]] = {("update", 0): []}
        for index, spec in enumerate(self.specs):
            if spec.blocks is None:
                own, value = self.shards.states[index], self.shards.values[index]
                found["update", 0].append(
                    OffloadUnit(index, own, value.numel(), value.is_contiguous())
                )
        for number, units in enumerate(self.exchange.units()):
            found["chunk", number] = units
        return found

    def may_be_present(self, about: Any) -> bool:
        """Whether a unit may have a gradient; blocks of a chunk share the answer."""
        return not isinstance(about, int) or self.shards.present[about] is not False

    def run(self, operation: OfBucket, maths: GroupMaths) -> None:
        """Run an operation of the schedule, which only concerns blocks."""
        self.exchange.run(operation, maths, self.chunk_arrived(operation))

    def finish_step(self) -> None:
        self._sums = {}
        self.shards.gradients = []
        self.exchange.end_step()

    abandon_step = finish_step

    def _gradient_problem(self) -> RankFailure | None:
        for index, (param, spec) in enumerate(zip(self.params, self.specs, strict=True)):
            grad = param.grad
            if grad is None or getattr(grad, "placements", None) == param.placements:
                continue
            if not fits(param, grad):
                found = grad.placements if isinstance(grad, DTensor) else "a plain tensor"
                message = (
                    f"the gradient of {spec.name!r} on rank {self._rank} is {found}, and the "
                    f"parameter {param.placements}: redistribute it first"
                )
                return RankFailure(RuntimeError(message), index)
        return None if self._check is None else self._check.problem() or self._not_finite()

    def _not_finite(self) -> RankFailure | None:
        """The first local gradient with NaN or inf."""
        for index, (param, name) in enumerate(zip(self.params, self._names, strict=True)):
            local = None if param.grad is None else local_of(param.grad)
            if local is not None and not is_finite(local):
                when = "before ranks combine it"
                if any(param is other for other in managed_beside([param])):
                    when = (
                        "after FSDP2 averaged it: the sum of finite gradients is too large for "
                        "their dtype, or backward ran before this optimizer had its plans"
                    )
                return RankFailure(not_finite(name, self._rank, local, when), index)
        return None

    def drop_reduced(self) -> None:
        if self._check is not None:
            self._check.drop()

    def meet(self, call: Call, problem: RankFailure | None) -> None:
        self._presence.meet(call, problem)

    def agree(self, problem: RankFailure | None) -> None:
        """Agree on which gradients exist; raises on all ranks if one has an error."""
        here = [summands(param) for param in self.params]
        present = self._presence.agree(here, problem, self.intent, whole=self._is_whole_along)
        # The largest of all ranks; a GPU is waited for until there was one of each.
        codes = self._presence.votes() if self._on_host else self._summands_anywhere(here)
        nothing: dict[Tensor, DTensor | None] = {
            param: no_summand(param, code)
            for param, code, anywhere in zip(self.params, codes, present, strict=True)
            if param.grad is None and anywhere is not False
        }
        self._sums = combine_gradients(self.params, nothing)
        grads = (self._sums.get(p) if p.grad is None else p.grad for p in self.params)
        self.shards.gradients = [None if grad is None else local_of(grad) for grad in grads]
        self.shards.present = present

    def scale_gradients(self, factor: Tensor) -> None:
        for param, summed in self._sums.items():  # the others have the same from now on
            param.grad = summed
        super().scale_gradients(factor)

    def end_look(self) -> None:
        self.finish_step()

    def _is_whole_along(self, index: int, axis: int) -> bool:
        """Whether this rank has a gradient that is not Partial."""
        grad = self.params[index].grad
        return isinstance(grad, DTensor) and not grad.placements[axis].is_partial()

    def _summands_anywhere(self, here: Sequence[int]) -> list[int]:
        """The union of `summands` over ranks so far."""
        self._summands[:] = list(map(max, self._summands, here))
        if not all(self._summands):
            self._summands[:] = list(map(max, self._summands, self._presence.votes()))
        return self._summands

    def present(self) -> list[tuple[int, bool | Tensor]]:
        """Group of each parameter, and whether it was present in the last step."""
        flags = self.shards.present or [False] * len(self.params)
        return [(spec.group, flag) for spec, flag in zip(self.specs, flags, strict=True)]

    def operands(
        self, number: int, window: WindowId | None = None
    ) -> Iterator[tuple[int, Operand]]:
        """Local shards of elementwise parameters."""
        if window is None:
            for index, spec in enumerate(self.specs):
                if spec.blocks is None and self.shards.present[index] is not False:
                    value, grad = self.shards.values[index], self.shards.gradient_of(index)
                    yield self._operand(index, value, grad, self.shards.states[index])
            return
        for part, state in self.arrived(window):
            index = part.unit.about
            if self.shards.present[index] is not False:
                value, grad = self.shards.values[index], self.shards.gradient_of(index)
                if not part.is_whole:
                    value = value.view(-1)[part.start : part.stop]
                    grad = grad.reshape(-1)[part.start : part.stop]
                yield self._operand(index, value, grad, state, part)

    def _operand(
        self,
        index: int,
        value: Tensor,
        grad: Tensor,
        state: State,
        part: OffloadSlice | None = None,
    ) -> tuple[int, Operand]:
        """The local part of an elementwise parameter, or a range of it, with its group."""
        present, where = self.shards.present[index], self.shards.elements[index]
        flag = present if isinstance(present, Tensor) else None
        if where is not None and part is not None and not part.is_whole:
            where = where.stretch(part.start, part.stop)
        origin = None if where is None else where.origin()
        counted, share = self.shards.is_primary(index), self.shards.share
        operand = Operand(value, grad, state, flag, counted, share, origin=origin)
        return self.specs[index].group, operand

    def grouped_gradients(self) -> Iterator[tuple[int, Tensor]]:
        """Local gradients with their groups; only primary copies."""
        for index, spec in enumerate(self.specs):
            if self.shards.present[index] is not False and self.shards.is_primary(index):
                yield spec.group, self.shards.gradient_of(index)


def _is_on(mesh: DeviceMesh, param: Tensor) -> bool:
    return bool(mesh_of(param) == mesh)
