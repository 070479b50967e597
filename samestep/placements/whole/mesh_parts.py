"""DTensors of which other meshes hold copies: what else than averaging the copies is to do.

A rank averages the part that it holds with the ranks that hold the same part, as it does with
plain parameters. What concerns the ranks of its own mesh is here: summands of gradients are added
up, whole values are gathered, and blocks come together. Each rank among the copies is the primary
holder of some blocks; its mesh brings these together, and spreads them over owners.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from samestep.comm.collectives import maximum, total
from samestep.comm.groups import RankGroup
from samestep.comm.meshes import (
    axes_group,
    held,
    mesh_group,
    replicated_here,
    whole_tensor,
)
from samestep.groups.distribution import Distribution
from samestep.groups.param_groups import Group
from samestep.layout.boxes import Shape
from samestep.placements.parts.block_exchange import BlockExchange
from samestep.placements.parts.local_shards import (
    LocalShards,
    placed_beside,
    refuse_cut_scales,
    refuse_unstaged,
)
from samestep.placements.state_store import StateStore, boxes_of_ranks
from samestep.placements.whole.held_tensors import MEAN, REPLICATED, SUMMAND
from samestep.placements.whole.piece_shards import PieceShards
from samestep.plan.layouts import Key, RankBoxes
from samestep.plan.narrowed import PrimaryBlock, even_share, held_spec, primary_blocks
from samestep.plan.sharding import ParamSpec, Piece, ShardingPlan
from samestep.rules.state import State, Whereabouts, whereabouts

Kinds = tuple[int, ...]  # of a gradient, along each axis of its mesh


class MeshParts:
    """The DTensors of one mesh, whose other copies somebody else thinks of.

    everyone: the ranks of all meshes that hold copies of them; `number`: which of these it is.
    """

    exchange: BlockExchange
    blocks: "PrimaryBlocks"

    def __init__(
        self,
        params: Sequence[Tensor],
        specs: Sequence[ParamSpec],
        mesh: DeviceMesh,
        everyone: RankGroup,
        number: int,
    ) -> None:
        self.mesh, self.everyone = mesh, everyone
        self.group = mesh_group(mesh)
        self._params = [param for param in params if isinstance(param, DTensor)]
        self.replicated = replicated_here(self._params, mesh, everyone, number)
        self._wholes = specs
        self._held: list[RankBoxes] = []
        self.shares: list[ParamSpec] = []
        self.specs: list[ParamSpec] = []
        for param, spec in zip(self._params, specs, strict=True):
            try:
                of_param = held(param, self.group)
                self.shares.append(even_share(spec, of_param.boxes))
                self.specs.append(held_spec(self.shares[-1], of_param.boxes[self.group.rank]))
            except ValueError as error:
                raise ValueError(f"parameter {spec.name!r}: {error}") from None
            refuse_cut_scales(spec, of_param.boxes)
            self._held.append(of_param)
        self.boxes = [of_param.boxes[self.group.rank] for of_param in self._held]

    def lines(self) -> list[str]:
        """How parameters lie, as text: the same on all ranks of a mesh, and of its copies."""
        placed = zip(self.shares, self._params, strict=True)
        return [f"mesh {tuple(self.mesh.shape)}"] + [
            f"{spec.name}: {tuple(param.shape)} as {param.placements}" for spec, param in placed
        ]

    def is_primary(self, index: int) -> bool:
        """Whether this rank's copy inside the mesh is the one that counts in sums over ranks."""
        return self._held[index].replicas[self.group.rank] == 0

    # --- blocks --------------------------------------------------------------------------

    def plan_blocks(
        self,
        plan: ShardingPlan,
        copies: RankGroup,
        distribution: Distribution,
        device: torch.device,
    ) -> None:
        """Spread the blocks of which this rank is the primary holder over its mesh."""
        items = primary_blocks(plan, self._held, copies.rank)
        mine = [item.has_parts_in(self.boxes[item.piece.param]) for item in items]
        self.blocks = PrimaryBlocks(items, mine, self.group, device)
        self.exchange = BlockExchange(self.blocks.shards, distribution)

    def prepare(self, groups: Sequence[Group]) -> None:
        """There is state now: refuse rules without stages, make what blocks need to travel."""
        for spec in self.specs:
            refuse_unstaged(spec, groups[spec.group])
        self.blocks.shards.groups = groups
        self.exchange.prepare()

    # --- summands ------------------------------------------------------------------------

    def needs_kinds(self, kinds: Sequence[Kinds]) -> bool:
        """Whether it is open, of any parameter with copies inside the mesh, what gradients are."""
        return any(
            not own and any(place.is_replicate() for place in param.placements)
            for own, param in zip(kinds, self._params, strict=True)
        )

    def agreed_kinds(self, kinds: Sequence[Kinds], groups: Sequence[RankGroup]) -> list[Kinds]:
        """What any rank knows of each gradient; waits for all of them."""
        axes, device = self.mesh.ndim, self._params[0].to_local().device
        codes = [sum(kind << 2 * axis for axis, kind in enumerate(own)) for own in kinds]
        known = torch.tensor(codes, dtype=torch.int64, device=device)
        for group in groups:
            known = maximum("kinds of gradients", known, group).wait()
        return [
            tuple(code >> 2 * axis & 3 for axis in range(axes)) if code else ()
            for code in known.tolist()
        ]

    def added_up(
        self, grads: list[tuple[Piece, Tensor]], kinds: Sequence[Kinds]
    ) -> list[tuple[Piece, Tensor]]:
        """Means over copies, of which some are summands still: those are added up over the mesh."""
        together: dict[Kinds, list[int]] = {}
        for place, (piece, _) in enumerate(grads):
            own = kinds[piece.param]
            if SUMMAND in own or MEAN in own:
                together.setdefault(own, []).append(place)
        results = dict(enumerate(grads))
        for own, places in together.items():
            axes = [axis for axis, kind in enumerate(own) if kind > REPLICATED]
            divisor = prod(self.mesh.size(axis) for axis in axes if own[axis] == MEAN)
            flat = torch.cat([grads[place][1].reshape(-1) for place in places])
            summed = total("sum of gradients", flat, axes_group(self.mesh, axes)).wait()
            if divisor > 1:
                summed = summed.div_(divisor)
            sizes = [grads[place][1].numel() for place in places]
            for place, part in zip(places, torch.split(summed, sizes), strict=True):
                results[place] = grads[place][0], part
        return [results[place] for place in range(len(grads))]

    def as_summand(self, index: int, local: Tensor, kinds: Kinds) -> Tensor:
        """What a rank gives to a sum that shall be `local`: all of it, or nothing."""
        here = self.mesh.get_coordinate()
        assert here is not None
        others = any(kind == SUMMAND and here[axis] for axis, kind in enumerate(kinds))
        return torch.zeros_like(local) if others else local

    # --- whole values --------------------------------------------------------------------

    def store(self, tensors: Mapping[Key, tuple[Shape, int]]) -> StateStore:
        """State that is laid out as what ranks of the mesh hold of parameters.

        tensors: by (index of the parameter, key) the shape of all of it, and of how many elements
            of the parameter, along its last dim, it has one.
        """
        boxes = {
            (index, key): self._held[index].divided(per).boxes
            for (index, key), (_, per) in tensors.items()
        }
        shapes = {key: shape for key, (shape, _) in tensors.items()}
        return StateStore("gather of the state", shapes, boxes_of_ranks(boxes), self.group)

    def part(self, index: int, whole: Tensor, per: int = 1) -> Tensor:
        """What this rank holds of a whole tensor, or of a DTensor however it is placed.

        `per`: of so many elements of the parameter, along its last dim, it has one.
        """
        if isinstance(whole, DTensor):
            param = self._params[index]
            if (whole.device_mesh, whole.placements) == (param.device_mesh, param.placements):
                return whole.to_local()
            whole = whole_tensor(whole)
        return whole[self.boxes[index].divided(per).slices]

    def whole(self, index: int, local: Tensor, per: int = 1) -> Tensor:
        """All of a tensor that is placed as a parameter is; collective."""
        device = self._params[index].to_local().device
        return whole_tensor(self.beside(index, local, per), self._held[index].divided(per), device)

    def beside(self, index: int, local: Tensor, per: int = 1) -> DTensor:
        """A DTensor with other values, placed as a parameter is."""
        return placed_beside(self._params[index], local, per)


