"""Tables of addresses in a chunk of sharded blocks, which kernels read.

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
from samestep.layout.blocks import Block
from samestep.layout.splits import Form
from samestep.plan.chunks import OF_WHOLE, PlannedBlock
from samestep.plan.packing import PackedPart, Packing
from samestep.rules.muon import lr_factor
from samestep.rules.state import MASTER, State, is_small
from samestep.rules.stored import REMAINDER_KEY, SCALE_SUFFIX, STEP
from samestep.shards.dtensor.local_chunk import BlockShard, LocalChunk

ROOM = 64  # elements: blocks in a buffer begin at multiples of it

T = TypeVar("T")


class NotRowsError(Exception):
    """Raised if a part is no matrix of contiguous rows."""


class OwnedBlocks(NamedTuple):
    """Blocks of one shape that this rank owns, contiguous in the buffer."""

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
        """The end of the last one, in elements."""
        return self.begin + len(self.places) * self.size.rows * self.size.cols


class _Owned(NamedTuple):
    """Index of an owned block: its job and the position in it."""

    job: int
    turn: int


class Region(NamedTuple):
    """A rectangle of a block."""

    size: Size
    row: int
    col: int


class DirectedPart(NamedTuple):
    """A part that this rank holds, and the place of its direction."""

    part: BlockShard
    region: Region
    source: SourceRows


class ChunkTables:
    """Tables of one chunk; raises NotRowsError if kernels cannot process it."""

    def __init__(
        self,
        chunk: LocalChunk,
        places: dict[int, int],  # of parameters among the gradients
        grad_dtypes: Sequence[torch.dtype],  # there
    ) -> None:
        _require_rectangles(chunk.blocks)
        for planned in chunk.blocks:  # of all ranks, which must decide alike
            if planned.block.form is not None and is_small(chunk.local.specs[planned.param].stored):
                raise NotRowsError  # its matrices may share scales along rows
        self.chunk, self._local = chunk, chunk.local
        self._device, self._places = chunk.device, places
        self.sent = sum(chunk.collection.out.sizes)
        self.batches = self._owned_batches()
        self._jobs = [job for _, jobs in self.batches for job in jobs]
        self.size = self._jobs[-1].stop if self._jobs else self.sent  # of the buffer
        self._owned = {
            place: _Owned(number, turn)
            for number, job in enumerate(self._jobs)
            for turn, place in enumerate(job.places)
        }
        back = chunk.giving_back
        into = () if back is None else back.into.parts
        came = {part.key[0]: part.start for part in into if part.key[1] != OF_WHOLE}
        self.parts = [self._directed(part, came) for part in chunk.shards]
        self.momenta = self._momentum_launches(grad_dtypes)
        self.assembling = self._moves_into_blocks()
        self.packing = None if back is None else self._moves_back(back.out)
        self.steps = self._step_launches()

    def _owned_batches(self) -> list[tuple[int, list[OwnedBlocks]]]:
        """Owned blocks that are orthogonalized together: one shape and its transpose."""
        alike = _by(
            self.chunk.owned.items(),
            lambda own: (
                self._local.specs[own[1].param].group,
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
                block, states = blocks[0].block, list(map(self.chunk.whole_state, places))
                params = torch.tensor([self._places[planned.param] for planned in blocks])
                matrices = []
                if block.form is not None:
                    matrices = list(map(self.chunk.states_of_matrices, places))
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
            batches.append((self._local.specs[owned[0][1].param].group, jobs))
        return batches

    def _in_buffer(self, place: int, region: Region) -> Rows:
        """Address of a region of an owned block."""
        own = self._owned[place]
        job = self._jobs[own.job]
        rows, cols = job.size
        return Rows(job.begin + own.turn * rows * cols + region.row * cols + region.col, cols)

    def _in_directions(self, place: int, region: Region) -> SourceRows:
        """Address among the directions, which are padded, and transposed for tall blocks.

        Of a block with a form they lie as it does.
        """
        own = self._owned[place]
        rows, cols = self._jobs[own.job].size
        if self._jobs[own.job].form is not None:
            begin = own.turn * rows * cols + region.row * cols + region.col
            return SourceRows(own.job, begin, cols, False)
        short, long = sorted((padded(rows), padded(cols)))
        tall = rows > cols
        row, col = (region.col, region.row) if tall else (region.row, region.col)
        return SourceRows(own.job, own.turn * short * long + row * long + col, long, tall)

    def _momentum_launches(
        self, grad_dtypes: Sequence[torch.dtype]
    ) -> list[tuple[int, MomentumOfParts]]:
        sent: dict[int, list[int]] = {}
        for packed in self.chunk.collection.out.parts:
            sent.setdefault(packed.key[0], []).append(packed.start)
        found, copies = [], []
        for part, region, _ in self.parts:
            size = region.size
            index, place = part.planned.param, part.place
            goes_to = [Rows(start, size.cols) for start in sent.get(place, [])]
            if place in self._owned:
                goes_to.insert(0, self._in_buffer(place, region))
            copies += [Move(size, SourceRows(0, *goes_to[0]), other) for other in goes_to[1:]]
            like = torch.empty(self._local.values[index].shape, device="meta")
            grad = _matrix(like[part.here], size)
            found.append(
                MomentumPart(
                    self._places[index],
                    size,
                    Rows(int(grad.storage_offset()), grad.stride(0)),
                    _known(self.chunk.views(part).state["momentum_buffer"], size),
                    goes_to[0] if goes_to else None,
                    _rounded(self.chunk, part, size),
                )
            )
        self.copies = Moves(copies, self._device) if copies else None
        groups = [self._local.specs[part.planned.param].group for part, _, _ in self.parts]
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
        """Copies of received parts into blocks."""
        found = []
        for part in self.chunk.collection.into.parts:
            place, region = part.key[0], self._region(part)
            source = SourceRows(0, part.start, region.size.cols)
            found.append(Move(region.size, source, self._in_buffer(place, region)))
        return Moves(found, self._device) if found else None

    def _moves_back(self, out: Packing) -> Moves | None:
        """Copies of parts of directions into the send buffer."""
        found = []
        for part in out.parts:
            place, what = part.key
            if what != OF_WHOLE:
                region = self._region(part)
                to = Rows(part.start, region.size.cols)
                found.append(Move(region.size, self._in_directions(place, region), to))
        return Moves(found, self._device) if found else None

    def _region(self, part: PackedPart) -> Region:
        return region_of(self.chunk.blocks[part.key[0]], part.slices)

    def _directed(self, part: BlockShard, came: dict[int, int]) -> DirectedPart:
        """The place of a part's direction: among this rank's own, or in what came last."""
        place, region = part.place, region_of(part.planned, part.in_block)
        if place in self._owned:
            return DirectedPart(part, region, self._in_directions(place, region))
        source = SourceRows(len(self._jobs), came[place], region.size.cols)
        return DirectedPart(part, region, source)

    def _step_launches(self) -> list[tuple[int, StepOfParts]]:
        found = []
        for part, region, source in self.parts:
            planned, size = part.planned, region.size
            value, state, _ = self.chunk.views(part)
            master = state.get(MASTER, state.get(REMAINDER_KEY))
            if master is not None and master.dtype not in (torch.float32, torch.int16):
                raise NotRowsError
            target = _known(value, size)
            own = None if master is None else _known(master, size)
            group, whole = (
                self._local.specs[planned.param].group,
                StepPart(
                    self._places[planned.param],
                    size,
                    target,
                    own,
                    source,
                    Size(*planned.block.matrices[0]),
                ),
            )
            found += [(group, step) for step in _of_one_rate(whole, planned.block, region)]
        kinds = _by(
            found,
            lambda pair: (
                pair[0],
                pair[1].target.dtype,
                None if pair[1].master is None else pair[1].master.dtype,
            ),
        )
        return [(same[0][0], StepOfParts([p for _, p in same], lr_factor)) for same in kinds]


def _of_one_rate(part: StepPart, block: Block, region: Region) -> Iterable[StepPart]:
    """Split a part where its matrices differ in shape, and so in their rate."""
    if block.form is None or len(set(block.matrices)) == 1:
        yield part
        return
    dim, begin = block.form.dim, 0
    first = region.col if dim else region.row
    numbers = block.form.numbers()[first : first + part.size[dim]]
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
    """Group items by key, in order of appearance."""
    found: dict[Hashable, list[T]] = {}
    for thing in things:
        found.setdefault(kind(thing), []).append(thing)
    return list(found.values())


def region_of(planned: PlannedBlock, slices: tuple[slice, ...]) -> Region:
    """A part of a block as a matrix: a block may be flattened, or one matrix of a stack."""
    lengths = [part.stop - part.start for part in slices]
    rows, cols = lengths[0 if planned.block.matrix is None else 1], planned.block.cols
    size = Size(rows, prod(lengths) // rows)
    part = _matrix(torch.empty(planned.box.sizes, device="meta")[slices], size)
    if size.rows > 1 and part.stride(0) != cols:
        raise NotRowsError
    return Region(size, *divmod(int(part.storage_offset()), cols))


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
    """A dtype that kernels support in place of one they do not."""
    if view.dtype not in STORED_DTYPES:
        raise NotRowsError
    return _matrix(view, size)


def _rounded(chunk: LocalChunk, part: BlockShard, size: Size) -> Rounded | None:
    """Kernel arguments for a part whose momentum is rounded stochastically."""
    where = chunk.local.elements[part.planned.param]
    if where is None:
        return None
    origin = where.at(_matrix(where.elements[part.here], size)).origin()
    step = chunk.whole_state(part.place)[STEP]
    scale = chunk.views(part).state.get("momentum_buffer" + SCALE_SUFFIX)
    if scale is not None:
        scale = _matrix(scale, Size(size.rows, scale.numel() // size.rows))
    return Rounded(origin, step, scale)


def _require_rectangles(chunk: Iterable[PlannedBlock]) -> None:
    """Raise unless all parts are rectangles of blocks, on all ranks.

    All ranks must decide alike, or copies of a part would be rounded in different ways.
    """
    kinds = {  # blocks of layers are alike
        (planned.box.sizes, box.sizes, planned.block.matrix is None, planned.block.cols): planned
        for planned in chunk
        for box, _ in planned.held
    }
    for (_, sizes, _, _), planned in kinds.items():
        region_of(planned, tuple(slice(0, length) for length in sizes))
