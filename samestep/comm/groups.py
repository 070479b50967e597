"""Groups of ranks: the members, the place of this rank, and the ranks that share a host.

Collectives of a group may go in two levels; a segment then crosses between hosts once:

    sums      inside every host, each rank adds up what belongs to those with its place on any
              host (its column); across hosts, the ranks of a column add up the rest
    gathers   the other way round

For that the segments of a column lie side by side: places are in the order of columns.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from samestep.comm.diagnosis.flight import attempt
from samestep.comm.diagnosis.roll_call import ranks_text as ranks_text
from samestep.plan.links import Fabric, usual_links

_log = logging.getLogger("samestep")


class RankGroup(NamedTuple):
    """A process group with its members and the place of this rank.

    hosts: number of hosts, with equally many ranks, one host after the other; 1 if not known.
    levels: collectives on segments go inside hosts and across them; places are then in the order
        of `in_two_levels`.
    """

    handle: dist.ProcessGroup
    rank: int  # my place in the group
    size: int
    members: tuple[int, ...]  # global ranks, by place
    hosts: int = 1
    levels: "Levels | None" = None


class Levels(NamedTuple):
    """The ranks of this rank's host, and those with its place on each host."""

    inside: RankGroup
    across: RankGroup


class GroupReduction(NamedTuple):
    """The ranks that share a group's state, and the divisor of the sum of their gradients.

    Experts live on some ranks and see the tokens of more: the divisor is the number of ranks
    whose losses are averaged. None: the number of ranks that hold the parameters.

    stages: number of pipeline stages among the ranks; gradients of stages are addends.
    """

    ranks: RankGroup
    divisor: float | None = None
    outer: RankGroup | None = None  # those that do the same in other groups
    stages: int = 1