class PrimaryBlocks:
    """The blocks of which this rank is the primary holder among copies, each as a tensor.

    shards: what this rank holds of them.
    mine: of each whether the piece has parts of it.
    """

    def __init__(
        self,
        items: Sequence[PrimaryBlock],
        mine: Sequence[bool],
        group: RankGroup,
        device: torch.device,
    ) -> None:
        self.items, self._mine = items, mine
        self._places = {  # of pieces that are here
            item.piece: index
            for index, (item, own) in enumerate(zip(items, mine, strict=True))
            if own
        }
        self.shards = LocalShards(
            [item.spec for item in items],
            [item.held for item in items],
            group,
            device,
            [_whereabouts(item) for item in items],
            counted=[item.counted for item in items],
        )
        self.drop()

    def take_shards(self, shards: PieceShards) -> None:
        """Read values and state of blocks from these shards, in this step and those after it."""
        of_items = [shards[item.piece] for item in self.items]
        values = [
            shard.value if mine else shard.value.new_empty(0, 0)
            for shard, mine in zip(of_items, self._mine, strict=True)
        ]
        states = [self._item_state(number, shard.state) for number, shard in enumerate(of_items)]
        self.shards.look_at(values, states)

    def _item_state(self, number: int, state: State) -> State:
        return {
            key: tensor[self.items[number].stack].view(-1)
            if self.shards.is_of_whole(number, key)
            else (tensor if self._mine[number] else tensor.new_empty(0, 0))
            for key, tensor in state.items()
        }

    def take(self, grads: Sequence[tuple[Piece, Tensor]]) -> None:
        """The mean gradients of pieces that are blocks, until the step is over."""
        for piece, grad in grads:
            if piece in self._places:
                self.shards.gradients[self._places[piece]] = grad

    def set_present(self, present: Sequence[bool | Tensor]) -> None:
        self.shards.present = [present[item.piece.param] for item in self.items]

    def gradients(self) -> list[Tensor]:
        """Those that count in sums over ranks."""
        shards = self.shards
        return [
            grad
            for index, grad in enumerate(shards.gradients)
            if grad is not None and shards.present[index] is not False and shards.is_primary(index)
        ]

    def drop(self) -> None:
        """Free the averaged gradients of blocks: the step is over."""
        self.shards.gradients = [None] * len(self.items)


def _whereabouts(item: PrimaryBlock) -> Whereabouts | None:
    """Where the elements of a block are in its parameter, if any are rounded at random."""
    where = whereabouts(item.of.name, item.of.shape, item.of.stored)
    if where is None:
        return None
    return where.at(item.block.view(where.elements).view(item.block.shape))
