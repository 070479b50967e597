"""The plan for blocks of DTensors: their owners, their chunks, and what travels.

The same functions plan for optimizers and for estimates, which have no ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

import torch

from samestep.groups.distribution import Distribution
from samestep.plan.chunks import (
    Chunk,
    blocks_to_all,
    blocks_to_owners,
    chunk_of,
)
from samestep.plan.layouts import RankBoxes
from samestep.plan.schedule import PlacementShape
from samestep.plan.sharding import ParamSpec
from samestep.plan.transfers import gather_of
from samestep.rules.exact_sums import WIDTH


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


def plan_chunks(
    specs: Sequence[ParamSpec],
    held: Sequence[RankBoxes],
    ranks: int,
    distribution: Distribution,
    device: torch.device,
) -> tuple[Chunk, ...]:
    """The blocks of some parameters in chunks, as the keywords ask for, and what each sends."""
    gives_back = distribution.muon_schedule == "parallel"
    size = distribution.chunk_elements(device)
    if gives_back:
        owners = distribution.owners
        chunks = blocks_to_owners(specs, held, ranks, chunk_elements=size, owners=owners)
    else:
        chunks = blocks_to_all(specs, held, ranks, chunk_elements=size)
    found = []
    for number, chunk in enumerate(chunks):
        dtypes = (specs[planned.param].math_dtype for planned in chunk)
        dtype, wide = travel_dtypes(dtypes, distribution, device)
        extra = [
            specs[planned.param].state_of_blocks[planned.number] if gives_back else 0
            for planned in chunk
        ]
        planned_chunk = chunk_of(
            number, chunk, extra, ranks, dtype=dtype, wide=wide, gives_back=gives_back
        )
        summed = tuple(specs[planned.param].sums for planned in chunk)
        found.append(_with_sums(planned_chunk, number, summed, ranks, device))
    return tuple(found)


def _with_sums(
    chunk: Chunk, number: int, summed: tuple[int, ...], ranks: int, device: torch.device
) -> Chunk:
    """A chunk whose rules need so many sums over each matrix of its blocks."""
    pairs = zip(chunk.blocks, summed, strict=True)
    rows = sum(count * len(planned.block.matrices) for planned, count in pairs)
    if not rows:
        return chunk
    on_cpu = device.type == "cpu"
    sizes = (rows * WIDTH,) * ranks
    name = f"sums of chunk {number}"
    sums = gather_of(name, torch.int64, sizes, on_cpu=on_cpu, uneven=not on_cpu)
    return replace(chunk, sums=sums, summed=summed)


def travel_dtypes(
    wide: Iterable[torch.dtype], distribution: Distribution, device: torch.device
) -> tuple[torch.dtype, torch.dtype]:
    """In which blocks of a chunk travel and are computed, from the math dtypes of its blocks."""
    widest = torch.float32
    for dtype in wide:
        widest = torch.promote_types(widest, dtype)
    usual = widest if device.type == "cpu" else torch.bfloat16
    return distribution.block_dtype or usual, widest
