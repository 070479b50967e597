"""Which chunks of spread blocks kernels do, and what all chunks of a step share."""

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samestep.placements.parts.block_moves import BlockMoves
from samestep.placements.parts.chunk_tables import ChunkTables, NotRowsError
from samestep.placements.parts.spread_chunk import KernelStages
from samestep.placements.parts.step_tables import StepTables
from samestep.rules.state import State
from samestep.update.plain import GroupMaths

if TYPE_CHECKING:
    from samestep.placements.parts.sharded import HeldPart, ShardedParameters


class SpreadBlocks:
    """The chunks of one placement. Tables are made once, unless something is replaced."""

    def __init__(
        self, chunks: "Sequence[tuple[BlockMoves, list[HeldPart]]]", gives_back: bool
    ) -> None:
        self._chunks = chunks
        self._gives_back = gives_back
        self._params = sorted({route.param for moves, _ in chunks for route in moves.chunk})
        self._places = {param: place for place, param in enumerate(self._params)}
        self._known: _Known | None = None
        self._tables: dict[int, ChunkTables | None] = {}
        self._groups: dict[int, set[int]] = {}
        self._step: StepTables | None = None

    def begin_step(self, held: "ShardedParameters") -> None:
        """Forget what was replaced since the last step."""
        self._step = None
        if self._known is None or not self._known.is_still(held, self._params):
            self._known, self._tables = _Known(held, self._params), {}

    def stages(
        self, held: "ShardedParameters", number: int, math: GroupMaths
    ) -> KernelStages | None:
        """A chunk with the tables of this step; None: plain torch does it."""
        if self._step is None:
            assert self._known is not None
            self._step = StepTables(held, self._params)
            if self._step.dtypes != self._known.grad_dtypes:
                self._known.grad_dtypes, self._tables = self._step.dtypes, {}
        moves, mine = self._chunks[number]
        if number not in self._groups:
            self._groups[number] = {held.specs[route.param].group for route in moves.chunk}
        if not all(self._step.can_run(group, math) for group in self._groups[number]):
            return None
        if number not in self._tables:
            self._tables[number] = self._made(held, moves, mine)
        tables = self._tables[number]
        return None if tables is None else KernelStages(tables, self._step)

    def end_step(self) -> None:
        """Gradients are no longer needed."""
        self._step = None

    def _made(
        self, held: "ShardedParameters", moves: BlockMoves, mine: "list[HeldPart]"
    ) -> ChunkTables | None:
        assert self._known is not None
        dtypes = self._known.grad_dtypes
        try:
            return ChunkTables(held, moves, mine, self._gives_back, self._places, dtypes)
        except NotRowsError:
            return None


class _Known:
    """Parameters and state as a step found them."""

    def __init__(self, held: "ShardedParameters", params: Sequence[int]) -> None:
        self._states = [held.state_of(index) for index in params]
        self._tensors = _tensors(self._states)
        self._addresses = _addresses(held, params)
        self.grad_dtypes: list[torch.dtype] = []

    def is_still(self, held: "ShardedParameters", params: Sequence[int]) -> bool:
        """Whether nothing was replaced since."""
        states = [held.state_of(index) for index in params]
        tensors = _tensors(states)
        return (
            all(map(operator.is_, states, self._states))
            and len(tensors) == len(self._tensors)
            and all(map(operator.is_, tensors, self._tensors))
            and _addresses(held, params) == self._addresses
        )


def _tensors(states: Sequence[State]) -> list[Tensor]:
    return [tensor for state in states for tensor in state.values()]


def _addresses(held: "ShardedParameters", params: Sequence[int]) -> list[int]:
    return [held.params[index].to_local().data_ptr() for index in params]
