"""Plans for replicated parameters: the rank that reduces, updates and sends each part.

Every part is a flat range of a contiguous parameter: a slice for an elementwise rule, a
whole block for a matrix rule. Parameters are cut into buckets in reverse order of use, the
order in which backward finishes them; in each bucket every rank has one segment, the parts
it owns. A reduction gives each rank the sum of its segment, a gather gives all ranks all
segments. Segments may differ in length and may be empty.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import gcd, inf, prod
from operator import attrgetter
from typing import Literal, NamedTuple

import torch

from samestep.layout.blocks import Block, Shape
from samestep.layout.boxes import Box
from samestep.layout.flat_ranges import in_runs, rounded_up
from samestep.layout.owners import balanced_owners, cyclic_owners, dealt
from samestep.plan.packing import PackedPart, Packing
from samestep.rules.orthogonalize import block_flops
from samestep.rules.rule import math_dtype
from samestep.rules.state import StoredTensors
from samestep.rules.stored import block_size

OwnerStrategy = Literal["balanced", "cyclic"]
_size = attrgetter("size")  # of a piece


class ParamSpec(NamedTuple):
    """The description of a parameter that plans are made from.

    A DTensor that other meshes hold copies of has three specs (`plan.mesh_shares`): of all of it
    (`whole`), of the even share with which every rank of its mesh plans, and of this rank's shard.

    shards: number of ranks that hold parts of each block: the plan counts an even share.
    stacks: number of ranks among which a stack of experts is cut between its matrices.
    grad_dtype: dtype of gradients; None: the dtype of the parameter.
    """

    name: str
    shape: Shape
    dtype: str
    group: int  # index of its parameter group
    rule: str
    blocks: tuple[Block, ...] | None  # None: an elementwise rule
    state_per_element: float = 1.0  # tensors of its shape that the rule keeps
    state_of_blocks: tuple[int, ...] = ()  # elements of each that all holders of parts have
    shards: int = 1
    stacks: int = 1
    whole: "ParamSpec | None" = None  # None: this is it
    stored: StoredTensors = StoredTensors()  # what is kept for it, by key
    sums: int = 0  # over each whole block, that its rule needs to finish
    grad_dtype: torch.dtype | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype of the values."""
        return _dtype_named(self.dtype)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Return the dtype of the gradients."""
        return self.grad_dtype or self.torch_dtype

    @property
    def numel(self) -> int:
        """Return the number of elements that a rank holds."""
        if self.shards > 1 and self.blocks is not None:
            return sum(piece.size for piece in whole_pieces(0, self))
        return -(-prod(self.shape) // self.shards)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the values that a rank holds."""
        return self.numel * self.torch_dtype.itemsize

    @property
    def math_dtype(self) -> torch.dtype:
        """Return the dtype of state and of arithmetic."""
        return math_dtype(torch.empty(0, dtype=self.torch_dtype, device="meta"))

    @property
    def quantum(self) -> int:
        """Return the number of neighbours that share a scale, which no cut may separate."""
        return max((how.per or 1 for how in self.stored.values()), default=1)

    def refuse_cut_scales(self, boxes: Sequence[Box]) -> None:
        """Raise if boxes of ranks would separate elements that share an 8-bit scale."""
        per = self.quantum
        if per == 1:
            return
        starts = {box.offsets[-1] for box in boxes}
        cuts = sorted(starts | {box.offsets[-1] + box.sizes[-1] for box in boxes})
        wrong = next((cut for cut in cuts if cut % per), None)
        if wrong is None:
            return
        fits = block_size(gcd(*cuts))
        smaller = "" if fits is None else f'blocks of {fits} ("8bit/{fits}"), '
        raise ValueError(
            f"parameter {self.name!r}: its last dim, of {self.shape[-1]}, is cut "
            f"between ranks at {wrong}, and in 8 bits {per} neighbours share a scale: "
            f"give state_dtypes {smaller}another format, or shard it in another dim"
        )

    def whole_blocks(self, block: Block) -> tuple[Block, ...]:
        """Return the blocks of the whole parameter that a block stands for, one per stack."""
        if self.whole is None:
            return (block,)
        assert self.blocks is not None
        assert self.whole.blocks is not None
        return self.whole.blocks[self.blocks.index(block) :: len(self.blocks)]


