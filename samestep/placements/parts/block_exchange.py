"""Blocks of DTensors: they come together on their owners, chunk by chunk, and go back.

`docs/dtensors.md` has the algorithm; `block_stages` runs a chunk of it in plain torch, and
`kernel_stages` with kernels.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from samestep.groups.distribution import Distribution
from samestep.kernels.choice import missing
from samestep.placements.parts.block_stages import LocalChunk, PlainStages
from samestep.placements.parts.local_shards import BlockState, LocalShards
from samestep.placements.placement import Arrived
from samestep.placements.windows import Unit
from samestep.plan.block_exchange import (
    Chunk,
    ExchangePlan,
    Key,
    chunk_of,
    plan_exchange,
    plan_gather,
)
from samestep.plan.layouts import RankBoxes
from samestep.plan.schedule import (
    Apply,
    Collect,
    GiveBack,
    OfBucket,
    PlacementShape,
    Transform,
    WindowId,
)
from samestep.plan.sharding import ParamSpec
from samestep.rules.state import State
from samestep.update.plain import GroupMaths

if TYPE_CHECKING:
    from samestep.placements.parts.kernel_stages import KernelStages, SpreadBlocks


NOTHING: State = {}


class BlockExchange:
    """The plan for the blocks of one mesh, at work."""

    def __init__(self, local: LocalShards, distribution: Distribution) -> None:
        self._local = local
        ranks, device = local.group.size, local.device
        self.plan = planned(local.specs, local.held, ranks, distribution, device)
        transfers = transfers_of(self.plan, local.specs, ranks, distribution, device)
        self.shape = shape_of(transfers, distribution, local.specs, ranks)
        self._stages: list[PlainStages] = []
        self._kernels: SpreadBlocks | None = None
        self._running: dict[int, PlainStages | KernelStages] = {}  # chunks that are on their way
        self._brought: dict[int, dict[Key, BlockState]] = {}  # by chunk, in the last step

    def lines(self, specs: Sequence[ParamSpec]) -> list[str]:
        """Who owns which block, as text."""
        lines = []
        for number, chunk in enumerate(self.shape.chunk_transfers):
            for place, route in enumerate(chunk.routes):
                what = f"chunk {number}: block {route.number} of {specs[route.param].name}"
                for owner in route.owners:
                    senders = list(chunk.collection.givers((place, ""), owner))
                    lines.append(f"{what} from {senders} on {owner}")
        return lines

    def prepare(self) -> None:
        """There is state now: make what blocks need to travel."""
        local = self._local
        chunks = [LocalChunk(chunk, local) for chunk in self.shape.chunk_transfers]
        self._stages = [PlainStages(chunk) for chunk in chunks]
        if missing(local.device) is None:
            from samestep.placements.parts.kernel_stages import SpreadBlocks

            self._kernels = SpreadBlocks(chunks)

    def begin_step(self) -> None:
        """Let kernels look up where this step's gradients lie."""
        if self._kernels is not None:
            self._kernels.begin_step(self._local)

    def units(self) -> list[list[Unit]]:
        """What every chunk needs of state that stays on the host: of parts, and of whole blocks."""
        local = self._local
        found = []
        for chunk in self.plan.chunks:
            parts = {part.route.key: local.kept_of_part(part) for part in local.of_blocks(chunk)}
            wholes = {route.key: local.kept_of_whole(route) for route in chunk}
            units = [Unit(("part", key), own, elements=1) for key, own in parts.items()]
            units += [Unit(("whole", key), own, elements=1) for key, own in wholes.items()]
            found.append([unit for unit in units if unit.state])
        return found

    def _bring(self, window: WindowId, arrived: Arrived) -> None:
        """Wait for the state of a chunk that stays on the host."""
        states: dict[Key, BlockState] = {}
        for part, state in arrived(window):
            kind, key = part.unit.about
            of_part, of_whole = states.get(key, BlockState(NOTHING, NOTHING))
            states[key] = BlockState(
                state if kind == "part" else of_part, state if kind == "whole" else of_whole
            )
        number = window.bucket.bucket
        known = self._brought.get(number, {})
        if self._kernels is not None and not _are_the_same(known, states):
            self._kernels.forget(number)
        self._brought[number] = states
        self._local.come(states)

    def run(self, operation: OfBucket, math: GroupMaths, arrived: Arrived | None = None) -> None:
        """One stage of one chunk; other operations are not about blocks.

        `arrived`: waits for a window, where the chunk has state that stays on the host.
        """
        number, local = operation.bucket.bucket, self._local
        match operation:
            case Collect():
                if arrived is not None:
                    self._bring(WindowId(operation.bucket, "chunk"), arrived)
                kernels = self._kernels and self._kernels.stages(local, number, math)
                self._running[number] = kernels or self._stages[number]
                self._running[number].collect(local, math)
            case Transform():
                self._running[number].transform(local, math)
            case GiveBack():
                self._running[number].give_back(local)
            case Apply():
                self._running.pop(number).apply(local, math)

    def end_step(self) -> None:
        """Everything was taken and placed, or the step has failed."""
        self._running = {}
        self._local.end_step()
        if self._kernels is not None:
            self._kernels.end_step()


def _are_the_same(known: dict[Key, BlockState], found: dict[Key, BlockState]) -> bool:
    return known.keys() == found.keys() and all(
        own.of_part is found[key].of_part and own.of_whole is found[key].of_whole
        for key, own in known.items()
    )


def planned(
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
    transfers: tuple[Chunk, ...],
    distribution: Distribution,
    specs: Sequence[ParamSpec],
    ranks: int,
) -> PlacementShape:
    """What a schedule depends on: the same on all ranks, whatever each holds."""
    return PlacementShape(
        bucket_sizes=(sum(prod(spec.shape) for spec in specs) // ranks,),
        agrees=True,
        reduces=False,
        chunks=len(transfers),
        gives_back=distribution.muon_schedule == "parallel",
        chunk_transfers=transfers,
    )


def transfers_of(
    plan: ExchangePlan,
    specs: Sequence[ParamSpec],
    ranks: int,
    distribution: Distribution,
    device: torch.device,
) -> tuple[Chunk, ...]:
    """What each chunk of a plan sends."""
    gives_back = distribution.muon_schedule == "parallel"
    found = []
    for number, chunk in enumerate(plan.chunks):
        dtypes = (specs[route.param].math_dtype for route in chunk)
        dtype, wide = travel_dtypes(dtypes, distribution, device)
        extra = [
            specs[route.param].state_of_blocks[route.number] if gives_back else 0 for route in chunk
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
