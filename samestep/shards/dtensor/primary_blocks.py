"""Blocks of DTensors whose copies on other meshes the optimizer averages.

Of each block one rank among those with copies is the primary holder. It has the mean gradient of
its shard of the block, and the state. The primary holders of one mesh bring the block together on
its owner and step on their shards, as `block_exchange` does it for other DTensors; afterwards
every copy gets the new values in the gather of its bucket.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.groups.param_groups import Group
from samestep.plan.mesh_shares import PrimaryBlock, block_owners
from samestep.plan.placement_plan import RankPlan
from samestep.plan.sharding import Piece
from samestep.rules.state import GlobalElementIndex, State, global_element_index
from samestep.shards.dtensor.block_exchange import BlockExchange
from samestep.shards.dtensor.local_shards import LocalShards, refuse_unstaged
from samestep.shards.dtensor.mesh_layout import MeshLayout
from samestep.shards.replicated.local_tensors import PieceShards


class PrimaryBlocks:
    """Blocks this rank is the primary holder of, each planned as one parameter.

    shards: what this rank holds of them.
    exchange: brings them together in the mesh.
    owners: who of the mesh owns which of them.
    """

    def __init__(self, plan: RankPlan, layout: MeshLayout, device: torch.device) -> None:
        assert plan.blocks is not None
        self._specs = plan.specs
        self.items = plan.primary_blocks()
        # A rank of the mesh may hold nothing of a block: experts of others, or rows that others
        # have all of.
        self._has_some = [bool(item.held.boxes[layout.group.rank].numel) for item in self.items]
        self._numbers = {
            item.piece: number
            for number, (item, has_some) in enumerate(zip(self.items, self._has_some, strict=True))
            if has_some
        }
        self.shards = LocalShards(
            [item.spec for item in self.items],
            [item.held for item in self.items],
            layout.group,
            device,
            [_whereabouts(item) for item in self.items],
            counted=[item.counted for item in self.items],
        )
        self.exchange = BlockExchange(self.shards, plan.blocks.chunks)
        self.owners = block_owners(self.items, plan.blocks.chunks, layout.group.rank)
        self.end_step()

    def prepare(self, groups: Sequence[Group]) -> None:
        """Refuse rules without stages, and allocate buffers for the exchange."""
        for spec in self._specs:  # of all blocks, so that all ranks decide alike
            refuse_unstaged(spec, groups[spec.group])
        self.shards.groups = groups
        self.exchange.prepare()

    def take_shards(self, shards: PieceShards) -> None:
        """Use values and state of blocks from these shards."""
        of_items = [shards[item.piece] for item in self.items]
        values = [
            shard.value if has_some else shard.value.new_empty(0, 0)
            for shard, has_some in zip(of_items, self._has_some, strict=True)
        ]
        states = [self._state_of(number, shard.state) for number, shard in enumerate(of_items)]
        self.shards.look_at(values, states)

    def _state_of(self, number: int, state: State) -> State:
        """State of one block, from that of its piece."""
        piece, stack, found = self.items[number].piece, self.items[number].stack, State()
        for key, tensor in state.items():
            if self.shards.is_owned(number, key):
                mine = self.owners.stacks(piece)
                has_it = stack in mine
                found[key] = tensor[mine.index(stack)].view(-1) if has_it else tensor.new_empty(0)
            elif self.shards.is_of_whole(number, key):
                found[key] = tensor[stack].view(-1)
            else:
                found[key] = tensor if self._has_some[number] else tensor.new_empty(0, 0)
        return found

    def take_gradients(self, means: Sequence[tuple[Piece, Tensor]]) -> None:
        """Keep mean gradients of blocks until the step ends."""
        for piece, mean in means:
            if piece in self._numbers:
                self.shards.gradients[self._numbers[piece]] = mean

    def set_present(self, present: Sequence[bool | Tensor]) -> None:
        """Set which parameters have a gradient on any rank in this step."""
        self.shards.present = [present[item.piece.param] for item in self.items]

    def grouped_gradients(self) -> list[tuple[int, Tensor]]:
        """Mean gradients that this rank counts in norms, with their groups."""
        shards = self.shards
        return [
            (shards.specs[number].group, grad)
            for number, grad in enumerate(shards.gradients)
            if grad is not None
            and shards.present[number] is not False
            and shards.is_primary(number)
        ]

    def end_step(self) -> None:
        """Free the mean gradients."""
        self.shards.gradients = [None] * len(self.items)
        self.exchange.end_step()


def _whereabouts(item: PrimaryBlock) -> GlobalElementIndex | None:
    """Global indices of the elements of a block, for stochastic rounding."""
    where = global_element_index(item.of.name, item.of.shape, item.of.stored)
    if where is None:
        return None
    return where.at(item.block.view(where.elements).view(item.block.shape))
