"""How many ranks a command has, and whether each could have a GPU."""

import torch
import torch.distributed as dist

from samestep.launch import TorchrunRank
from samestep.tooling.request import BadRequestError


def number_of_ranks(asked: int | None, torchrun: TorchrunRank | None, *, least: int) -> int:
    """Those that were asked for, 2 if none were, or torchrun's, which must agree with that."""
    if torchrun is None:
        ranks, source = 2 if asked is None else asked, "--world-size"
    else:
        ranks, source = torchrun.world_size, "torchrun's WORLD_SIZE"
        if asked not in (None, ranks):
            raise BadRequestError(
                f"--world-size is {asked}, but torchrun has started {ranks} ranks"
            )
    if ranks < least:
        raise BadRequestError(f"{source} must be at least {least}, got {ranks}")
    return ranks


def nccl_devices() -> int:
    # Not torch.cuda.is_available(), after which CUDA does not work in forked ranks.
    return torch.cuda.device_count() if dist.is_nccl_available() else 0
