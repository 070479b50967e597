"""Sending updated parameters to everyone, bucket by bucket, and who waits for them.

The way back of a reduction. Of what is still on its way when the step is over,
`ParametersInFlight` knows: modules wait for their own parameters, and everyone else for all.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.comm.collectives import Gathered, Pending, gather_stretch
from samestep.comm.groups import RankGroup
from samestep.layout.boxes import mesh_of
from samestep.plan.sharding import Bucket, Piece, Segment, ShardingPlan
from samestep.plan.transfers import BucketTransfers
from samestep.shards.replicated.awaited import mark, unmark
from samestep.shards.replicated.buffers import FlatParameters
from samestep.shards.replicated.local_tensors import LocalTensors

# They compute with the weights of modules inside them, without calling these.
READ_THEIR_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(eq=False)
class ParameterGatherer:
    """Gathers the pieces that ranks have updated, and puts those of others into place.

    places: the ranks in the order of the plan's segments.
    flat: the buffers in which parameters lie, where they do.
    in_flight: who waits for parameters after the step; None: the step places them itself.
    """

    held: LocalTensors
    plan: ShardingPlan
    places: RankGroup
    transfers: Sequence[BucketTransfers]
    flat: FlatParameters | None
    in_flight: "ParametersInFlight | None"

    def __post_init__(self) -> None:
        self._flying: dict[int, Pending[Gathered]] = {}
        self._owned = [bucket.owned(self.places.rank).pieces for bucket in self.plan.buckets]
        self._runs_of_others: dict[int, list[tuple[Piece, int, int]]] = {}

    def launch(self, number: int) -> None:
        """Start sending the updated pieces of a bucket."""
        bucket, transfer = self.plan.buckets[number], self.transfers[number].gather
        if transfer is None:
            return
        assert transfer.sizes is not None
        whole = None
        if self.flat is not None:
            whole = self.flat.room(number)
            segment = torch.split(whole, list(transfer.sizes))[self.places.rank]
        else:
            mine = [self.held.read(piece) for piece in self._owned[number]]
            if not mine:
                mine = [self.held.value(bucket.params[0]).new_empty(0)]
            segment = mine[0] if len(mine) == 1 else torch.cat(mine)
        planned = transfer.sizes[self.places.rank], transfer.dtype
        assert planned == (segment.numel(), segment.dtype), transfer.name
        self.advance()
        self._flying[number] = gather_stretch(transfer, segment, self.places, into=whole)
        if self.in_flight is not None:
            members = [self.held.params[index] for index in bucket.params]
            self.in_flight.add(members, partial(self.place, number))

    def advance(self) -> None:
        """Launch what follows on the first halves of gathers in two levels."""
        for gather in self._flying.values():
            gather.advance()

    def place(self, number: int) -> None:
        """Wait for a bucket, and copy what the others updated into place."""
        if number not in self._flying:
            return
        arrived = self._flying.pop(number).wait()
        if self.flat is not None:
            self.flat.arrived(number)
            return
        stretch, first = arrived
        for piece, start, stop in self._of_others(number):
            self.held.write(piece, stretch[start - first : stop - first])

    def _of_others(self, number: int) -> list[tuple[Piece, int, int]]:
        """What others own in a bucket, in runs, and where each lies."""
        known = self._runs_of_others.get(number)
        if known is None:
            bucket, rank = self.plan.buckets[number], self.places.rank
            segments = list(bucket.segments)
            segments[rank] = Segment((), (), segments[rank].size)
            runs = Bucket(bucket.dtype, tuple(segments)).runs
            known = self._runs_of_others[number] = [(p, at, at + p.size) for p, at in runs]
        return known


class ParametersInFlight:
    """Gathers that nobody has waited for yet: `arrivals`, by parameter.

    Modules that are watched wait before they run, are saved or are loaded into. Everyone else
    who reads or writes parameters between steps calls `wait_for_all` first.
    """

    def __init__(self) -> None:
        self.arrivals: dict[Tensor, Callable[[], None]] = {}
        self._watched: set[Tensor] = set()
        _tables.add(weakref.ref(self, _tables.discard))

    def watch(self, model: nn.Module) -> None:
        """From now on the modules of a model wait for their own parameters."""
        for module in model.modules():
            reads_children = isinstance(module, READ_THEIR_CHILDREN)
            own = list(module.parameters(recurse=reads_children))
            if own:
                wait = _kind_of_hook()(self, recurse=reads_children)
                module.register_forward_pre_hook(wait, prepend=True)
                module.register_state_dict_pre_hook(wait)  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(wait)  # type: ignore[no-untyped-call]
                self._watched.update(own)

    def all_watched(self, params: Iterable[Tensor]) -> bool:
        """Whether some module waits for each of them."""
        return self._watched.issuperset(params)

    def add(self, params: Iterable[Tensor], arrive: Callable[[], None]) -> None:
        """These are on their way until `arrive` was called; calling it again does nothing."""
        for param in params:
            self.arrivals[param] = arrive
            # Whoever takes the part of a DTensor takes a view, which autograd keeps: the memory
            # that it shares with others must not be written any more.
            whole = mesh_of(param) is not None
            mark(param, self.wait_for_all if whole else partial(self.wait_for, (param,)))

    def wait_for(self, params: Iterable[Tensor]) -> None:
        """Return when these have arrived."""
        if self.arrivals:
            for param in params:
                arrive = self.arrivals.pop(param, None)
                if arrive is not None:
                    arrive()
                    unmark(param)

    def wait_for_all(self) -> None:
        """Return when nothing is on its way."""
        self.wait_for(list(self.arrivals))


class _WaitFor:
    """A hook of a module. A copy of the model has none; the original's are not saved with it."""

    def __init__(self, in_flight: ParametersInFlight, *, recurse: bool) -> None:
        self._in_flight = in_flight
        self._recurse = recurse

    def __call__(self, module: nn.Module, *_: object) -> None:
        self._in_flight.wait_for(module.parameters(recurse=self._recurse))

    def __reduce__(self) -> Any:
        return _Nothing, ()


@cache
def _kind_of_hook() -> type[_WaitFor]:
    """The hooks, which compilers leave alone from now on.

    To say so imports all of torch._dynamo, as long again as torch itself: not before there is one.
    """
    disable: Any = torch.compiler.disable
    _WaitFor.__call__ = disable(_WaitFor.__call__)  # type: ignore[method-assign]
    return _WaitFor


class _Nothing:
    def __call__(self, *_: object) -> None:
        """The copied or loaded model belongs to no optimizer."""


# A set of references, since a WeakSet cannot be looked through while another thread makes an
# optimizer. Copying a set is one step for all threads.
_tables: set["weakref.ref[ParametersInFlight]"] = set()


def wait_for_anyone(params: Iterable[Tensor]) -> None:
    """Return when these have arrived, whichever optimizer has sent them on their way."""
    wanted = list(params)
    for reference in list(_tables):
        table = reference()
        if table is not None:
            table.wait_for(wanted)
