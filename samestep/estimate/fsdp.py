"""What FSDP2 itself sends in a training step: gathers of parameters, reductions of gradients.

A unit is what one `fully_shard` call manages. Shards are rows, as many on every rank: the last ones
are padded. Units are gathered for forward and, unless they were kept, again for backward.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.estimate.collectives import Collective
from samestep.estimate.grid import Peers
from samestep.plan.transfers import Traffic, Transfer, of_segments

ALONE = Peers((), 1)


class Unit(NamedTuple):
    """The parameters of one `fully_shard` call, as a rank of tensor and expert parallel has them.

    reshards: given back after forward.
    shard, replicate: the ranks that share them, and those that do the same.
    summands: of these the ranks of tensor parallel, `model`, have summands of the gradients, which
        are added up before FSDP2 reduces them.
    early: whose gradients come before those of the units inside.
    brings_tokens: ranks whose tokens come to it, of experts.
    """

    name: str
    params: tuple[Tensor, ...]
    reshards: bool = True
    shard: Peers = ALONE
    replicate: Peers = ALONE
    model: Peers = ALONE
    summands: tuple[Tensor, ...] = ()
    early: tuple[Tensor, ...] = ()
    brings_tokens: int = 1


def padded_shard(params: Sequence[Tensor], ranks: int) -> int:
    """Elements of a rank's part of all of them, padding included."""
    return sum(-(-param.shape[0] // ranks) * param[0].numel() for param in params)


def passes_1f1b(stage: int, stages: int, micro_batches: int) -> str:
    """Forward and backward passes of a stage in turn, such as FFBFBB."""
    first = min(micro_batches, stages - stage)
    return "F" * first + "BF" * (micro_batches - first) + "B" * first


def fsdp_collectives(
    units: Sequence[Unit],
    *,
    passes: str = "FB",
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> list[Collective]:
    """Those of the passes of one step, unit by unit; gradients are reduced in the last."""
    found = []
    for unit in units:
        found += gather_of(unit, param_dtype) * _count_of_gathers(unit, passes)
        found += reductions_of(unit, reduce_dtype or param_dtype)
    return found


def _count_of_gathers(unit: Unit, passes: str) -> int:
    """After a backward pass parameters stay for the next pass, but for the last one."""
    count, is_whole = 0, False
    for each in passes:
        count += not is_whole
        is_whole = each == "B" or not unit.reshards
    return count


def gather_of(unit: Unit, dtype: torch.dtype | None = None) -> list[Collective]:
    """What makes a unit whole; nothing where one rank has it."""
    size, ranks = padded_shard(unit.params, unit.shard.size), unit.shard.size
    if ranks == 1:
        return []
    dtype = dtype or unit.params[0].dtype
    name, sizes = f"gather of {unit.name}", (size,) * ranks
    return [Collective((of_segments(Traffic.ALL_GATHER, name, dtype, sizes),), unit.shard)]


def reductions_of(unit: Unit, dtype: torch.dtype | None = None) -> list[Collective]:
    """What adds up the gradients of a unit, in order."""
    found = []
    dtype = dtype or unit.params[0].dtype
    for param in unit.summands if unit.model.size > 1 else ():
        name = f"sum of a gradient of {unit.name}"
        summed = Transfer(Traffic.ALL_REDUCE, name, param.dtype, param.numel())
        found.append(Collective((summed,), unit.model))
    trained = [param for param in unit.params if param.requires_grad]
    size, ranks = padded_shard(trained, unit.shard.size), unit.shard.size
    if trained and ranks > 1:
        name, sizes = f"reduction of {unit.name}", (size,) * ranks
        scattered = of_segments(Traffic.REDUCE_SCATTER, name, dtype, sizes)
        found.append(Collective((scattered,), unit.shard))
    if trained and unit.replicate.size > 1:
        summed = Transfer(Traffic.ALL_REDUCE, f"outer sum of {unit.name}", dtype, size)
        found.append(Collective((summed,), unit.replicate))
    return found
