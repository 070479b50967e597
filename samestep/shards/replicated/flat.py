"""Flat buffers: parameters end to end, as views of one buffer per dtype, and gradients likewise.

Nothing is packed or copied around a collective: a bucket is a stretch of these buffers.
"""

import math
from collections.abc import Container, Sequence

import torch
from torch import Tensor

from samestep.comm.collectives import Gathered
from samestep.plan.flat import FlatPlace, places
from samestep.plan.sharding import ShardingPlan
from samestep.shards.replicated.local_tensors import LocalTensors

BufferKind = tuple[torch.dtype, torch.device]


class FlatGradients:
    """Moves gradients into flat buffers as backward finishes them.

    There `.grad` is a view of its place, and later micro-batches add to it. With `keep` all
    buffers stay (zero1), and this rank's sum takes the place of its segment; else a buffer is given
    back once its bucket is reduced (zero2), and the next bucket of that size takes it.
    """

    def __init__(
        self,
        local: LocalTensors,
        plan: ShardingPlan,
        dtypes: Sequence[torch.dtype],
        reduce_dtype: torch.dtype | None,
        rank: int,
        *,
        keep: bool,
    ) -> None:
        self._local, self._plan, self._rank, self._keep = local, plan, rank, keep
        self._reduce_dtype = reduce_dtype
        self._places = places(plan)
        self._members = [bucket.params for bucket in plan.buckets]
        self._sizes = [bucket.size for bucket in plan.buckets]
        self._buffers: dict[int, Tensor] = {}
        # By dtype of the gradients and device: each has room for any bucket of that kind, also
        # where `grad_dtype` gives parameters of several dtypes gradients of one.
        devices = [local.params[members[0]].device for members in self._members]
        self._kinds = list(zip(dtypes, devices, strict=True))
        self._spare: dict[BufferKind, list[Tensor]] = {kind: [] for kind in self._kinds}
        self._room = dict.fromkeys(self._kinds, 0)
        for kind, size in zip(self._kinds, self._sizes, strict=True):
            self._room[kind] = max(self._room[kind], size)
        self._views: dict[tuple[int, int], Tensor] = {}  # by address of the buffer, and parameter

    def arrived(self, index: int) -> None:
        """Move a gradient into its bucket."""
        place, grad = self._places[index], self._local.gradient(index)
        if place is None or grad is None or grad.layout != torch.strided:
            return
        view = self._view(index, place)
        if grad.data_ptr() != view.data_ptr() and grad.dtype == view.dtype:
            view.copy_(grad)
            self._local.put_gradient(index, view)

    def packed(self, number: int, without: Container[int]) -> Tensor:
        """The buffer of a bucket, with late gradients copied in."""
        for index in self._members[number]:
            place = self._places[index]
            assert place is not None
            view = self._view(index, place)
            grad = None if index in without else self._local.dense_gradient(index)
            if grad is None:
                view.zero_()
            elif grad.data_ptr() != view.data_ptr():
                view.copy_(grad)
        buffer = self._buffer(number)[: self._sizes[number]]
        return buffer if self._reduce_dtype is None else buffer.to(self._reduce_dtype)

    def divided(self, number: int, buffer: Tensor, by: int) -> Tensor:
        """Divide the buffer in place, unless another dtype is sent."""
        return buffer.div(by) if _lies_in(buffer, self._buffer(number)) else buffer.div_(by)

    def landed(self, number: int, total: Tensor) -> Tensor:
        """Keep the sum in this rank's segment, or give the buffer back."""
        bucket = self._plan.buckets[number]
        if not self._keep:
            self._spare[self._kinds[number]].append(self._buffers.pop(number))
            return total
        if bucket.replicated:
            return total
        own = torch.split(self._buffers[number][: bucket.size], bucket.segment_sizes)[self._rank]
        if total.dtype != own.dtype:
            return total
        if total.data_ptr() != own.data_ptr():
            own.copy_(total)
        return own

    def set_aside(self, total: Tensor) -> Tensor:
        """Copy a sum that the next round would overwrite."""
        return total.clone() if self._keep else total

    def end_step(self) -> None:
        """Drop `.grad` tensors that now hold sums."""
        for index, place in enumerate(self._places):
            grad = None if place is None else self._local.gradient(index)
            if place is None or grad is None or grad.layout != torch.strided:
                continue
            buffer = self._buffers.get(place.bucket)
            if buffer is not None and _lies_in(grad, buffer):
                self._local.put_gradient(index, None)

    def _view(self, index: int, place: FlatPlace) -> Tensor:
        """A gradient's view of the buffer, with its own version counter."""
        buffer = self._buffer(place.bucket)
        view = self._views.get((buffer.data_ptr(), index))
        if view is None:
            spec = self._plan.params[index]
            flat = buffer[place.start : place.start + spec.numel]
            view = self._views[buffer.data_ptr(), index] = flat.view(spec.shape).data
        return view

    def _buffer(self, number: int) -> Tensor:
        """The buffer of a bucket; gaps are never read."""
        buffer = self._buffers.get(number)
        if buffer is None:
            kind = self._kinds[number]
            if self._spare[kind]:
                buffer = self._spare[kind].pop()
            else:
                size = self._sizes[number] if self._keep else self._room[kind]
                buffer = torch.zeros(size, dtype=kind[0], device=kind[1])
            self._buffers[number] = buffer
        return buffer


