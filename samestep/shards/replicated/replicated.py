"""The placement of parameters with copies on several ranks: reduce, update in shards, gather.

A copy is all of a plain parameter, or the same shard of a DTensor. All ranks run the same
collectives with the same sizes, whatever gradients they have and whatever they own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samestep.comm.collectives import Gathered, Pending, gather_stretch
from samestep.comm.groups import GroupReduction, RankGroup, in_two_levels, ranks_text
from samestep.comm.presence import Call, PresenceAgreement, RankFailure
from samestep.groups.mistakes import GradientEdits
from samestep.groups.param_groups import Group
from samestep.layout.boxes import mesh_of
from samestep.plan.placement_plan import RankPlan
from samestep.plan.schedule import Average, Gather, OfBucket, Place, Reduce, Stage, WindowId
from samestep.plan.sharding import Piece
from samestep.rules.state import State
from samestep.shards.placement import Placement, PlanMembers
from samestep.shards.replicated.agreed import agree_on_plan, mend_replicas
from samestep.shards.replicated.buckets import (
    CopiedGradients,
    CopiedParameters,
    GradientBuckets,
    ParameterBuckets,
)
from samestep.shards.replicated.flat import FlatGradients, FlatParameters
from samestep.shards.replicated.local_tensors import LocalTensors, PieceShards
from samestep.shards.replicated.planning import (
    comparable_lines,
    plan_lines,
    plan_on_rank,
    reduced_alike,
    votes_on_copies,
)
from samestep.shards.replicated.reduction import BucketReductions
from samestep.shards.replicated.values import ReplicatedValues
from samestep.shards.windows import OffloadUnit, state_device
from samestep.update.plain import GroupMaths, Operand

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from samestep.shards.dtensor.gradients import MeshSums  # DTensors take long to import
    from samestep.shards.dtensor.mesh_layout import MeshLayout
    from samestep.shards.dtensor.primary_blocks import PrimaryBlocks
    from samestep.shards.planner import Request


@dataclass(eq=False)
class MeshSide:
    """The mesh of DTensors whose copies are on other meshes.

    layout: who of this mesh holds which shards.
    sums: adds up gradients of which the ranks of the mesh have summands.
    blocks: those of which this rank is the primary holder come together in the mesh.
    """

    layout: "MeshLayout"
    sums: "MeshSums"
    blocks: "PrimaryBlocks"
    _kinds_agreed: bool = False

    def agree_on_kinds(self, reductions: BucketReductions, groups: Sequence[RankGroup]) -> None:
        """Agree on placements of gradients along the mesh. Collective."""
        if not self._kinds_agreed:
            reductions.kinds = self.sums.agreed_kinds(reductions.kinds, groups)
            self._kinds_agreed = not self.sums.are_open(reductions.kinds)


class ReplicatedShards(Placement):
    """Runs one plan of replicated parameters."""

    values: ReplicatedValues

    def __init__(
        self,
        request: "Request",
        members: PlanMembers,
        reduction: GroupReduction,
        layout: "MeshLayout | None" = None,
        everyone: RankGroup | None = None,
    ) -> None:
        group, divisor, outer, stages = reduction
        self.params = list(members.params)
        self.group_indices = tuple(sorted({spec.group for spec in members.specs}))
        self.local = LocalTensors(self.params, [spec.name for spec in members.specs])
        self.device = self.local.value(0).device
        # The few plain ones beside DTensors: whole, so that checkpoints have all their state.
        beside = request.brings_together
        self.distribution = request.distribution
        self.distribution = self.distribution.beside_dtensors() if beside else self.distribution
        if stages > 1:
            # One stage's backward waits for another's: a reduction that both take part in would
            # not arrive inside of it, and hold up those that are launched after it.
            self.distribution = replace(self.distribution, overlap_grad_reduce=False)
            self.sums_over = group
        self.group, self.held_by = group, everyone or group
        self._groups = [group] if outer is None else [group, outer]
        # Inside a mesh others hold other shards: only copies are compared.
        self._holding_alike = list(self._groups)
        if layout is not None:
            self._groups.append(layout.group)
            self.sums_over = everyone
        of_rank = plan_on_rank(request, members, reduction, self.device, self.distribution, layout)
        planned = of_rank.buckets
        assert planned is not None
        self.plan, self.shape = planned.plan, of_rank.shape
        # The ranks in the order of the plan's segments.
        self.places = group._replace(hosts=planned.fabric.hosts)
        if planned.policy.levels == 2:
            self.places = in_two_levels(group, planned.fabric.per_host)
        self._names = [spec.name for spec in self.plan.params]
        lines = [*self.distribution.lines(), f"divisor = {divisor}"]
        self._plan_lines = plan_lines(planned, layout)
        lines += comparable_lines(planned, members, self._plan_lines, self.device)
        agree_on_plan(self._names, self.local.values(), lines, self._groups, members.problem)
        self._parameters, gradients = self._buckets(planned.gradient_dtypes)
        self.mend_replicas()
        self.mesh: MeshSide | None = None
        if layout is not None:
            self.mesh = self._mesh_side(layout, of_rank)
        self.reductions = BucketReductions(
            self.local,
            self.plan,
            gradients,
            reduction._replace(ranks=self.places),
            self.distribution,
            planned.policy,
            self.shape.exchanges,
            request.order,
        )
        self._order = request.order
        self._gathers: dict[int, Pending[Gathered]] = {}  # by bucket, in flight
        self._in_flight = request.in_flight if self.shape.defers else None
        replicated = None if layout is None else layout.replicated
        if layout is None and not self.shape.reduces:
            replicated = votes_on_copies(len(self.params), group)
        self.compares_copies = replicated is not None
        self._presence = PresenceAgreement(
            self._names,
            self._groups,
            self.device,
            replicated,
            waits=self.distribution.check_gradients,
        )
        self._present: list[bool | Tensor] = []
        self._edits: GradientEdits | None = None  # inside backward every edit is an error
        if self.shape.reduces and not self.distribution.overlap_grad_reduce:
            self._edits = GradientEdits(self.params)
        # By bucket: the pieces that this rank owns, and where they lie in its segment.
        self._owned = [bucket.owned(self.places.rank).places() for bucket in self.plan.buckets]
        self._grads: dict[int, list[tuple[Piece, Tensor]]] = {}

    def _buckets(self, dtypes: Sequence[torch.dtype]) -> tuple[ParameterBuckets, GradientBuckets]:
        """Flat buffers, or buffers copied for each collective.

        dtypes: of the gradients of each bucket.
        """
        chosen, rank = self.distribution, self.places.rank
        of_plan = self.local, self.plan
        if chosen.buffers != "flat":
            sent = [chosen.reduce_dtype or dtype for dtype in dtypes]
            return CopiedParameters(*of_plan, rank), CopiedGradients(*of_plan, sent)
        keep, poison = not chosen.frees_gradients, chosen.poison_early_reads
        return (
            FlatParameters(*of_plan, rank, poison=poison),
            FlatGradients(*of_plan, dtypes, chosen.reduce_dtype, rank, keep=keep),
        )

    @classmethod
    def plans(cls, request: "Request") -> "list[ReplicatedShards]":
        """One plan for groups that are reduced alike."""
        if request.ranks is None:
            return []
        usual = GroupReduction(request.ranks, outer=request.outer)
        alike = {usual: list[int](), **reduced_alike(request, request.indices, usual)}
        return [
            cls(request, request.members(indices), reduction)
            for reduction, indices in alike.items()
            if indices
        ]

    @classmethod
    def of_mesh(cls, request: "Request", mesh: "DeviceMesh") -> "list[ReplicatedShards]":
        """Plans for DTensors with copies on other ranks."""
        from samestep.shards.dtensor.mesh_layout import MeshLayout  # DTensors take long to import

        copies, everyone, number = request.copies[mesh]
        params = {index: request.groups[index]["params"] for index in request.indices}
        there = [index for index, own in params.items() if any(mesh_of(p) == mesh for p in own)]
        found = []
        for reduction, indices in reduced_alike(request, there, GroupReduction(copies)).items():
            members = request.members(indices, lambda param: mesh_of(param) == mesh)
            layout = MeshLayout(members.params, members.specs, mesh, everyone, number)
            found.append(cls(request, members, reduction, layout, everyone))
        return found

    def _mesh_side(self, layout: "MeshLayout", of_rank: RankPlan) -> MeshSide:
        from samestep.shards.dtensor.gradients import MeshSums  # DTensors take long to import
        from samestep.shards.dtensor.primary_blocks import PrimaryBlocks

        blocks = PrimaryBlocks(of_rank, layout, self.device)
        return MeshSide(layout, MeshSums(layout), blocks)

    def activate(self) -> None:
        """Add the buckets to the launch order."""
        hooks = self.reductions.hooks
        if hooks is not None and self.distribution.overlap_grad_reduce:
            self._order.add(hooks, self.shape.places)
            self._order.launch_inside_backward(self._names, self.group.members)

    def lines(self) -> list[str]:
        return self._plan_lines

    def lines_here(self) -> list[str]:
        return self.plan.lines()

    def averaged_by(self, param: Tensor) -> str:
        if self.distribution.grads == "reduced":
            return "somebody else"
        outer = (
            ""
            if self.reductions.outer is None
            else f", {ranks_text(self.reductions.outer.members)}"
        )
        return f"us: {ranks_text(self.group.members)}{outer}"

    def updated_by(self, param: Tensor) -> str:
        """Which ranks update a parameter, as text."""
        index, owners = self.values.index(param), set[int]()
        for bucket in self.plan.buckets:
            for rank, segment in bucket.filled:
                if any(piece.param == index for piece in segment.pieces):
                    owners |= set(range(self.group.size)) if bucket.replicated else {rank}
        parts = ""
        if self.mesh is not None and self.mesh.layout.group.size > 1:
            parts = f", in {self.mesh.layout.group.size} parts"
        return ranks_text(sorted(self.places.members[rank] for rank in owners)) + parts

    def mend_replicas(self) -> None:
        """Compare copies; copy rank 0's where they differ, or raise."""
        for group in reversed(self._holding_alike):
            mend_replicas(self._names, self.local.values(), group, strict=self.distribution.strict)

    def make_state(self, groups: Sequence[Group], master_weights: bool) -> dict[Tensor, State]:
        """State of owned pieces: one 1-D tensor per parameter and key."""
        averages = self.distribution.grads == "local"
        self.values = ReplicatedValues(
            self.local,
            self.plan,
            self.places,
            groups,
            state_device(self.device, self.distribution.offload),
            self.reductions if averages else None,
            self._groups,
            self.mesh,
        )
        layout = None if self.mesh is None else self.mesh.layout
        self._shards = PieceShards(self.local, self.plan, self.values.packing, groups, layout)
        state = self.values.new_state()
        self.values.refresh_masters(state)
        if self.mesh is not None:
            self.mesh.blocks.prepare(groups)
        return state

    # --- the step, operation by operation ------------------------------------------------

    def begin_step(self, state: Mapping[Tensor, State], problem: RankFailure | None) -> None:
        if self._edits is not None and not self._edits.look():
            self._edits = None
        problem = problem or self.local.changed(self.group)
        if problem is None:
            self._parameters.adopt()
        self.reductions.end_round(problem)
        self.problem = self.reductions.problem
        are_new = self._shards.look_at(state)
        if self.mesh is not None:
            if are_new:
                self.mesh.blocks.take_shards(self._shards)
            self.mesh.blocks.exchange.begin_step()
        if self.distribution.offload is not None:
            self._keep_windows((state[param] for param in self.params), self._units)

    def _units(self) -> dict[tuple[Stage, int], list[OffloadUnit]]:
        """Offload units by bucket, or by chunk of blocks."""
        found: dict[tuple[Stage, int], list[OffloadUnit]] = {}
        for number, owned in enumerate(self._owned):
            found["update", number] = [
                self._shards.unit(piece)
                for piece, _ in owned
                if piece.block is None or self.mesh is None
            ]
        if self.mesh is not None:
            for number, units in enumerate(self.mesh.blocks.exchange.units()):
                found["chunk", number] = units
        return found

    def may_be_present(self, about: Any) -> bool:
        """Whether a unit may have a gradient; blocks of a chunk share the answer."""
        return not isinstance(about, Piece) or self._present[about.param] is not False

    def expect_edits(self) -> None:
        """Allow writes to gradients after backward."""
        self._edits = None

    def finish_step(self) -> None:
        self._shards.write_strided()  # also those that nobody gathers
        for gather in self._gathers.values():
            gather.advance()  # forward may wait for them in another order on each rank
        self.reductions.finish_step()
        if self.mesh is not None:
            self.mesh.blocks.end_step()

    def abandon_step(self) -> None:
        """Drop the gradients of a failed step."""
        self._grads.clear()
        self.reductions.abandon()
        self.problem = None
        if self.mesh is not None:
            self.mesh.blocks.end_step()

    def pause(self, paused: bool) -> None:
        if self.reductions.hooks is not None:
            self.reductions.hooks.paused = paused

    def end_round(self) -> None:
        if self.distribution.grads == "local":
            self.reductions.end_round(None)

    def launch(self, number: int) -> None:
        """Start the reduction of a bucket, unless backward has."""
        if self.distribution.grads == "local":
            self.reductions.launch(number)
            self.problem = self.reductions.problem

    def keep_sums(self) -> None:
        """Wait for reductions, keep this rank's part, begin a new round."""
        if self.distribution.grads == "local":
            if self._presence.look_for_drops(bool(self.reductions.sent.dropped)):
                self._void_dropped()
            self.reductions.accumulate()

    def drop_reduced(self) -> None:
        self.reductions.sent.drop_all()

    def begin_look(self) -> None:
        self.reductions.is_looked_at = True

    def scale_gradients(self, factor: Tensor) -> None:
        if self.distribution.grads == "local":
            self.reductions.scale(factor)
        else:
            super().scale_gradients(factor)

    def end_look(self) -> None:
        self._grads.clear()
        if self.mesh is not None:
            self.mesh.blocks.end_step()
        self.reductions.is_looked_at = False
        if self.distribution.grads == "local":
            self.reductions.sent.show_as_reduced()

    def run(self, operation: OfBucket, maths: GroupMaths) -> None:
        """Run an operation of the schedule on one bucket."""
        number = operation.bucket.bucket
        match operation:
            case Reduce():
                self.launch(number)
            case Average():
                self.average(number)
            case Gather():
                self._shards.write_strided(piece for piece, _ in self._owned[number])
                self._gather(number)
            case Place():
                self._place(number)
            case _:
                assert self.mesh is not None
                self.mesh.blocks.exchange.run(operation, maths, self.chunk_arrived(operation))

    def meet(self, call: Call, problem: RankFailure | None) -> None:
        self._presence.meet(call, problem)

    def agree(self, problem: RankFailure | None) -> None:
        """Agree on which gradients exist; raises on all ranks if one has an error."""
        overlaps = self.distribution.overlap_grad_reduce
        met = overlaps and self._order.met()
        whole = self.reductions.is_whole_along
        dropped = bool(self.reductions.sent.dropped)
        self._present = self._presence.agree(
            self.reductions.sent.here, problem, self.intent, met, whole, dropped=dropped
        )
        if self._presence.dropped:
            self._void_dropped()
        if overlaps:
            self._order.told(self._presence.flagged)
        if self.mesh is not None:
            self.mesh.agree_on_kinds(self.reductions, self._groups)
            self.mesh.blocks.set_present(self._present)

    def _void_dropped(self) -> None:
        """Drop reductions of gradients that were dropped, on all ranks."""
        void, again = self._presence.agree_on_drops(self.reductions.sent.drops())
        self.reductions.void(void, again=again)

    def average(self, number: int) -> None:
        """Mean gradient of each owned piece of a bucket."""
        if self.distribution.grads == "local":
            mean = self.reductions.mean(number)
            grads = [(piece, mean[place]) for piece, place in self._owned[number]]
            if self.mesh is not None:
                grads = self.mesh.sums.added_up(grads, self.reductions.kinds)
                self.mesh.blocks.take_gradients(grads)
                grads = [(piece, grad) for piece, grad in grads if piece.block is None]
            self._grads[number] = grads
            return
        self._grads[number] = []
        for piece, _ in self._owned[number]:
            param = self.params[piece.param]
            grad = torch.zeros_like(param) if param.grad is None else param.grad.detach()
            part = grad.reshape(-1)[piece.start : piece.stop]
            self._grads[number].append((piece, part))

    def _gather(self, number: int) -> None:
        """Start gathering a bucket of updated parameters."""
        gather = self.shape.exchanges[number].gather
        if gather is None:
            return
        transfer = gather.transfer
        segment, whole = self._parameters.segment(number)
        assert transfer.sizes is not None
        planned = transfer.sizes[self.places.rank], transfer.dtype
        assert planned == (segment.numel(), segment.dtype), transfer.name
        for earlier in self._gathers.values():
            earlier.advance()  # the second legs of gathers that go in two levels
        self._gathers[number] = gather_stretch(transfer, segment, self.places, into=whole)
        if self._in_flight is not None:
            members = [self.params[index] for index in self.plan.buckets[number].params]
            self._in_flight.add(members, partial(self._place, number))

    def _place(self, number: int) -> None:
        """Wait for a bucket, and copy it into parameters."""
        if number in self._gathers:
            self._parameters.arrived(number, self._gathers.pop(number).wait())

    def operands(
        self, number: int, window: WindowId | None = None
    ) -> Iterator[tuple[int, Operand]]:
        """Owned pieces of a bucket with their groups."""
        bucket = self.plan.buckets[number]
        of_copies = not bucket.replicated or self.places.rank == 0
        grads_of_pieces = self._grads[number]
        if window is None:
            found = self._shards.lying(grads_of_pieces)
        else:
            assert self.windows is not None
            found = self._shards.arrived(
                grads_of_pieces, self.windows, window, self.arrived(window)
            )
        for piece, grad, views in found:
            counted = of_copies and (self.mesh is None or self.mesh.layout.is_primary(piece.param))
            present = self._present[piece.param]
            if present is False:
                continue
            index = self.plan.params[piece.param].group
            flag = present if isinstance(present, Tensor) else None
            form = None if piece.block is None else piece.block.form
            grads = [grad] if form is None else form.views(grad)
            for own, (part, state, rows, origin) in zip(grads, views, strict=True):
                yield index, Operand(part, own, state, flag, counted, rows=rows, origin=origin)

    def grouped_gradients(self) -> Iterator[tuple[int, Tensor]]:
        yield from super().grouped_gradients()
        if self.mesh is not None:
            yield from self.mesh.blocks.grouped_gradients()

    def drop_gradients(self, number: int) -> None:
        del self._grads[number]

    def present(self) -> list[tuple[int, bool | Tensor]]:
        """Group of each parameter, and whether it was present in the last step."""
        flags = self._present or [False] * len(self.params)
        return [(spec.group, flag) for spec, flag in zip(self.plan.params, flags, strict=True)]
