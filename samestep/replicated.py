"""Parameters that every rank holds whole: reduced, updated in parts, and gathered.

All ranks run the same collectives with the same sizes, whatever gradients they have and
whatever they own.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from samestep.apply import Operand
from samestep.buffers.reduction import GradientReducer
from samestep.comm.agreement import broadcast_from_first, checksum, differing, require_same_lines
from samestep.comm.collectives import Pending, gather_segments
from samestep.comm.groups import RankGroup
from samestep.comm.presence import PresenceAgreement, Problem
from samestep.distribution import Distribution
from samestep.layout.blocks import Shape
from samestep.placement import Placement
from samestep.plan.schedule import PlacementShape
from samestep.plan.sharding import Bucket, ParamSpec, Piece, ShardingPlan, plan_sharding
from samestep.rules.rule import Rule
from samestep.state import MASTER, State, math_dtype, needs_master


class ReplicatedParameters(Placement):
    """One plan at work: the parameters of a construction or of one added group."""

    def __init__(
        self,
        params: Sequence[Tensor],
        specs: Sequence[ParamSpec],
        option_lines: Sequence[str],
        group: RankGroup,
        distribution: Distribution,
        divisor: float | None = None,
    ) -> None:
        self.params = list(params)
        self.group = group
        self.distribution = distribution
        self.plan: ShardingPlan = plan_sharding(
            specs,
            group.size,
            shard=distribution.sharding != "none",
            crossover=distribution.crossover,
            bucket_elements=distribution.bucket_size,
            owners=distribution.owners,
            max_size_ratio=distribution.max_state_ratio,
        )
        self.device = self.params[0].device
        strided = [s.name for s, p in zip(specs, params, strict=True) if not p.is_contiguous()]
        elsewhere = [
            f"{s.name} on {p.device.type}"
            for s, p in zip(specs, params, strict=True)
            if p.device != self.device
        ]
        lines = [*distribution.lines(), f"divisor = {divisor}", *self.plan.lines(), *option_lines]
        lines += [f"not contiguous: {strided}", f"on another device: {elsewhere}"]
        require_same_lines("plan", lines, group, self.device)
        if strided:  # raised by all ranks or by none
            raise ValueError(
                f"parameter {strided[0]!r} is not contiguous, and only contiguous parameters can "
                "be shared between ranks: replace its data by .contiguous()"
            )
        if elsewhere:
            raise ValueError(
                f"parameter {elsewhere[0]}, others on {self.device.type}: parameters that ranks "
                "share must be on one device"
            )
        self.mend_replicas()
        self.reducer = GradientReducer(
            params, self.plan, group, distribution, group.size if divisor is None else divisor
        )
        self.shape = PlacementShape(
            bucket_sizes=tuple(bucket.size for bucket in self.plan.buckets),
            agrees=True,
            reduces=distribution.grads == "local",
            overlaps=distribution.overlap_grad_reduce or distribution.check_gradients,
        )
        self._presence = PresenceAgreement([spec.name for spec in specs], group, self.device)
        self._present: list[bool | Tensor] = []
        self._grads: dict[int, list[Tensor]] = {}
        self._gathers: dict[int, Pending[list[Tensor]]] = {}
        self._spans: dict[Piece, _Spans] = {}

    def mend_replicas(self) -> None:
        """Compare the replicas; where they differ, take the first rank's, or refuse if strict."""
        sums = torch.stack([checksum(param) for param in self.params])
        different = differing(sums, self.group)
        if not different:
            return
        names = ", ".join(self.plan.params[index].name for index in different[:6])
        more = f" and {len(different) - 6} more" if len(different) > 6 else ""
        if self.distribution.strict:
            raise ValueError(
                f"replicas differ between ranks: {names}{more}. Seed every rank alike or load the "
                "same checkpoint before building the optimizer"
            )
        warnings.warn(
            f"replicas differ between ranks and were set to rank {self.group.members[0]}'s: "
            f"{names}{more}",
            stacklevel=7,
        )
        with torch.no_grad():
            for index in different:
                broadcast_from_first(self.params[index], self.group)

    # --- state ---------------------------------------------------------------------------

    def make_state(
        self,
        groups: Sequence[Mapping[str, Any]],
        rules: Sequence[Rule],
        master_weights: bool,
    ) -> dict[Tensor, State]:
        """State of the owned pieces: per parameter and key one 1-D tensor, piece after piece."""
        sizes: list[dict[str, int]] = []
        for param, spec in zip(self.params, self.plan.params, strict=True):
            keys = dict.fromkeys(rules[spec.group].state_shapes((0, 0), groups[spec.group]), 0)
            if needs_master(param, master_weights):
                keys[MASTER] = 0
            sizes.append(keys)
        for piece in self.plan.owned(self.group.rank):
            index = self.plan.params[piece.param].group
            shapes = {**rules[index].state_shapes(_shape(piece), groups[index])}
            shapes[MASTER] = _shape(piece)
            spans: _Spans = {}
            for key, start in sizes[piece.param].items():
                spans[key] = (start, shapes[key])
                sizes[piece.param][key] = start + prod(shapes[key])
            self._spans[piece] = spans
        return {
            param: {
                key: torch.zeros(size, dtype=math_dtype(param), device=param.device)
                for key, size in by_key.items()
            }
            for param, by_key in zip(self.params, sizes, strict=True)
        }

    # --- the step, operation by operation ------------------------------------------------

    def begin_step(self, state: Mapping[Tensor, State], problem: Problem | None) -> None:
        """No gradient comes any more."""
        super().begin_step(state, problem)
        self.reducer.end_round(problem)
        self.problem = self.reducer.problem

    def finish_step(self) -> None:
        """Everything was taken and placed."""
        self.reducer.begin_step()

    def abandon_step(self) -> None:
        """The step failed on all ranks: forget its gradients."""
        self._grads.clear()
        self.reducer.abandon()
        self.problem = None

    def synchronize(self) -> None:
        """Reduce what has arrived, and keep this rank's part."""
        if self.distribution.grads == "local":
            self.reducer.accumulate()

    def reduce(self, number: int) -> None:
        """Start a reduction, unless backward has."""
        self.reducer.launch_through(number)
        self.problem = self.reducer.problem

    def agree(self, problem: Problem | None) -> None:
        """Find out what is present anywhere; raises on all ranks if any has a problem."""
        self._present = self._presence.agree(self.reducer.here, problem)

    def average(self, number: int) -> None:
        """The mean gradient of each piece that this rank owns in a bucket, in fp32 or wider."""
        owned = self._owned(self.plan.buckets[number])
        if self.distribution.grads == "local":
            mean = self.reducer.take(number)
            self._grads[number] = list(torch.split(mean, [piece.size for piece in owned]))
            return
        self._grads[number] = []
        for piece in owned:
            param = self.params[piece.param]
            grad = torch.zeros_like(param) if param.grad is None else param.grad.detach()
            self._grads[number].append(grad.reshape(-1)[piece.start : piece.stop])

    def operands(self, number: int) -> Iterator[tuple[int, Operand]]:
        """What this rank updates in a bucket, with the index of its group."""
        bucket = self.plan.buckets[number]
        counted = not bucket.replicated or self.group.rank == 0
        for piece, grad in zip(self._owned(bucket), self._grads[number], strict=True):
            present = self._present[piece.param]
            if present is False:
                continue
            views = {}
            for key, (start, shape) in self._spans[piece].items():
                flat = self._state[self.params[piece.param]][key]
                views[key] = flat[start : start + prod(shape)].view(shape)
            flag = present if isinstance(present, Tensor) else None
            gradient = grad.view(_shape(piece))
            operand = Operand(self._view(piece), gradient, views, flag, counted)
            yield self.plan.params[piece.param].group, operand

    def drop_gradients(self, number: int) -> None:
        """They are not needed any longer."""
        del self._grads[number]

    def gather(self, number: int) -> None:
        """Start sending the updated pieces of a bucket to everyone."""
        bucket = self.plan.buckets[number]
        if bucket.replicated:
            return
        mine = [self._view(piece).reshape(-1) for piece in bucket.segments[self.group.rank]]
        if not mine:
            mine = [self.params[bucket.params[0]].new_empty(0)]
        segment = mine[0] if len(mine) == 1 else torch.cat(mine)
        name = f"gather of bucket {number}"
        self._gathers[number] = gather_segments(name, segment, bucket.segment_sizes, self.group)

    def place(self, number: int) -> None:
        """Copy what the others updated into place."""
        if number not in self._gathers:
            return
        arrived = self._gathers.pop(number).wait()
        for rank, pieces in enumerate(self.plan.buckets[number].segments):
            if rank == self.group.rank:
                continue
            parts = torch.split(arrived[rank], [piece.size for piece in pieces])
            for piece, part in zip(pieces, parts, strict=True):
                self._view(piece).copy_(part.view(_shape(piece)))

    def present(self) -> list[tuple[int, bool | Tensor]]:
        """The group of each parameter, and whether it was present in the last step."""
        flags = self._present or [False] * len(self.params)
        return [(spec.group, flag) for spec, flag in zip(self.plan.params, flags, strict=True)]

    def _owned(self, bucket: Bucket) -> tuple[Piece, ...]:
        return bucket.segments[0 if bucket.replicated else self.group.rank]

    def _view(self, piece: Piece) -> Tensor:
        """The piece in its parameter: (size,), or (rows, cols) for a block."""
        flat = self.params[piece.param].detach().view(-1)
        return flat[piece.start : piece.stop].view(_shape(piece))


_Spans = dict[str, tuple[int, Shape]]  # per key: where it starts in the 1-D state, its shape


def _shape(piece: Piece) -> Shape:
    return (piece.size,) if piece.block is None else piece.block.shape
