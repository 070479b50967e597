"""A process group that counts what goes through it, whatever the library says it sends.

    with counted() as log:  # in a rank, before the first group or optimizer is made
        opt = samestep.MuonAdamW(model)
        ...
    log.sent, log.received, [call.op for call in log], log.of("all_gather")

It is the backend "counting": gloo behind a Python ProcessGroup. From C++, only some calls reach
Python: DDP's do; those that do not find no backend and raise, so that none passes uncounted.

Bytes are what a rank must send at least, without a root that does all the work. Over all ranks
of a group, as much is received as is sent.

    all_to_all                  the segments for others
    reduce_scatter              all segments but mine; received: mine from each other rank
    all_gather                  mine to each other rank
    all_reduce                  2 S (N-1)/N: a reduce-scatter and an all-gather of S bytes
    broadcast, reduce           N-1 ranks must receive, or send, S bytes: the opposite direction
                                is shared by all, S (N-1)/N each (the best algorithms are near)
    gather, scatter, send, recv what goes over the wire
    barrier                     0
"""

import ctypes
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.limits import HANG


class Call(NamedTuple):
    """One collective as this rank launched it."""

    op: str
    dtype: torch.dtype | None
    elements: int  # that this rank hands in; of a recv or on a scatter's receivers: that it gets
    sent: Fraction  # bytes; exact, since N need not divide them
    received: Fraction
    asynchronous: bool | None  # None: send and recv do not say
    group: str


class Log(list[Call]):
    """The calls of a block, in the order of their launch."""

    @property
    def sent(self) -> Fraction:
        return sum((call.sent for call in self), Fraction(0))

    @property
    def received(self) -> Fraction:
        return sum((call.received for call in self), Fraction(0))

    def of(self, *ops: str) -> "Log":
        return Log(call for call in self if call.op in ops)


class SettledWork(dist.Work):
    """Gloo's work, but when `wait` returns, gloo's threads have let go of the tensors.

    They do so a little after the transfer. A buffer dropped before that would be freed by them,
    at some time and in a thread that nobody watches: see tests/memory.py.
    """

    def __init__(self, launch: Callable[..., dist.Work], args: tuple[Any, ...]) -> None:
        super().__init__()
        self._args: tuple[Any, ...] = args  # so that gloo is not the last owner
        self._lent: list[weakref.ref[Any]] = []
        self._work: dist.Work | None = launch(*_lend(args, self._lent))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._work is not None:
            self._work.wait(timeout)
        self._work = None
        deadline = time.monotonic() + HANG
        while any(memory() is not None for memory in self._lent):
            if time.monotonic() > deadline:
                raise RuntimeError("gloo still holds the tensors of a call that is done")
            time.sleep(0)
        self._args = ()
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        assert self._work is not None, "to be asked before wait"
        self._lent = []  # the future may hold them for as long as it likes
        return self._work.get_future()


_open_logs: list[Log] = []
_replaced: list[dist.ProcessGroup] = []  # kept, since other ranks may still use its connections


