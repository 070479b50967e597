"""What is planned for blocks of DTensors: their owners, their chunks, and what travels.

The same functions plan for optimizers and for estimates, which have no ranks.
"""

from collections.abc import Iterable, Sequence
from math import prod

import torch

from samestep.groups.distribution import Distribution
from samestep.plan.block_exchange import (
    Chunk,
    ExchangePlan,
    chunk_of,
    plan_exchange,
    plan_gather,
)
from samestep.plan.layouts import RankBoxes
from samestep.plan.schedule import PlacementShape
from samestep.plan.sharding import ParamSpec


def plan_blocks(
    specs: Sequence[ParamSpec],
    held: Sequence[RankBoxes],
    ranks: int,
    distribution: Distribution,
    device: torch.device,
) -> ExchangePlan:
    """The plan that some keywords ask for."""
    size = distribution.chunk_elements(device)
    if distribution.muon_schedule == "gather":
        return plan_gather(specs, held, ranks, chunk_elements=size)
    return plan_exchange(specs, held, ranks, chunk_elements=size, owners=distribution.owners)


def shape_of(
    chunks: tuple[Chunk, ...],
    distribution: Distribution,
    specs: Sequence[ParamSpec],
    ranks: int,
) -> PlacementShape:
    """What a schedule depends on: the same on all ranks, whatever each holds."""
    return PlacementShape(
        bucket_sizes=(sum(prod(spec.shape) for spec in specs) // ranks,),
        agrees=True,
        reduces=False,
        chunks=len(chunks),
        gives_back=distribution.muon_schedule == "parallel",
        planned_chunks=chunks,
    )


def chunks_of(
    plan: ExchangePlan,
    specs: Sequence[ParamSpec],
    ranks: int,
    distribution: Distribution,
    device: torch.device,
) -> tuple[Chunk, ...]:
    """The chunks of a plan, with what each of them sends."""
    gives_back = distribution.muon_schedule == "parallel"
    found = []
    for number, chunk in enumerate(plan.chunks):
        dtypes = (specs[planned.param].math_dtype for planned in chunk)
        dtype, wide = travel_dtypes(dtypes, distribution, device)
        extra = [
            specs[planned.param].state_of_blocks[planned.number] if gives_back else 0
            for planned in chunk
        ]
        found.append(
            chunk_of(number, chunk, extra, ranks, dtype=dtype, wide=wide, gives_back=gives_back)
        )
    return tuple(found)


def travel_dtypes(
    wide: Iterable[torch.dtype], distribution: Distribution, device: torch.device
) -> tuple[torch.dtype, torch.dtype]:
    """In which blocks of a chunk travel and are computed, from the math dtypes of its blocks."""
    widest = torch.float32
    for dtype in wide:
        widest = torch.promote_types(widest, dtype)
    usual = widest if device.type == "cpu" else torch.bfloat16
    return distribution.block_dtype or usual, widest
