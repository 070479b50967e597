"""Where everything of a chunk of spread blocks lies: made once, for `kernel_stages`.

New directions lie in one buffer: first what is sent to owners, part after part, then the blocks
that this rank owns.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from samestep.kernels.choice import padded
from samestep.kernels.norm import DTYPES, STORED_DTYPES
from samestep.kernels.parts import (
    MomentumOfParts,
    MomentumPart,
    Move,
    Moves,
    Rounded,
    Rows,
    Size,
    SourceRows,
    StepOfParts,
    StepPart,
)
from samestep.layout.blocks import Block, Shape
from samestep.layout.splits import Form
from samestep.placements.parts.block_exchange import LocalChunk
from samestep.placements.parts.local_shards import BlockShard, LocalShards
from samestep.plan.block_exchange import OF_WHOLE, PlannedBlock
from samestep.plan.exchanges import Packing
from samestep.rules.muon import lr_factor
from samestep.rules.state import MASTER, State, is_small
from samestep.rules.stored import REMAINDER_KEY, SCALE_SUFFIX, STEP

ROOM = 64  # elements: blocks in a buffer begin at multiples of it

T = TypeVar("T")


class NotRowsError(Exception):
    """A part is no matrix of contiguous rows that kernels can read."""


class OwnedBlocks(NamedTuple):
    """Blocks of one shape and form that this rank owns, one after the other in the buffer."""

    size: Size
    places: list[int]  # in the chunk
    block: Block  # any of them
    begin: int
    states: list[State]  # of whole blocks
    params: Tensor  # places of their parameters among the gradients
    matrices: list[list[State]]  # of each block with a form those of its matrices; else nothing

    @property
    def form(self) -> Form | None:
        return self.block.form

    @property
    def stop(self) -> int:
        """Where the last one ends."""
        return self.begin + len(self.places) * self.size.rows * self.size.cols


class _Owned(NamedTuple):
    """Where a block that this rank owns is: which job, and which one of its blocks."""

    job: int
    turn: int


class DirectedPart(NamedTuple):
    """A part that this rank holds, and where its direction will be."""

    part: BlockShard
    size: Size
    source: SourceRows


class ChunkTables:
    """One chunk; raises NotRowsError if kernels cannot do all its parts."""

    def __init__(
        self,
        local: LocalShards,
        chunk: LocalChunk,
        places: dict[int, int],  # of parameters among the gradients
        grad_dtypes: Sequence[torch.dtype],  # there
    ) -> None:
        _require_rectangles(chunk.blocks)
        for planned in chunk.blocks:  # of all ranks, which must decide alike
            if planned.block.form is not None and is_small(local.specs[planned.param].stored):
                raise NotRowsError  # its matrices may share scales along rows
        self.chunk, self._device, self._places = chunk, local.device, places
        self.sent = sum(chunk.collection.out.sizes)
        self.batches = self._owned_batches(local)
        self._jobs = [job for _, jobs in self.batches for job in jobs]
        self.size = self._jobs[-1].stop if self._jobs else self.sent  # of the buffer
        self._owned = {
            place: _Owned(number, turn)
            for number, job in enumerate(self._jobs)
            for turn, place in enumerate(job.places)
        }
        sizes = [_size(part.planned, _lengths(part.in_block)) for part in chunk.shards]
        back = chunk.giving_back
        into = () if back is None else back.into.parts
        came = {part.key[0]: part.start for part in into if part.key[1] != OF_WHOLE}
        self.parts = [
            DirectedPart(part, size, self._source(part, size, came))
            for part, size in zip(chunk.shards, sizes, strict=True)
        ]
        self.momenta = self._momentum_launches(local, grad_dtypes)
        self.assembling = self._moves_into_blocks()
        self.packing = None if back is None else self._moves_back(back.out)
        self.steps = self._step_launches(local)

    def _owned_batches(self, local: LocalShards) -> list[tuple[int, list[OwnedBlocks]]]:
        """Those of a shape and of its transpose are orthogonalized together; with their group."""
        alike = _by(
            self.chunk.owned.items(),
            lambda own: (
                local.specs[own[1].param].group,
                *(own[1].block[2:] if own[1].block.form else sorted(own[1].block.shape)),
            ),
        )
        begin, batches = self.sent, []
        for owned in alike:
            jobs = []
            owned.sort(key=lambda own: own[1].block.rows)
            for _, same in groupby(owned, key=lambda own: own[1].block.rows):
                places, blocks = map(list, zip(*same, strict=True))
                begin = -(-begin // ROOM) * ROOM
                block, states = blocks[0].block, list(map(local.whole_state, blocks))
                params = torch.tensor([self._places[planned.param] for planned in blocks])
                matrices = []
                if block.form is not None:
                    matrices = list(map(local.states_of_matrices, blocks))
                jobs.append(
                    OwnedBlocks(
                        Size(*block.shape),
                        places,
                        block,
                        begin,
                        states,
                        params.to(self._device),
                        matrices,
                    )
                )
                begin = jobs[-1].stop
            batches.append((local.specs[owned[0][1].param].group, jobs))
        return batches

    def _in_buffer(self, place: int, first: tuple[int, int]) -> Rows:
        """Rows of a block that this rank owns, from some row and column on."""
        own = self._owned[place]
        job = self._jobs[own.job]
        rows, cols = job.size
        return Rows(job.begin + own.turn * rows * cols + first[0] * cols + first[1], cols)

    def _in_directions(self, place: int, first: tuple[int, int]) -> SourceRows:
        """The same among the directions, which are padded, and turned if the block is tall.

        Of a block with a form they lie as it does.
        """
        own = self._owned[place]
        rows, cols = self._jobs[own.job].size
        if self._jobs[own.job].form is not None:
            begin = own.turn * rows * cols + first[0] * cols + first[1]
            return SourceRows(own.job, begin, cols, False)
        short, long = sorted((padded(rows), padded(cols)))
        tall = rows > cols
        along = first[1] * long + first[0] if tall else first[0] * long + first[1]
        return SourceRows(own.job, own.turn * short * long + along, long, tall)

    def _momentum_launches(
        self, local: LocalShards, grad_dtypes: Sequence[torch.dtype]
    ) -> list[tuple[int, MomentumOfParts]]:
        sent: dict[int, list[int]] = {}
        for packed in self.chunk.collection.out.parts:
            sent.setdefault(packed.key[0], []).append(packed.start)
        found, copies = [], []
        for part, size, _ in self.parts:
            index, place = part.planned.param, part.place
            goes_to = [Rows(start, size.cols) for start in sent.get(place, [])]
            if place in self._owned:
                goes_to.insert(0, self._in_buffer(place, _first(part.planned, part.in_block, size)))
            copies += [Move(size, SourceRows(0, *goes_to[0]), other) for other in goes_to[1:]]
            like = torch.empty(local.values[index].shape, device="meta")
            grad = _matrix(like[part.here], size)
            found.append(
                MomentumPart(
                    self._places[index],
                    size,
                    Rows(int(grad.storage_offset()), grad.stride(0)),
                    _known(local.views(part).state["momentum_buffer"], size),
                    goes_to[0] if goes_to else None,
                    _rounded(local, part, size),
                )
            )
        self.copies = Moves(copies, self._device) if copies else None
        groups = [local.specs[part.planned.param].group for part, _, _ in self.parts]
        pairs = list(zip(groups, found, strict=True))
        kinds = _by(
            pairs,
            lambda pair: (
                pair[0],
                grad_dtypes[pair[1].param],
                pair[1].momentum.dtype,
                pair[1].rounded is None,
                pair[1].block,
            ),
        )
        launches = []
        for same in kinds:
            group, parts = same[0][0], [part for _, part in same]
            dtype = grad_dtypes[parts[0].param]
            if dtype not in DTYPES:
                raise NotRowsError
            launches.append((group, MomentumOfParts(parts, dtype)))
        return launches

    def _moves_into_blocks(self) -> Moves | None:
        """Parts that came, to their places in the blocks."""
        found = []
        for _, (place, _), sizes, slices, start, _ in self.chunk.collection.into.parts:
            planned = self.chunk.blocks[place]
            size = _size(planned, sizes)
            to = self._in_buffer(place, _first(planned, slices, size))
            found.append(Move(size, SourceRows(0, start, size.cols), to))
        return Moves(found, self._device) if found else None

    def _moves_back(self, out: Packing) -> Moves | None:
        """Parts of directions, to their places in the buffer that goes back."""
        found = []
        for _, (place, what), sizes, slices, start, _ in out.parts:
            if what != OF_WHOLE:
                planned = self.chunk.blocks[place]
                size = _size(planned, sizes)
                source = self._in_directions(place, _first(planned, slices, size))
                found.append(Move(size, source, Rows(start, size.cols)))
        return Moves(found, self._device) if found else None

    def _source(self, part: BlockShard, size: Size, came: dict[int, int]) -> SourceRows:
        """Where the direction of a part is: among this rank's own, or in what came, the last."""
        place = part.place
        if place in self._owned:
            return self._in_directions(place, _first(part.planned, part.in_block, size))
        return SourceRows(len(self._jobs), came[place], size.cols)

    def _step_launches(self, local: LocalShards) -> list[tuple[int, StepOfParts]]:
        found = []
        for part, size, source in self.parts:
            planned = part.planned
            value, state, _ = local.views(part)
            master = state.get(MASTER, state.get(REMAINDER_KEY))
            if master is not None and master.dtype not in (torch.float32, torch.int16):
                raise NotRowsError
            target = _known(value, size)
            own = None if master is None else _known(master, size)
            group, whole = (
                local.specs[planned.param].group,
                StepPart(
                    self._places[planned.param],
                    size,
                    target,
                    own,
                    source,
                    Size(*planned.block.matrices[0]),
                ),
            )
            first = _first(planned, part.in_block, size)
            found += [(group, step) for step in _of_one_rate(whole, planned.block, first)]
        kinds = _by(
            found,
            lambda pair: (
                pair[0],
                pair[1].target.dtype,
                None if pair[1].master is None else pair[1].master.dtype,
            ),
        )
        return [(same[0][0], StepOfParts([p for _, p in same], lr_factor)) for same in kinds]