def _lies_in(tensor: Tensor, buffer: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


class FlatParameters:
    """Parameters as views of one buffer per dtype, divided into buckets.

    poison: parameters that are on their way are NaN, to show reads that come too early.
    """

    def __init__(self, local: LocalTensors, plan: ShardingPlan, rank: int, *, poison: bool) -> None:
        self._local, self._rank, self._poison = local, rank, poison
        self._rooms: dict[int, Tensor] = {}  # that buckets are gathered into, if poisoned
        self._segment_sizes = [bucket.segment_sizes for bucket in plan.buckets]
        self._buckets: list[Tensor] = [torch.empty(0)] * len(plan.buckets)
        for dtype in dict.fromkeys(bucket.dtype for bucket in plan.buckets):
            numbers = [i for i, bucket in enumerate(plan.buckets) if bucket.dtype == dtype]
            sizes = [plan.buckets[number].size for number in numbers]
            like = local.value(plan.buckets[numbers[0]].params[0])
            buffer = like.new_zeros(sum(sizes))
            for number, part in zip(numbers, torch.split(buffer, sizes), strict=True):
                self._buckets[number] = part
        self._views = [
            None if place is None else self._view(place, spec.shape)
            for spec, place in zip(plan.params, places(plan), strict=True)
        ]
        self.adopt()

    def _view(self, place: FlatPlace, shape: Sequence[int]) -> Tensor:
        """View of a parameter's elements.

        The tensor has a storage of its own on the same memory, since `torch.save` writes the whole
        storage of every tensor: one norm of a state dict would bring the whole model along.
        """
        view = self._buckets[place.bucket][place.start : place.start + math.prod(shape)].view(shape)
        # Meta tensors have no memory, and other devices no DLPack that shares it.
        return torch.from_dlpack(view) if view.device.type in ("cpu", "cuda") else view

    @torch.no_grad()
    def adopt(self) -> None:
        """Move new or replaced parameters into the buffer."""
        for index, view in enumerate(self._views):
            if view is None:
                continue
            value = self._local.value(index)
            if value.data_ptr() == view.data_ptr() and value.stride() == view.stride():
                continue
            view.copy_(value.clone())  # it may lie across the very same memory
            self._local.replace(index, view)

    def segment(self, number: int) -> tuple[Tensor, Tensor]:
        """This rank's segment and its bucket."""
        whole = bucket = self._buckets[number]
        if self._poison:
            whole = self._rooms[number] = bucket.clone()
            bucket.fill_(torch.nan)
        return torch.split(whole, self._segment_sizes[number])[self._rank], whole

    @torch.no_grad()
    def arrived(self, number: int, gathered: Gathered) -> None:
        """Copy gathered values, unless they arrived in the parameters themselves."""
        if number in self._rooms:
            self._buckets[number].copy_(self._rooms.pop(number))
