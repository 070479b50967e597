"""Sends blocks of DTensors to their owners, chunk by chunk, and their updates back.

`docs/fsdp2.md` has the algorithm. Only what needs the whole block is done by its owner.
`PlainStages` are those of a chunk in plain torch; `kernel_stages` has them with kernels, for which
the same travels.
"""

import operator
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from samestep.comm.collectives import Pending, gather_segments
from samestep.kernels.choice import missing
from samestep.layout.blocks import Shape
from samestep.plan.chunks import OF_WHOLE, Chunk, PlannedBlock, owned_blocks
from samestep.plan.schedule import Apply, Collect, GiveBack, OfBucket, Sum, Transform, WindowId
from samestep.plan.sharding import ParamSpec
from samestep.rules.exact_sums import WIDTH, digits_of, nothing, total_of
from samestep.rules.rule import BoundedRule, StagedRule, follows, is_summing, math_dtype
from samestep.rules.state import State
from samestep.shards.dtensor.local_chunk import BlockShard, LocalChunk
from samestep.shards.dtensor.local_shards import LocalShards
from samestep.shards.placement import Arrived
from samestep.shards.windows import OffloadUnit
from samestep.update.plain import (
    GroupMath,
    GroupMaths,
    direction_squares,
    exact_value,
    new_count,
    parameter_pairs,
    state_pairs,
    wide_state,
)

if TYPE_CHECKING:
    from samestep.shards.dtensor.kernel_stages import KernelStages, SpreadBlocks


class BlockExchange:
    """Runs the exchange plan of the blocks of one mesh."""

    def __init__(self, local: LocalShards, chunks: Sequence[Chunk]) -> None:
        self._local, self.chunks = local, chunks
        local.owned = owned_blocks(chunks, local.group.rank, len(local.specs))
        self._local_chunks: list[LocalChunk] = []
        self._version = local.version  # of what views were made of
        self._fetched: set[int] = set()  # chunks with state from the host, in this step
        self._stages: list[PlainStages] = []
        self._kernels: SpreadBlocks | None = None
        self._running: dict[int, PlainStages | KernelStages] = {}  # chunks that are on their way

    def lines(self, specs: Sequence[ParamSpec]) -> list[str]:
        """The owner of every block, as lines of text."""
        lines = []
        for number, chunk in enumerate(self.chunks):
            for place, planned in enumerate(chunk.blocks):
                what = f"chunk {number}: block {planned.number} of {specs[planned.param].name}"
                for owner in planned.owners:
                    senders = list(chunk.collection.givers((place, ""), owner))
                    lines.append(f"{what} from {senders} on {owner}")
        return lines

    def prepare(self) -> None:
        """Allocate what the exchange needs, once state exists."""
        local = self._local
        self._local_chunks = [LocalChunk(chunk, local) for chunk in self.chunks]
        self._stages = [PlainStages(chunk) for chunk in self._local_chunks]
        if missing(local.device) is None:
            from samestep.shards.dtensor.kernel_stages import SpreadBlocks

            self._kernels = SpreadBlocks(self._local_chunks)

    def begin_step(self) -> None:
        """Use the parameters, state and gradients of this step."""
        if self._version != self._local.version:  # some were replaced since the last step
            self._version = self._local.version
            for chunk in self._local_chunks:
                chunk.forget_views()
        if self._kernels is not None:
            self._kernels.begin_step(self._local)

    def units(self) -> list[list[OffloadUnit]]:
        """State of every chunk that is offloaded to the host."""
        return [chunk.units() for chunk in self._local_chunks]

    def run(self, operation: OfBucket, math: GroupMaths, arrived: Arrived | None = None) -> None:
        """Run one operation of the schedule on one chunk.

        `arrived`: waits for a window, where the chunk has state that stays on the host.
        """
        number = operation.bucket.bucket
        match operation:
            case Collect():
                if arrived is not None:
                    parts = arrived(WindowId(operation.bucket, "chunk"))
                    moved = self._local_chunks[number].take_fetched(parts)
                    self._fetched.add(number)
                    if self._kernels is not None and moved:
                        self._kernels.forget(number)
                kernels = self._kernels and self._kernels.stages(self._local, number, math)
                self._running[number] = kernels or self._stages[number]
                self._running[number].collect(math)
            case Transform():
                self._running[number].transform(math)
            case GiveBack():
                self._running[number].give_back()
            case Sum():
                stages = self._running[number]
                assert isinstance(stages, PlainStages)  # no rule that has kernels needs sums
                stages.add_up(math)
            case Apply():
                self._running.pop(number).apply(math)

    def end_step(self) -> None:
        """Release the buffers after a step, also after a failed one."""
        self._running = {}
        for number in self._fetched:  # that state is gone again
            self._local_chunks[number].forget_views()
        self._fetched.clear()
        if self._kernels is not None:
            self._kernels.end_step()


