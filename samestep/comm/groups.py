"""Groups of ranks: who takes part, and which place is mine."""

import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from samestep.comm.flight import attempt


class RankGroup(NamedTuple):
    """A process group with what is asked of it all the time."""

    handle: dist.ProcessGroup
    rank: int  # my place in the group
    size: int
    members: tuple[int, ...]  # global ranks, by place


class GroupReduction(NamedTuple):
    """The ranks that share a group's state, and what the sum of their gradients is divided by.

    Experts live on some ranks and see the tokens of more: the divisor is the number of ranks
    whose losses are averaged. None: the number of ranks that hold them.
    """

    ranks: RankGroup
    divisor: float | None = None
    outer: RankGroup | None = None  # those that do the same in other groups


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
    group = registry.of(process_group)
    return None if group.size == 1 else group


class GroupRegistry(threading.local):
    """One RankGroup per process group, also of one rank, and one process group per set of ranks.

    It knows the groups of the present default group and forgets them with it. Per thread, since
    in tests ranks are threads.
    """

    def __init__(self) -> None:
        self._world: dist.ProcessGroup | None = None
        self._by_handle: dict[dist.ProcessGroup, RankGroup] = {}
        self._by_members: dict[tuple[int, ...], RankGroup | None] = {}

    def of(self, process_group: dist.ProcessGroup | None = None) -> RankGroup:
        """The given group, or the default one. Raises if it does not contain this rank."""
        world = self._forget_others()
        handle = world if process_group is None else process_group
        known = self._by_handle.get(handle)
        if known is None:
            rank = dist.get_rank(handle)
            if rank < 0:
                raise ValueError(
                    f"rank {dist.get_rank()} is not a member of the given process_group"
                )
            members = tuple(dist.get_process_group_ranks(handle))
            known = self._by_handle[handle] = RankGroup(handle, rank, len(members), members)
        return known

    def of_ranks(self, ranks: Iterable[int], timeout: timedelta | None = None) -> RankGroup | None:
        """The group of these global ranks, made when first asked for; None if I am not among them.

        All ranks of the default group must call this, in the same order. All of them together
        are the default group. A new group does not take over the default group's timeout: without
        `timeout` it is the backend's, 10 minutes for NCCL and 30 for others.
        """
        whole = self.of()
        members = tuple(sorted(set(ranks)))
        if not members or not set(members) <= set(whole.members):
            raise ValueError(f"no group can be made of ranks {list(members)} of {whole.size}")
        if len(members) == whole.size:
            return whole
        if members not in self._by_members:
            name = f"creation of the group of ranks {', '.join(map(str, members))}"
            handle = attempt(
                name,
                whole,
                lambda: dist.new_group(list(members), timeout=timeout),
                [whole.members.index(rank) for rank in members],  # the others do not wait
            )
            inside = dist.get_rank() in members
            self._by_members[members] = self.of(handle) if inside else None
        return self._by_members[members]

    def of_members(self, ranks: Iterable[int]) -> RankGroup:
        """The group of these global ranks, of which I am one, made when first asked for.

        Only these ranks call it, all of them in the same order.
        """
        whole = self.of()
        members = tuple(sorted(set(ranks)))
        if members == whole.members:
            return whole
        if members not in self._by_members:
            handle = dist.new_group(list(members), use_local_synchronization=True)
            self._by_members[members] = self.of(handle)
        found = self._by_members[members]
        assert found is not None
        return found

    def forget(self) -> None:
        """Let go of all groups, for a process that forks ranks after it had groups of its own.

        A forked child drops what the parent's other threads had, and gloo's end waits for threads
        that are not there.
        """
        self._world = None
        self._by_handle.clear()
        self._by_members.clear()

    def _forget_others(self) -> dist.ProcessGroup:
        """The present default group; what was known of another one is forgotten."""
        world = dist.group.WORLD if dist.is_available() else None
        if world is None:
            raise RuntimeError(
                "torch.distributed is not initialized: call torch.distributed.init_process_group"
            )
        if world is not self._world:
            self.forget()
            self._world = world
        return world


registry = GroupRegistry()
