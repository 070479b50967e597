"""What FSDP2 itself sends in a training step: gathers of parameters, reductions of gradients.

A unit is what one `fully_shard` call manages. Shards are rows, as many on every rank: the last ones
are padded. Units are gathered for forward and, unless they were kept, again for backward.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.comm.traffic import Traffic
from samestep.estimate.collectives import Collective
from samestep.estimate.grid import Peers


class Unit(NamedTuple):
    """The parameters of one `fully_shard` call; `reshards`: given back after forward."""

    name: str
    params: tuple[Tensor, ...]
    reshards: bool = True


def padded_shard(params: Sequence[Tensor], ranks: int) -> int:
    """Elements of a rank's part of all of them, padding included."""
    return sum(-(-param.shape[0] // ranks) * param[0].numel() for param in params)


def fsdp_collectives(
    units: Sequence[Unit],
    shard: Peers,
    replicate: Peers | None = None,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> list[Collective]:
    """Those of one forward and backward pass, in the order of use and back."""
    forward, backward = [], []
    for unit in units:
        size = padded_shard(unit.params, shard.size)
        gathered = param_dtype or unit.params[0].dtype
        reduced = reduce_dtype or gathered
        sizes, whole = (size,) * shard.size, size * shard.size
        gather = Collective(
            Traffic.ALL_GATHER, f"gather of {unit.name}", shard, gathered, whole, sizes
        )
        reduction = Collective(
            Traffic.REDUCE_SCATTER, f"reduction of {unit.name}", shard, reduced, whole, sizes
        )
        forward.append(gather)
        later = [gather] if unit.reshards else []
        later.append(reduction)
        if replicate is not None and replicate.size > 1:
            name = f"outer sum of {unit.name}"
            later.append(Collective(Traffic.ALL_REDUCE, name, replicate, reduced, size))
        backward.append(later)
    return forward + [each for later in reversed(backward) for each in later]
