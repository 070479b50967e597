"""Plans for DTensors that several ranks hold copies of.

    whole parameter -> an even share of it -> the plan -> what this rank really holds

Who owns which block, and which bucket it travels in, is decided for an even share of everything,
so that all ranks of a mesh decide alike. Each piece of such a share then becomes what this rank
has of it: the same block, cut to this rank's rows and columns, or the same fraction of a slice.
Ranks along the copies hold equal parts, so theirs is the same plan.

The primary holder of a block among the copies brings it together with the others of its mesh, as
a tensor of its own.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from samestep.layout.blocks import Block, Shape
from samestep.layout.boxes import Box
from samestep.plan.block_exchange import block_box
from samestep.plan.layouts import RankBoxes
from samestep.plan.sharding import Bucket, ParamSpec, Piece, Segment, ShardingPlan, whole_pieces


def even_share(spec: ParamSpec, boxes: Sequence[Box]) -> ParamSpec:
    """What a plan counts of a parameter of which ranks hold these boxes.

    Experts that are cut evenly between their matrices are, on every rank, a stack of as many.
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


def held_spec(share: ParamSpec, box: Box) -> ParamSpec:
    """What a rank that holds `box` of the whole has of a share, as a parameter of its own."""
    blocks = None
    if share.blocks is not None:
        blocks = tuple(
            _held_block(block, number, share, box) for number, block in enumerate(share.blocks)
        )
    return share._replace(shape=box.sizes, blocks=blocks, shards=1)


def part_of_block(block: Block, shape: Shape, box: Box) -> Box:
    """What a rank that holds `box` of a parameter of `shape` has of a block.

    Rows and columns, counted from the block's first ones; a convolution's weight is the matrix
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
            f"it is cut in a dim after the second, and flattened to {block.shape}: cut it by its "
            "first or second dim"
        )
    offsets, sizes = part.offsets[rows : rows + 2], part.sizes[rows : rows + 2]
    return Box((offsets[0], offsets[1] * inner), (sizes[0], sizes[1] * inner))


def _held_block(block: Block, number: int, share: ParamSpec, box: Box) -> Block:
    """The same in the part that is held; of which nothing is held, known by its number."""
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


def narrowed(plan: ShardingPlan, held: Sequence[ParamSpec], *, flat: bool) -> ShardingPlan:
    """The plan of what `held_spec` says that this rank holds.

    Raises:
        ValueError: Of flat buffers, where ranks hold more or less than an even share.
    """
    if flat:
        _require_even(plan, held)
    pieces = [
        {} if share.blocks is None else dict(zip(share.blocks, whole_pieces(i, own), strict=True))
        for i, (share, own) in enumerate(zip(plan.params, held, strict=True))
    ]

    def piece_of(piece: Piece) -> Piece:
        if piece.block is not None:
            return pieces[piece.param][piece.block]
        share, own = plan.params[piece.param].numel, held[piece.param].numel
        if share == own:
            return piece
        quantum = held[piece.param].quantum
        start, stop = (end * own // share // quantum * quantum for end in (piece.start, piece.stop))
        return Piece(piece.param, start, stop)

    def segment_of(segment: Segment) -> Segment:
        found = tuple(map(piece_of, segment.pieces))
        return segment._replace(pieces=found) if flat else Segment.of(found)

    buckets = [
        Bucket(bucket.dtype, tuple(map(segment_of, bucket.segments)), bucket.replicated)
        for bucket in plan.buckets
    ]
    return ShardingPlan(tuple(held), plan.ranks, tuple(buckets))


def _require_even(plan: ShardingPlan, held: Sequence[ParamSpec]) -> None:
    for index, (share, own) in enumerate(zip(plan.params, held, strict=True)):
        shares, parts = whole_pieces(index, share), whole_pieces(index, own)
        if [(p.start, p.stop) for p in shares] != [(p.start, p.stop) for p in parts]:
            assert share.whole is not None
            raise ValueError(
                f"parameter {share.name!r} {share.whole.shape} is cut over its mesh into parts "
                f"that are not equal, in blocks of {[part.size for part in parts]} elements here "
                f"where an even share has {[part.size for part in shares]}: flat buffers need "
                'equal ones; take buffers="per_parameter"'
            )


class PrimaryBlock(NamedTuple):
    """A whole block of which a rank is the primary holder among copies, as a tensor of its own.

    piece: of the plan; it stands for `stacks` whole blocks, of which this is number `stack`.
    of: the whole parameter, and `block` in it.
    held: who of the mesh holds what of the block.
    counted: whether this rank among the copies is the one that counts in sums over ranks.
    """

    piece: Piece
    stack: int
    stacks: int
    of: ParamSpec
    block: Block
    spec: ParamSpec
    held: RankBoxes
    counted: bool

    def has_parts_in(self, box: Box) -> bool:
        """Whether the piece of a rank that holds `box` of the parameter is of it."""
        rows = max(1, self.of.shape[0])
        return self.stacks == 1 or self.stack == box.offsets[0] * self.stacks // rows


def primary_blocks(plan: ShardingPlan, held: Sequence[RankBoxes], place: int) -> list[PrimaryBlock]:
    """The blocks of which a rank is the primary holder among copies.

    `plan`: for even shares, or a narrowed one. `held`: who of a mesh holds what of each whole
    parameter; the same on all its ranks.
    """
    found = []
    known: dict[tuple[Block, int], RankBoxes] = {}  # layers are alike
    for bucket in plan.buckets:
        counted = place == 0 or not bucket.replicated
        for piece in bucket.owned(place).pieces:
            found += _primary(piece, plan.params[piece.param], held[piece.param], counted, known)
    return found


def _primary(
    piece: Piece,
    spec: ParamSpec,
    held: RankBoxes,
    counted: bool,
    known: dict[tuple[Block, int], RankBoxes],
) -> list[PrimaryBlock]:
    if piece.block is None or spec.whole is None:
        return []
    blocks = spec.whole_blocks(piece.block)
    found = []
    for stack, block in enumerate(blocks):
        number = (spec.whole.blocks or ()).index(block)
        item = spec.whole._replace(
            name=f"{spec.name}[{number}]",
            shape=block.shape,
            blocks=(Block(None, 0, *block.shape, block.form),),
            state_of_blocks=(spec.whole.state_of_blocks[number],),
        )
        key = block, id(held.boxes)
        if key not in known:
            boxes = (part_of_block(block, spec.whole.shape, box) for box in held.boxes)
            known[key] = held._replace(boxes=tuple(boxes))
        found.append(
            PrimaryBlock(piece, stack, len(blocks), spec.whole, block, item, known[key], counted)
        )
    return found
