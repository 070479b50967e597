"""Which ranks share a host, and the links between them."""

import os

import torch

from samestep.comm.groups import RankGroup
from samestep.plan.links import CPU_LINKS, GPU_LINKS, Fabric


def fabric_of(group: RankGroup, device: torch.device, ranks_per_host: int | None = None) -> Fabric:
    """The links of a group. Hosts have neighbouring ranks, as torchrun numbers them.

    A group that does not have as many ranks on each host counts as if it were on one. Nothing is
    sent to find out: who has another answer has another plan, and plans are compared.
    """
    on_host = ranks_per_host or int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or None
    inside, between = CPU_LINKS if device.type == "cpu" else GPU_LINKS
    per_host = group.size
    if on_host is not None:
        counts: dict[int, int] = {}
        for member in group.members:
            counts[member // on_host] = counts.get(member // on_host, 0) + 1
        if len(set(counts.values())) == 1:
            per_host = group.size // len(counts)
    return Fabric(inside, between, group.size, per_host)
