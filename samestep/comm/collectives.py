"""Collectives on segments: a buffer in which every rank owns one stretch.

Each returns a `Pending`, which keeps its buffers alive until it was waited for.
Segments may differ in length and may be empty.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.groups import RankGroup


class CollectiveError(RuntimeError):
    """A collective failed: a peer died, never arrived, or sent something else."""


class Pending:
    """A collective in flight. `wait()` gives its result, and does so once."""

    def __init__(
        self,
        name: str,
        work: dist.Work | None,
        buffers: tuple[Tensor, ...],
        result: Callable[[], Tensor],
    ) -> None:
        self.name = name
        self._work = work
        self._buffers: tuple[Tensor, ...] | None = buffers  # not to be freed or reused before
        self._result = result

    def wait(self) -> Tensor:
        """Wait for the transfer, then give the result."""
        try:
            if self._work is not None:
                self._work.wait()
        except RuntimeError as error:
            raise CollectiveError(f"{self.name} failed: {error}") from error
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
    mine = sizes[group.rank]
    if ordered:
        received = buffer.new_empty(group.size * mine)
        work = _launch(
            name,
            lambda: dist.all_to_all_single(
                received, buffer, [mine] * group.size, list(sizes), group.handle, async_op=True
            ),
        )
        return Pending(name, work, (buffer, received), lambda: sum_in_rank_order(received, group))
    output = buffer.new_empty(mine)
    parts = list(torch.split(buffer, list(sizes)))
    work = _launch(
        name, lambda: dist.reduce_scatter(output, parts, group=group.handle, async_op=True)
    )
    return Pending(name, work, (buffer, output), lambda: output)


def gather_segments(name: str, segment: Tensor, sizes: Sequence[int], group: RankGroup) -> Pending:
    """Give everyone all segments, in rank order, as one buffer."""
    if len(set(sizes)) == 1:
        whole = segment.new_empty(sum(sizes))
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        work = _launch(name, lambda: gather(whole, segment, group=group.handle, async_op=True))
        return Pending(name, work, (segment, whole), lambda: whole)
    # Unequal lengths: no backend gathers them in one call but as an all-to-all of copies.
    others = [0 if rank == group.rank else segment.numel() for rank in range(group.size)]
    copies = segment.repeat(group.size - 1)
    incoming = [0 if rank == group.rank else size for rank, size in enumerate(sizes)]
    received = segment.new_empty(sum(incoming))
    work = _launch(
        name,
        lambda: dist.all_to_all_single(
            received, copies, incoming, others, group.handle, async_op=True
        ),
    )

    def assemble() -> Tensor:
        before = sum(incoming[: group.rank])
        return torch.cat([received[:before], segment, received[before:]])

    return Pending(name, work, (copies, received, segment), assemble)


def reduce_whole(name: str, buffer: Tensor, group: RankGroup, *, ordered: bool) -> Pending:
    """Sum every rank's `buffer` and give everyone the whole sum."""
    if not ordered:
        work = _launch(name, lambda: dist.all_reduce(buffer, group=group.handle, async_op=True))
        return Pending(name, work, (buffer,), lambda: buffer)
    bounds = [buffer.numel() * rank // group.size for rank in range(group.size + 1)]
    sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
    sums = reduce_segments(name, buffer, sizes, group, ordered=True)
    return Pending(
        name, None, (buffer,), lambda: gather_segments(name, sums.wait(), sizes, group).wait()
    )


def maximum(name: str, values: Tensor, group: RankGroup) -> Pending:
    """The largest value of each element over all ranks."""
    work = _launch(
        name,
        lambda: dist.all_reduce(values, dist.ReduceOp.MAX, group=group.handle, async_op=True),
    )
    return Pending(name, work, (values,), lambda: values)


def total(name: str, values: Tensor, group: RankGroup) -> Pending:
    """The sum of each element over all ranks."""
    return reduce_whole(name, values, group, ordered=False)


def sum_in_rank_order(contributions: Tensor, group: RankGroup) -> Tensor:
    """(size x n,) -> (n,): contributions added one by one, in fp32 or wider."""
    rows = contributions.view(group.size, -1)
    wide = torch.promote_types(rows.dtype, torch.float32)
    result = rows[0].to(wide, copy=True)
    for row in rows[1:]:
        result += row
    return result


def _launch(name: str, call: Callable[[], dist.Work | None]) -> dist.Work | None:
    try:
        return call()
    except RuntimeError as error:
        raise CollectiveError(f"{name} failed: {error}") from error