def _of_one_rate(part: StepPart, block: Block, first: tuple[int, int]) -> Iterable[StepPart]:
    """A part, or ranges of it where its matrices differ in shape, so in their rate.

    `first`: the row and column of the block at which it begins.
    """
    if block.form is None or len(set(block.matrices)) == 1:
        yield part
        return
    dim, begin = block.form.dim, 0
    numbers = block.form.numbers()[first[dim] : first[dim] + part.size[dim]]
    for shape, places in groupby(numbers, key=lambda number: block.matrices[number]):
        count = len(list(places))
        size = Size(*(count if d == dim else n for d, n in enumerate(part.size)))
        target = part.target.narrow(dim, begin, count)
        master = None if part.master is None else part.master.narrow(dim, begin, count)
        step = 1 if dim == 1 else part.source.stride  # directions of forms are never turned
        source = part.source._replace(begin=part.source.begin + begin * step)
        yield StepPart(part.param, size, target, master, source, Size(*shape))
        begin += count


def _by(things: Iterable[T], kind: Callable[[T], Hashable]) -> list[list[T]]:
    """Things of one kind together, in order of appearance."""
    found: dict[Hashable, list[T]] = {}
    for thing in things:
        found.setdefault(kind(thing), []).append(thing)
    return list(found.values())


