"""Plans for DTensors of which several meshes hold copies, whose gradients the optimizer averages.

    whole parameter -> an even share of it -> the plan -> the plan of this rank's shards

Owners and buckets of blocks are decided for an even share of every parameter, so that all ranks of
a mesh decide alike. `restrict_to_shards` then replaces each piece
of an even share by the part that this rank holds of the same block, or by the same fraction of
its elements.
Ranks with copies hold equal shards, so they get the same plan.

Among ranks with copies each block has one primary holder, which has the mean gradient of its shard
of the block. The primary holders of one mesh bring the block together (`plan.chunks`),
where it is planned as a parameter of its own: a `PrimaryBlock`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from samestep.layout.blocks import Block, Shape
from samestep.layout.boxes import Box
from samestep.plan.chunks import Chunk, block_box
from samestep.plan.layouts import RankBoxes
from samestep.plan.sharding import Bucket, ParamSpec, Piece, Segment, ShardingPlan, whole_pieces


def even_share(spec: ParamSpec, boxes: Sequence[Box]) -> ParamSpec:
    """Return the even share of a parameter with which every rank of a mesh plans.

    boxes: boxes of the parameter by rank of the mesh.
    A stack of experts that is cut evenly between its matrices is a smaller stack on every rank.
    """
    parts = len({box for box in boxes if box.numel}) or 1
    here = {box.sizes[0] for box in boxes}
    cut = spec.blocks and spec.blocks[0].matrix is not None and len(here) == 1
    stacks = spec.shape[0] // here.pop() if cut else 1
    blocks = spec.blocks
    if blocks is not None and stacks > 1:
        blocks = blocks[: len(blocks) // stacks]
    shape = (spec.shape[0] // stacks, *spec.shape[1:]) if stacks > 1 else spec.shape
    return spec._replace(
        shape=shape, blocks=blocks, shards=parts // stacks, stacks=stacks, whole=spec
    )


def shard_spec(share: ParamSpec, box: Box) -> ParamSpec:
    """Return the shard `box` of the whole parameter as a parameter that can be planned.

    Raises:
        ValueError: The shard has no rows and columns of a block.
    """
    if share.blocks is None:
        return share._replace(shape=box.sizes, shards=1)
    try:
        blocks = tuple(
            _block_of_shard(block, number, share, box) for number, block in enumerate(share.blocks)
        )
    except ValueError as error:
        raise ValueError(f"parameter {share.name!r}: {error}") from None
    return share._replace(shape=box.sizes, blocks=blocks, shards=1)


def part_of_block(block: Block, shape: Shape, box: Box) -> Box:
    """Return the rows and columns of a block in `box`, one rank's part of a parameter.

    Offsets are relative to the block. `shape` is the parameter's; a convolution is the matrix
    (out, all the rest).
    """
    of_block = block_box(block, shape)
    part = box.overlap(of_block).within(of_block)
    if not part.numel:
        return Box((0, 0), (0, 0))
    rows = int(block.matrix is not None)
    inner = prod(shape[rows + 2 :])
    if part.sizes[rows + 2 :] != shape[rows + 2 :]:
        raise ValueError(
            f"it is flattened to {block.shape} and sharded in a later dim than the "
            "second: shard its first or second dim"
        )
    offsets, sizes = part.offsets[rows : rows + 2], part.sizes[rows : rows + 2]
    return Box((offsets[0], offsets[1] * inner), (sizes[0], sizes[1] * inner))


def _block_of_shard(block: Block, number: int, share: ParamSpec, box: Box) -> Block:
    """Return the rows and columns that a shard has of a block of an even share.

    If the shard has nothing of it, the block is empty and identified by its number.
    """
    assert share.whole is not None
    first = box.offsets[0] if share.stacks > 1 else 0
    if block.matrix is not None:
        block = block._replace(matrix=block.matrix + first)
    part = part_of_block(block, share.whole.shape, box)
    if not part.numel:
        return Block(None, number, 0, 0)
    rows = int(block.matrix is not None)
    matrix = None if block.matrix is None else block.matrix - box.offsets[0]
    height, width = part.sizes
    return Block(matrix, max(0, block.row - box.offsets[rows]), height, width)


def restrict_to_shards(
    plan: ShardingPlan, shards: Sequence[ParamSpec], *, flat: bool
) -> ShardingPlan:
    """Restrict a plan of even shares to the shards of this rank, made by `shard_spec`.

    Raises:
        ValueError: With flat buffers, where ranks hold more or less than an even share.
    """
    if flat:
        _require_even(plan, shards)
    pieces = [
        {} if share.blocks is None else dict(zip(share.blocks, whole_pieces(i, own), strict=True))
        for i, (share, own) in enumerate(zip(plan.params, shards, strict=True))
    ]

    def piece_of(piece: Piece) -> Piece:
        if piece.block is not None:
            return pieces[piece.param][piece.block]
        share, own = plan.params[piece.param].numel, shards[piece.param].numel
        if share == own:
            return piece
        quantum = shards[piece.param].quantum
        start, stop = (end * own // share // quantum * quantum for end in (piece.start, piece.stop))
        return Piece(piece.param, start, stop)

    def segment_of(segment: Segment) -> Segment:
        found = tuple(map(piece_of, segment.pieces))
        return segment._replace(pieces=found) if flat else Segment.of(found)

    buckets = [
        Bucket(bucket.dtype, tuple(map(segment_of, bucket.segments)), bucket.replicated)
        for bucket in plan.buckets
    ]
    return ShardingPlan(tuple(shards), plan.ranks, tuple(buckets))


def _require_even(plan: ShardingPlan, shards: Sequence[ParamSpec]) -> None:
    for index, (share, own) in enumerate(zip(plan.params, shards, strict=True)):
        shares, parts = whole_pieces(index, share), whole_pieces(index, own)
        if [(p.start, p.stop) for p in shares] != [(p.start, p.stop) for p in parts]:
            assert share.whole is not None
            raise ValueError(
                f"parameter {share.name!r} {share.whole.shape} is sharded over its mesh "
                f"into unequal parts, with {[part.size for part in parts]} elements on "
                f"this rank where an even share has {[part.size for part in shares]}: "
                'flat buffers need equal parts; use buffers="per_parameter"'
            )


class PrimaryBlock(NamedTuple):
    """A whole block of which a rank is the primary holder, planned as a parameter of its own.

    piece: its piece in the plan of shards, which stands for one block of each stack of experts.
    stack: index of the block among these.
    of: the whole parameter, in which the block is `block`.
    spec: the block as a parameter, (rows, cols).
    held: rows and columns of the block that each rank of the mesh holds.
    counted: whether this rank, among all with copies, counts the block in sums over ranks.
    """

    piece: Piece
    stack: int
    of: ParamSpec
    block: Block
    spec: ParamSpec
    held: RankBoxes
    counted: bool


def primary_blocks(plan: ShardingPlan, held: Sequence[RankBoxes], place: int) -> list[PrimaryBlock]:
    """Return the blocks of which the rank at `place` among ranks with copies is primary holder.

    plan: a plan for even shares, or restricted to shards.
    held: by whole parameter the boxes of all ranks of a mesh. All ranks of the mesh get the
        same list.
    """
    found = list[PrimaryBlock]()
    known: dict[tuple[Block, int], RankBoxes] = {}  # layers are alike
    for bucket in plan.buckets:
        counted = place == 0 or not bucket.replicated
        for piece in bucket.owned(place).pieces:
            found += _primary(piece, plan.params[piece.param], held[piece.param], counted, known)
    return found


class BlockOwners(NamedTuple):
    """The owners, in a mesh, of the blocks that pieces stand for: one of each stack.

    rank: this rank in the mesh, the default of `stacks`.
    """

    by_piece: Mapping[Piece, Sequence[Sequence[int]]]
    rank: int

    def stacks(self, piece: Piece, rank: int | None = None) -> list[int]:
        """Return the stacks of a piece whose block this rank, or the given rank, owns."""
        owner = self.rank if rank is None else rank
        owners = self.by_piece.get(piece, ())
        return [stack for stack, ranks in enumerate(owners) if owner in ranks]


def block_owners(items: Sequence[PrimaryBlock], chunks: Iterable[Chunk], rank: int) -> BlockOwners:
    """Return the owners of primary blocks at one place among copies, sent in `chunks`."""
    found: dict[Piece, dict[int, Sequence[int]]] = {}
    for planned in (planned for chunk in chunks for planned in chunk.blocks):
        item = items[planned.param]
        found.setdefault(item.piece, {})[item.stack] = planned.owners
    by_piece = {
        piece: [owners[stack] for stack in range(len(owners))] for piece, owners in found.items()
    }
    return BlockOwners(by_piece, rank)


def _primary(
    piece: Piece,
    spec: ParamSpec,
    held: RankBoxes,
    counted: bool,
    known: dict[tuple[Block, int], RankBoxes],
) -> Iterator[PrimaryBlock]:
    if piece.block is None or spec.whole is None:
        return
    for stack, block in enumerate(spec.whole_blocks(piece.block)):
        number = (spec.whole.blocks or ()).index(block)
        alone = spec.whole._replace(
            name=f"{spec.name}[{number}]",
            shape=block.shape,
            blocks=(Block(None, 0, *block.shape, block.form),),
            state_of_blocks=(spec.whole.state_of_blocks[number],),
        )
        key = block, id(held.boxes)
        if key not in known:
            boxes = (part_of_block(block, spec.whole.shape, box) for box in held.boxes)
            known[key] = held._replace(boxes=tuple(boxes))
        yield PrimaryBlock(piece, stack, spec.whole, block, alone, known[key], counted)
