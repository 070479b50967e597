"""Plans for parameters that lie end to end in flat buffers, with the owner of each part.

The plan differs from one of `plan.sharding` in two ways: every parameter lies whole in
one bucket, and every segment is a stretch of that bucket, so that nothing has to be packed.
Elementwise rules have equal segments, which cut parameters anywhere; matrix rules have segments
of whole blocks.
"""

from collections.abc import Sequence
from typing import NamedTuple

from samestep.layout.flat_ranges import (
    BlockSizes,
    FlatLayout,
    equal_shards,
    owner_shards,
)
from samestep.plan.sharding import (
    NOTHING,
    Bucket,
    ParamSpec,
    Piece,
    Segment,
    ShardingPlan,
    in_launch_order,
    whole_pieces,
)
from samestep.rules.orthogonalize import block_flops


class FlatPlace(NamedTuple):
    """The place of a parameter: its first element lies at `start` of a bucket."""

    bucket: int
    start: int


def plan_flat(
    params: Sequence[ParamSpec], ranks: int, *, bucket_elements: int, columns: int = 1
) -> ShardingPlan:
    """Lay out `params` (in order of use) in buckets, the last parameters first."""
    backwards = range(len(params) - 1, -1, -1)
    order = [i for i in backwards if params[i].numel]
    buckets: list[Bucket] = []
    for dtype in dict.fromkeys(params[i].dtype for i in backwards if not params[i].numel):
        # Without elements they still count their steps.
        empty = [i for i in backwards if params[i].dtype == dtype and not params[i].numel]
        pieces = [piece for i in empty for piece in whole_pieces(i, params[i])]
        if pieces:
            buckets.append(Bucket(dtype, (Segment.of(pieces),), replicated=True))
    for dtype, matrix in dict.fromkeys(
        (params[i].dtype, params[i].blocks is not None) for i in order
    ):
        alike = [
            i
            for i in order
            if params[i].dtype == dtype and (params[i].blocks is not None) == matrix
        ]
        if matrix:
            blocks = [_block_sizes(params[i]) for i in alike]
            layout = owner_shards(blocks, ranks, bucket_elements, columns=columns)
        else:
            together = max(params[i].quantum for i in alike)
            sizes = [params[i].numel for i in alike]
            layout = equal_shards(sizes, ranks, bucket_elements, together=together)
        of_params = [whole_pieces(i, params[i]) for i in alike]
        for number in range(len(layout.buckets)):
            buckets.append(Bucket(dtype, _segments(layout, number, of_params)))
    return ShardingPlan(tuple(params), ranks, in_launch_order(buckets))


def places(plan: ShardingPlan) -> list[FlatPlace | None]:
    """Return the place of each parameter; None for one without elements or blocks."""
    found: list[FlatPlace | None] = [None] * len(plan.params)
    for number, bucket in enumerate(plan.buckets):
        for piece, start in bucket.places():
            if found[piece.param] is None:
                found[piece.param] = FlatPlace(number, start - piece.start)
    return found


def _block_sizes(param: ParamSpec) -> BlockSizes:
    blocks = param.blocks or ()
    return BlockSizes(
        tuple(piece.size for piece in whole_pieces(0, param)),
        tuple(block_flops(block) for block in blocks),
    )


def _segments(
    layout: FlatLayout, number: int, pieces: Sequence[Sequence[Piece]]
) -> tuple[Segment, ...]:
    """Return a bucket's segments by rank; `pieces[i]` are the pieces of parameter i."""
    shards = layout.buckets[number].shards
    owned: dict[int, list[tuple[Piece, int]]] = {}
    for fragment in layout.fragments(number):
        start, stop = fragment.in_param
        for piece in pieces[fragment.param]:
            if piece.block is None:  # may be cut
                piece = Piece(piece.param, start, stop)
            if start <= piece.start < stop:
                where = fragment.in_shard.start + piece.start - start
                owned.setdefault(fragment.rank, []).append((piece, where))
    return tuple(
        Segment(tuple(p for p, _ in own), tuple(start for _, start in own), shard.size)
        if (own := owned.get(rank))
        else Segment((), (), shard.size)
        if shard.size
        else NOTHING
        for rank, shard in enumerate(shards)
    )