class CountingGroup(dist.ProcessGroup):
    """A gloo group that enters every call into the open logs, then forwards it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # torch refuses the store from a Python subclass
        self._store, self._name = store, ""
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._launcher = ThreadPoolExecutor(1)

    @staticmethod
    def install(timeout: timedelta = timedelta(seconds=HANG)) -> Log:
        """Make the default group, and with it groups to come, count; give a log that stays open.

        To be called by all ranks. It replaces the default group: handles from before are void.
        """
        log = Log()
        _open_logs.append(log)
        world = dist.group.WORLD
        if not isinstance(world, CountingGroup):
            rank, size = world.rank(), world.size()
            store = dist.PrefixStore("counting", world.get_group_store())
            _replaced.append(world)
            dist.destroy_process_group()
            dist.init_process_group(
                "counting", store=store, rank=rank, world_size=size, timeout=timeout
            )
        return log

    # torch's own versions of these ask a registered backend, which would let calls pass uncounted.

    def get_group_store(self) -> dist.Store:
        return self._store

    def name(self) -> str:
        return "counting"

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _enter(
        self,
        op: str,
        tensors: Any,
        sent: int | Fraction,
        received: int | Fraction,
        opts: tuple[Any, ...] | None,
    ) -> None:
        flat = _flat(tensors)
        asynchronous = None if opts is None else any(getattr(o, "asyncOp", False) for o in opts)
        call = Call(
            op,
            flat[0].dtype if flat else None,
            sum(tensor.numel() for tensor in flat),
            Fraction(sent),
            Fraction(received),
            asynchronous,
            self.group_name,
        )
        for log in _open_logs:
            log.append(call)

    # --- collectives, by the names under which torch calls them -------------------------------

    def allreduce(self, tensors: Any, *opts: Any) -> dist.Work:
        share = 2 * self._share(tensors)
        self._enter("all_reduce", tensors, share, share, opts)
        return self._forward("allreduce", tensors, *opts)

    def allreduce_coalesced(self, tensors: Any, *opts: Any) -> dist.Work:
        share = 2 * self._share(tensors)
        self._enter("all_reduce", tensors, share, share, opts)
        return self._forward("allreduce_coalesced", tensors, *opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, *opts: Any) -> dist.Work:
        self._enter_reduce_scatter(outputs, inputs, opts)
        return self._forward("reduce_scatter", outputs, inputs, *opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, *opts: Any) -> dist.Work:
        self._enter_reduce_scatter(output, input, opts)
        # Underscored, but the only name that the gloo backend has for it; so is the gather's.
        return self._forward("_reduce_scatter_base", output, input, *opts)

    def allgather(self, outputs: Any, inputs: Any, *opts: Any) -> dist.Work:
        self._enter_all_gather(outputs, inputs, opts)
        return self._forward("allgather", outputs, inputs, *opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, *opts: Any) -> dist.Work:
        self._enter_all_gather(outputs, inputs, opts)
        return self._forward("allgather_coalesced", outputs, inputs, *opts)

    def all_gather_single(self, output: Tensor, input: Tensor, *opts: Any) -> dist.Work:
        self._enter_all_gather(output, input, opts)
        return self._forward("_allgather_base", output, input, *opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, incoming: list[int], outgoing: list[int], *opts: Any
    ) -> dist.Work:
        sent = _bytes(input) - self._own_rows(input, outgoing)
        received = _bytes(output) - self._own_rows(output, incoming)
        self._enter("all_to_all", input, sent, received, opts)
        return self._forward("alltoall_base", output, input, incoming, outgoing, *opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], *opts: Any) -> dist.Work:
        sent = _bytes(inputs) - _bytes(inputs[self.rank()])
        received = _bytes(outputs) - _bytes(outputs[self.rank()])
        self._enter("all_to_all", inputs, sent, received, opts)
        return self._forward("alltoall", outputs, inputs, *opts)

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        received = 0 if self._is_root(opts) else _bytes(tensors)
        self._enter("broadcast", tensors, self._share(tensors), received, (opts,))
        return self._forward("broadcast", tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> dist.Work:
        sent = 0 if self._is_root(opts) else _bytes(tensors)
        self._enter("reduce", tensors, sent, self._share(tensors), (opts,))
        return self._forward("reduce", tensors, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        own, root = _bytes(inputs), self._is_root(opts)
        received = _bytes(outputs) - own if root else 0
        self._enter("gather", inputs, 0 if root else own, received, (opts,))
        return self._forward("gather", outputs, inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        own, root = _bytes(outputs), self._is_root(opts)
        sent = _bytes(inputs) - own if root else 0
        self._enter("scatter", inputs if root else outputs, sent, 0 if root else own, (opts,))
        return self._forward("scatter", outputs, inputs, opts)

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> dist.Work:
        self._enter("send", tensors, _bytes(tensors), 0, None)
        return self._gloo.send(tensors, destination, tag)  # no thread of gloo's takes part

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        self._enter("recv", tensors, 0, _bytes(tensors), None)
        return self._gloo.recv(tensors, source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        self._enter("recv", tensors, 0, _bytes(tensors), None)
        return self._gloo.recv_anysource(tensors, tag)

    def barrier(self, opts: Any) -> dist.Work:
        self._enter("barrier", [], 0, 0, (opts,))
        return self._forward("barrier", opts)

    # What torch before 2.13 calls them.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _forward(self, name: str, *args: Any) -> dist.Work:
        # From another thread, as gloo copies some inputs, which tests/memory.py shall not see.
        return SettledWork(
            lambda *lent: self._launcher.submit(getattr(self._gloo, name), *lent).result(), args
        )

    # --- bytes --------------------------------------------------------------------------------

    def _enter_reduce_scatter(self, outputs: Any, inputs: Any, opts: tuple[Any, ...]) -> None:
        mine = _bytes(outputs)
        received = mine * (self.size() - 1)
        self._enter("reduce_scatter", inputs, _bytes(inputs) - mine, received, opts)

    def _enter_all_gather(self, outputs: Any, inputs: Any, opts: tuple[Any, ...]) -> None:
        mine = _bytes(inputs)
        sent = mine * (self.size() - 1)
        self._enter("all_gather", inputs, sent, _bytes(outputs) - mine, opts)

    def _share(self, tensors: Any) -> Fraction:
        return Fraction(_bytes(tensors) * (self.size() - 1), self.size())

    def _own_rows(self, tensor: Tensor, splits: list[int]) -> int:
        if not splits:  # torch's way to say that they are equal
            return _bytes(tensor) // self.size()
        return splits[self.rank()] * (_bytes(tensor) // max(tensor.shape[0], 1))

    def _is_root(self, opts: Any) -> bool:
        return bool(self.rank() == opts.rootRank)


dist.Backend.register_backend("counting", CountingGroup, devices=["cpu"])


@contextmanager
def counted(*, default: bool = True) -> Iterator[Log]:
    """Log the calls of this block, after `install`, which lasts beyond it.

    With `default=False` the default group stays as it is, and only groups count that are made
    by `dist.new_group(backend="counting")`.
    """
    log = CountingGroup.install() if default else Log()
    if not default:
        _open_logs.append(log)
    try:
        yield log
    finally:
        _open_logs[:] = [other for other in _open_logs if other is not log]


def _lend(value: Any, lent: list[weakref.ref[Any]]) -> Any:
    """The value with every tensor replaced by another on the same memory, whose end is seen."""
    if isinstance(value, list | tuple):
        return type(value)(_lend(part, lent) for part in value)
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return value
    if value.numel() == 0:
        return value.new_empty(value.shape)
    if not value.is_contiguous():  # gloo refuses it
        return value
    # A weak reference to an alias would not do: torch ends a tensor's Python object first and
    # lets go of its storage afterwards. A buffer that Python owns is gone when it is gone.
    memory = type("Memory", (ctypes.c_byte * _bytes(value),), {}).from_address(value.data_ptr())
    memory.owner = value
    lent.append(weakref.ref(memory))
    return torch.frombuffer(memory, dtype=value.dtype).view(value.shape)


def _flat(tensors: Any) -> list[Tensor]:
    """The tensors of a tensor, a list, or a list of lists."""
    if isinstance(tensors, Tensor):
        return [tensors]
    return [tensor for part in tensors for tensor in _flat(part)]


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _flat(tensors))
