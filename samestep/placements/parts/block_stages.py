"""A chunk of spread blocks on one rank, and its stages in plain torch.

`docs/dtensors.md` has the algorithm. Only what needs the whole block is done by the owner.
`kernel_stages` has the stages with kernels, for which the same travels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from samestep.comm.exchange import PackedExchange
from samestep.layout.blocks import Shape
from samestep.placements.parts.local_shards import BlockShard, LocalShards
from samestep.plan.block_exchange import OF_WHOLE, Chunk, Route
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


class LocalChunk:
    """What a rank has to do with a chunk: shards of blocks that it holds, and blocks that it owns.

    collection, giving_back: how blocks come here, and shards of directions; what belongs to all of
        a block comes with them. Without a way back every rank is an owner.
    """

    def __init__(self, chunk: Chunk, local: LocalShards) -> None:
        group, self.device = local.group, local.device
        self.routes, self.dtype, self.wide = chunk.routes, chunk.dtype, chunk.wide
        self.shards = local.of_blocks(chunk.routes)
        owned = [place for place, route in enumerate(chunk.routes) if group.rank in route.owners]
        self.owned = {place: chunk.routes[place] for place in owned}
        self.collection = PackedExchange(chunk.collection, chunk.to, group, local.device)
        self.giving_back: PackedExchange | None = None
        if chunk.giving_back is not None and chunk.back is not None:
            back = PackedExchange(chunk.giving_back, chunk.back, group, local.device)
            self.giving_back = back
        out = () if self.giving_back is None else self.giving_back.out.parts
        self._states_sent = {part.key[0] for part in out if part.key[1] == OF_WHOLE}

    def packed_states(self, local: LocalShards) -> dict[int, Tensor]:
        """What belongs to whole blocks owned here, unrounded, as elements that travel."""
        found = {}
        for place in self._states_sent:
            state = local.whole_state(self.routes[place])
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
        self._matrices_of = [route.block.matrices for route in chunk.routes]  # shapes
        self._prepared: dict[int, Tensor] = {}  # by place of the block in the chunk
        self._directions: dict[int, Tensor] = {}

    def collect(self, local: LocalShards, math: GroupMaths) -> None:
        """Prepare the parts local here, and start sending them to the owners."""
        prepared: dict[int, Tensor] = {}
        for part in self._chunk.shards:
            route = part.route
            rule, of_group = local.staged(route, math)
            state, value = local.part_of_state(part), local.values[route.param]
            grad = local.gradient_of(route.param)[part.here].to(math_dtype(value))
            prepared[part.place], new = rule.prepare(
                of_group.gradient(grad),
                wide_state(value, state),
                of_group.scalars,
                of_group.options,
            )
            origin = local.origin_of(part)
            step = None if origin is None else local.step_after(route)
            local.put(route, of_group, state_pairs(state, new, step, origin))
        there = self._chunk.collection
        there.send(prepared[part.key[0]] for part in there.out.parts)
        self._prepared = prepared

    def transform(self, local: LocalShards, math: GroupMaths) -> None:
        """Run the rule on the whole blocks that this rank owns, those of one shape together."""
        blocks = self._blocks()
        stacks: dict[object, list[_Matrix]] = {}
        directions: dict[int, Tensor] = {}
        for place, route in self._chunk.owned.items():
            spec = local.specs[route.param]
            for matrix in self._matrices(local, place, blocks[place], directions):
                stacks.setdefault((matrix.shape, spec.group, spec.dtype), []).append(matrix)
        for matrices in stacks.values():
            first, shape = matrices[0].route, matrices[0].shape
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
            for number, (place, route, _, _, state, direction) in enumerate(matrices):
                if direction is None:
                    directions[place] = found[number].view(route.box.sizes)
                else:
                    direction.copy_(found[number].view(direction.shape))
                of_matrix = {key: tensor[number] for key, tensor in new.items()}
                step = new_count(state, of_matrix)
                local.put(route, of_group, state_pairs(state, of_matrix, step, None))
        self._directions = directions

    def _blocks(self) -> dict[int, Tensor]:
        """Wait for the blocks that this rank owns, in the shapes of their boxes."""
        chunk, prepared, self._prepared = self._chunk, self._prepared, {}
        came = chunk.collection.arrived_parts()
        found = {
            place: torch.empty(route.box.sizes, dtype=chunk.wide, device=chunk.device)
            for place, route in chunk.owned.items()
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
        route, shapes = self._chunk.routes[place], self._matrices_of[place]
        form = route.block.form
        if form is None:
            value = block.view(shapes[0])
            return [_Matrix(place, route, shapes[0], value, local.whole_state(route), None)]
        block = block.view(route.block.shape)
        direction = torch.empty_like(block, dtype=self._chunk.dtype)
        directions[place] = direction.view(route.box.sizes)
        states = local.states_of_matrices(route)
        of_matrices = zip(shapes, form.views(block), states, form.views(direction), strict=True)
        return [_Matrix(place, route, *of_matrix) for of_matrix in of_matrices]

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
                local.put_whole_state(chunk.routes[place], chunk.state(values))
            else:
                came[place] = values.view(part.sizes)
        for shard in chunk.shards:
            route = shard.route
            rule, of_group = local.staged(route, math)
            mine = own.get(shard.place)
            direction = came[shard.place] if mine is None else mine[shard.in_block]
            kept = local.part_of_state(shard)
            target = shard.of(local.values[route.param])
            value = exact_value(target, kept)
            new = self._finished(rule, shard, value, direction.to(value.dtype), of_group)
            local.put(route, of_group, parameter_pairs(target, kept, new))
            local.count(route, of_group, direction)

    def _finished(
        self, rule: StagedRule, part: BlockShard, value: Tensor, direction: Tensor, math: GroupMath
    ) -> Tensor:
        """The step of a part; matrices of its block may differ in shape, so in their rate."""
        block, matrices = part.route.block, self._matrices_of[part.place]
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
    route: Route
    shape: Shape
    value: Tensor
    state: State
    direction: Tensor | None  # None: the block is this matrix
