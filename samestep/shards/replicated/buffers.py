"""Where the gradients of a bucket lie when it is reduced.

`flat` has them in buffers that stay, with parameters end to end.
"""

from collections.abc import Container, Sequence
from functools import reduce

import torch
from torch import Tensor

from samestep.groups.group_checks import sparse_gradient
from samestep.plan.sharding import ShardingPlan
from samestep.shards.replicated.local_tensors import LocalTensors

BufferKind = tuple[torch.dtype, torch.device]


class GradientBuffers:
    """A buffer is made for every reduction, and gradients are copied into it."""

    def __init__(
        self, held: LocalTensors, plan: ShardingPlan, reduce_dtype: torch.dtype | None
    ) -> None:
        self._held = held
        self._plan = plan
        self._reduce_dtype = reduce_dtype
        # What every step asks of the plan: where in a bucket which elements of a parameter go.
        self._packed = [
            [(part.key[0], part.place, part.elements) for part in bucket.packing.parts]
            for bucket in plan.buckets
        ]
        self._sizes = [bucket.size for bucket in plan.buckets]
        self._members = [bucket.params for bucket in plan.buckets]
        # As planned: ranks send what they agreed on, also if one has converted its model since.
        of_buckets = [[held.params[index] for index in members] for members in self._members]
        self._dtypes = [joint_gradient_dtype(params) for params in of_buckets]
        self._devices = [params[0].device for params in of_buckets]

    def arrived(self, index: int) -> None:
        """Backward has finished a gradient."""

    def packed(self, number: int, *, without: Container[int] = ()) -> Tensor:
        """The local gradients of a bucket, segment after segment; zeros where there is none.

        without: parameters whose gradients stay where they are; zeros go in their place.
        """
        dtype = self._reduce_dtype or self._dtypes[number]
        buffer = torch.empty(self._sizes[number], dtype=dtype, device=self._devices[number])
        for index, place, elements in self._packed[number]:
            grad = None if index in without else self._dense(index)
            if grad is None:
                buffer[place].zero_()
            else:
                buffer[place].copy_(grad.reshape(-1)[elements])
        return buffer

    def _dense(self, index: int) -> Tensor | None:
        """A gradient that is about to travel, which may be before a step looks at it."""
        grad = self._held.gradient(index)
        if grad is not None and grad.layout != torch.strided:
            raise sparse_gradient(self._plan.params[index].name)
        return grad

    def divided(self, number: int, buffer: Tensor, by: int) -> Tensor:
        """What `packed` gave, divided; gradients stay what they are."""
        return buffer.div_(by)

    def landed(self, number: int, total: Tensor) -> Tensor:
        """The sum of this rank's segment has arrived: where it shall be kept."""
        return total

    def set_aside(self, total: Tensor) -> Tensor:
        """A sum that outlives the round: it must not keep a whole bucket alive."""
        return total.clone() if total.untyped_storage().nbytes() > total.nbytes else total

    def end_step(self) -> None:
        """What was reduced has been used."""


def gradient_dtype(param: Tensor) -> torch.dtype:
    """What `.grad` has; by default the parameter's, and in torch 2.9 always."""
    return getattr(param, "grad_dtype", None) or param.dtype


def joint_gradient_dtype(params: Sequence[Tensor]) -> torch.dtype:
    """The narrowest that holds the gradients of all, since users may set `grad_dtype` of some."""
    return reduce(torch.promote_types, map(gradient_dtype, params))