class PlainStages:
    """The stages of one chunk in plain torch: collect, transform, give back, apply."""

    def __init__(self, chunk: LocalChunk) -> None:
        self._chunk, self._local = chunk, chunk.local
        self._matrices_of = [planned.block.matrices for planned in chunk.blocks]  # shapes
        self._prepared: dict[int, Tensor] = {}  # by place of the block in the chunk
        self._directions: dict[int, Tensor] = {}
        self._of_shards: dict[int, Tensor] | None = None  # directions of shards, once they are here
        self._sums: Pending[list[Tensor]] | None = None
        # Where sums over a block begin among those of the chunk, matrix after matrix.
        sizes = map(operator.mul, chunk.summed, map(len, self._matrices_of))
        self._first_sums = list(accumulate(sizes, initial=0))

    def collect(self, math: GroupMaths) -> None:
        """Prepare the shards that this rank holds, and start sending them to the owners."""
        chunk, local = self._chunk, self._local
        prepared: dict[int, Tensor] = {}
        for shard in chunk.shards:
            planned = shard.planned
            rule, of_group = local.staged(planned, math)
            value, state, origin = chunk.views(shard)
            grad = local.gradient_of(planned.param)[shard.here].to(math_dtype(value))
            prepared[shard.place], new = rule.prepare(
                of_group.gradient(grad),
                wide_state(value, state),
                of_group.scalars,
                of_group.options,
            )
            step = None if origin is None else chunk.step_after(shard.place)
            local.put(planned, of_group, state_pairs(state, new, step, origin))
        there = chunk.collection
        there.send(prepared[part.key[0]] for part in there.out.parts)
        self._prepared = prepared

    def transform(self, math: GroupMaths) -> None:
        """Run the rule on the whole blocks that this rank owns, those of one shape together."""
        local, blocks = self._local, self._blocks()
        stacks: dict[object, list[_Matrix]] = {}
        directions: dict[int, Tensor] = {}
        for place, planned in self._chunk.owned.items():
            spec = local.specs[planned.param]
            for matrix in self._matrices(place, blocks[place], directions):
                stacks.setdefault((matrix.shape, spec.group, spec.dtype), []).append(matrix)
        for matrices in stacks.values():
            first, shape = matrices[0].planned, matrices[0].shape
            rule, of_group = local.staged(first, math)
            dtype = math_dtype(local.values[first.param])
            found, new = rule.transform(
                torch.stack([matrix.value.reshape(shape).to(dtype) for matrix in matrices]),
                {
                    key: torch.stack([matrix.state[key] for matrix in matrices])
                    for key in matrices[0].state
                },
                of_group.scalars,
                of_group.options,
            )
            if of_group.bounds is not None and follows(type(rule), BoundedRule):
                largest = cast("BoundedRule", rule).largest_norm(shape, of_group.options)
                squares, group = direction_squares(found), local.specs[first.param].group
                of_group.bounds.look_at(group, squares, largest, of_group.only_if)
            found = found.to(self._chunk.dtype)  # as others get it: copies must not drift apart
            for number, (place, planned, _, _, state, direction) in enumerate(matrices):
                if direction is None:
                    directions[place] = found[number].view(planned.box.sizes)
                else:
                    direction.copy_(found[number].view(direction.shape))
                of_matrix = {key: tensor[number] for key, tensor in new.items()}
                step = new_count(state, of_matrix)
                local.put(planned, of_group, state_pairs(state, of_matrix, step, None))
        self._directions = directions

    def _blocks(self) -> dict[int, Tensor]:
        """Wait for the blocks this rank owns, in their shapes."""
        chunk, prepared, self._prepared = self._chunk, self._prepared, {}
        came = chunk.collection.arrived_parts()
        found = {
            place: torch.empty(planned.box.sizes, dtype=chunk.wide, device=chunk.device)
            for place, planned in chunk.owned.items()
        }
        for part in chunk.shards:
            if part.place in found:
                found[part.place][part.in_block] = prepared[part.place]
        for (_, (place, _), sizes, slices, _, _), values in came:
            found[place][slices] = values.view(sizes)
        return found

    def _matrices(
        self, place: int, block: Tensor, directions: dict[int, Tensor]
    ) -> "list[_Matrix]":
        """The matrices of a block; the directions of several share one tensor."""
        planned, shapes = self._chunk.blocks[place], self._matrices_of[place]
        form = planned.block.form
        if form is None:
            value = block.view(shapes[0])
            state = self._chunk.whole_state(place)
            return [_Matrix(place, planned, shapes[0], value, state, None)]
        block = block.view(planned.block.shape)
        direction = torch.empty_like(block, dtype=self._chunk.dtype)
        directions[place] = direction.view(planned.box.sizes)
        states = self._chunk.states_of_matrices(place)
        of_matrices = zip(shapes, form.views(block), states, form.views(direction), strict=True)
        return [_Matrix(place, planned, *of_matrix) for of_matrix in of_matrices]

    def give_back(self) -> None:
        """Start sending directions to the ranks that hold their shards."""
        chunk, back = self._chunk, self._chunk.giving_back
        assert back is not None
        states = chunk.packed_states() if chunk.states_sent else {}
        back.send(
            states[place] if what == OF_WHOLE else self._directions[place][slices]
            for _, (place, what), _, slices, _, _ in back.out.parts
        )

    def add_up(self, math: GroupMaths) -> None:
        """Start summing over ranks the numbers that rules need of whole blocks."""
        chunk, local, directions = self._chunk, self._local, self._directions_here()
        assert chunk.sums is not None
        rows = nothing(self._first_sums[-1], chunk.device)
        for shard in chunk.shards:
            if local.held[shard.planned.param].replicas[local.group.rank] != 0:
                continue
            rule, of_group = local.staged(shard.planned, math)
            if not is_summing(rule):
                continue
            names = rule.sums(of_group.options)
            target, kept, _ = chunk.views(shard)
            value, direction = exact_value(target, kept), directions[shard.place]
            for part in self._parts(shard, apart=True):
                terms = rule.summands(
                    part.of(value),
                    part.of(direction.to(value.dtype)),
                    part.shape,
                    of_group.scalars,
                    of_group.options,
                )
                first = self._first_sums[shard.place] + part.first * len(names)
                for row, name in enumerate(names, first):
                    rows[row] = digits_of(terms[name].reshape(1, -1))[0]
        sizes = [rows.numel()] * local.group.size
        self._sums = gather_segments(chunk.sums.name, rows.view(-1), sizes, local.group)

    def apply(self, math: GroupMaths) -> None:
        """Apply the directions to this rank's shards."""
        chunk, local, directions = self._chunk, self._local, self._directions_here()
        totals: Tensor | None = None
        if self._sums is not None:
            totals = total_of(torch.stack(self._sums.wait()).view(local.group.size, -1, WIDTH))
        self._directions, self._of_shards, self._sums = {}, None, None
        for shard in chunk.shards:
            planned, direction = shard.planned, directions[shard.place]
            rule, of_group = local.staged(planned, math)
            target, kept, _ = chunk.views(shard)
            value = exact_value(target, kept)
            new = self._finished(rule, shard, value, direction.to(value.dtype), of_group, totals)
            local.put(planned, of_group, parameter_pairs(target, kept, new))
            if of_group.sizes is not None:
                local.count(planned, of_group, direction)

    def _directions_here(self) -> dict[int, Tensor]:
        """Directions of this rank's shards: local ones, and received ones once awaited."""
        if self._of_shards is not None:
            return self._of_shards
        chunk, found = self._chunk, dict[int, Tensor]()
        for part, values in () if chunk.giving_back is None else chunk.giving_back.arrived_parts():
            place, what = part.key
            if what == OF_WHOLE:
                chunk.put_whole_state(place, values)
            else:
                found[place] = values.view(part.sizes)
        for shard in chunk.shards:
            if shard.place in self._directions:
                found[shard.place] = self._directions[shard.place][shard.in_block]
        self._of_shards = found
        return found

    def _parts(self, shard: BlockShard, *, apart: bool) -> "Iterator[_PartOfShard]":
        """A shard as parts of matrices of one shape; with `apart`, of one matrix."""
        block, matrices = shard.planned.block, self._matrices_of[shard.place]
        shapes = list(dict.fromkeys(matrices))
        if len(matrices) == 1 or (len(shapes) == 1 and not apart):
            yield _PartOfShard(shapes[0], 0)
            return
        assert block.form is not None
        dim = block.form.dim + int(block.matrix is not None)
        numbers = block.form.numbers()[shard.in_block[dim]]
        kinds = range(len(matrices)) if apart else shapes
        for kind in kinds:
            own = [at for at, n in enumerate(numbers) if kind == (n if apart else matrices[n])]
            if own:
                first = numbers[own[0]]
                places = torch.tensor(own, device=self._chunk.device)
                yield _PartOfShard(matrices[first], first, dim, places)

    def _finished(
        self,
        rule: StagedRule,
        shard: BlockShard,
        value: Tensor,
        direction: Tensor,
        math: GroupMath,
        totals: Tensor | None,
    ) -> Tensor:
        """The updated shard; its matrices may differ in shape, and so in their rate."""
        new, names = torch.empty(0), rule.sums(math.options) if is_summing(rule) else ()
        for part in self._parts(shard, apart=bool(names)):
            scalars = dict(math.scalars)
            if names:
                assert totals is not None
                first = self._first_sums[shard.place] + part.first * len(names)
                own = totals[first : first + len(names)].view(-1, *[1] * value.ndim)
                scalars.update(zip(names, own, strict=True))
            own_new = rule.finish(
                part.of(value), part.of(direction), part.shape, scalars, math.options
            )
            if part.places is None:
                return own_new
            new = torch.empty_like(value) if new.numel() == 0 else new
            new.index_copy_(part.dim, part.places, own_new.to(new.dtype))
        return new


class _PartOfShard(NamedTuple):
    """Rows or columns of a shard that belong to matrices of one shape."""

    shape: Shape
    first: int
    dim: int = 0
    places: Tensor | None = None  # None: all of the shard

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self.places is None else tensor.index_select(self.dim, self.places)


class _Matrix(NamedTuple):
    """A matrix that this rank orthogonalizes, and the place of its direction."""

    place: int  # of its block in the chunk
    planned: PlannedBlock
    shape: Shape
    value: Tensor
    state: State
    direction: Tensor | None  # None: the block is this matrix
