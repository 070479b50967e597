"""A chunk of spread blocks: its stages in plain torch, and how its parts travel.

`docs/dtensors.md` has the algorithm. Only what needs the whole block is done by the owner.
`kernel_stages` has the stages with kernels, whose parts travel the same way.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.comm.collectives import Pending, move_parts
from samestep.comm.groups import RankGroup
from samestep.layout.blocks import Shape
from samestep.placements.parts.held_parts import HeldPart, HeldParts
from samestep.plan.block_exchange import ChunkTransfers, Item, Key, Route, from_owners, to_owners
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
        self._matrices_of = {route.key: route.block.matrices for route in moves.chunk}  # shapes
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
        shapes, form = self._matrices_of[route.key], route.block.form
        if form is None:
            value = block.view(shapes[0])
            return [_Matrix(route, shapes[0], value, held.whole_state(route), None)]
        block = block.view(route.block.shape)
        direction = torch.empty_like(block, dtype=self._moves.dtype)
        directions[route.key] = direction.view(route.box.sizes)
        states = held.states_of_matrices(route)
        of_matrices = zip(shapes, form.views(block), states, form.views(direction), strict=True)
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
            new = self._finished(rule, part, value, direction.to(value.dtype), of_group)
            held.put(route, of_group, parameter_pairs(target, state, new))
            held.count(route, of_group, direction)

    def _finished(
        self, rule: StagedRule, part: HeldPart, value: Tensor, direction: Tensor, math: GroupMath
    ) -> Tensor:
        """The step of a part; matrices of its block may differ in shape, so in their rate."""
        block, matrices = part.route.block, self._matrices_of[part.route.key]
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

    route: Route
    shape: Shape
    value: Tensor
    state: State
    direction: Tensor | None  # None: the block is this matrix


# --- how parts travel ----------------------------------------------------------------------------


class Travelling(NamedTuple):
    """A part of a block on its way, as a step needs it: plans count and slice once.

    start: where it begins in the buffer that travels.
    beside: elements that belong to the whole block, and travel with it, after it.
    """

    rank: int
    key: Key
    sizes: Shape | None  # None: no part, only what is beside
    slices: tuple[slice, ...]  # in the block
    start: int
    numel: int
    beside: int

    @property
    def size(self) -> int:
        return self.numel + self.beside


class Way(NamedTuple):
    """What goes out to other ranks, and what comes in from them."""

    out: list[Travelling]
    into: list[Travelling]
    outgoing: list[int]  # elements to each rank
    incoming: list[int]


class BlockMoves:
    """One chunk of blocks, each known by its key: (parameter, number among its blocks)."""

    def __init__(
        self,
        transfers: ChunkTransfers,
        chunk: Sequence[Route],
        group: RankGroup,
        device: torch.device,
    ) -> None:
        self.chunk = chunk
        self.dtype = transfers.to.dtype
        self._transfers = transfers
        self._group = group
        self._wide = transfers.wide
        self._device = device
        self.nothing = torch.empty(0, dtype=self.dtype, device=device)
        self.to = self._way(*to_owners(chunk, group.rank), beside=False)
        self.back = self._way(
            *from_owners(chunk, group.rank, group.size, to_all=any(transfers.extra)), beside=True
        )
        self._owned = [
            (route, [part.in_block.slices for part in route.parts if part.rank == group.rank])
            for route in chunk
            if route.owner == group.rank
        ]
        self._waiting: Pending[Tensor] | None = None

    def _way(self, out: Sequence[Item], into: Sequence[Item], *, beside: bool) -> Way:
        outgoing, incoming = [0] * self._group.size, [0] * self._group.size
        travelling_out, travelling_in = (self._travelling(x, beside) for x in (out, into))
        for item in travelling_out:
            outgoing[item.rank] += item.size
        for item in travelling_in:
            incoming[item.rank] += item.size
        return Way(travelling_out, travelling_in, outgoing, incoming)

    def _travelling(self, items: Sequence[Item], beside: bool) -> list[Travelling]:
        found, start = [], 0
        for item in items:
            found.append(
                Travelling(
                    item.rank,
                    self.chunk[item.route].key,
                    None if item.part is None else item.part.in_block.sizes,
                    () if item.part is None else item.part.in_block.slices,
                    start,
                    item.numel,
                    self._transfers.extra[item.route] if beside else 0,
                )
            )
            start += found[-1].size
        return found

    def collect(self, prepared: dict[Key, Tensor]) -> None:
        """Start sending this rank's parts to the owners."""
        pieces = [self._packed(prepared[item.key]) for item in self.to.out]
        self.send_there(self._joined(pieces))

    def blocks(self, prepared: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Wait, and give the whole blocks that this rank owns, in the shapes of their boxes."""
        arrived = _taken_apart(self.to, self.arrived())
        found = {}
        for route, own in self._owned:
            block = torch.empty(route.box.sizes, dtype=self._wide, device=self._device)
            for slices in own:
                block[slices] = prepared[route.key]
            found[route.key] = block
        for item, values in arrived:
            assert item.sizes is not None
            found[item.key][item.slices] = values.view(item.sizes)
        return found

    def give_back(self, directions: dict[Key, Tensor], extra: dict[Key, Tensor]) -> None:
        """Start sending every holder its parts of the directions, and the extra of each block."""
        pieces = []
        for item in self.back.out:
            if item.sizes is not None:
                pieces.append(self._packed(directions[item.key][item.slices]))
            if item.beside:
                pieces.append(self.packed_beside(extra[item.key]))
        self.send_back(self._joined(pieces))

    def parts(self) -> dict[Key, tuple[Tensor | None, Tensor | None]]:
        """Wait, and give this rank's part of each direction that came, and the block's extra."""
        found: dict[Key, tuple[Tensor | None, Tensor | None]] = {}
        for item, values in _taken_apart(self.back, self.arrived()):
            part = None if item.sizes is None else values[: item.numel].view(item.sizes)
            extra = None
            if item.beside:
                extra = self.beside(values[item.numel :])
            found[item.key] = part, extra
        return found

    def send_there(self, buffer: Tensor) -> None:
        """Start sending a buffer with all that goes to the owners."""
        self._send(self._transfers.to, buffer, self.to)

    def send_back(self, buffer: Tensor) -> None:
        """Start sending a buffer with all that goes back."""
        assert self._transfers.back is not None
        self._send(self._transfers.back, buffer, self.back)

    def _send(self, transfer: Transfer, buffer: Tensor, way: Way) -> None:
        self._waiting = move_parts(transfer, buffer, way.outgoing, way.incoming, self._group)

    def arrived(self) -> Tensor:
        """Wait, and give the buffer that has come."""
        assert self._waiting is not None
        received, self._waiting = self._waiting.wait(), None
        return received

    def packed_beside(self, extra: Tensor) -> Tensor:
        """What belongs to a whole block, unrounded, as elements that travel."""
        return extra.reshape(-1).to(self._wide).view(self.dtype)

    def beside(self, elements: Tensor) -> Tensor:
        """The same taken out of a buffer that came."""
        return elements.clone().view(self._wide)  # at a place for wide ones

    def _packed(self, part: Tensor) -> Tensor:
        return part.reshape(-1).to(self.dtype)

    def _joined(self, pieces: list[Tensor]) -> Tensor:
        if not pieces:
            return self.nothing
        if len(pieces) > 1:
            return torch.cat(pieces)
        return pieces[0].contiguous()  # a row of a tall block, which is computed transposed


def _taken_apart(way: Way, received: Tensor) -> Iterable[tuple[Travelling, Tensor]]:
    return zip(way.into, torch.split(received, [item.size for item in way.into]), strict=True)