def _lengths(slices: Iterable[slice]) -> list[int]:
    return [part.stop - part.start for part in slices]


def _size(planned: PlannedBlock, lengths: Sequence[int]) -> Size:
    """Of a part of a block as a matrix: a block may be flattened, or one matrix of a stack."""
    rows = lengths[0 if planned.block.matrix is None else 1]
    return Size(rows, prod(lengths) // rows)


def _matrix(view: Tensor, size: Size) -> Tensor:
    """A part, (rows, cols), whose rows are contiguous."""
    try:
        matrix = view.view(size)
    except RuntimeError:
        raise NotRowsError from None
    if matrix.stride(1) != 1 and size.cols > 1:
        raise NotRowsError
    return matrix


def _known(view: Tensor, size: Size) -> Tensor:
    """The same of a dtype that kernels know."""
    if view.dtype not in STORED_DTYPES:
        raise NotRowsError
    return _matrix(view, size)


def _rounded(local: LocalShards, part: BlockShard, size: Size) -> Rounded | None:
    """What kernels need to know of a part whose momentum is rounded at random."""
    where = local.elements[part.planned.param]
    if where is None:
        return None
    origin = where.at(_matrix(where.elements[part.here], size)).origin()
    step = local.whole_state(part.planned)[STEP]
    scale = local.views(part).state.get("momentum_buffer" + SCALE_SUFFIX)
    if scale is not None:
        scale = _matrix(scale, Size(size.rows, scale.numel() // size.rows))
    return Rounded(origin, step, scale)


def _require_rectangles(chunk: Iterable[PlannedBlock]) -> None:
    """Whether all parts are rows and columns of blocks, also those of other ranks.

    All ranks must decide alike, or copies of a part would be rounded in different ways.
    """
    kinds = {
        (planned.box.sizes, box.sizes, _size(planned, box.sizes), planned.block.cols)
        for planned in chunk
        for box, _ in planned.held
    }
    for sizes, of_part, size, cols in kinds:
        _in_block(sizes, tuple(slice(length) for length in of_part), size, cols)


def _first(planned: PlannedBlock, slices: tuple[slice, ...], size: Size) -> tuple[int, int]:
    """The row and column of a block at which a part begins."""
    part = _in_block(planned.box.sizes, slices, size, planned.block.cols)
    return divmod(int(part.storage_offset()), planned.block.cols)


def _in_block(sizes: Shape, slices: tuple[slice, ...], size: Size, cols: int) -> Tensor:
    """A part of a block without values."""
    part = _matrix(torch.empty(sizes, device="meta")[slices], size)
    if size.rows > 1 and part.stride(0) != cols:
        raise NotRowsError
    return part
