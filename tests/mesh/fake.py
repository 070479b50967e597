"""One rank of a large world in which nobody answers: torch's fake backend."""

from contextlib import contextmanager

import torch.distributed as dist

# Private, and used nowhere else: the store of the fake backend.
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(rank, world):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
