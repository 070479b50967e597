"""The stages of a chunk of spread blocks in plain torch: `docs/dtensors.md` has the algorithm.

Only what needs the whole block is done by the owner.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.layout.blocks import Shape
from samestep.placements.parts.block_moves import BlockMoves
from samestep.placements.parts.held_parts import HeldPart, HeldParts
from samestep.plan.block_exchange import Key, Route
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

    def __init__(self, moves: BlockMoves, mine: Sequence[HeldPart]) -> None:
        self._moves = moves
        self._mine = mine
        self._prepared: dict[Key, Tensor] = {}
        self._directions: dict[Key, Tensor] = {}

    def collect(self, held: HeldParts, math: GroupMaths) -> None:
        """Prepare the parts held here, and start sending them to the owners."""
        prepared: dict[Key, Tensor] = {}
        for part in self._mine:
            route = part.route
            rule, of_group = held.staged(route, math)
            state, value = held.part_of_state(part), held.value_of(route.param)
            grad = held.gradient_of(route.param)[part.here].to(math_dtype(value))
            prepared[route.key], new = rule.prepare(
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
        directions: dict[Key, Tensor] = {}
        for route in self._moves.chunk:
            if route.owner == held.group.rank:
                spec = held.specs[route.param]
                for matrix in self._matrices(held, route, blocks[route.key], directions):
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
            for place, (route, _, _, state, direction) in enumerate(matrices):
                if direction is None:
                    directions[route.key] = found[place].view(route.box.sizes)
                else:
                    direction.copy_(found[place].view(direction.shape))
                of_place = {key: tensor[place] for key, tensor in new.items()}
                step = new_count(state, of_place)
                held.put(route, of_group, state_pairs(state, of_place, step, None))
        self._directions = directions

    def _matrices(
        self, held: HeldParts, route: Route, block: Tensor, directions: dict[Key, Tensor]
    ) -> "list[_Matrix]":
        """Those of a block; where it has several, their directions go into one made for it."""
        block, form = block.view(route.block.shape), route.block.form
        if form is None:
            return [_Matrix(route, route.block.shape, block, held.whole_state(route), None)]
        direction = torch.empty_like(block, dtype=self._moves.dtype)
        directions[route.key] = direction.view(route.box.sizes)
        states = held.states_of_matrices(route)
        of_matrices = zip(
            route.block.matrices, form.views(block), states, form.views(direction), strict=True
        )
        return [_Matrix(route, *of_matrix) for of_matrix in of_matrices]

    def give_back(self, held: HeldParts) -> None:
        """Start sending everyone the parts of the directions that they hold."""
        extra = {}
        for route in self._moves.chunk:
            if route.owner == held.group.rank:
                state = held.whole_state(route)
                if state:
                    extra[route.key] = torch.cat([t.reshape(-1) for t in state.values()])
        self._moves.give_back(self._directions, extra)

    def apply(self, held: HeldParts, math: GroupMaths, *, gives_back: bool) -> None:
        """Step in the directions, on the parts held here."""
        came = self._moves.parts() if gives_back else {}
        own, self._directions = self._directions, {}
        for route in self._moves.chunk:
            extra = came.get(route.key, (None, None))[1]
            if extra is not None:
                held.put_whole_state(route, extra)
        for part in self._mine:
            route = part.route
            rule, of_group = held.staged(route, math)
            if route.key in own:
                direction: Tensor | None = own[route.key][part.in_block]
            else:
                direction = came[route.key][0]
            assert direction is not None
            state = held.part_of_state(part)
            target = part.of(held.value_of(route.param))
            value = exact_value(target, state)
            new = _finished(rule, part, value, direction.to(value.dtype), of_group)
            held.put(route, of_group, parameter_pairs(target, state, new))
            held.count(route, of_group, direction)


class _Matrix(NamedTuple):
    """A matrix that this rank orthogonalizes; `direction`: where its result goes."""

    route: Route
    shape: Shape
    value: Tensor
    state: State
    direction: Tensor | None  # None: the block is this matrix


def _finished(
    rule: StagedRule, part: HeldPart, value: Tensor, direction: Tensor, of_group: GroupMath
) -> Tensor:
    """The step along a direction, of a part; its matrices may differ in shape, so in their rate."""
    block, math = part.route.block, (of_group.scalars, of_group.options)
    shapes = list(dict.fromkeys(block.matrices))
    if len(shapes) == 1:
        return rule.finish(value, direction, shapes[0], *math)
    assert block.form is not None
    dim = block.form.dim + int(block.matrix is not None)
    numbers = block.form.numbers()[part.in_block[dim]]
    new = torch.empty_like(value)
    for shape in shapes:
        own = [place for place, n in enumerate(numbers) if block.matrices[n] == shape]
        if own:
            places = torch.tensor(own, device=value.device)
            parts = value.index_select(dim, places), direction.index_select(dim, places)
            new.index_copy_(dim, places, rule.finish(*parts, shape, *math))
    return new
