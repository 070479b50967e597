"""The part of a chunk on one rank: shards that it holds, and blocks that it owns.

`block_exchange` runs a chunk in plain torch and `kernel_stages` with kernels; both ask it for the
same views and send by the same two exchanges.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.comm.exchange import PackedExchange
from samestep.groups.param_groups import rule_of
from samestep.plan.chunks import OF_WHOLE, Chunk, PlannedBlock
from samestep.rules.noise import Origin
from samestep.rules.state import State, block_states, matrix_states
from samestep.rules.stored import STEP
from samestep.shards.dtensor.local_shards import LocalShards, Slices, divided
from samestep.shards.windows import OffloadSlice, OffloadUnit


class BlockShard(NamedTuple):
    """A shard of a block: its box in the local tensor and in the block."""

    place: int  # of the block in its chunk
    planned: PlannedBlock
    here: Slices
    in_block: Slices


class ShardViews(NamedTuple):
    """Views of the tensors of a shard that a step reads and writes.

    state: what has an element for each of the shard's, or for some neighbours.
    origin: where the shard lies in the whole parameter; None: nothing is rounded at random.
    """

    value: Tensor
    state: State
    origin: Origin | None


class BlockState(NamedTuple):
    """State of a block that was fetched from the host."""

    of_shard: State
    of_whole: State


NOTHING: State = {}


class LocalChunk:
    """One chunk on this rank, with cached views.

    shards: of the chunk's blocks, that this rank holds.
    owned: the blocks that it owns, by their place in the chunk.
    collection: brings blocks together. giving_back: returns shards of directions, and what belongs
        to whole blocks; None: every rank is an owner.
    states_sent: the places of owned blocks whose state goes back with their directions.
    """

    def __init__(self, chunk: Chunk, local: LocalShards) -> None:
        self.local, self.device = local, local.device
        self.blocks, self.dtype, self.wide = chunk.blocks, chunk.dtype, chunk.wide
        self.sums, self.summed = chunk.sums, chunk.summed or (0,) * len(chunk.blocks)
        rank = local.group.rank
        self.shards = [
            BlockShard(place, planned, part.shifted(planned.box).within(outer).slices, part.slices)
            for place, planned in enumerate(chunk.blocks)
            for part, outer in [(planned.held.box_of(rank), local.box(planned.param))]
            if part is not None
        ]
        self.owned = {
            place: planned for place, planned in enumerate(chunk.blocks) if rank in planned.owners
        }
        self.collection = PackedExchange(chunk.collection, local.group, local.device)
        self.giving_back: PackedExchange | None = None
        if chunk.giving_back is not None:
            self.giving_back = PackedExchange(chunk.giving_back, local.group, local.device)
        out = () if self.giving_back is None else self.giving_back.out.parts
        self.states_sent = {part.key[0] for part in out if part.key[1] == OF_WHOLE}
        self._views: dict[int, ShardViews] = {}  # by place of the block, as all that follow
        self._whole_states: dict[int, State] = {}
        self._fetched: dict[int, BlockState] = {}  # in this step
        self._fetched_before: dict[int, BlockState] = {}

    # --- views ---------------------------------------------------------------------------

    def forget_views(self) -> None:
        """Drop cached views after tensors were replaced."""
        self._fetched, self._views, self._whole_states = {}, {}, {}

    def views(self, shard: BlockShard) -> ShardViews:
        """Views of a shard."""
        found = self._views.get(shard.place)
        if found is None:
            index, fetched = shard.planned.param, self._fetched.get(shard.place)
            where = self.local.elements[index]
            found = self._views[shard.place] = ShardViews(
                self.local.values[index][shard.here],
                self._kept_of_shard(shard) if fetched is None else fetched.of_shard,
                None if where is None else where.at(where.elements[shard.here]).origin(),
            )
        return found

    def whole_state(self, place: int) -> State:
        """Views of the state that belongs to a whole block, such as its variance."""
        found = self._whole_states.get(place)
        if found is None:
            fetched = self._fetched.get(place)
            found = self._kept_of_whole(place) if fetched is None else fetched.of_whole
            self._whole_states[place] = found
        return found

    def states_of_matrices(self, place: int) -> list[State]:
        """State of a block, matrix by matrix."""
        planned, state = self.blocks[place], self.whole_state(place)
        spec = self.local.specs[planned.param]
        group = self.local.groups[spec.group]
        return matrix_states(rule_of(group), planned.block, state, group, spec.stored)

    def step_after(self, place: int) -> Tensor:
        """Step count of a block after this step."""
        return self.whole_state(place)[STEP].reshape(-1)[0] + 1

    def _kept_of_shard(self, shard: BlockShard) -> State:
        """Stored state of a shard, perhaps on the host."""
        index = shard.planned.param
        stored = self.local.specs[index].stored
        return {
            key: tensor[divided(shard.here, stored[key].per or 1)]
            for key, tensor in self.local.states[index].items()
            if not self.local.is_of_whole(index, key)
        }

    def _kept_of_whole(self, place: int) -> State:
        """Stored state of a whole block, perhaps on the host."""
        planned = self.blocks[place]
        index, state = planned.param, self.local.states[planned.param]
        of_whole = {key: state[key] for key in state if self.local.is_of_whole(index, key)}
        if not of_whole:
            return NOTHING
        spec = self.local.specs[index]
        group, blocks = self.local.groups[spec.group], spec.blocks or ()
        everyones = {key: own for key, own in of_whole.items() if not spec.stored[key].owned}
        found = block_states(rule_of(group), everyones, blocks, group, spec.stored)[planned.number]
        mine = self.local.owned[index]
        if planned.number in mine:
            owned = {key: own for key, own in of_whole.items() if spec.stored[key].owned}
            here = [blocks[number] for number in mine]
            states = block_states(rule_of(group), owned, here, group, spec.stored)
            found |= states[mine.index(planned.number)]
        return found

    # --- state that stays on the host ----------------------------------------------------

    def units(self) -> list[OffloadUnit]:
        """State that is fetched from the host together."""
        of_shards = (
            OffloadUnit(("shard", shard.place), self._kept_of_shard(shard), elements=1)
            for shard in self.shards
        )
        of_wholes = (
            OffloadUnit(("whole", place), self._kept_of_whole(place), elements=1)
            for place in range(len(self.blocks))
        )
        return [unit for unit in (*of_shards, *of_wholes) if unit.state]

    def take_fetched(self, parts: Sequence[tuple[OffloadSlice, State]]) -> bool:
        """Use fetched state; returns whether its address has changed."""
        found: dict[int, BlockState] = {}
        for part, state in parts:
            kind, place = part.unit.about
            known = found.get(place, BlockState(NOTHING, NOTHING))
            changed = {"of_shard": state} if kind == "shard" else {"of_whole": state}
            found[place] = known._replace(**changed)
        before, self._fetched_before = self._fetched_before, found
        self.forget_views()
        self._fetched = found
        return not _same_tensors(before, found)

    # --- what belongs to whole blocks, on its way ----------------------------------------

    def _travelling(self, place: int) -> list[Tensor]:
        """State of a whole block that all its ranks have."""
        index, state = self.blocks[place].param, self.whole_state(place)
        return [own for key, own in state.items() if not self.local.is_owned(index, key)]

    def packed_states(self) -> dict[int, Tensor]:
        """State of whole owned blocks as elements to send."""
        found = {}
        for place in self.states_sent:
            flat = torch.cat([tensor.reshape(-1) for tensor in self._travelling(place)])
            found[place] = flat.to(self.wide).view(self.dtype)
        return found

    def put_whole_state(self, place: int, elements: Tensor) -> None:
        """Copy a block's state from the owner out of a receive buffer."""
        state = self._travelling(place)
        sizes = [tensor.numel() for tensor in state]
        wide = elements.clone().view(self.wide)  # a clone begins at a place for wide ones
        for tensor, values in zip(state, torch.split(wide, sizes), strict=True):
            tensor.copy_(values.view(tensor.shape))


def _same_tensors(known: Mapping[int, BlockState], found: Mapping[int, BlockState]) -> bool:
    return known.keys() == found.keys() and all(
        own.of_shard is found[place].of_shard and own.of_whole is found[place].of_whole
        for place, own in known.items()
    )
