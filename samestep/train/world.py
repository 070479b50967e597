"""The ranks of a run: process group, this process's rank and device, sums over all ranks."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.nccl import sharing_problem
from samestep.launch import TorchrunRank, torchrun_rank
from samestep.tooling.request import BadRequestError


class Running(NamedTuple):
    """The backend over which ranks communicate, as a log records it.

    requested_backend: The backend that `--device` asks for: "nccl" for GPUs, "gloo" for a CPU;
        None: auto, which takes what there is.
    runtime_mode: "torchrun", "one process", or "caller", who has initialized the process group.
    fallback_reason: The reason why the backend is not the one that would be best here;
        None: it is the best.
    """

    requested_backend: str | None = None
    actual_backend: str = "gloo"
    runtime_mode: str = "one process"
    fallback_reason: str | None = None


class World(NamedTuple):
    """The number of ranks, and this process's rank and device."""

    rank: int
    size: int
    device: torch.device
    running: Running = Running()

    def share(self, items: Tensor) -> Tensor:
        """Return this rank's part of items divided by index; sizes differ by at most one."""
        return items.tensor_split(self.size)[self.rank]

    def largest_share(self, count: int) -> int:
        """Return the size of the largest part when all ranks divide ``count`` items."""
        return -(-count // self.size)

    def total(self, value: Tensor) -> Tensor:
        """Return the sum over all ranks in rank order: the same bits on every rank, every time."""
        parts = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(parts, value.contiguous())
        return sum(parts[1:], start=parts[0])

    def highest(self, value: Tensor) -> Callable[[], Tensor]:
        """Start an all-reduce of the maximum; return a function that waits for the result."""
        work = dist.all_reduce(value, dist.ReduceOp.MAX, async_op=True)

        def wait() -> Tensor:
            if work is not None:
                work.wait()
            return value

        return wait


@contextmanager
def joined(device: str) -> Iterator[World]:
    """Join the process group of torchrun's ranks, or make one of this process alone.

    Yield the world, and destroy the process group at the end, unless the caller initialized it.
    """
    place = torchrun_rank() or TorchrunRank(0, 1, 0, 1)
    here = _device(device, place)
    asked = {"cuda": "nccl", "cpu": "gloo"}.get(device)
    if dist.is_initialized():  # by whoever called: they end it, too
        actual = dist.get_backend()
        reason = None if asked in (None, actual) else "the process group was there already"
        running = Running(asked, actual, "caller", reason)
        yield World(dist.get_rank(), dist.get_world_size(), here, running)
        return
    if place.local_world_size == place.world_size and sys.platform == "linux":
        # On one machine: its own name may not resolve to an address that gloo can use.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # NCCL refuses two ranks on one GPU, unless its environment allows that; gloo takes them.
    reason = None if device == "cpu" else _no_nccl(here, place)
    backend = "nccl" if here.type == "cuda" and reason is None else "gloo"
    dist.init_process_group(
        backend,
        store=_store(),
        rank=place.rank,
        world_size=place.world_size,
        device_id=here if backend == "nccl" else None,
    )
    mode = "one process" if torchrun_rank() is None else "torchrun"
    try:
        running = Running(asked, backend, mode, reason)
        yield World(place.rank, place.world_size, here, running)
    finally:
        dist.destroy_process_group()


def _no_nccl(here: torch.device, place: TorchrunRank) -> str | None:
    """Return the reason why ranks do not communicate over NCCL; None if they do."""
    if here.type != "cuda":
        return "torch sees no GPU"
    gpus = torch.cuda.device_count()
    if place.local_world_size <= gpus:
        return None
    problem = sharing_problem()
    return problem and f"{place.local_world_size} ranks share {gpus} GPUs: {problem}"


def _store() -> dist.Store:
    """Return the store in which ranks find each other's addresses.

    torchrun keeps its store when it restarts all ranks, with the addresses of processes that are
    gone, to which gloo would connect. Every attempt therefore has a prefix of its own.
    """
    if torchrun_rank() is None:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"samestep_train_{attempt}", store)


def _device(asked: str, place: TorchrunRank) -> torch.device:
    if asked == "cuda" and not torch.cuda.is_available():
        raise BadRequestError("--device is cuda, and torch sees no GPU here")
    if asked == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
