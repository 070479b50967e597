"""Collectives on segments: a buffer in which every rank owns one stretch.

Each returns a `Pending`, which keeps its buffers alive until it was waited for.
Segments may differ in length and may be empty. In a group of one rank nothing travels, and the
result may be the very tensor that was given.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.flight import CollectiveError as CollectiveError
from samestep.comm.flight import Flight
from samestep.comm.groups import RankGroup


class Pending:
    """A collective in flight, or None if nothing travels. `wait()` gives its result, once."""

    def __init__(
        self, flight: Flight | None, buffers: tuple[Tensor, ...], result: Callable[[], Tensor]
    ) -> None:
        self._flight = flight
        self._buffers: tuple[Tensor, ...] | None = buffers  # not to be freed or reused before
        self._result = result

    def wait(self) -> Tensor:
        """Wait for the transfer, then give the result."""
        if self._flight is not None:
            self._flight.wait()
        result = self._result()
        self._buffers = None
        return result


def reduce_segments(
    name: str, buffer: Tensor, sizes: Sequence[int], group: RankGroup, *, ordered: bool
) -> Pending:
    """Sum every rank's `buffer`; each rank gets the sum of its own segment.

    `ordered` adds the contributions in rank order, in fp32 or wider, so that the sum does not
    depend on where a segment lies: all-to-all and a local sum, the bytes of a reduce-scatter.
    """
    if group.size == 1:
        alone = sum_in_rank_order(buffer, group) if ordered else buffer
        return Pending(None, (buffer,), lambda: alone)
    mine = sizes[group.rank]
    if ordered:
        received = buffer.new_empty(group.size * mine)
        flight = _launch(
            name,
            group,
            buffer,
            lambda: dist.all_to_all_single(
                received, buffer, [mine] * group.size, list(sizes), group.handle, async_op=True
            ),
        )
        return Pending(flight, (buffer, received), lambda: sum_in_rank_order(received, group))
    output = buffer.new_empty(mine)
    parts = list(torch.split(buffer, list(sizes)))
    flight = _launch(
        name,
        group,
        buffer,
        lambda: dist.reduce_scatter(output, parts, group=group.handle, async_op=True),
    )
    return Pending(flight, (buffer, output), lambda: output)


def gather_segments(name: str, segment: Tensor, sizes: Sequence[int], group: RankGroup) -> Pending:
    """Give everyone all segments, in rank order, as one buffer."""
    if group.size == 1:
        return Pending(None, (segment,), lambda: segment)
    if len(set(sizes)) == 1:
        whole = segment.new_empty(sum(sizes))
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        flight = _launch(
            name,
            group,
            segment,
            lambda: gather(whole, segment, group=group.handle, async_op=True),
        )
        return Pending(flight, (segment, whole), lambda: whole)
    # Unequal lengths: no backend gathers them in one call but as an all-to-all of copies.
    others = [0 if rank == group.rank else segment.numel() for rank in range(group.size)]
    copies = segment.repeat(group.size - 1)
    incoming = [0 if rank == group.rank else size for rank, size in enumerate(sizes)]
    received = segment.new_empty(sum(incoming))
    flight = _launch(
        name,
        group,
        segment,
        lambda: dist.all_to_all_single(
            received, copies, incoming, others, group.handle, async_op=True
        ),
    )

    def assemble() -> Tensor:
        before = sum(incoming[: group.rank])
        return torch.cat([received[:before], segment, received[before:]])

    return Pending(flight, (copies, received, segment), assemble)


def maximum(name: str, values: Tensor, group: RankGroup) -> Pending:
    """The largest value of each element over all ranks."""
    return _all_reduce(name, values, dist.ReduceOp.MAX, group)


def minimum(name: str, values: Tensor, group: RankGroup) -> Pending:
    """The smallest value of each element over all ranks."""
    return _all_reduce(name, values, dist.ReduceOp.MIN, group)


def total(name: str, values: Tensor, group: RankGroup) -> Pending:
    """The sum of each element over all ranks."""
    return _all_reduce(name, values, dist.ReduceOp.SUM, group)


def from_first(name: str, tensor: Tensor, group: RankGroup) -> Pending:
    """The values that the first rank of the group has, in place."""
    if group.size == 1:
        return Pending(None, (tensor,), lambda: tensor)
    flight = _launch(
        name,
        group,
        tensor,
        lambda: dist.broadcast(tensor, src=group.members[0], group=group.handle, async_op=True),
    )
    return Pending(flight, (tensor,), lambda: tensor)


def sum_in_rank_order(contributions: Tensor, group: RankGroup) -> Tensor:
    """(size x n,) -> (n,): contributions added one by one, in fp32 or wider."""
    rows = contributions.view(group.size, -1)
    wide = torch.promote_types(rows.dtype, torch.float32)
    result = rows[0].to(wide, copy=True)
    for row in rows[1:]:
        result += row
    return result


def _all_reduce(
    name: str, values: Tensor, op: dist.ReduceOp.RedOpType, group: RankGroup
) -> Pending:
    if group.size == 1:
        return Pending(None, (values,), lambda: values)
    flight = _launch(
        name,
        group,
        values,
        lambda: dist.all_reduce(values, op, group=group.handle, async_op=True),
    )
    return Pending(flight, (values,), lambda: values)


def _launch(
    name: str, group: RankGroup, buffer: Tensor, call: Callable[[], dist.Work | None]
) -> Flight:
    return Flight(name, group, call, on_host=buffer.device.type == "cpu")
