"""Buckets as tensors: gradients before they are reduced, and parameters on their way back.

Gradients are copied into a buffer that is made for each reduction, and what a gather brings is
copied into the parameters. In flat buffers (`flat`) both lie in buffers that stay, and nothing is
copied.
"""

from collections.abc import Container, Sequence
from typing import Protocol

import torch
from torch import Tensor

from samestep.comm.collectives import Gathered
from samestep.plan.packing import PackedPart
from samestep.plan.sharding import ShardingPlan
from samestep.shards.replicated.local_tensors import LocalTensors


class GradientBuckets(Protocol):
    """The local gradients of a plan's buckets, and the sums that take their place."""

    def arrived(self, index: int) -> None:
        """Backward has finished the gradient of a parameter."""

    def packed(self, number: int, without: Container[int]) -> Tensor:
        """The gradients of a bucket, (bucket.size,), segment after segment.

        without: parameters whose gradients stay where they are; zeros go in their place, as for
            those that have none.
        """
        ...

    def divided(self, number: int, buffer: Tensor, by: int) -> Tensor:
        """The buffer that `packed` gave, divided; gradients stay what they are."""
        ...

    def landed(self, number: int, total: Tensor) -> Tensor:
        """Take the sum of this rank's segment; gives it where it shall be kept."""
        ...

    def set_aside(self, total: Tensor) -> Tensor:
        """A kept sum, where it does not change when the gradients of another round come."""
        ...

    def end_step(self) -> None:
        """Let go of memory: all sums were used."""


class ParameterBuckets(Protocol):
    """The parameters of a plan's buckets, of which this rank has updated its segments."""

    def adopt(self) -> None:
        """A step begins: bring in parameters that were replaced."""

    def segment(self, number: int) -> tuple[Tensor, Tensor | None]:
        """This rank's segment, and the whole bucket to gather into; None: a new buffer."""
        ...

    def arrived(self, number: int, gathered: Gathered) -> None:
        """Put the segments of other ranks into the parameters."""


class CopiedGradients:
    """A buffer is made for every reduction, and gradients are copied into it.

    dtypes: in which each bucket travels, as ranks agreed, also if one converts its model later.
    """

    def __init__(
        self, local: LocalTensors, plan: ShardingPlan, dtypes: Sequence[torch.dtype]
    ) -> None:
        self._local = local
        # What every step asks of the plan: where in a bucket which elements of a parameter go.
        self._parts = [
            [(part.key[0], part.place, part.elements) for part in bucket.packing.parts]
            for bucket in plan.buckets
        ]
        self._sizes = [bucket.size for bucket in plan.buckets]
        self._dtypes = list(dtypes)
        self._devices = [local.params[bucket.params[0]].device for bucket in plan.buckets]

    def arrived(self, index: int) -> None:
        """See `GradientBuckets`: gradients stay where backward has put them."""

    def packed(self, number: int, without: Container[int]) -> Tensor:
        """See `GradientBuckets`."""
        dtype, device = self._dtypes[number], self._devices[number]
        buffer = torch.empty(self._sizes[number], dtype=dtype, device=device)
        for index, place, elements in self._parts[number]:
            grad = None if index in without else self._local.dense_gradient(index)
            if grad is None:
                buffer[place].zero_()
            else:
                buffer[place].copy_(grad.reshape(-1)[elements])
        return buffer

    def divided(self, number: int, buffer: Tensor, by: int) -> Tensor:
        """See `GradientBuckets`."""
        return buffer.div_(by)

    def landed(self, number: int, total: Tensor) -> Tensor:
        """See `GradientBuckets`."""
        return total

    def set_aside(self, total: Tensor) -> Tensor:
        """A sum that outlives the round: it must not keep a whole bucket alive."""
        return total.clone() if total.untyped_storage().nbytes() > total.nbytes else total

    def end_step(self) -> None:
        """See `GradientBuckets`: no memory is kept."""


class CopiedParameters:
    """Parameters lie anywhere; segments are copied out of them, and into them."""

    def __init__(self, local: LocalTensors, plan: ShardingPlan, rank: int) -> None:
        self._local, self._plan, self._rank = local, plan, rank
        self._owned = [bucket.owned(rank).pieces for bucket in plan.buckets]
        self._parts_of_others: dict[int, Sequence[PackedPart]] = {}

    def adopt(self) -> None:
        """See `ParameterBuckets`: parameters may lie anywhere."""

    def segment(self, number: int) -> tuple[Tensor, None]:
        """See `ParameterBuckets`."""
        mine = [self._local.read(piece.param, piece.elements) for piece in self._owned[number]]
        if not mine:
            mine = [self._local.value(self._plan.buckets[number].params[0]).new_empty(0)]
        return (mine[0] if len(mine) == 1 else torch.cat(mine)), None

    def arrived(self, number: int, gathered: Gathered) -> None:
        """See `ParameterBuckets`."""
        if number not in self._parts_of_others:
            bucket = self._plan.buckets[number]
            self._parts_of_others[number] = bucket.packing_without(self._rank).parts
        for part in self._parts_of_others[number]:
            start = part.start - gathered.start
            values = gathered.stretch[start : start + part.numel]
            self._local.write(part.key[0], part.elements, values)


def gradient_dtype(param: Tensor) -> torch.dtype:
    """The dtype of `.grad`; by default the parameter's, and in torch 2.9 always."""
    return getattr(param, "grad_dtype", None) or param.dtype
