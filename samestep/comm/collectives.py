"""Collectives on segments: buffers of which every rank owns a range.

Each collective returns a `Pending`, which keeps its buffers alive until it was waited for.
Segments may differ in length and may be empty. In a group of one rank nothing travels, and the
result may be the very tensor that was given.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.diagnosis import recorder, watch
from samestep.comm.diagnosis.flight import CollectiveError as CollectiveError
from samestep.comm.diagnosis.flight import Flight
from samestep.comm.groups import Levels, RankGroup
from samestep.plan.transfers import Traffic, Transfer, gather_of, of_segments

T = TypeVar("T")


class Pending(Generic[T]):
    """A collective in flight, if anything travels; `wait()` returns the result, once."""

    def __init__(
        self, flight: Flight | None, buffers: tuple[Tensor, ...], result: Callable[[], T]
    ) -> None:
        self._flight = flight
        self._buffers: tuple[Tensor, ...] | None = buffers  # not to be freed or reused before
        self._result = result

    def advance(self) -> None:
        """Launch the second of two chained collectives, if there is one.

        All ranks call `advance` in the same order among their collectives.
        """

    def wait(self) -> T:
        if self._flight is not None:
            self._flight.wait()
        result = self._result()
        self._buffers = None
        return result


S = TypeVar("S")


class Chained(Pending[T], Generic[S, T]):
    """A collective followed by another on its result.

    Where the host waits, the second is launched by `advance` or `wait`. A GPU waits on `stream`,
    beside its compute stream: there the second is launched at once.
    """

    def __init__(
        self,
        first: Pending[S],
        then: Callable[[S], Pending[T]],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        super().__init__(None, (), lambda: self._second().wait())
        self._launched: Pending[T] | None = None
        self._launch: Callable[[], Pending[T]] | None = lambda: then(first.wait())
        if stream is not None:
            # The host does not wait: buffers of the first stay until the second is waited for.
            self._buffers = first._buffers
            # The second comes after what was launched so far, even if the first does not travel.
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            with torch.cuda.stream(stream):
                self._second()

    def advance(self) -> None:
        self._second()

    def _second(self) -> Pending[T]:
        if self._launch is not None:
            self._launched = self._launch()
            self._launch = None  # which knows the first one and its buffers
        assert self._launched is not None
        return self._launched


def add_up(
    transfer: Transfer, buffer: Tensor, group: RankGroup, *, reuse: bool = False
) -> Pending[Tensor]:
    """Sum a buffer over ranks by its planned collective; each rank gets its segment."""
    if transfer.traffic is Traffic.ALL_REDUCE:
        return total(transfer.name, buffer, group)
    assert transfer.sizes is not None
    # What is counted is what is sent.
    assert (transfer.elements, transfer.dtype) == (buffer.numel(), buffer.dtype), transfer.name
    if group.levels is not None:
        return _add_up_in_two(transfer, buffer, group, reuse=reuse)
    if transfer.traffic is Traffic.REDUCE_SCATTER:
        return _reduced(transfer, buffer, group)
    return _exchanged(transfer, buffer, group, reuse=reuse)


def _add_up_in_two(
    transfer: Transfer, buffer: Tensor, group: RankGroup, *, reuse: bool
) -> Pending[Tensor]:
    """Sum a column inside the host, then this rank's segment across hosts."""
    assert group.levels is not None
    assert transfer.sizes is not None
    inside, across = group.levels
    columns, mine = _columns(transfer.sizes, group.levels)
    first = transfer._replace(name=f"{transfer.name}, in hosts", sizes=columns, levels=1)

    def then(summed: Tensor) -> Pending[Tensor]:
        name = f"{transfer.name}, across hosts"
        second = Transfer(transfer.traffic, name, summed.dtype, summed.numel(), mine)
        return add_up(second, summed, across, reuse=True)

    summed_inside = add_up(first, buffer, inside, reuse=reuse)
    return Chained(summed_inside, then, _beside(inside, buffer.device))


