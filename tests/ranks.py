"""Run a function on several ranks and collect its values.

``run_forked`` has real processes and gloo; ``run_threaded`` takes a few milliseconds.
"""

import importlib
import itertools
import os
import socket
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import samestep
from samestep.launch import RanksFailed, forked
from tests.limits import HANG, limit
from tests.ranks_threaded import run_threaded

__all__ = ["RanksFailed", "free_port", "prepare", "run_cases", "run_forked", "run_threaded"]


def run_forked(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float | Callable[[], float] = HANG,
    collective_timeout: float = limit(120.0),
    grace: float = limit(5.0),
) -> list[Any]:
    """`samestep.launch.forked.run_forked` with limits for hangs alone.

    A test that itself waits for one of them to pass gives a short one, by `tests.limits.limit`.
    """
    prepare()
    return forked.run_forked(
        world_size,
        fn,
        *args,
        timeout=timeout,
        collective_timeout=collective_timeout,
        grace=grace,
    )


_ports = itertools.count(os.getpid())


def free_port() -> int:
    """A port that ranks can meet at, below those that the system gives to connections.

    One of those could be taken by a connection of another test before ranks have come there.
    """
    for number in itertools.islice(_ports, 1000):
        port = 20_000 + number % 10_000
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("no port is free")


def run_cases(
    world_size: int, cases: Iterable[Any], job: Callable[[int, Any], Any], **limits: Any
) -> list[tuple[Any, list[Any]]]:
    """`job(rank, case)` of one case after another, on ranks that are started once.

    Gives each case with the values of all ranks. An error tells of which case it is.
    """
    cases = list(cases)

    def job_of_all(rank: int) -> list[Any]:
        found = []
        for case in cases:
            try:
                found.append(job(rank, case))
            except BaseException as error:
                error.add_note(f"in case {case}")
                raise
        return found

    results = run_forked(world_size, job_of_all, **limits)
    return [(case, [of_rank[n] for of_rank in results]) for n, case in enumerate(cases)]


@cache
def prepare() -> None:
    """Import and compute here, once, what every forked rank would for itself.

    No backward pass, since that starts threads which ranks would lack.
    """
    importlib.import_module("torch._dynamo")  # which hooks and compiled rules import
    for name in ("block_exchange", "gradients", "sharded"):
        importlib.import_module(f"samestep.shards.dtensor.{name}")
    importlib.import_module("samestep.checkpoint")
    matrix = nn.Parameter(torch.eye(2))
    matrix.grad = torch.eye(2)
    samestep.Muon([matrix]).step()
    if torch.backends.cuda.is_built():
        return  # fake tensors pretend a GPU, and a backward pass here would start its threads
    # torch's first look at an operation on DTensors; no test has so many ranks.
    mesh = DeviceMesh("cpu", torch.arange(61), _init_backend=False, _rank=0)
    nn.Parameter(DTensor.from_local(torch.eye(2), mesh, [Shard(0)], run_check=False)).detach()
