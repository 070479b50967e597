"""Sends and receives of torch's pipeline schedules, always in batches.

Newer versions of torch (2.13 does) send alone what goes in one direction only, so that nothing
waits in line (pytorch issue 175225). On NCCL each such pair of ranks then opens a communicator of
its own when it first meets, in whatever order ranks come by, which takes memory, warns, and has
been seen to deadlock; a batch travels on the communicator of the whole group. There is no switch
for it, so the one function that decides is replaced while a schedule runs. Gloo sends one by one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.pipelining import schedules


@contextmanager
def batched_sends(wanted: bool = True) -> Iterator[None]:
    """Run schedules inside with batches; with `wanted=False` as torch does it."""
    original = schedules._batch_p2p
    if wanted:
        schedules._batch_p2p = _in_a_batch
    try:
        yield
    finally:
        schedules._batch_p2p = original


def _in_a_batch(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
    return dist.batch_isend_irecv(p2p_ops) if p2p_ops else []
