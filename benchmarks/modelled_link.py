"""A link of known speed between forked ranks: gloo moves the data, a model says how long it takes.

    link = ModelledLink(ranks=2)  # before ranks are forked
    link.install()                # in every rank, before the first group or optimizer is made
    link.set_speed(latency=1e-4, bandwidth=50e6)  # at the same place in all ranks

It is the backend "modelled". Transfers follow each other, as they do on one stream:

    start(k) = max(launch(k) on every rank, end(k - 1))
    end(k) = start(k) + latency + bytes / bandwidth

Bytes are what the busiest direction of any rank's link carries: the most of sent and received. A
transfer is complete when its end has passed and gloo is done. Groups of some ranks have links of
their own speed (`set_speeds`), and a rank's transfers follow each other over all its groups. Their
ranks learn of each other's links when these wait. The clock is what a rank has computed, plus what
it has waited for the link by the model: nobody sleeps, and other work on the machine does not
count. For ranks of one thread. A barrier makes the clocks of all ranks equal.
"""

import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

CAPACITY = 1 << 17  # transfers of a group in the life of a link
POLL = 1e-4  # seconds

LEAST = 1e-12  # seconds: not 0, which stands for what is not known yet


class Speed(NamedTuple):
    """Of a link: seconds per transfer, and bytes per second."""

    latency: float
    bandwidth: float


Speeds = Callable[[str, Sequence[int]], Speed]  # by kind of collective, and the ranks that meet


@dataclass(slots=True)
class Transfer:
    """One collective of this rank; times in seconds of the link's clock."""

    number: int
    kind: str
    bytes: float
    seconds: float  # that it occupies the link; of this rank alone until all have launched it
    launched: float
    lane: int = 0  # which one of the rank's groups
    members: Sequence[int] = ()
    ready: float = math.nan  # when the last rank launched it; before that nobody can know
    start: float = math.nan
    end: float = math.nan


class ModelledLink:
    """Which rank launched what when, in memory that forked ranks share, and how long that takes."""

    def __init__(self, ranks: int, *, groups: int = 1) -> None:
        """groups: that a rank is in, at most."""
        self._waited = 0.0
        # Per rank and group: launches, when they would be over on an idle link, and when the rank's
        # link was free for them.
        self._times = [
            [[multiprocessing.RawArray("d", CAPACITY) for _ in range(3)] for _ in range(groups)]
            for _ in range(ranks)
        ]
        self._rank = -1
        self._counts: list[int] = []  # of transfers, by group
        self._unknown: list[Transfer] = []  # of which some rank was not seen to launch
        self._last_end = 0.0
        self.transfers: list[Transfer] = []  # in order of launch; to be cleared by whoever reads
        self.set_speed(0.0, math.inf)

    def set_speed(self, latency: float, bandwidth: float) -> None:
        """For transfers to come: seconds per transfer, and bytes per second."""
        speed = Speed(latency, bandwidth)
        self.set_speeds(lambda kind, members: speed)

    def set_speeds(self, speeds: Speeds) -> None:
        """The same, by kind of collective and the ranks that meet."""
        self._speeds = speeds

    def add_group(self, store: dist.Store, rank: int, size: int) -> tuple[int, Sequence[int]]:
        """A group that this rank is in, for `launch`: its number here, and the ranks in it."""
        store.set(f"modelled member {rank}", str(self._rank))
        members = tuple(int(store.get(f"modelled member {other}")) for other in range(size))
        self._counts.append(0)
        return len(self._counts) - 1, members

    def now(self) -> float:
        return time.thread_time() + self._waited

    def install(self) -> None:
        """Put the link under the default group, on all ranks; handles from before are void."""
        world = dist.group.WORLD
        assert world is not None
        self._rank = world.rank()
        dist.Backend.register_backend(
            "modelled", lambda *args: ModelledGroup(self, *args), devices=["cpu"]
        )
        store = dist.PrefixStore("modelled", world.get_group_store())
        size = world.size()
        self._replaced = world  # kept, since other ranks may still use its connections
        dist.destroy_process_group()
        dist.init_process_group("modelled", store=store, rank=self._rank, world_size=size)

    def launch(self, kind: str, carried: float, lane: int, members: Sequence[int]) -> Transfer:
        speed = self._speeds(kind, members)
        seconds = speed.latency + carried / speed.bandwidth
        number = self._counts[lane]
        transfer = Transfer(number, kind, carried, seconds, self.now(), lane, members)
        launches, alone, _ = self._times[self._rank][lane]
        launches[number], alone[number] = transfer.launched, transfer.launched + seconds
        self._counts[lane] += 1
        self._unknown.append(transfer)
        self.transfers.append(transfer)
        return transfer

    def is_over(self, transfer: Transfer) -> bool:
        return self._is_known(transfer) and self.now() >= transfer.end

    def pass_time(self, transfer: Transfer) -> None:
        """Come nearer to the end of a transfer."""
        if not self._is_known(transfer):
            time.sleep(POLL)
        else:
            self._waited += max(transfer.end - self.now(), 0.0)

    def forget_polling(self, since: float, transfer: Transfer) -> None:
        """What a rank computes while it waits, since then, is this model's own work."""
        self._waited = max(since, transfer.end) - time.thread_time()

    def _is_known(self, transfer: Transfer) -> bool:
        while self._unknown and math.isnan(transfer.end):
            first = self._unknown[0]
            frees = self._times[self._rank][first.lane][2]
            frees[first.number] = max(self._last_end, LEAST)
            seen = [
                [times[first.number] for times in self._times[member][first.lane]]
                for member in first.members
            ]
            if len(self._counts) == 1:  # all ranks have the same transfers: their links are alike
                seen = [[launched, over, self._last_end + LEAST] for launched, over, _ in seen]
            if not all(map(all, seen)):
                return False
            first.seconds = max(over - launched for launched, over, _ in seen)
            first.ready = max(launched for launched, _, _ in seen)
            first.start = max(first.ready, self._last_end, *(free for _, _, free in seen))
            first.end = self._last_end = first.start + first.seconds
            self._unknown.pop(0)
        return True