def _beside(group: RankGroup, device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream that waits for collectives; None if the host waits."""
    return _stream(device) if is_nccl(group, device) else None


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _columns(sizes: Sequence[int], levels: Levels) -> tuple[list[int], Sequence[int]]:
    """Return the elements of every column, and of each segment of this rank's column."""
    hosts = levels.across.size
    columns = [sum(sizes[start : start + hosts]) for start in range(0, len(sizes), hosts)]
    first = levels.inside.rank * hosts
    return columns, sizes[first : first + hosts]


def exchange_segments(
    name: str, buffer: Tensor, sizes: Sequence[int], group: RankGroup, *, reuse: bool = False
) -> Pending[Tensor]:
    """Sum segments in rank order, in fp32 or wider; each rank gets the sum of its segment.

    Where hosts are known, the ranks of each host are summed first, as in two levels.
    An all-to-all and a local sum send as many bytes as a reduce-scatter, and the sum does not
    depend on where a segment lies. With `reuse` the sum may be a view of `buffer` or of the
    receive buffer.
    """
    transfer = of_segments(Traffic.EXCHANGE, name, buffer.dtype, sizes)
    return _exchanged(transfer, buffer, group, reuse=reuse)


def _exchanged(
    transfer: Transfer, buffer: Tensor, group: RankGroup, *, reuse: bool
) -> Pending[Tensor]:
    sizes = transfer.sizes
    assert sizes is not None
    start = sum(sizes[: group.rank])
    own = buffer[start : start + sizes[group.rank]]
    if group.size == 1:
        return Pending(None, (buffer,), lambda: sum_in_order([own]))
    others, outgoing = _others(sizes, group.rank)
    incoming = [own.numel()] * group.size
    incoming[group.rank] = outgoing[group.rank]
    received = buffer.new_empty(sum(incoming))

    def add_up() -> Tensor:
        contributions = list(torch.split(received, incoming))
        contributions[group.rank] = own
        if group.hosts == 1:
            if reuse and group.rank == 1:  # a + b is b + a: the sum of both may lie in mine
                contributions[:2] = reversed(contributions[:2])
            return sum_in_order(contributions, in_place=reuse)
        on_host = group.size // group.hosts
        of_hosts = [
            sum_in_order(contributions[first : first + on_host])
            for first in range(0, group.size, on_host)
        ]
        return sum_in_order(of_hosts, in_place=True)

    call = partial(dist.all_to_all_single, received, buffer[others], incoming, outgoing)
    return _sent(transfer, group, call, (buffer, received), add_up)


def move_parts(
    transfer: Transfer,
    buffer: Tensor,
    outgoing: Sequence[int],
    incoming: Sequence[int],
    group: RankGroup,
) -> Pending[Tensor]:
    """Send parts of a buffer to other ranks, and return theirs, in rank order (all-to-all).

    `outgoing` and `incoming` are the numbers of elements to and from each rank.
    """
    if not transfer.elements:
        return Pending(None, (buffer,), lambda: buffer.new_empty(0))
    assert transfer.sizes is not None
    assert transfer.incoming is not None
    # What is counted is what is sent: the plan has it for all ranks, these lists for this one.
    planned = transfer.sizes[group.rank], transfer.incoming[group.rank], transfer.dtype
    assert planned == (sum(outgoing), sum(incoming), buffer.dtype), transfer.name
    received = buffer.new_empty(sum(incoming))
    call = partial(dist.all_to_all_single, received, buffer, list(incoming), list(outgoing))
    return _sent(transfer, group, call, (buffer, received), lambda: received)


def reduce_segments(
    name: str, buffer: Tensor, sizes: Sequence[int], group: RankGroup
) -> Pending[Tensor]:
    """Sum segments by the backend's reduce-scatter; each rank gets the sum of its segment."""
    return _reduced(of_segments(Traffic.REDUCE_SCATTER, name, buffer.dtype, sizes), buffer, group)


def _reduced(transfer: Transfer, buffer: Tensor, group: RankGroup) -> Pending[Tensor]:
    if group.size == 1:
        return Pending(None, (buffer,), lambda: buffer)
    assert transfer.sizes is not None
    output = buffer.new_empty(transfer.sizes[group.rank])
    call = partial(dist.reduce_scatter, output, list(torch.split(buffer, list(transfer.sizes))))
    return _sent(transfer, group, call, (buffer, output), lambda: output)


class Gathered(NamedTuple):
    """A buffer with the segments of all other ranks.

    This rank's own segment may be in the buffer or not; if it is, it may not be valid.
    """

    stretch: Tensor
    start: int


def gather_segments(
    name: str, segment: Tensor, sizes: Sequence[int], group: RankGroup
) -> Pending[list[Tensor]]:
    """Gather the segments of all ranks on every rank, as a list by rank."""
    if group.size == 1:
        return Pending(None, (segment,), lambda: [segment])
    if segment.dtype == torch.int16:  # which no backend sends: as bytes
        of_bytes = segment.contiguous().view(torch.uint8)
        bytes_of_all = gather_segments(name, of_bytes, [2 * size for size in sizes], group)
        return Pending(
            None, (segment,), lambda: [part.view(torch.int16) for part in bytes_of_all.wait()]
        )
    gather = gather_stretch(_gather_of(name, segment, sizes, group), segment, group)

    def take_apart() -> list[Tensor]:
        stretch = gather.wait().stretch
        inside = list(sizes)
        if stretch.numel() < sum(sizes):
            inside[group.rank] = 0
        segments = list(torch.split(stretch, inside))
        segments[group.rank] = segment
        return segments

    return Pending(None, (segment,), take_apart)


def _gather_of(name: str, segment: Tensor, sizes: Sequence[int], group: RankGroup) -> Transfer:
    """Return the transfer that gathers segments in a group, where no plan has it."""
    on_cpu, uneven = segment.device.type == "cpu", is_nccl(group, segment.device)
    return gather_of(name, segment.dtype, sizes, on_cpu=on_cpu, uneven=uneven)


def gather_stretch(
    transfer: Transfer, segment: Tensor, group: RankGroup, into: Tensor | None = None
) -> Pending[Gathered]:
    """All-gather segments of all ranks side by side, in `into` if that is given.

    `into` has room for all segments, and `segment` is the view of it for this rank.
    """
    if group.size == 1:
        return Pending(None, (segment,), lambda: Gathered(segment, 0))
    if group.levels is not None:
        return _gather_in_two(transfer, segment, group, into)
    sizes = transfer.sizes
    assert sizes is not None
    if transfer.traffic in (Traffic.UNEVEN_GATHER, Traffic.ALL_GATHER):
        whole = segment.new_empty(sum(sizes)) if into is None else into
        if transfer.traffic is Traffic.UNEVEN_GATHER:
            call = partial(dist.all_gather, list(torch.split(whole, list(sizes))), segment)
        else:
            gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            call = partial(gather, whole, segment)
        return _sent(transfer, group, call, (segment, whole), lambda: Gathered(whole, 0))
    others, incoming = _others(sizes, group.rank)
    outgoing = [segment.numel()] * group.size
    outgoing[group.rank] = incoming[group.rank]
    copies = segment if group.size == 2 else segment.repeat(sum(map(bool, outgoing)) or 1)
    received = segment.new_empty(sum(incoming)) if into is None else into[others]
    call = partial(dist.all_to_all_single, received, copies, incoming, outgoing)
    gathered = Gathered(received, others.start or 0)
    return _sent(transfer, group, call, (copies, received, segment), lambda: gathered)


def _gather_in_two(
    transfer: Transfer, segment: Tensor, group: RankGroup, into: Tensor | None
) -> Pending[Gathered]:
    """Gather this rank's column across hosts, then the other columns inside the host."""
    assert group.levels is not None
    assert transfer.sizes is not None
    name, sizes = transfer.name, transfer.sizes
    inside, across = group.levels
    columns, mine = _columns(sizes, group.levels)
    whole = segment.new_empty(sum(sizes)) if into is None else into
    column = torch.split(whole, columns)[inside.rank]
    own = torch.split(column, list(mine))[across.rank]
    if into is None:
        own.copy_(segment)
    of_column = _gather_of(f"{name}, across hosts", own, mine, across)
    first = gather_stretch(of_column, own, across, into=column)

    def then(_: Gathered) -> Pending[Gathered]:
        of_others = _gather_of(f"{name}, in hosts", column, columns, inside)
        others = gather_stretch(of_others, column, inside, into=whole)

        def all_of_it() -> Gathered:
            others.wait()
            return Gathered(whole, 0)

        return Pending(None, (whole,), all_of_it)

    return Chained(first, then, _beside(across, segment.device))


def is_nccl(group: RankGroup, device: torch.device) -> bool:
    """Whether a group uses NCCL, which waits on streams and gathers unequal lengths at once."""
    return f"{device.type}:nccl" in str(dist.get_backend_config(group.handle))


def _others(sizes: Sequence[int], rank: int) -> tuple[slice, list[int]]:
    """Return the smallest range with all other ranks' segments, and the sizes inside."""
    inside = list(sizes)
    if rank == 0:
        inside[0] = 0
        return slice(sizes[0], None), inside
    if rank == len(sizes) - 1:
        inside[rank] = 0
        return slice(0, -sizes[rank] or None), inside
    return slice(None), inside  # with my own in the middle


def maximum(name: str, values: Tensor, group: RankGroup) -> Pending[Tensor]:
    """All-reduce the maximum of each element over ranks, in place."""
    call = partial(dist.all_reduce, values, dist.ReduceOp.MAX)
    return _in_place(Traffic.ALL_REDUCE, name, values, group, call)


def total(name: str, values: Tensor, group: RankGroup) -> Pending[Tensor]:
    """All-reduce the sum of each element over ranks, in place."""
    call = partial(dist.all_reduce, values, dist.ReduceOp.SUM)
    return _in_place(Traffic.ALL_REDUCE, name, values, group, call)


def from_first(name: str, tensor: Tensor, group: RankGroup) -> Pending[Tensor]:
    """Broadcast the values of the group's first rank, in place."""
    call = partial(dist.broadcast, tensor, src=group.members[0])
    return _in_place(Traffic.BROADCAST, name, tensor, group, call)


def sum_in_order(contributions: Sequence[Tensor], *, in_place: bool = False) -> Tensor:
    """Return the sum in list order, in fp32 or wider; `in_place`: in the first, if it is wide."""
    first = contributions[0]
    wide = torch.promote_types(first.dtype, torch.float32)
    result = first if in_place and first.dtype == wide else first.to(wide, copy=True)
    for contribution in contributions[1:]:
        result += contribution
    return result


def _in_place(
    traffic: Traffic, name: str, values: Tensor, group: RankGroup, call: Callable[..., Any]
) -> Pending[Tensor]:
    if group.size == 1:
        return Pending(None, (values,), lambda: values)
    transfer = Transfer(traffic, name, values.dtype, values.numel())
    return _sent(transfer, group, call, (values,), lambda: values)


def _sent(
    transfer: Transfer,
    group: RankGroup,
    call: Callable[..., Any],
    buffers: tuple[Tensor, ...],
    result: Callable[[], T],
) -> Pending[T]:
    """Launch a collective of torch.distributed."""
    launch = partial(call, group=group.handle, async_op=True)
    return Pending(_launch(transfer, group, buffers[0].device, launch), buffers, result)


def _launch(
    transfer: Transfer, group: RankGroup, device: torch.device, call: Callable[[], dist.Work | None]
) -> Flight:
    """Launch a collective, seen by watch and recorder; every collective passes here."""
    watched = watch.of(group.handle) if device.type == "cuda" else None
    operation = None if watched is None else watched(transfer, group.members)
    recording = recorder.current
    if recording is not None:
        flight = recording.launch(transfer, group, device, call)
    else:
        flight = Flight(
            transfer.name,
            group,
            call,
            on_host=device.type == "cpu",
            elements=transfer.elements,
        )
    if operation is not None:
        operation.work, operation.launched = flight.work, True
        flight.operation = operation
    return flight
