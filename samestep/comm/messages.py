"""Objects of our own processes, brought to the first rank."""

from typing import Any

import torch.distributed as dist


def gather_on_first(message: object) -> list[Any] | None:
    """What every rank of the default group gives, by rank, on rank 0; None on the others.

    For a harness that talks to itself: objects travel as pickles.
    """
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(message, gathered)
    return gathered
