"""Parameters that every rank holds whole: reduced, updated in parts, and gathered.

    presence -> reduce -> rule -> gather

All ranks run the same collectives with the same sizes, whatever gradients they have and
whatever they own.
"""

import warnings
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from samestep.apply import Operand
from samestep.comm.agreement import broadcast_from_first, checksum, differing, require_same_lines
from samestep.comm.collectives import (
    Pending,
    gather_segments,
    maximum,
    reduce_segments,
    reduce_whole,
)
from samestep.comm.groups import RankGroup
from samestep.distribution import Distribution
from samestep.plan.sharding import Bucket, ParamSpec, Piece, ShardingPlan, plan_sharding
from samestep.rules.rule import Rule
from samestep.state import MASTER, State, math_dtype


class ReplicatedParameters:
    """One plan at work: the parameters of a construction or of one added group."""

    def __init__(
        self,
        params: Sequence[Tensor],
        specs: Sequence[ParamSpec],
        option_lines: Sequence[str],
        group: RankGroup,
        distribution: Distribution,
    ) -> None:
        self.params = list(params)
        self.group = group
        self.distribution = distribution
        self.sharded = distribution.sharding != "none"
        self.plan: ShardingPlan = plan_sharding(
            specs,
            group.size,
            shard=self.sharded,
            crossover=distribution.crossover,
            bucket_elements=distribution.bucket_size,
            owners=distribution.owners,
        )
        self.device = self.params[0].device
        strided = [s.name for s, p in zip(specs, params, strict=True) if not p.is_contiguous()]
        lines = [*self._policy_lines(), *self.plan.lines(), *option_lines]
        require_same_lines("plan", [*lines, f"not contiguous: {strided}"], group, self.device)
        if strided:  # raised by all ranks or by none
            raise ValueError(
                f"parameter {strided[0]!r} is not contiguous, and only contiguous parameters can "
                "be shared between ranks: replace its data by .contiguous()"
            )
        self.mend_replicas()
        self.pieces: dict[int, list[Piece]] = {index: [] for index in range(len(params))}
        for piece in self.plan.owned(group.rank):
            self.pieces[piece.param].append(piece)

    def _policy_lines(self) -> list[str]:
        policy = self.distribution
        keys = ("sharding", "reduction", "grads", "crossover", "bucket_size", "owners")
        return [f"{key} = {getattr(policy, key)}" for key in keys]

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
            stacklevel=6,
        )
        with torch.no_grad():
            for index in different:
                broadcast_from_first(self.params[index], self.group)

    # --- state ---------------------------------------------------------------------------

    def state_of(
        self, index: int, rule: Rule, options: Mapping[str, Any], master_weights: bool
    ) -> State:
        """State of the owned pieces of a parameter: one 1-D tensor per key, piece after piece."""
        param = self.params[index]
        dtype = math_dtype(param)
        shapes = [rule.state_shapes(_shape(piece), options) for piece in self.pieces[index]]
        state = {
            key: torch.zeros(sum(prod(s[key]) for s in shapes), dtype=dtype, device=param.device)
            for key in rule.state_shapes((0, 0), options)
        }
        if master_weights and param.dtype.itemsize < dtype.itemsize:
            size = sum(piece.size for piece in self.pieces[index])
            state[MASTER] = torch.zeros(size, dtype=dtype, device=param.device)
        return state

    def operands(
        self,
        index: int,
        grads: Mapping[Piece, Tensor],
        rule: Rule,
        state: State,
        options: Mapping[str, Any],
    ) -> list[Operand]:
        """The owned pieces of a parameter, with views of their gradients and state."""
        operands = []
        offsets = dict.fromkeys(state, 0)
        for piece in self.pieces[index]:
            shapes = {**rule.state_shapes(_shape(piece), options), MASTER: _shape(piece)}
            views = {}
            for key, tensor in state.items():
                size = prod(shapes[key])
                views[key] = tensor[offsets[key] : offsets[key] + size].view(shapes[key])
                offsets[key] += size
            operands.append(Operand(self._view(piece), grads[piece].view(_shape(piece)), views))
        return operands

    def _view(self, piece: Piece) -> Tensor:
        """The piece in its parameter: (size,), or (rows, cols) for a block."""
        flat = self.params[piece.param].detach().view(-1)
        return flat[piece.start : piece.stop].view(_shape(piece))

    # --- the step ------------------------------------------------------------------------

    def agree_on_presence(self) -> list[bool]:
        """Per parameter: does any rank have a gradient? One integer all-reduce.

        The host reads the answer only if it does not know it: what is present here is present.
        """
        here = [param.grad is not None for param in self.params]
        mask = torch.tensor(here, dtype=torch.int32, device=self.device)
        anywhere = maximum("presence", mask, self.group).wait()
        return here if all(here) else [bool(value) for value in anywhere.tolist()]

    def launch_reductions(self) -> list[Pending | None]:
        """Start reducing every bucket; under zero2 each gradient is freed once it is packed."""
        pending: list[Pending | None] = []
        left = [
            sum(i in bucket.params for bucket in self.plan.buckets) for i in range(len(self.params))
        ]
        for number, bucket in enumerate(self.plan.buckets):
            if self.distribution.grads == "reduced":
                pending.append(None)
                continue
            buffer = self._packed(bucket)
            ordered = self.distribution.reduction == "ordered"
            name = f"reduction of bucket {number} ({self.plan.params[bucket.params[0]].name}, ...)"
            if bucket.replicated:
                pending.append(reduce_whole(name, buffer, self.group, ordered=ordered))
            else:
                pending.append(
                    reduce_segments(name, buffer, bucket.segment_sizes, self.group, ordered=ordered)
                )
            for index in bucket.params:
                left[index] -= 1
                if left[index] == 0 and self.distribution.sharding in ("auto", "zero2"):
                    self.params[index].grad = None
        return pending

    def _packed(self, bucket: Bucket) -> Tensor:
        """The local gradients in the order of the segments; zeros where there is none."""
        parts = []
        for segment in bucket.segments:
            for piece in segment:
                grad = self.params[piece.param].grad
                if grad is None:
                    parts.append(self.params[piece.param].new_zeros(piece.size))
                else:
                    parts.append(grad.detach().reshape(-1)[piece.start : piece.stop])
        return torch.cat(parts)

    def averaged(self, bucket: Bucket, pending: Pending | None) -> dict[Piece, Tensor]:
        """The mean gradient of each piece that this rank owns in the bucket, in fp32 or wider."""
        owned = bucket.segments[0 if bucket.replicated else self.group.rank]
        if pending is None:
            grads = [self.params[piece.param].grad for piece in owned]
            return {
                piece: self._view(piece).new_zeros(piece.size)
                if grad is None
                else grad.detach().reshape(-1)[piece.start : piece.stop]
                for piece, grad in zip(owned, grads, strict=True)
            }
        total = pending.wait()
        total = total.to(torch.promote_types(total.dtype, torch.float32)).div_(self.group.size)
        parts = torch.split(total, [piece.size for piece in owned])
        return dict(zip(owned, parts, strict=True))

    def launch_gather(self, number: int) -> Pending | None:
        """Start sending the updated pieces of a bucket to everyone."""
        bucket = self.plan.buckets[number]
        if bucket.replicated:
            return None
        mine = [self._view(piece).reshape(-1) for piece in bucket.segments[self.group.rank]]
        empty = torch.zeros(0, dtype=self.params[bucket.params[0]].dtype, device=self.device)
        return gather_segments(
            f"gather of bucket {number}",
            torch.cat([*mine, empty]),
            bucket.segment_sizes,
            self.group,
        )

    def run_reductions(self) -> dict[Piece, Tensor]:
        """Reduce all buckets and give the mean gradient of every owned piece."""
        launched = self.launch_reductions()
        grads: dict[Piece, Tensor] = {}
        for bucket, pending in zip(self.plan.buckets, launched, strict=True):
            grads.update(self.averaged(bucket, pending))
        return grads

    def counted(self, grads: Mapping[Piece, Tensor], present: Sequence[bool]) -> list[Tensor]:
        """The gradients this rank adds to the norm: its own pieces; shared ones are rank 0's."""
        return [
            grads[piece]
            for bucket in self.plan.buckets
            if not bucket.replicated or self.group.rank == 0
            for piece in bucket.segments[0 if bucket.replicated else self.group.rank]
            if present[piece.param]
        ]

    def run_gathers(self) -> None:
        """Send every updated piece to everyone."""
        launched = [self.launch_gather(number) for number in range(len(self.plan.buckets))]
        for number, pending in enumerate(launched):
            self.finish_gather(number, pending)

    def finish_gather(self, number: int, pending: Pending | None) -> None:
        """Copy what the others updated into place."""
        if pending is None:
            return
        pieces = [piece for segment in self.plan.buckets[number].segments for piece in segment]
        parts = torch.split(pending.wait(), [piece.size for piece in pieces])
        for piece, part in zip(pieces, parts, strict=True):
            self._view(piece).copy_(part.view(_shape(piece)))


def _shape(piece: Piece) -> tuple[int, ...]:
    return (piece.size,) if piece.block is None else piece.block.shape
