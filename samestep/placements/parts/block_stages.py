"""A chunk of spread blocks: its stages in plain torch, and how its parts travel.

`docs/dtensors.md` has the algorithm. Only what needs the whole block is done by the owner.
`kernel_stages` has the stages with kernels, whose parts travel the same way.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.comm.collectives import Pending, move_parts
from samestep.comm.groups import RankGroup
from samestep.layout.blocks import Shape
from samestep.placements.parts.held_parts import HeldPart, HeldParts
from samestep.plan.block_exchange import OF_WHOLE, Chunk, Route
from samestep.plan.exchanges import PackedPart, Packing
from samestep.plan.transfers import Transfer
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


class PlainStages:
    """A chunk's way in plain torch: its parts to the owners, directions back, and the step."""

    def __init__(self, moves: "BlockMoves", mine: Sequence[HeldPart]) -> None:
        self._moves = moves
        self._mine = mine
        self._matrices_of = [route.block.matrices for route in moves.routes]  # shapes
        self._prepared: dict[int, Tensor] = {}  # by place of the block in the chunk
        self._directions: dict[int, Tensor] = {}

    def collect(self, held: HeldParts, math: GroupMaths) -> None:
        """Prepare the parts held here, and start sending them to the owners."""
        prepared: dict[int, Tensor] = {}
        for part in self._mine:
            route = part.route
            rule, of_group = held.staged(route, math)
            state, value = held.part_of_state(part), held.value_of(route.param)
            grad = held.gradient_of(route.param)[part.here].to(math_dtype(value))
            prepared[part.place], new = rule.prepare(
                of_group.gradient(grad),
                wide_state(value, state),
                of_group.scalars,
                of_group.options,
            )
            origin = held.origin_of(part)
            step = None if origin is None else held.step_after(route)
            held.put(route, of_group, state_pairs(state, new, step, origin))
        self._moves.collect(prepared)
        self._prepared = prepared

    def transform(self, held: HeldParts, math: GroupMaths) -> None:
        """Run the rule on the whole blocks that this rank owns, those of one shape together."""
        blocks = self._moves.blocks(self._prepared)
        self._prepared = {}
        stacks: dict[object, list[_Matrix]] = {}
        directions: dict[int, Tensor] = {}
        for place, route in self._moves.owned:
            spec = held.specs[route.param]
            for matrix in self._matrices(held, place, blocks[place], directions):
                stacks.setdefault((matrix.shape, spec.group, spec.dtype), []).append(matrix)
        for matrices in stacks.values():
            first, shape = matrices[0].route, matrices[0].shape
            rule, of_group = held.staged(first, math)
            dtype = math_dtype(held.value_of(first.param))
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
                squares, group = direction_squares(found), held.specs[first.param].group
                of_group.bounds.look_at(group, squares, largest, of_group.only_if)
            found = found.to(self._moves.dtype)  # as others get it: copies must not drift apart
            for number, (place, route, _, _, state, direction) in enumerate(matrices):
                if direction is None:
                    directions[place] = found[number].view(route.box.sizes)
                else:
                    direction.copy_(found[number].view(direction.shape))
                of_matrix = {key: tensor[number] for key, tensor in new.items()}
                step = new_count(state, of_matrix)
                held.put(route, of_group, state_pairs(state, of_matrix, step, None))
        self._directions = directions

    def _matrices(
        self, held: HeldParts, place: int, block: Tensor, directions: dict[int, Tensor]
    ) -> "list[_Matrix]":
        """Those of a block; where it has several, their directions go into one made for it."""
        route, shapes = self._moves.routes[place], self._matrices_of[place]
        form = route.block.form
        if form is None:
            value = block.view(shapes[0])
            return [_Matrix(place, route, shapes[0], value, held.whole_state(route), None)]
        block = block.view(route.block.shape)
        direction = torch.empty_like(block, dtype=self._moves.dtype)
        directions[place] = direction.view(route.box.sizes)
        states = held.states_of_matrices(route)
        of_matrices = zip(shapes, form.views(block), states, form.views(direction), strict=True)
        return [_Matrix(place, route, *of_matrix) for of_matrix in of_matrices]

    def give_back(self, held: HeldParts) -> None:
        """Start sending everyone the parts of the directions that they hold."""
        states = {}
        for place, route in self._moves.owned:
            state = held.whole_state(route)
            if state:
                states[place] = torch.cat([t.reshape(-1) for t in state.values()])
        self._moves.give_back(self._directions, states)

    def apply(self, held: HeldParts, math: GroupMaths, *, gives_back: bool) -> None:
        """Step in the directions, on the parts held here."""
        came, states = self._moves.parts() if gives_back else ({}, {})
        own, self._directions = self._directions, {}
        for place, state in states.items():
            held.put_whole_state(self._moves.routes[place], state)
        for part in self._mine:
            route = part.route
            rule, of_group = held.staged(route, math)
            mine = own.get(part.place)
            direction = came[part.place] if mine is None else mine[part.in_block]
            kept = held.part_of_state(part)
            target = part.of(held.value_of(route.param))
            value = exact_value(target, kept)
            new = self._finished(rule, part, value, direction.to(value.dtype), of_group)
            held.put(route, of_group, parameter_pairs(target, kept, new))
            held.count(route, of_group, direction)

    def _finished(
        self, rule: StagedRule, part: HeldPart, value: Tensor, direction: Tensor, math: GroupMath
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


# --- how parts travel ----------------------------------------------------------------------------


class BlockMoves:
    """One chunk of blocks on one rank: what it sends and gets, each block by its place."""

    def __init__(self, chunk: Chunk, group: RankGroup, device: torch.device) -> None:
        self._chunk, self._group, self._device = chunk, group, device
        self.routes, self.dtype = chunk.routes, chunk.dtype
        rank, back, nothing = group.rank, chunk.giving_back, Packing((), ())
        self.nothing = torch.empty(0, dtype=self.dtype, device=device)
        self.out, self.into = chunk.collection.packed_from(rank), chunk.collection.packed_to(rank)
        self.out_back = nothing if back is None else back.packed_from(rank)
        self.into_back = nothing if back is None else back.packed_to(rank)
        numbered = list(enumerate(chunk.routes))
        self.owned = [(place, route) for place, route in numbered if rank in route.owners]
        self._own = {place: route.held.box_of(rank) for place, route in self.owned}
        self._waiting: Pending[Tensor] | None = None

    def collect(self, prepared: Mapping[int, Tensor]) -> None:
        """Start sending this rank's parts to the owners."""
        self.send_there(self._joined([self._packed(prepared[p.key[0]]) for p in self.out.parts]))

    def blocks(self, prepared: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Wait, and give the whole blocks that this rank owns, in the shapes of their boxes."""
        received = self.arrived()
        found = {}
        for place, route in self.owned:
            block = torch.empty(route.box.sizes, dtype=self._chunk.wide, device=self._device)
            own = self._own[place]
            if own is not None:
                block[own.slices] = prepared[place]
            found[place] = block
        for part, values in _taken_apart(self.into, received):
            found[part.key[0]][part.slices] = values.view(part.sizes)
        return found

    def give_back(self, directions: Mapping[int, Tensor], states: Mapping[int, Tensor]) -> None:
        """Start sending everyone parts of directions, and what belongs to all of each block."""
        pieces = [
            self.packed_state(states[place])
            if what == OF_WHOLE
            else self._packed(directions[place][slices])
            for _, (place, what), _, slices, _, _ in self.out_back.parts
        ]
        self.send_back(self._joined(pieces))

    def parts(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Wait, and give this rank's parts of directions, and what belongs to all of each block."""
        parts, states = dict[int, Tensor](), dict[int, Tensor]()
        for part, values in _taken_apart(self.into_back, self.arrived()):
            place, what = part.key
            if what == OF_WHOLE:
                states[place] = self.state(values)
            else:
                parts[place] = values.view(part.sizes)
        return parts, states

    def send_there(self, buffer: Tensor) -> None:
        """Start sending a buffer with all that goes to the owners."""
        self._send(self._chunk.to, buffer, self.out, self.into)

    def send_back(self, buffer: Tensor) -> None:
        """Start sending a buffer with all that goes back."""
        assert self._chunk.back is not None
        self._send(self._chunk.back, buffer, self.out_back, self.into_back)

    def _send(self, transfer: Transfer, buffer: Tensor, out: Packing, into: Packing) -> None:
        self._waiting = move_parts(transfer, buffer, out.sizes, into.sizes, self._group)

    def arrived(self) -> Tensor:
        """Wait, and give the buffer that has come."""
        assert self._waiting is not None
        received, self._waiting = self._waiting.wait(), None
        return received

    def packed_state(self, state: Tensor) -> Tensor:
        """What belongs to a whole block, unrounded, as elements that travel."""
        return state.reshape(-1).to(self._chunk.wide).view(self.dtype)

    def state(self, elements: Tensor) -> Tensor:
        """The same taken out of a buffer that came."""
        return elements.clone().view(self._chunk.wide)  # at a place for wide ones

    def _packed(self, part: Tensor) -> Tensor:
        return part.reshape(-1).to(self.dtype)

    def _joined(self, pieces: list[Tensor]) -> Tensor:
        if not pieces:
            return self.nothing
        if len(pieces) > 1:
            return torch.cat(pieces)
        return pieces[0].contiguous()  # a row of a tall block, which is computed transposed


def _taken_apart(packing: Packing, received: Tensor) -> Iterator[tuple[PackedPart, Tensor]]:
    sizes = [part.numel for part in packing.parts]
    return zip(packing.parts, torch.split(received, sizes), strict=True)
