"""Parameters end to end in buffers."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from samestep.plan.flat import places
from samestep.plan.sharding import ShardingPlan


class FlatParameters:
    """Parameters as views of one buffer per dtype; `buckets[number]` is (size,), gaps included."""

    def __init__(self, params: Sequence[Tensor], plan: ShardingPlan, *, poison: bool) -> None:
        self._params = params
        self._poison = poison
        self._rooms: dict[int, Tensor] = {}
        self.buckets: list[Tensor] = [torch.empty(0)] * len(plan.buckets)
        for dtype in dict.fromkeys(bucket.dtype for bucket in plan.buckets):
            numbers = [i for i, bucket in enumerate(plan.buckets) if bucket.dtype == dtype]
            sizes = [plan.buckets[number].size for number in numbers]
            like = params[plan.buckets[numbers[0]].params[0]]
            buffer = like.detach().new_zeros(sum(sizes))
            for number, part in zip(numbers, torch.split(buffer, sizes), strict=True):
                self.buckets[number] = part
        self._views = [
            None
            if place is None
            else self.buckets[place.bucket][place.start : place.start + param.numel()].view(
                param.shape
            )
            for param, place in zip(params, places(plan), strict=True)
        ]
        self.adopt()

    @torch.no_grad()
    def adopt(self) -> int | None:
        """Bring in parameters that lie elsewhere: all at first, later those that were replaced.

        Gives the first one that cannot be, since its dtype or device has changed.
        """
        for index, (param, view) in enumerate(zip(self._params, self._views, strict=True)):
            if view is None or (param.data_ptr(), param.stride()) == self._at(view):
                continue
            if (param.dtype, param.device) != (view.dtype, view.device):
                return index
            view.copy_(param.clone())  # it may lie across the very same memory
            param.data = view
        return None

    @staticmethod
    def _at(view: Tensor) -> tuple[int, tuple[int, ...]]:
        return view.data_ptr(), view.stride()

    def room(self, number: int) -> Tensor:
        """Where a bucket is gathered: in place, or elsewhere to show reads that come too early."""
        bucket = self.buckets[number]
        if not self._poison:
            return bucket
        self._rooms[number] = bucket.clone()
        bucket.fill_(torch.nan)
        return self._rooms[number]

    @torch.no_grad()
    def arrived(self, number: int) -> None:
        """The gather of a bucket is over."""
        if number in self._rooms:
            self.buckets[number].copy_(self._rooms.pop(number))


def overlapping(params: Sequence[Tensor]) -> list[int]:
    """The first two contiguous parameters that have memory in common, or nothing."""
    order = sorted(
        (i for i, param in enumerate(params) if param.numel()), key=lambda i: params[i].data_ptr()
    )
    for one, other in pairwise(order):
        if params[one].data_ptr() + params[one].nbytes > params[other].data_ptr():
            return sorted((one, other))
    return []
