"""Which ranks share a host, the links between them, and groups whose collectives go in two levels.

In two levels a segment crosses between hosts once:

    sums      inside every host, each rank adds up what belongs to those with its place on any
              host (its column); across hosts, the ranks of a column add up the rest
    gathers   the other way round

For that the segments of a column lie side by side: places are in the order of columns.
"""

import os
from collections import Counter

import torch

from samestep.comm.groups import Levels, RankGroup, registry
from samestep.plan.links import Fabric, usual_links


def fabric_of(
    group: RankGroup, device: torch.device, ranks_per_host: int | None, *, ordered: bool
) -> Fabric:
    """The links of a group. Hosts have neighbouring ranks, as torchrun numbers them.

    Ordered sums go by hosts that the user has told of, not by those that torchrun has: who resumes
    on other hosts, or compares with FSDP2, expects the bits of rank order.

    A group that does not have as many ranks on each host counts as if it were on one. Nothing is
    sent to find out: who has another answer has another plan, and plans are compared.
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
    """The same ranks, column by column. All of them must call it: groups are made."""
    hosts = group.size // per_host
    host, here = divmod(group.rank, per_host)
    inside = registry.of_members(group.members[host * per_host : (host + 1) * per_host])
    across = registry.of_members(group.members[here::per_host])
    columns = [group.members[place::per_host] for place in range(per_host)]
    members = tuple(rank for column in columns for rank in column)
    levels = Levels(inside, across)
    return RankGroup(group.handle, here * hosts + host, group.size, members, levels=levels)
