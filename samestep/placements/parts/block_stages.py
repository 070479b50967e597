"""The stages of a chunk of spread blocks in plain torch: `docs/dtensors.md` has the algorithm.

Only what needs the whole block is done by the owner.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.placements.parts.block_moves import BlockMoves
from samestep.placements.parts.held_parts import HeldPart, HeldParts
from samestep.plan.block_exchange import Key, Route
from samestep.rules.state import MASTER, math_dtype
from samestep.update.plain import GroupMaths, direction_squares, exact_value, is_bounded


class PlainStages:
    """One chunk."""

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
            state = {
                key: part.of(tensor)
                for key, tensor in held.state_of(route.param).items()
                if key != MASTER and not held.is_of_whole(route.param, key)
            }
            dtype = math_dtype(held.value_of(route.param))
            grad = of_group.gradient(held.gradient_of(route.param)[part.here].to(dtype))
            wide = {key: tensor.to(dtype) for key, tensor in state.items()}
            prepared[route.key], new = rule.prepare(grad, wide, of_group.scalars, of_group.options)
            held.put(route, of_group, ((state[key], new[key]) for key in state))
        self._moves.collect(prepared)
        self._prepared = prepared

    def transform(self, held: HeldParts, math: GroupMaths) -> None:
        """Run the rule on the whole blocks that this rank owns, those of one shape together."""
        blocks = self._moves.blocks(self._prepared)
        self._prepared = {}
        stacks: dict[object, list[Route]] = {}
        for route in self._moves.chunk:
            if route.owner == held.group.rank:
                spec = held.specs[route.param]
                stacks.setdefault((route.block.shape, spec.group, spec.dtype), []).append(route)
        directions: dict[Key, Tensor] = {}
        for routes in stacks.values():
            rule, of_group = held.staged(routes[0], math)
            dtype = math_dtype(held.value_of(routes[0].param))
            states = [held.whole_state(route) for route in routes]
            found, new = rule.transform(
                torch.stack(
                    [blocks[route.key].view(route.block.shape).to(dtype) for route in routes]
                ),
                {key: torch.stack([state[key] for state in states]) for key in states[0]},
                of_group.scalars,
                of_group.options,
            )
            if of_group.bounds is not None and is_bounded(rule):
                largest = rule.largest_norm(routes[0].block.shape, of_group.options)
                squares, group = direction_squares(found), held.specs[routes[0].param].group
                of_group.bounds.look_at(group, squares, largest, of_group.only_if)
            found = found.to(self._moves.dtype)  # as others get it: copies must not drift apart
            for place, route in enumerate(routes):
                directions[route.key] = found[place].view(route.box.sizes)
                pairs = [(states[place][key], new[key][place]) for key in states[place]]
                held.put(route, of_group, pairs)
        self._directions = directions

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
            state = {
                key: part.of(tensor)
                for key, tensor in held.state_of(route.param).items()
                if key == MASTER
            }
            target = part.of(held.value_of(route.param))
            value = exact_value(target, state)
            new = rule.finish(
                value, direction.to(value.dtype), route.block.shape, of_group.scalars,
                of_group.options,
            )  # fmt: skip
            held.put(route, of_group, [(target, new), *((old, new) for old in state.values())])
            held.count(route, of_group, direction)
