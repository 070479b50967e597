"""Packs state into one tensor per parameter and key, piece after piece.

Of DTensors a rank has pieces of the shard that it holds. State with an element for each of the
parameter's is that of this shard, and called local here; state that belongs to whole blocks is
there for each block that a piece is a part of, one after the other.
"""

from collections.abc import Sequence
from math import prod

from torch import Tensor

from samestep.groups.param_groups import Group, rule_of
from samestep.layout.blocks import Shape
from samestep.plan.mesh_shares import BlockOwners
from samestep.plan.packing import PackedPart
from samestep.plan.sharding import ParamSpec, Piece, ShardingPlan
from samestep.rules.state import State, block_state_shapes, state_shapes


def piece_shape(piece: Piece) -> Shape:
    """Shape of a piece: (size,), or (rows, cols) of a block."""
    return (piece.size,) if piece.block is None else piece.block.shape


def is_local(key: str, spec: ParamSpec) -> bool:
    """Whether DTensor state is stored in the shape of the local shard."""
    return spec.whole is not None and spec.stored[key].per is not None


def _state_shapes(
    piece: Piece, spec: ParamSpec, group: Group, owners: BlockOwners | None
) -> dict[str, Shape]:
    """Shapes of a piece's state."""
    rule, stored = rule_of(group), spec.stored
    if piece.block is None:
        return state_shapes(rule, piece_shape(piece), group, stored)
    shapes = block_state_shapes(rule, piece.block, group, stored)
    if spec.whole is None:
        return shapes
    blocks = spec.whole_blocks(piece.block)
    of_whole = block_state_shapes(rule, blocks[0], group, stored)
    here = len(blocks) if owners is None else len(owners.stacks(piece))
    counts = {key: here if how.owned else len(blocks) for key, how in spec.stored.items()}
    return {
        key: own if is_local(key, spec) else (counts[key], *of_whole[key])
        for key, own in shapes.items()
    }


class StatePacking:
    """Offsets of pieces in the packed state of a rank.

    sizes: per parameter and key the elements of that tensor.
    parts: per piece and key the part of that tensor.

    Args:
        owners: The owners, in a mesh, of the blocks that pieces stand for; None: all state that
            owners alone have is there.
    """

    def __init__(
        self,
        plan: ShardingPlan,
        rank: int,
        groups: Sequence[Group],
        owners: BlockOwners | None = None,
    ) -> None:
        self.sizes = [dict.fromkeys(spec.stored, 0) for spec in plan.params]
        self.parts: dict[Piece, dict[str, PackedPart]] = {}
        for piece in plan.owned(rank):
            spec = plan.params[piece.param]
            shapes = _state_shapes(piece, spec, groups[spec.group], owners)
            sizes = self.sizes[piece.param]
            own = self.parts[piece] = {}
            for key, start in sizes.items():
                shape, numel = shapes[key], prod(shapes[key])
                tensor = piece.param, key
                own[key] = PackedPart(rank, tensor, shape, _everything(shape), start, numel)
                sizes[key] = start + numel

    def views(self, piece: Piece, state: State) -> State:
        """A piece's state in the shapes of the rule."""
        return {key: self.view(piece, key, state[key]) for key in self.parts[piece]}

    def view(self, piece: Piece, key: str, tensor: Tensor) -> Tensor:
        """A piece's part of a state tensor."""
        part = self.parts[piece][key]
        return tensor[part.place].view(part.sizes)


def _everything(shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)
