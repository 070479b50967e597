"""Delays at random, in streams of a GPU and on one host: where a wait is missing, values are wrong.

NCCL runs a collective on a stream of its own, which begins when the stream that launches it has
come so far; `wait()` of its work lets the stream that is current then wait for the end. Tiny models
are so fast that a collective has mostly arrived before anyone reads it, whoever forgot to wait. So
a kernel that only spins is put

    compute      into the current stream, before a launch: what is sent, and all after it, is late
    collectives  between the current stream and the collective, which begins late and alone
    copies       before copies between host and device, on their own streams
    host         as a sleep before a launch, on one rank

Draws depend on seed and rank alone, in the order in which a rank launches its collectives.

A missing wait may still not show. A communicator runs its collectives in order: who has waited for
a later one of a group has waited for all before it. And streams that share a queue of the device
wait for each other: `CUDA_DEVICE_MAX_CONNECTIONS=32` gives nearly all one of their own, which
NVIDIA's MPS refuses.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.tooling.request import BadRequestError
from samestep.update.offload import CudaStreams

Where = Literal["compute", "collectives", "copies", "host"]
EVERYWHERE: tuple[Where, ...] = ("compute", "collectives", "copies", "host")
CYCLES_PER_MS = 1_500_000  # of a spinning kernel; clocks differ, and so may the delay
# What launches a collective in torch.distributed; of some names torch has only one, by version.
LAUNCHES = (
    "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single",
    "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single",
)  # fmt: skip


@dataclass(frozen=True)
class Delays:
    """The kinds of delays, how often they occur, and their length.

    often: the part of all launches that is delayed, of each kind by itself.
    most_ms: a delay is at most that long, and at least half of it where all are delayed.
    """

    where: tuple[Where, ...] = EVERYWHERE
    seed: int = 0
    often: float = 0.25
    most_ms: float = 3.0

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Delay what this rank launches on a GPU while this is entered."""
        with ExitStack() as stack:
            draws = _Draws(self)
            for name in LAUNCHES:
                if hasattr(dist, name):
                    late = partial(_launched_late, draws, getattr(dist, name))
                    stack.enter_context(mock.patch.object(dist, name, late))
            copied = CudaStreams._copied

            def copied_late(self: CudaStreams, stream: Any, copies: Any) -> Any:
                with torch.cuda.stream(stream):
                    draws.spin("copies")
                return copied(self, stream, copies)

            stack.enter_context(mock.patch.object(CudaStreams, "_copied", copied_late))
            yield


def check_delays(device: str) -> None:
    """Raise BadRequestError where there are no streams to delay."""
    if device != "cuda":
        raise BadRequestError(
            "--delays are for streams of GPUs, and ranks compute on "
            f"{device}: give --backend nccl, or --device cuda"
        )


class _Draws:
    """The delays of one rank, drawn one after the other."""

    def __init__(self, delays: Delays) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._delays = delays
        self._random = random.Random(f"{delays.seed} {rank}")
        self._late_host = random.Random(delays.seed).randrange(ranks) == rank

    def ms(self, where: Where) -> float:
        """Return the next delay of a kind, in ms; 0: none."""
        delays = self._delays
        if where not in delays.where:
            return 0.0
        drawn, part = self._random.random() < delays.often, self._random.random()
        part = (1.0 + part) / 2 if delays.often == 1.0 else part
        return delays.most_ms * part if drawn else 0.0

    def spin(self, where: Where) -> None:
        """Let the current stream spin for a while, if a delay is drawn."""
        cycles = int(self.ms(where) * CYCLES_PER_MS)
        if cycles:
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    def sleep(self) -> None:
        """Let this host sleep, if a delay is drawn and this rank is the late one."""
        ms = self.ms("host")
        if ms and self._late_host:
            time.sleep(ms / 1000)


def _launched_late(
    draws: _Draws, launch: Callable[..., Any], *args: Any, **kwargs: Any
) -> dist.Work | None:
    """Launch a collective, after delays if it is on a GPU and nothing is being recorded there."""
    device = _device(args)
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        work: dist.Work | None = launch(*args, **kwargs)
        return work
    draws.sleep()
    draws.spin("compute")
    if not kwargs.get("async_op"):  # then the present stream waits for it at once
        draws.spin("collectives")
        return launch(*args, **kwargs)  # type: ignore[no-any-return]
    # The collective waits for the stream that launches it, which is this one; nobody else does.
    # Another stream every time: delays of one would add up.
    beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        draws.spin("collectives")
        return launch(*args, **kwargs)  # type: ignore[no-any-return]


def _device(args: tuple[Any, ...]) -> torch.device:
    """Return the device of the first tensor, which may be in a list."""
    for each in args:
        first = each[0] if isinstance(each, list | tuple) and each else each
        if isinstance(first, Tensor):
            return first.device
    return torch.device("cpu")