def rank_group(process_group: dist.ProcessGroup | None = None) -> RankGroup | None:
    """Return the given group or the default group; None when there is no other rank.

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


class GroupCreation(NamedTuple):
    """A group that was made, for traces: all ranks that make it do so in one order."""

    members: tuple[int, ...]
    timeout: float | None  # seconds; None: the backend's own
    everyone: bool  # all ranks of the default group took part, not only the members
    mine: bool  # I am a member

    def __str__(self) -> str:
        limit = "the backend's timeout" if self.timeout is None else f"timeout {self.timeout:g} s"
        return f"group of {ranks_text(self.members)}, {limit}"


class GroupRegistry(threading.local):
    """One RankGroup per process group, also of one rank, and one process group per set of ranks.

    The registry has the groups of the present default group and forgets them with it. It is local
    to a thread, since in tests ranks are threads.

    A new group has the timeout that is asked for, or else that of the default group: torch's own
    answer would be the backend's, 10 minutes for NCCL and 30 for others.
    """

    def __init__(self) -> None:
        self._world: dist.ProcessGroup | None = None
        self._by_handle: dict[dist.ProcessGroup, RankGroup] = {}
        self._by_members: dict[tuple[int, ...], RankGroup | None] = {}
        # Those that only their members have heard of: others would make them once more.
        self._among_members: dict[tuple[int, ...], RankGroup] = {}
        self._creations: list[GroupCreation] = []

    @property
    def creations(self) -> tuple[GroupCreation, ...]:
        """Return the groups that were made since the default group was, in order."""
        return tuple(self._creations)

    def of(self, process_group: dist.ProcessGroup | None = None) -> RankGroup:
        """Return the given group, or the default one; raise if it does not contain this rank."""
        world = self._forget_others()
        handle = world if process_group is None else process_group
        known = self._by_handle.get(handle)
        if known is None:
            rank = dist.get_rank(handle)
            if rank < 0:
                raise ValueError(
                    f"rank {dist.get_rank()} is not a member of the given "
                    "process_group: give each rank a group that contains it"
                )
            members = tuple(dist.get_process_group_ranks(handle))
            known = self._by_handle[handle] = RankGroup(handle, rank, len(members), members)
        return known

    def of_ranks(self, ranks: Iterable[int], timeout: timedelta | None = None) -> RankGroup | None:
        """Return the group of global ranks, made at the first call; None on other ranks.

        All ranks of the default group must call this, in the same order. For all of its ranks
        the result is the default group.
        """
        whole = self.of()
        members = tuple(sorted(set(ranks)))
        if not members or not set(members) <= set(whole.members):
            raise ValueError(
                f"a process group of ranks {list(members)} is impossible: ranks must be "
                f"different and below {whole.size}"
            )
        if len(members) == whole.size:
            return whole
        if members not in self._by_members:
            self._by_members[members] = self._made(members, timeout, everyone=True)
        return self._by_members[members]

    def of_members(self, ranks: Iterable[int]) -> RankGroup:
        """Return the group of global ranks, with this one among them, made at the first call.

        Only the members call this, all of them in the same order, and each is then in equally many
        groups: torch names such a group by the number of groups.
        """
        whole = self.of()
        members = tuple(sorted(set(ranks)))
        if members == whole.members:
            return whole
        found = self._by_members.get(members) or self._among_members.get(members)
        if found is None:
            found = self._made(members, None, everyone=False)
            assert found is not None
            self._among_members[members] = found
        return found

    def known_among_members(self, ranks: Iterable[int]) -> bool:
        """Whether `of_members` has made this group, without the knowledge of other ranks."""
        return tuple(sorted(set(ranks))) in self._among_members

    def tell_everyone(self, ranks: Iterable[int]) -> None:
        """Let `of_ranks` return a group made by `of_members`; all ranks must call this."""
        members = tuple(sorted(set(ranks)))
        self._by_members.setdefault(members, self._among_members.pop(members, None))

    def has_another(self, handle: dist.ProcessGroup) -> bool:
        """Whether the registry has a different group of the same ranks."""
        members = tuple(sorted(dist.get_process_group_ranks(handle)))
        known = self._by_members.get(members) or self._among_members.get(members)
        return known is not None and known.handle is not handle

    def adopt(self, ranks: Iterable[int], handle: dist.ProcessGroup | None) -> None:
        """Let `of_ranks` return a group of global ranks that was made elsewhere.

        All ranks of the default group call this, where none of them `has_another`.
        handle: None on ranks that are not members.
        """
        members = tuple(sorted(set(ranks)))
        self._by_members[members] = None if handle is None else self.of(handle)

    def _made(
        self, members: tuple[int, ...], timeout: timedelta | None, *, everyone: bool
    ) -> RankGroup | None:
        """Make a process group; logged before and after, so that a hang is not silent."""
        whole = self.of()
        limit = default_timeout() if timeout is None else timeout
        me = dist.get_rank()
        seconds = None if limit is None else limit.total_seconds()
        creation = GroupCreation(members, seconds, everyone, me in members)
        self._creations.append(creation)
        _log.info("rank %d makes group %d: %s", me, len(self._creations), creation)
        since = time.monotonic()
        handle = attempt(
            f"creation of the group of {ranks_text(members)}",
            whole,
            lambda: dist.new_group(
                list(members), timeout=limit, use_local_synchronization=not everyone
            ),
            [whole.members.index(rank) for rank in members],  # the others do not wait
        )
        took = time.monotonic() - since
        _log.info("rank %d made group %d in %.3f s", me, len(self._creations), took)
        return self.of(handle) if creation.mine else None

    def forget(self) -> None:
        """Drop all groups, for a process that forks ranks after it had groups of its own.

        A forked child drops the objects of the parent's other threads, and the destructor of gloo
        waits for threads that are not there.
        """
        self._world = None
        self._by_handle.clear()
        self._by_members.clear()
        self._among_members.clear()
        self._creations.clear()

    def _forget_others(self) -> dist.ProcessGroup:
        """Return the present default group; groups of an earlier one are forgotten."""
        world = dist.group.WORLD if dist.is_available() else None
        if world is None:
            raise RuntimeError(
                "torch.distributed is not initialized: call torch.distributed.init_process_group"
            )
        if world is not self._world:
            self.forget()
            self._world = world
        return world


def default_timeout() -> timedelta | None:
    """Return the timeout of the default group; None if its backend does not tell."""
    return timeout_of(dist.group.WORLD)


def timeout_of(handle: dist.ProcessGroup | None) -> timedelta | None:
    """Return the timeout of a group; None if its backend does not tell."""
    # torch has no public way to ask for it.
    device = "cuda" if "nccl" in dist.get_backend(handle) else "cpu"
    try:
        return handle._get_backend(torch.device(device)).options._timeout  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # ranks that are threads, or none at all
        return None


registry = GroupRegistry()


def fabric_of(
    group: RankGroup, device: torch.device, ranks_per_host: int | None, *, ordered: bool
) -> Fabric:
    """Return the links of a group; hosts have neighbouring ranks, as torchrun numbers them.

    Ordered sums go by hosts that the user has named, not by those of torchrun: a run resumed on
    other hosts, or compared with FSDP2, has to have the bits of rank order.

    A group with unequal numbers of ranks on its hosts counts as on one host. Nothing is sent to
    find out: a rank with another answer has another plan, and plans are compared.
    """
    on_host = ranks_per_host
    if on_host is None and not ordered:
        on_host = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or None
    inside, between = usual_links(device.type)
    per_host = group.size
    if on_host is not None and list(group.members) == sorted(group.members):
        counts = Counter(member // on_host for member in group.members)
        if len(set(counts.values())) == 1:
            per_host = group.size // len(counts)
    return Fabric(inside, between, group.size, per_host)


def in_two_levels(group: RankGroup, per_host: int) -> RankGroup:
    """Return a group with its ranks column by column. Collective: it makes groups."""
    hosts = group.size // per_host
    host, here = divmod(group.rank, per_host)
    inside = registry.of_members(group.members[host * per_host : (host + 1) * per_host])
    across = registry.of_members(group.members[here::per_host])
    columns = [group.members[place::per_host] for place in range(per_host)]
    members = tuple(rank for column in columns for rank in column)
    levels = Levels(inside, across)
    return RankGroup(group.handle, here * hosts + host, group.size, members, levels=levels)