class ModelledWork(dist.Work):
    """Complete when both gloo and the model of the link say so."""

    def __init__(self, link: ModelledLink, transfer: Transfer, real: dist.Work) -> None:
        super().__init__()
        self._link, self._transfer, self._real = link, transfer, real

    def is_completed(self) -> bool:
        return self._real.is_completed() and self._link.is_over(self._transfer)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Sleep until it is complete; raises if that takes longer than a timeout above 0."""
        transfer, limit = self._transfer, timeout.total_seconds() or math.inf
        begun, deadline = self._link.now(), time.monotonic() + limit
        self._real.wait(timeout)
        while not self._link.is_over(transfer):
            if time.monotonic() >= deadline:
                raise RuntimeError(f"{transfer.kind} is not over after {limit} s")
            self._link.pass_time(transfer)
        self._link.forget_polling(begun, transfer)
        return True


class ModelledGroup(dist.ProcessGroup):
    """A gloo group whose collectives take the time of a modelled link.

    It has the collectives that samestep and FSDP2 launch on CPU; others find no backend and raise.
    """

    def __init__(
        self, link: ModelledLink, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> None:
        # torch refuses the store from a Python subclass.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._link, self._store, self._name = link, store, ""
        self._lane, self._members = link.add_group(store, rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(
            store, rank, size, timeout
        )  # not all of it has types

    # torch's own versions of these ask a registered backend, which would not be modelled.

    def get_group_store(self) -> dist.Store:
        return self._store

    def name(self) -> str:
        return "modelled"

    @property
    def group_name(self) -> Any:  # a str, of which newer torch has a type of its own
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    # By the names under which torch calls them.

    def all_to_all_single(
        self, output: Tensor, input: Tensor, incoming: list[int], outgoing: list[int], *opts: Any
    ) -> dist.Work:
        sent = sum(outgoing) - outgoing[self.rank()]
        received = sum(incoming) - incoming[self.rank()]
        carried = max(sent, received) * input.nbytes / max(len(input), 1)  # sizes count rows
        launch = self._gloo.alltoall_base
        return self._launch("all_to_all", carried, launch, output, input, incoming, outgoing, *opts)

    def allreduce(self, tensors: Any, *opts: Any) -> dist.Work:
        """A reduce-scatter and an all-gather."""
        carried = 2 * self._share(tensors)
        return self._launch("all_reduce", carried, self._gloo.allreduce, tensors, *opts)

    def broadcast(self, tensors: Any, *opts: Any) -> dist.Work:
        carried = sum(tensor.nbytes for tensor in tensors)
        return self._launch("broadcast", carried, self._gloo.broadcast, tensors, *opts)

    def all_gather_single(self, output: Tensor, input: Tensor, *opts: Any) -> dist.Work:
        carried = self._share([output])
        return self._launch("all_gather", carried, self._gloo._allgather_base, output, input, *opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, *opts: Any) -> dist.Work:
        launch = self._gloo._reduce_scatter_base
        return self._launch("reduce_scatter", self._share([input]), launch, output, input, *opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._launch("barrier", 0, self._gloo.barrier, opts)

    # Their names before torch 2.13.
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def _share(self, tensors: list[Tensor]) -> float:
        return sum(tensor.nbytes for tensor in tensors) * (self.size() - 1) / self.size()

    def _launch(
        self, kind: str, carried: float, launch: Callable[..., dist.Work], *args: Any
    ) -> dist.Work:
        transfer = self._link.launch(kind, carried, self._lane, self._members)
        return ModelledWork(self._link, transfer, launch(*args))
