"""Groups of ranks: who takes part, and which place is mine."""

from typing import NamedTuple

import torch.distributed as dist


class RankGroup(NamedTuple):
    """A process group with what is asked of it all the time."""

    handle: dist.ProcessGroup
    rank: int  # my place in the group
    size: int
    members: tuple[int, ...]  # global ranks, by place


def rank_group(process_group: dist.ProcessGroup | None = None) -> RankGroup | None:
    """The group to work in: the given one, the default one, or None when there is no other rank.

    Raises if the given group does not contain this rank.
    """
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None:
            raise RuntimeError(
                "process_group was given, but torch.distributed is not initialized: call "
                "torch.distributed.init_process_group first"
            )
        return None
    handle = process_group or dist.group.WORLD
    assert handle is not None
    rank = dist.get_rank(handle)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not a member of the given process_group")
    members = tuple(dist.get_process_group_ranks(handle))
    return None if len(members) == 1 else RankGroup(handle, rank, len(members), members)
