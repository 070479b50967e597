"""The stages of a chunk of spread blocks with kernels; `block_stages` has them in plain torch.

What travels is the same. All who hold parts of a block step along what its owner has, rounded to
the dtype in which it travels; so does the owner.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samestep.kernels.muon import GivenBlocks, finished, orthogonalized
from samestep.kernels.parts import Size, SourceRows
from samestep.placements.parts.chunk_tables import ChunkTables
from samestep.placements.parts.step_tables import StepTables
from samestep.update.plain import GroupMaths, direction_squares, is_bounded

if TYPE_CHECKING:
    from samestep.placements.parts.sharded import ShardedParameters


class KernelStages:
    """One chunk in one step."""

    def __init__(self, tables: ChunkTables, step: StepTables) -> None:
        self._tables = tables
        self._step = step
        self._out: Tensor | None = None
        self._directions: list[Tensor] = []

    def collect(self, held: "ShardedParameters", math: GroupMaths) -> None:
        """Prepare the parts held here, and start sending them to the owners."""
        out = torch.empty(self._tables.size, dtype=self._tables.moves.dtype, device=held.device)
        for group, parts in self._tables.momenta:
            parts.run_(self._step.grads, out, self._step.of_group(group, math)[1])
        if self._tables.copies is not None:
            self._tables.copies.run_([out], out)
        self._tables.moves.send_there(out[: self._tables.sent])
        self._out = out

    def transform(self, held: "ShardedParameters", math: GroupMaths) -> None:
        """Orthogonalize the blocks that this rank owns."""
        received = self._tables.moves.arrived()
        out, self._out = self._out, None
        assert out is not None
        if self._tables.assembling is not None:
            self._tables.assembling.run_([received], out)
        writes = self._step.grads.writes
        for group, jobs in self._tables.batches:
            of_group, step = self._step.of_group(group, math)
            blocks = [
                GivenBlocks(
                    out[job.begin : job.stop].view(-1, *job.size),
                    job.states,
                    None if writes is None or not job.states[0] else writes[job.places],
                )
                for job in jobs
            ]
            found = orthogonalized([(given, None) for given in blocks], step)
            for given, directions in zip(blocks, found, strict=True):
                if of_group.bounds is not None and is_bounded(of_group.rule):
                    largest = of_group.rule.largest_norm((given.rows, given.cols), of_group.options)
                    squares = direction_squares(directions)
                    of_group.bounds.look_at(group, squares, largest, of_group.only_if)
                self._directions.append(finished(given, directions, step, self._tables.moves.dtype))

    def give_back(self, held: "ShardedParameters") -> None:
        """Start sending everyone the parts of the directions that they hold."""
        way, buffer = self._tables.moves.back, self._tables.moves.nothing
        if way.out:
            buffer = buffer.new_empty(sum(way.outgoing))
        if self._tables.packing is not None:
            self._tables.packing.run_(self._directions, buffer)
        for item in way.out:
            if item.beside:
                state = self._tables.whole_state(item.key)
                extra = torch.cat([tensor.reshape(-1) for tensor in state.values()])
                begin = item.start + item.numel
                buffer[begin : begin + item.beside] = self._tables.moves.packed_beside(extra)
        self._tables.moves.send_back(buffer)

    def apply(self, held: "ShardedParameters", math: GroupMaths, *, gives_back: bool) -> None:
        """Step in the directions, on the parts held here."""
        sources, self._directions = self._directions, []
        if gives_back:
            sources.append(self._tables.moves.arrived())
            self._put_whole_states(held, sources[-1])
        measured = False
        for group, parts in self._tables.steps:
            of_group, step = self._step.of_group(group, math)
            parts.run_(sources, self._step.grads.writes, step)
            measured |= of_group.sizes is not None
        for part, size, source in self._tables.parts if measured else ():
            of_group, _ = self._step.of_group(held.specs[part.route.param].group, math)
            held.count(part.route, of_group, _taken(sources, source, size))

    def _put_whole_states(self, held: "ShardedParameters", received: Tensor) -> None:
        """Take over what owners decided with whole blocks in sight."""
        moves = self._tables.moves
        if any(item.beside for item in moves.back.into):
            routes = {route.key: route for route in moves.chunk}
            for item in moves.back.into:
                if item.beside:
                    begin = item.start + item.numel
                    extra = moves.beside(received[begin : begin + item.beside])
                    held.put_whole_state(routes[item.key], extra)


def _taken(sources: Sequence[Tensor], source: SourceRows, size: Size) -> Tensor:
    """The direction of a part, (rows, cols)."""
    strides = (1, source.stride) if source.turned else (source.stride, 1)
    of = sources[source.number]
    return of.as_strided(size, strides, int(of.storage_offset()) + source.begin)
