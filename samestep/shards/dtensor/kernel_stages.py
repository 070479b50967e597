"""The stages of chunks of sharded blocks with Triton kernels.

What travels is the same. All who hold parts of a block step along what its owner has, rounded to
the dtype in which it travels; so does the owner. `SpreadBlocks` says which chunks kernels do,
`StepTables` has what all chunks share in one step.
"""

import operator
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from samestep.comm.exchange import PackedExchange
from samestep.kernels.call import Step, Table
from samestep.kernels.muon import GivenBlocks, count_step, finished, orthogonalized
from samestep.kernels.parts import GradientTable, Size, SourceRows
from samestep.plan.chunks import OF_WHOLE
from samestep.rules.stored import STEP
from samestep.shards.dtensor.chunk_tables import ChunkTables, NotRowsError, OwnedBlocks
from samestep.shards.dtensor.local_chunk import LocalChunk
from samestep.shards.dtensor.local_shards import LocalShards
from samestep.update.plain import GroupMath, GroupMaths, direction_squares, is_bounded
from samestep.update.triton import can_run


class StepTables:
    """Gradients, presence and options of one step, for kernels."""

    def __init__(self, local: LocalShards, params: Sequence[int]) -> None:
        # Contiguous: as tables of parts take them to be. Kept until all launches have read them.
        self._grads = [local.gradient_of(index).contiguous() for index in params]
        self.dtypes = [grad.dtype for grad in self._grads]
        self._device = local.device
        self._maths: dict[int, tuple[GroupMath, Step]] = {}
        self._can: dict[int, bool] = {}
        aligned = not reduce(operator.or_, [grad.data_ptr() for grad in self._grads], 0) % 16
        flags = [local.present[index] for index in params]
        table = Table([self._grads]).addresses[0]
        self.grads = GradientTable(table, aligned, self._writes(flags))

    def _writes(self, present: Sequence[bool | Tensor]) -> Tensor | None:
        """Presence flags, (params,) float64; None: all are present."""
        if all(flag is True for flag in present):
            return None
        known = torch.arange(2, device=self._device).bool().unbind()
        flags = [flag if isinstance(flag, Tensor) else known[flag] for flag in present]
        return torch.stack(flags).double()

    def of_group(self, group: int, math: GroupMaths) -> tuple[GroupMath, Step]:
        """Rule, options and numbers of a group in this step."""
        if group not in self._maths:
            found = math(group, self._device)
            only_if = None if found.only_if is None else found.only_if.double()
            step = Step(found.scalars, found.options, found.factor, found.maximize, only_if)
            self._maths[group] = found, step
        return self._maths[group]

    def can_run(self, group: int, math: GroupMaths) -> bool:
        """Whether there are kernels for the rule and options of a group."""
        if group not in self._can:
            self._can[group] = can_run(self.of_group(group, math)[0], self._device)
        return self._can[group]


