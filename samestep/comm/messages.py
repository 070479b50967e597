"""Small objects sent between ranks of one job, as pickles."""

from typing import Any

import torch.distributed as dist


def gather_on_first(message: object, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """Gather an object of every rank on a group's first rank; return None on other ranks."""
    is_first = dist.get_rank(group) == 0
    gathered: list[Any] | None = [None] * dist.get_world_size(group) if is_first else None
    dist.gather_object(message, gathered, group=group, group_dst=0)
    return gathered


def gather_everywhere(message: object, group: dist.ProcessGroup) -> list[Any]:
    """Gather an object of every rank of a group on all its ranks, by rank."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, message, group=group)
    return gathered


def scatter_from_first(messages: list[Any], group: dist.ProcessGroup) -> Any:
    """Return this rank's message of those that the group's first rank gives."""
    mine: list[Any] = [None]
    given = messages if dist.get_rank(group) == 0 else None
    dist.scatter_object_list(mine, given, group=group, group_src=0)
    return mine[0]