def _dtype_named(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


class Piece(NamedTuple):
    """The flat range [start, stop) of a parameter, and the block in it, if it is a block."""

    param: int  # index in the plan's parameters
    start: int
    stop: int
    block: Block | None = None

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def elements(self) -> slice:
        """Return the range of the piece in the flattened parameter."""
        return slice(self.start, self.stop)


class Segment(NamedTuple):
    """Consecutive pieces, each from its start in `starts`; gaps may follow any of them."""

    pieces: tuple[Piece, ...]
    starts: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> "Segment":
        """Return a segment of pieces that lie end to end."""
        if not pieces:
            return NOTHING
        if len(pieces) == 1:  # most are, where a thousand ranks have a slice each
            return cls((pieces[0],), (0,), pieces[0].size)
        *starts, size = accumulate((piece.size for piece in pieces), initial=0)
        return cls(tuple(pieces), tuple(starts), size)

    def places(self) -> list[tuple[Piece, slice]]:
        """Return each piece with its range in a tensor of the segment's elements."""
        return [
            (piece, slice(start, start + piece.size))
            for piece, start in zip(self.pieces, self.starts, strict=True)
        ]


NOTHING = Segment((), (), 0)


@dataclass(frozen=True)
class Bucket:
    """Pieces that are sent together; `segments[rank]` has the pieces that the rank owns.

    A replicated bucket has one segment that all ranks own: it is all-reduced.
    """

    dtype: str
    segments: tuple[Segment, ...]
    replicated: bool = False

    # Kept: with a thousand ranks most segments are empty, and a plan's buckets are asked often.

    @cached_property
    def filled(self) -> tuple[tuple[int, Segment], ...]:
        """Return (place, segment) of every segment with a piece."""
        return tuple(
            (place, segment) for place, segment in enumerate(self.segments) if segment.pieces
        )

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(segment.size for segment in self.segments)

    @property
    def segment_sizes(self) -> list[int]:
        """Return the number of elements per segment, gaps included."""
        return list(self._sizes)

    @cached_property
    def size(self) -> int:
        """Return the number of elements of the bucket, gaps included."""
        return sum(self._sizes)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parameters in the bucket, gaps included."""
        return self.size * _dtype_named(self.dtype).itemsize

    @cached_property
    def count(self) -> int:
        """Return the number of pieces in all segments."""
        return sum(len(segment.pieces) for _, segment in self.filled)

    def owned(self, rank: int) -> Segment:
        """Return the segment that a rank updates: in a replicated bucket the first."""
        return self.segments[0 if self.replicated else rank]

    def places(self) -> Iterator[tuple[Piece, int]]:
        """Yield every piece with its start in the bucket."""
        base = 0
        for segment in self.segments:
            for piece, start in zip(segment.pieces, segment.starts, strict=True):
                yield piece, base + start
            base += segment.size

    @cached_property
    def packing(self) -> Packing:
        """Return the packing of the bucket; neighbours of one parameter are one part."""
        return self.packing_without(None)

    def packing_without(self, rank: int | None) -> Packing:
        """Return the packing of the bucket without the pieces of one rank."""
        found: list[PackedPart] = []
        base = 0
        for owner, segment in enumerate(self.segments):
            for piece, start in zip(segment.pieces, segment.starts, strict=True):
                if owner != rank:
                    part = _packed(owner, piece.param, piece.start, piece.stop, base + start)
                    if found and _follows(part, found[-1]):
                        before = found.pop()
                        first = before.elements.start
                        part = _packed(before.rank, piece.param, first, piece.stop, before.start)
                    found.append(part)
            base += segment.size
        return Packing(tuple(found), self._sizes)

    @cached_property
    def _params(self) -> tuple[int, ...]:
        return tuple(
            sorted({piece.param for _, segment in self.filled for piece in segment.pieces})
        )

    @property
    def params(self) -> list[int]:
        """Return the numbers of parameters with a piece in the bucket, each once."""
        return list(self._params)


def _packed(rank: int, param: int, first: int, stop: int, start: int) -> PackedPart:
    """Return elements [first, stop) of a parameter as a part from `start` of a bucket."""
    size = stop - first
    return PackedPart(rank, (param, ""), (size,), (slice(first, stop),), start, size)


def _follows(part: PackedPart, before: PackedPart) -> bool:
    """Whether a part continues another one, in the parameter and in the bucket."""
    same = part.key == before.key and part.elements.start == before.elements.stop
    return same and part.start == before.start + before.numel


class ShardingPlan(NamedTuple):
    """Parameters, ranks and buckets in launch order."""

    params: tuple[ParamSpec, ...]
    ranks: int
    buckets: tuple[Bucket, ...]

    def parameter_lines(self) -> list[str]:
        """Return the planned parameters as lines of text."""
        return [f"{p.name}: {p.shape} {p.dtype}, group {p.group}, {p.rule}" for p in self.params]

    def lines(self) -> list[str]:
        """Return the plan as lines of text, for comparing it between ranks."""
        lines = [f"{self.ranks} ranks", *self.parameter_lines()]
        for number, bucket in enumerate(self.buckets):
            for owner, segment in bucket.filled:
                who = "all ranks" if bucket.replicated else f"rank {owner}"
                pieces = [
                    f"{self.params[p.param].name}[{p.start}:{p.stop}] at {start}"
                    for p, start in zip(segment.pieces, segment.starts, strict=True)
                ]
                lines.append(f"bucket {number}, {who}, {segment.size}: {', '.join(pieces)}")
        return lines

    def owned(self, rank: int) -> list[Piece]:
        """Return every piece that a rank updates, in launch order."""
        return [piece for bucket in self.buckets for piece in bucket.owned(rank).pieces]


def plan_sharding(
    params: Sequence[ParamSpec],
    ranks: int,
    *,
    shard: bool = True,
    crossover: int = 1024,
    bucket_elements: int = 1 << 22,
    owners: OwnerStrategy = "balanced",
    max_size_ratio: float | None = None,
    columns: int = 1,
) -> ShardingPlan:
    """Cut `params` (in order of use) into buckets for `ranks` ranks.

    Parameters below `crossover` elements are replicated, all of one dtype in one bucket.
    With `shard=False` all parameters are replicated, in buckets as well. With `columns` > 1,
    owners that follow each other are in different columns.
    """
    order = range(len(params) - 1, -1, -1)
    small = {i for i in order if not shard or ranks == 1 or params[i].numel < crossover}
    owner_of = {
        block: dealt(owner, ranks, columns)
        for block, owner in _block_owners(
            params, [i for i in order if i not in small], ranks, owners, max_size_ratio
        ).items()
    }
    quanta = [param.quantum for param in params]
    weights = _slice_weights(params, [i for i in order if i not in small], ranks, owner_of)
    buckets: list[Bucket] = []
    # Small parameters travel in one collective; whole models do not.
    limit = bucket_elements if not shard or ranks == 1 else inf
    for dtype in dict.fromkeys(params[i].dtype for i in order):
        alike = [i for i in order if params[i].dtype == dtype]
        large = [i for i in alike if i not in small]
        blocks = [
            (piece, owner_of[i, j])
            for i in large
            if params[i].blocks is not None
            for j, piece in enumerate(whole_pieces(i, params[i]))
        ]
        owner_of_piece = dict(blocks)
        for pieces in in_runs(owner_of_piece, _size, bucket_elements):
            owned: dict[int, list[Piece]] = {}
            for piece in pieces:
                owned.setdefault(owner_of_piece[piece], []).append(piece)
            buckets.append(_bucket(dtype, owned, ranks))
        ranges = [
            Piece(i, start, min(start + step, params[i].numel))
            for i in large
            if params[i].blocks is None
            for step in [rounded_up(bucket_elements, params[i].quantum)]
            for start in range(0, params[i].numel, step)
        ]
        for pieces in in_runs(ranges, _size, bucket_elements):
            buckets.append(_bucket(dtype, _cut(pieces, weights, quanta), ranks))
        shared = [piece for i in alike if i in small for piece in whole_pieces(i, params[i])]
        for pieces in in_runs(shared, _size, limit):
            buckets.append(Bucket(dtype, (Segment.of(pieces),), replicated=True))
    return ShardingPlan(tuple(params), ranks, in_launch_order(buckets))


def in_launch_order(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """Sort buckets as backward completes them: from the last parameter to the first."""
    return tuple(sorted(buckets, key=lambda bucket: -bucket.params[0]))


def whole_pieces(index: int, param: ParamSpec) -> list[Piece]:
    """Return the pieces of a whole parameter: blocks for a matrix rule, else one piece."""
    if param.blocks is None:
        return [Piece(index, 0, param.numel)]
    pieces = []
    if param.shards > 1:  # an even share of each
        start = 0
        for block in param.blocks:
            stop = start - (-block.rows * block.cols // param.shards)
            pieces.append(Piece(index, start, stop, block))
            start = stop
        return pieces
    for block in param.blocks:
        stack_rows = param.shape[-2] if block.matrix is not None else 0
        start = ((block.matrix or 0) * stack_rows + block.row) * block.cols
        pieces.append(Piece(index, start, start + block.rows * block.cols, block))
    return pieces


def _block_owners(
    params: Sequence[ParamSpec],
    indices: Sequence[int],
    ranks: int,
    strategy: OwnerStrategy,
    max_size_ratio: float | None,
) -> dict[tuple[int, int], int]:
    """Return the owner of each block, by (parameter, place among its blocks)."""
    keys = [(i, j) for i in indices for j in range(len(params[i].blocks or ()))]
    blocks = [(params[i].blocks or ())[j] for i, j in keys]
    if strategy == "cyclic":
        return dict(zip(keys, cyclic_owners(len(keys), ranks), strict=True))
    flops = [block_flops(block) for block in blocks]
    sizes = [block.rows * block.cols for block in blocks]
    chosen = balanced_owners(flops, sizes, ranks, max_size_ratio=max_size_ratio)
    return dict(zip(keys, chosen, strict=True))


def _slice_weights(
    params: Sequence[ParamSpec],
    indices: Sequence[int],
    ranks: int,
    owner_of: dict[tuple[int, int], int],
) -> list[int]:
    """Return weights by rank for slices, with which all ranks keep equal state.

    Whole blocks are given out by FLOPs, so their state is uneven; slices can be of any size and
    make up for it.
    """
    of_blocks = [0.0] * ranks
    for (i, j), owner in owner_of.items():
        of_blocks[owner] += whole_pieces(i, params[i])[j].size * params[i].state_per_element
    of_slices = sum(
        params[i].numel * params[i].state_per_element for i in indices if params[i].blocks is None
    )
    mean = (sum(of_blocks) + of_slices) / ranks
    weights = [max(0, round(mean - owned)) for owned in of_blocks]
    return weights if any(weights) else [1] * ranks


def _cut(
    pieces: Sequence[Piece], weights: Sequence[int], quanta: Sequence[int]
) -> dict[int, list[Piece]]:
    """Cut consecutive ranges by weight, and return the pieces of each rank.

    `quanta`: each parameter is cut at multiples of its quantum.

    Ranges are cut as one sequence, not one by one: with a thousand ranks few ranges are cut at
    all, and neighbours in the bucket are neighbours in their parameter too.
    """
    size = sum(piece.size for piece in pieces)
    shares = list(accumulate(weights, initial=0))
    ends = iter([size * share // shares[-1] for share in shares[1:]])
    owned: dict[int, list[Piece]] = {}
    rank, end, done = 0, next(ends), 0
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            while end <= done:
                rank, end = rank + 1, next(ends)
            stop = min(piece.stop, rounded_up(start + end - done, quanta[piece.param]))
            owned.setdefault(rank, []).append(Piece(piece.param, start, stop))
            done += stop - start
            start = stop
    return owned


def _bucket(dtype: str, owned: Mapping[int, Sequence[Piece]], ranks: int) -> Bucket:
    segments = [NOTHING] * ranks
    for owner, pieces in owned.items():
        segments[owner] = Segment.of(pieces)
    return Bucket(dtype, tuple(segments))