class KernelStages:
    """The stages of one chunk in one step."""

    def __init__(self, tables: ChunkTables, step: StepTables) -> None:
        self._tables = tables
        self._step = step
        self._out: Tensor | None = None
        self._directions: list[Tensor] = []

    def collect(self, math: GroupMaths) -> None:
        """Prepare the shards that this rank holds, and start sending them to the owners."""
        chunk = self._tables.chunk
        out = torch.empty(self._tables.size, dtype=chunk.dtype, device=chunk.device)
        for group, parts in self._tables.momenta:
            parts.run_(self._step.grads, out, self._step.of_group(group, math)[1])
        if self._tables.copies is not None:
            self._tables.copies.run_([out], out)
        chunk.collection.send_packed(out[: self._tables.sent])
        self._out = out

    def transform(self, math: GroupMaths) -> None:
        """Orthogonalize the blocks that this rank owns."""
        received = self._tables.chunk.collection.arrived()
        out, self._out = self._out, None
        assert out is not None
        if self._tables.assembling is not None:
            self._tables.assembling.run_([received], out)
        writes = self._step.grads.writes
        for group, jobs in self._tables.batches:
            _, step = self._step.of_group(group, math)
            for job in jobs:
                self._count(job, step)
            if jobs[0].form is not None:
                for job in jobs:
                    self._directions.append(self._transformed_form(job, group, out, math))
                continue
            blocks = [
                GivenBlocks(
                    out[job.begin : job.stop].view(-1, *job.size),
                    job.states,
                    None if writes is None or not job.states[0] else writes[job.params],
                )
                for job in jobs
            ]
            found = orthogonalized([(given, None) for given in blocks], step)
            for given, directions in zip(blocks, found, strict=True):
                self._directions.append(self._finished(given, directions, group, math))

    def _count(self, job: OwnedBlocks, step: Step) -> None:
        """Increment step counts of blocks whose momentum is rounded stochastically."""
        if STEP not in job.states[0]:
            return
        writes = self._step.grads.writes
        counts = Table([[state[STEP].view(()) for state in job.states]])
        count_step(counts, None if writes is None else writes[job.params], step)

    def _finished(
        self, given: GivenBlocks, directions: Tensor, group: int, math: GroupMaths
    ) -> Tensor:
        """Directions in the dtype that is sent; too large ones are flagged."""
        of_group, step = self._step.of_group(group, math)
        if of_group.bounds is not None and is_bounded(of_group.rule):
            largest = of_group.rule.largest_norm((given.rows, given.cols), of_group.options)
            squares = direction_squares(directions)
            of_group.bounds.look_at(group, squares, largest, of_group.only_if)
        return finished(given, directions, step, self._tables.chunk.dtype)

    def _transformed_form(
        self, job: OwnedBlocks, group: int, out: Tensor, math: GroupMaths
    ) -> Tensor:
        """Directions of blocks with interleaved matrices, in stored order."""
        assert job.form is not None
        blocks = out[job.begin : job.stop].view(-1, *job.size)
        result = torch.empty_like(blocks, dtype=self._tables.chunk.dtype)
        writes, step = self._step.grads.writes, self._step.of_group(group, math)[1]
        shapes = job.block.matrices
        for shape in dict.fromkeys(shapes):
            alike = [number for number, other in enumerate(shapes) if other == shape]
            values = [job.form.views(blocks)[number].reshape(-1, *shape) for number in alike]
            states = [of_block[number] for number in alike for of_block in job.matrices]
            given = GivenBlocks(
                torch.cat(values),
                states,
                None if writes is None or not states[0] else writes[job.params].repeat(len(alike)),
            )
            (found,) = orthogonalized([(given, None)], step)
            directions = self._finished(given, found, group, math)
            if given.tall:
                directions = directions.mT
            directions = directions[:, : shape[0], : shape[1]]
            for number, own in zip(alike, directions.chunk(len(alike)), strict=True):
                place = job.form.views(result)[number]
                place.copy_(own.reshape(place.shape))
        return result

    def give_back(self) -> None:
        """Start sending directions to the ranks that hold their shards."""
        chunk, back = self._tables.chunk, self._tables.chunk.giving_back
        assert back is not None
        buffer = back.new_buffer()
        if self._tables.packing is not None:
            self._tables.packing.run_(self._directions, buffer)
        states = chunk.packed_states()
        for part in back.out.parts:
            place, what = part.key
            if what == OF_WHOLE:
                buffer[part.start : part.start + part.numel] = states[place]
        back.send_packed(buffer)

    def apply(self, math: GroupMaths) -> None:
        """Apply the directions to this rank's shards."""
        sources, self._directions = self._directions, []
        local, back = self._tables.chunk.local, self._tables.chunk.giving_back
        if back is not None:
            sources.append(back.arrived())
            self._put_whole_states(back, sources[-1])
        measured = False
        for group, parts in self._tables.steps:
            of_group, step = self._step.of_group(group, math)
            parts.run_(sources, self._step.grads.writes, step)
            measured |= of_group.sizes is not None
        for part, region, source in self._tables.parts if measured else ():
            of_group, _ = self._step.of_group(local.specs[part.planned.param].group, math)
            local.count(part.planned, of_group, _taken(sources, source, region.size))

    def _put_whole_states(self, back: PackedExchange, received: Tensor) -> None:
        """Copy the state of whole blocks that owners have updated."""
        chunk = self._tables.chunk
        for part in back.into.parts:
            place, what = part.key
            if what == OF_WHOLE:
                chunk.put_whole_state(place, received[part.start : part.start + part.numel])


def _taken(sources: Sequence[Tensor], source: SourceRows, size: Size) -> Tensor:
    """The direction of a part, (rows, cols)."""
    strides = (1, source.stride) if source.turned else (source.stride, 1)
    of = sources[source.number]
    return of.as_strided(size, strides, int(of.storage_offset()) + source.begin)


class SpreadBlocks:
    """Chunks of one placement with their tables, rebuilt when tensors are replaced."""

    def __init__(self, chunks: Sequence[LocalChunk]) -> None:
        self._chunks = chunks
        self._params = sorted({planned.param for chunk in chunks for planned in chunk.blocks})
        self._places = {param: place for place, param in enumerate(self._params)}
        self._version = 0  # of what tables are of
        self._dtypes: list[torch.dtype] = []  # of gradients, likewise
        self._tables: dict[int, ChunkTables | None] = {}
        self._groups: dict[int, set[int]] = {}
        self._step: StepTables | None = None

    def begin_step(self, local: LocalShards) -> None:
        """Drop tables whose tensors were replaced since the last step."""
        self._step = None
        if self._version != local.version:
            self._version, self._tables = local.version, {}

    def stages(self, local: LocalShards, number: int, math: GroupMaths) -> KernelStages | None:
        """The kernel stages of a chunk; None: plain torch runs it."""
        if self._step is None:
            self._step = StepTables(local, self._params)
            if self._step.dtypes != self._dtypes:
                self._dtypes, self._tables = self._step.dtypes, {}
        chunk = self._chunks[number]
        if number not in self._groups:
            self._groups[number] = {local.specs[planned.param].group for planned in chunk.blocks}
        if not all(self._step.can_run(group, math) for group in self._groups[number]):
            return None
        if number not in self._tables:
            self._tables[number] = self._made(chunk)
        tables = self._tables[number]
        return None if tables is None else KernelStages(tables, self._step)

    def forget(self, number: int) -> None:
        """Drop the tables of a chunk whose state has moved."""
        self._tables.pop(number, None)

    def end_step(self) -> None:
        self._step = None

    def _made(self, chunk: LocalChunk) -> ChunkTables | None:
        try:
            return ChunkTables(chunk, self._places, self._dtypes)
        except NotRowsError:
            return None
