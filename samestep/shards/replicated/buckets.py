"""Buckets as tensors: gradients to reduce, and parameters to gather.

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
    """Local gradients of the buckets of a plan, and their sums."""

    def arrived(self, index: int) -> None:
        """Take the gradient of a parameter after backward."""

    def packed(self, number: int, without: Container[int]) -> Tensor:
        """Gradients of a bucket, (bucket.size,), in segments.

        without: parameters whose gradients stay where they are; zeros go in their place, as for
            those that have none.
        """
        ...

    def divided(self, number: int, buffer: Tensor, by: int) -> Tensor:
        """The packed buffer divided by the number of ranks."""
        ...

    def landed(self, number: int, total: Tensor) -> Tensor:
        """Keep the sum of this rank's segment; returns where."""
        ...

    def set_aside(self, total: Tensor) -> Tensor:
        """Copy a sum that the next round would overwrite."""
        ...

    def end_step(self) -> None:
        """Free memory after the step."""


class ParameterBuckets(Protocol):
    """Parameters of the buckets, of which this rank updates its segments."""

    def adopt(self) -> None:
        """Take in replaced parameters at the start of a step."""

    def segment(self, number: int) -> tuple[Tensor, Tensor | None]:
        """This rank's segment, and the buffer to gather into."""
        ...

    def arrived(self, number: int, gathered: Gathered) -> None:
        """Copy gathered segments into parameters."""


class CopiedGradients:
    """Copies gradients into a new buffer for every reduction.

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
        """Leave the gradient where backward put it."""

    def packed(self, number: int, without: Container[int]) -> Tensor:
        """Copy the gradients of a bucket into a new buffer."""
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
        """Divide the buffer in place."""
        return buffer.div_(by)

    def landed(self, number: int, total: Tensor) -> Tensor:
        """Keep this rank's segment of the sum."""
        return total

    def set_aside(self, total: Tensor) -> Tensor:
        """Copy a sum, so that it does not keep a whole bucket alive."""
        return total.clone() if total.untyped_storage().nbytes() > total.nbytes else total

    def end_step(self) -> None:
        """Do nothing: no buffer is kept."""


class CopiedParameters:
    """Copies segments out of parameters and gathered values into them."""

    def __init__(self, local: LocalTensors, plan: ShardingPlan, rank: int) -> None:
        self._local, self._plan, self._rank = local, plan, rank
        self._owned = [bucket.owned(rank).pieces for bucket in plan.buckets]
        self._parts_of_others: dict[int, Sequence[PackedPart]] = {}

    def adopt(self) -> None:
        """Do nothing: parameters stay in their own memory."""

    def segment(self, number: int) -> tuple[Tensor, None]:
        """Copy this rank's segment of parameters."""
        mine = [self._local.read(piece.param, piece.elements) for piece in self._owned[number]]
        if not mine:
            mine = [self._local.value(self._plan.buckets[number].params[0]).new_empty(0)]
        return (mine[0] if len(mine) == 1 else torch.cat(mine)), None

    def arrived(self, number: int, gathered: Gathered) -> None:
        """Copy gathered segments into parameters."""
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
