"""Parameters as plain tensors of this rank: all of a parameter, or its shard of a DTensor.

Whoever averages over copies works on these, whatever the rest of a parameter is on other ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.comm.groups import RankGroup
from samestep.comm.presence import RankFailure, changed_parameter
from samestep.groups.group_checks import sparse_gradient
from samestep.layout.boxes import cut_as, mesh_of, range_boxes
from samestep.shards.replicated.reduced_gradient import ReducedGradient

REPLICATED, SUMMAND, MEAN = 1, 2, 3  # what a gradient is along a mesh axis that has copies


class LocalTensors:
    """The parameters of one plan, by their index in it."""

    def __init__(self, params: Sequence[Tensor], names: Sequence[str]) -> None:
        self.params, self._names = list(params), names
        self._dtensors: list[Any] = [
            None if mesh_of(param) is None else param for param in self.params
        ]
        self._were = [(param.dtype, param.device) for param in self.params]

    # torch has no public way to move what a DTensor holds, and `to_local` is a part of autograd:
    # in every step this is asked of every parameter, so what is held is looked at directly.

    def _held(self, index: int) -> Tensor:
        dtensor = self._dtensors[index]
        held: Tensor = self.params[index] if dtensor is None else dtensor._local_tensor
        return held

    def value(self, index: int) -> Tensor:
        """A view to read from and write to."""
        return self._held(index).detach()

    def read(self, index: int, elements: slice) -> Tensor:
        """Some elements of a parameter, (size,): a view, or a copy if it has other strides."""
        value = self.value(index)
        if value.is_contiguous():
            return value.view(-1)[elements]
        return torch.cat([part.reshape(-1) for part in _boxes_of(value, elements)])

    def write(self, index: int, elements: slice, values: Tensor) -> None:
        """Put values, (size,), where some elements of a parameter lie."""
        value = self.value(index)
        if value.is_contiguous():
            value.view(-1)[elements].copy_(values)
            return
        parts = _boxes_of(value, elements)
        sizes = [part.numel() for part in parts]
        for part, own in zip(parts, torch.split(values, sizes), strict=True):
            part.copy_(own.view(part.shape))

    def values(self) -> list[Tensor]:
        """The local tensors of all parameters."""
        return [self.value(index) for index in range(len(self.params))]

    def addresses(self) -> list[tuple[int, bool]]:
        """The address of each local tensor, and whether it is contiguous."""
        held = map(self._held, range(len(self.params)))
        return [(tensor.data_ptr(), tensor.is_contiguous()) for tensor in held]

    def changed(self, group: RankGroup) -> RankFailure | None:
        """The first that is not what it was, and what it is now."""
        for index, (param, was) in enumerate(zip(self.params, self._were, strict=True)):
            if (param.dtype, param.device) != was:
                now, then = f"{param.dtype} on {param.device}", f"{was[0]} on {was[1]}"
                return changed_parameter(
                    self._names[index], index, f"is {now} now, and was {then}", group
                )
        return None

    @torch.no_grad()
    def replace(self, index: int, view: Tensor) -> None:
        """Let a parameter lie elsewhere, with the values that are there."""
        dtensor = self._dtensors[index]
        if dtensor is None:
            self.params[index].data = view
        else:
            dtensor._local_tensor = view

    def gradient(self, index: int) -> Tensor | None:
        """The local tensor of `.grad`, detached; it may be an addend of a sum over a mesh.

        None also where a gradient was reduced and given back.
        """
        grad: Any = self.params[index].grad
        if grad is None or type(grad) is ReducedGradient:
            return None
        dtensor = self._dtensors[index]
        if dtensor is None:
            return grad.detach()  # type: ignore[no-any-return]
        held = _held_of(grad)
        if held.shape != dtensor._local_tensor.shape:
            self._cut_gradient(index)
            held = _held_of(self.params[index].grad)
        return held.detach()

    def dense_gradient(self, index: int) -> Tensor | None:
        """The local tensor of a gradient that is about to travel; raises if it is sparse."""
        grad = self.gradient(index)
        if grad is not None and grad.layout != torch.strided:
            raise sparse_gradient(self._names[index])
        return grad

    def has_gradient(self, index: int) -> bool:
        """Whether there is one to read here."""
        grad = self.params[index].grad
        return grad is not None and type(grad) is not ReducedGradient

    @torch.no_grad()
    def _cut_gradient(self, index: int) -> None:
        """Keep this rank's part of a gradient that is whole on every rank; nothing travels."""
        param: Any = self.params[index]
        found = getattr(param.grad, "placements", None)
        if found is not None:
            param.grad = param.grad.redistribute(placements=cut_as(param.placements, found))

    @torch.no_grad()
    def put_gradient(self, index: int, local: Tensor | None) -> None:
        """Let `.grad` be a tensor, or nothing; it is then placed as the one before it."""
        param = self.params[index]
        if local is None or self._dtensors[index] is None:
            param.grad = local
            return
        from samestep.shards.dtensor.gradients import placed  # DTensors take long to import

        like: Any = param.grad if self.has_gradient(index) else self._dtensors[index]
        param.grad = placed(local, like, like.placements)

    def kinds_along_axes(self, index: int) -> tuple[int, ...]:
        """The kind of a gradient along each mesh axis; 0 where it is cut. () if there is none.

        Raises:
            ValueError: It is placed in another way than its parameter.
        """
        dtensor = self._dtensors[index]
        if dtensor is None or not self.has_gradient(index):
            return ()
        self._cut_gradient(index)
        found = getattr(self.params[index].grad, "placements", None)
        if found is None:
            raise ValueError("is a plain tensor")
        kinds = []
        for own, of_grad in zip(dtensor.placements, found, strict=True):
            operation = getattr(of_grad, "reduce_op", None)
            if own == of_grad:
                kinds.append(REPLICATED if own.is_replicate() else 0)
            elif own.is_replicate() and of_grad.is_partial() and operation in ("sum", "avg"):
                kinds.append(SUMMAND if operation == "sum" else MEAN)
            else:
                raise ValueError(f"is {tuple(found)}")
        return tuple(kinds)


def _boxes_of(value: Tensor, elements: slice) -> list[Tensor]:
    """The views that make up some elements of a parameter, in its logical order."""
    shape = tuple(value.shape)
    return [value[box.slices] for box in range_boxes(shape, elements.start, elements.stop)]


def _held_of(grad: Any) -> Tensor:
    """The local tensor of a DTensor's gradient; a plain tensor, refused later, as it is."""
    held: Tensor = getattr(grad, "_local_tensor", grad)
    return held
