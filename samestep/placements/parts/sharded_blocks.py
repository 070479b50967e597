"""Blocks of DTensors: they come together on their owners, chunk by chunk, and go back.

`docs/dtensors.md` has the algorithm; `block_stages` runs a chunk of it in plain torch, and
`kernels.spread_chunk` with kernels.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from samestep.comm.integrity.agreement import require_same_lines
from samestep.comm.presence import Problem
from samestep.groups.distribution import Distribution
from samestep.groups.param_groups import Group
from samestep.kernels.choice import line_of, missing
from samestep.placements.parts.block_moves import BlockMoves
from samestep.placements.parts.block_parts import BlockParts
from samestep.placements.parts.block_stages import PlainStages
from samestep.placements.placement import PlanMembers
from samestep.plan.block_exchange import (
    ChunkTransfers,
    ExchangePlan,
    ShardedSpec,
    chunk_transfers,
    plan_exchange,
    plan_gather,
)
from samestep.plan.schedule import PlacementShape
from samestep.plan.sharding import ParamSpec
from samestep.rules.state import State, math_dtype
from samestep.update.plain import GroupMaths

if TYPE_CHECKING:
    from samestep.placements.parts.spread_blocks import SpreadBlocks


class Stages(Protocol):
    """One chunk of blocks, stage by stage."""

    def collect(self, held: BlockParts, math: GroupMaths) -> None:
        """Prepare the parts held here, and start sending them to the owners."""
        ...

    def transform(self, held: BlockParts, math: GroupMaths) -> None:
        """Run the rule on the whole blocks that this rank owns."""
        ...

    def give_back(self, held: BlockParts) -> None:
        """Start sending everyone the parts of the directions that they hold."""
        ...

    def apply(self, held: BlockParts, math: GroupMaths, *, gives_back: bool) -> None:
        """Step in the directions, on the parts held here."""
        ...


class ShardedParameters(BlockParts):
    """The DTensors of one mesh: those of a construction or of one added group."""

    def __init__(
        self,
        members: PlanMembers,
        mesh: DeviceMesh,
        distribution: Distribution,
        ranks: int,
    ) -> None:
        super().__init__(members.params, members.specs, mesh, ranks)
        self.plan = self._planned(distribution)
        lines = [*distribution.lines(), *self.lines(), *members.lines, line_of(self.device)]
        require_same_lines("plan", lines, self.group, self.device)
        held = sum(param.to_local().numel() for param in self.params)
        transfers = transfers_of(
            self.plan, self.params, self.specs, self.group.size, distribution, self.device
        )
        self.shape = shape_of(transfers, distribution, held)
        self._kernels: SpreadBlocks | None = None
        self._running: dict[int, Stages] = {}  # chunks that are on their way

    def _planned(self, distribution: Distribution) -> ExchangePlan:
        specs = [
            ShardedSpec(spec.name, spec.shape, spec.blocks or (), of_param.boxes, of_param.replicas)
            for spec, of_param in zip(self.specs, self._held, strict=True)
        ]
        return planned(specs, self.group.size, distribution, self.device)

    def lines(self) -> list[str]:
        """Who holds and owns what, as text."""
        lines = [f"mesh {tuple(self.mesh.shape)} of ranks {self.mesh.mesh.flatten().tolist()}"]
        for spec, param in zip(self.specs, self.params, strict=True):
            what = f"{spec.shape} {spec.dtype}, group {spec.group}, {spec.rule}"
            lines.append(f"{spec.name}: {what}, {param.placements}")
        for number, chunk in enumerate(self.plan.chunks):
            for route in chunk:
                senders = [part.rank for part in route.parts if part.sent]
                lines.append(
                    f"chunk {number}: block {route.number} of {self.specs[route.param].name} from "
                    f"{senders} on {route.owner}"
                )
        return lines

    def make_state(self, groups: Sequence[Group], master_weights: bool) -> dict[Tensor, State]:
        """State, and what blocks need to travel."""
        made = super().make_state(groups, master_weights)
        self._chunks = [
            (BlockMoves(transfers, chunk, self.group, self.device), self.held_parts(chunk))
            for transfers, chunk in zip(self.shape.chunk_transfers, self.plan.chunks, strict=True)
        ]
        self._stages = [PlainStages(*chunk) for chunk in self._chunks]
        if missing(self.device) is None:
            from samestep.placements.parts.spread_blocks import SpreadBlocks

            self._kernels = SpreadBlocks(self._chunks, self.shape.gives_back)
        return made

    # --- chunks of blocks ----------------------------------------------------------------

    def begin_step(self, state: Mapping[Tensor, State], problem: Problem | None) -> None:
        """No gradient comes any more."""
        super().begin_step(state, problem)
        if self._kernels is not None:
            self._kernels.begin_step(self)

    def collect(self, number: int, math: GroupMaths) -> None:
        """Prepare the parts held here, and start sending them to the owners."""
        stages: Stages | None = None
        if self._kernels is not None:
            stages = self._kernels.stages(self, number, math)
        self._running[number] = stages or self._stages[number]
        self._running[number].collect(self, math)

    def transform(self, number: int, math: GroupMaths) -> None:
        """Run the rule on the whole blocks that this rank owns."""
        self._running[number].transform(self, math)

    def give_back(self, number: int) -> None:
        """Start sending everyone the parts of the directions that they hold."""
        self._running[number].give_back(self)

    def apply(self, number: int, math: GroupMaths) -> None:
        """Step in the directions, on the parts held here."""
        self._running.pop(number).apply(self, math, gives_back=self.shape.gives_back)

    def finish_step(self) -> None:
        """Everything was taken and placed."""
        super().finish_step()
        self._forget_step()

    def abandon_step(self) -> None:
        """The step failed on all ranks: forget its gradients."""
        super().abandon_step()
        self._forget_step()

    def _forget_step(self) -> None:
        self._running = {}
        if self._kernels is not None:
            self._kernels.end_step()


def planned(
    specs: Sequence[ShardedSpec], ranks: int, distribution: Distribution, device: torch.device
) -> ExchangePlan:
    """The plan that some keywords ask for."""
    size = distribution.chunk_elements(device)
    if distribution.muon_schedule == "gather":
        return plan_gather(specs, ranks, chunk_elements=size)
    return plan_exchange(specs, ranks, chunk_elements=size, owners=distribution.owners)


def shape_of(
    transfers: tuple[ChunkTransfers, ...], distribution: Distribution, held: int
) -> PlacementShape:
    """What a schedule depends on; `held`: elements of this rank."""
    return PlacementShape(
        bucket_sizes=(held,),
        agrees=True,
        reduces=False,
        chunks=len(transfers),
        gives_back=distribution.muon_schedule == "parallel",
        chunk_transfers=transfers,
    )


def transfers_of(
    plan: ExchangePlan,
    params: Sequence[Tensor],
    specs: Sequence[ParamSpec],
    ranks: int,
    distribution: Distribution,
    device: torch.device,
) -> tuple[ChunkTransfers, ...]:
    """What each chunk of a plan sends."""
    gives_back = distribution.muon_schedule == "parallel"
    found = []
    for number, chunk in enumerate(plan.chunks):
        dtypes = (math_dtype(params[route.param]) for route in chunk)
        dtype, wide = travel_dtypes(dtypes, distribution, device)
        extra = [
            specs[route.param].state_of_blocks[route.number] if gives_back else 0 for route in chunk
        ]
        found.append(
            chunk_transfers(
                number, chunk, extra, ranks, dtype=dtype, wide=wide, gives_back=gives_back
            )
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
