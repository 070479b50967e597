"""Blocks of DTensors: they come together on their owners, chunk by chunk, and go back.

`docs/dtensors.md` has the algorithm. Only what needs the whole block is done by its owner.
`PlainStages` are those of a chunk in plain torch; `kernel_stages` has them with kernels, for which
the same travels.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from samestep.comm.exchange import PackedExchange
from samestep.groups.distribution import Distribution
from samestep.kernels.choice import missing
from samestep.layout.blocks import Shape
from samestep.placements.parts.local_shards import BlockShard, BlockState, LocalShards
from samestep.placements.parts.planned import chunks_of, plan_blocks, shape_of
from samestep.placements.placement import Arrived
from samestep.placements.windows import Unit
from samestep.plan.block_exchange import OF_WHOLE, Chunk, Key, PlannedBlock
from samestep.plan.schedule import Apply, Collect, GiveBack, OfBucket, Transform, WindowId
from samestep.plan.sharding import ParamSpec
from samestep.rules.rule import StagedRule, math_dtype
from samestep.rules.state import State
from samestep.update.plain import (
    GroupMath,
    GroupMaths,
    direction_squares,
    exact_value,
    is_bounded,
    new_count,
    parameter_pairs,
    state_pairs,
    wide_state,
)

if TYPE_CHECKING:
    from samestep.placements.parts.kernel_stages import KernelStages, SpreadBlocks


NOTHING: State = {}


class BlockExchange:
    """The plan for the blocks of one mesh, at work."""

    def __init__(self, local: LocalShards, distribution: Distribution) -> None:
        self._local = local
        ranks, device = local.group.size, local.device
        self.plan = plan_blocks(local.specs, local.held, ranks, distribution, device)
        chunks = chunks_of(self.plan, local.specs, ranks, distribution, device)
        self.shape = shape_of(chunks, distribution, local.specs, ranks)
        self._stages: list[PlainStages] = []
        self._kernels: SpreadBlocks | None = None
        self._running: dict[int, PlainStages | KernelStages] = {}  # chunks that are on their way
        self._brought: dict[int, dict[Key, BlockState]] = {}  # by chunk, in the last step

    def lines(self, specs: Sequence[ParamSpec]) -> list[str]:
        """Who owns which block, as text."""
        lines = []
        for number, chunk in enumerate(self.shape.chunk_transfers):
            for place, planned in enumerate(chunk.blocks):
                what = f"chunk {number}: block {planned.number} of {specs[planned.param].name}"
                for owner in planned.owners:
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
            parts = {part.planned.key: local.kept_of_part(part) for part in local.of_blocks(chunk)}
            wholes = {planned.key: local.kept_of_whole(planned) for planned in chunk}
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


# --- a chunk on one rank -------------------------------------------------------------------------


class LocalChunk:
    """What a rank has to do with a chunk: shards of blocks that it holds, and blocks that it owns.

    collection, giving_back: how blocks come here, and shards of directions; what belongs to all of
        a block comes with them. Without a way back every rank is an owner.
    """

    def __init__(self, chunk: Chunk, local: LocalShards) -> None:
        group, self.device = local.group, local.device
        self.blocks, self.dtype, self.wide = chunk.blocks, chunk.dtype, chunk.wide
        self.shards = local.of_blocks(chunk.blocks)
        owned = [
            place for place, planned in enumerate(chunk.blocks) if group.rank in planned.owners
        ]
        self.owned = {place: chunk.blocks[place] for place in owned}
        self.collection = PackedExchange(chunk.collection, group, local.device)
        self.giving_back: PackedExchange | None = None
        if chunk.giving_back is not None:
            self.giving_back = PackedExchange(chunk.giving_back, group, local.device)
        out = () if self.giving_back is None else self.giving_back.out.parts
        self._states_sent = {part.key[0] for part in out if part.key[1] == OF_WHOLE}

    def packed_states(self, local: LocalShards) -> dict[int, Tensor]:
        """What belongs to whole blocks owned here, unrounded, as elements that travel."""
        found = {}
        for place in self._states_sent:
            state = local.whole_state(self.blocks[place])
            flat = torch.cat([tensor.reshape(-1) for tensor in state.values()])
            found[place] = flat.to(self.wide).view(self.dtype)
        return found

    def state(self, elements: Tensor) -> Tensor:
        """The same taken out of a buffer that came."""
        return elements.clone().view(self.wide)  # at a place for wide ones


class PlainStages:
    """A chunk's way in plain torch: its parts to the owners, directions back, and the step."""

    def __init__(self, chunk: LocalChunk) -> None:
        self._chunk = chunk
        self._matrices_of = [planned.block.matrices for planned in chunk.blocks]  # shapes
        self._prepared: dict[int, Tensor] = {}  # by place of the block in the chunk
        self._directions: dict[int, Tensor] = {}

    def collect(self, local: LocalShards, math: GroupMaths) -> None:
        """Prepare the parts local here, and start sending them to the owners."""
        prepared: dict[int, Tensor] = {}
        for part in self._chunk.shards:
            planned = part.planned
            rule, of_group = local.staged(planned, math)
            value, state, origin = local.views(part)
            grad = local.gradient_of(planned.param)[part.here].to(math_dtype(value))
            prepared[part.place], new = rule.prepare(
                of_group.gradient(grad),
                wide_state(value, state),
                of_group.scalars,
                of_group.options,
            )
            step = None if origin is None else local.step_after(planned)
            local.put(planned, of_group, state_pairs(state, new, step, origin))
        there = self._chunk.collection
        there.send(prepared[part.key[0]] for part in there.out.parts)
        self._prepared = prepared

    def transform(self, local: LocalShards, math: GroupMaths) -> None:
        """Run the rule on the whole blocks that this rank owns, those of one shape together."""
        blocks = self._blocks()
        stacks: dict[object, list[_Matrix]] = {}
        directions: dict[int, Tensor] = {}
        for place, planned in self._chunk.owned.items():
            spec = local.specs[planned.param]
            for matrix in self._matrices(local, place, blocks[place], directions):
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
            if of_group.bounds is not None and is_bounded(rule):
                largest = rule.largest_norm(shape, of_group.options)
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
        """Wait for the blocks that this rank owns, in the shapes of their boxes."""
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
        self, local: LocalShards, place: int, block: Tensor, directions: dict[int, Tensor]
    ) -> "list[_Matrix]":
        """Those of a block; where it has several, their directions go into one made for it."""
        planned, shapes = self._chunk.blocks[place], self._matrices_of[place]
        form = planned.block.form
        if form is None:
            value = block.view(shapes[0])
            return [_Matrix(place, planned, shapes[0], value, local.whole_state(planned), None)]
        block = block.view(planned.block.shape)
        direction = torch.empty_like(block, dtype=self._chunk.dtype)
        directions[place] = direction.view(planned.box.sizes)
        states = local.states_of_matrices(planned)
        of_matrices = zip(shapes, form.views(block), states, form.views(direction), strict=True)
        return [_Matrix(place, planned, *of_matrix) for of_matrix in of_matrices]

    def give_back(self, local: LocalShards) -> None:
        """Start sending everyone the parts of the directions that they hold."""
        chunk, back = self._chunk, self._chunk.giving_back
        assert back is not None
        states = chunk.packed_states(local)
        back.send(
            states[place] if what == OF_WHOLE else self._directions[place][slices]
            for _, (place, what), _, slices, _, _ in back.out.parts
        )

    def apply(self, local: LocalShards, math: GroupMaths) -> None:
        """Step in the directions, on the parts local here."""
        chunk, came = self._chunk, dict[int, Tensor]()
        own, self._directions = self._directions, {}
        for part, values in () if chunk.giving_back is None else chunk.giving_back.arrived_parts():
            place, what = part.key
            if what == OF_WHOLE:
                local.put_whole_state(chunk.blocks[place], chunk.state(values))
            else:
                came[place] = values.view(part.sizes)
        for shard in chunk.shards:
            planned = shard.planned
            rule, of_group = local.staged(planned, math)
            mine = own.get(shard.place)
            direction = came[shard.place] if mine is None else mine[shard.in_block]
            target, kept, _ = local.views(shard)
            value = exact_value(target, kept)
            new = self._finished(rule, shard, value, direction.to(value.dtype), of_group)
            local.put(planned, of_group, parameter_pairs(target, kept, new))
            local.count(planned, of_group, direction)

    def _finished(
        self, rule: StagedRule, part: BlockShard, value: Tensor, direction: Tensor, math: GroupMath
    ) -> Tensor:
        """The step of a part; matrices of its block may differ in shape, so in their rate."""
        block, matrices = part.planned.block, self._matrices_of[part.place]
        shapes = list(dict.fromkeys(matrices))
        if len(shapes) == 1:
            return rule.finish(value, direction, shapes[0], math.scalars, math.options)
        assert block.form is not None
        dim = block.form.dim + int(block.matrix is not None)
        numbers = block.form.numbers()[part.in_block[dim]]
        new = torch.empty_like(value)
        for shape in shapes:
            own = [place for place, n in enumerate(numbers) if matrices[n] == shape]
            if own:
                places = torch.tensor(own, device=value.device)
                parts = value.index_select(dim, places), direction.index_select(dim, places)
                new.index_copy_(dim, places, rule.finish(*parts, shape, math.scalars, math.options))
        return new


class _Matrix(NamedTuple):
    """A matrix that this rank orthogonalizes; `direction`: where its result goes."""

    place: int  # of its block in the chunk
    planned: PlannedBlock
    shape: Shape
    value: Tensor
    state: State
    direction: Tensor | None  # None: the block is this matrix
