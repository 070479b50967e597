"""Runs batches of blocks in parallel on two CUDA streams.

The last tiles of a product leave most of a GPU idle, and passes over memory leave its matrix units
idle: a second batch has work for both. A second batch needs memory of its own, though, and large
batches fill a GPU for so long that nothing is won: large batches run one after the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch

from samestep.rules.orthogonalize import cheaper_execution, orthogonalize_flops

T = TypeVar("T")

LANES = 2
MOST = 4_000_000_000  # bytes of temporary memory of all lanes: more is not worth its while


@dataclass(frozen=True)
class Batch:
    """Blocks of one shape, or of its transpose, that are orthogonalized together."""

    count: int
    rows: int
    cols: int

    @property
    def flops(self) -> int:
        return self.count * orthogonalize_flops(self.rows, self.cols)

    @property
    def temporary_bytes(self) -> int:
        """Return the bytes of temporaries while the batch is orthogonalized.

        Counted from `kernels/orthogonalize.py`. Receipts of `samestep bench step` before there were
        lanes have 1,966,083,072 and 6,039,801,344 bytes for gpt-1280 and gpt-2048, and the largest
        batches give 3,072 and 3,840 less.
        """
        short, long = sorted((self.rows, self.cols))
        squares = 7 if cheaper_execution(self.rows, self.cols) == "gram" else 2
        return 2 * self.count * (2 * short * long + squares * short * short)


def dealt(batches: Sequence[Batch], *, sparing: bool = False) -> list[list[int]]:
    """Assign batches to lanes, most work first; return the batch numbers of each lane.

    sparing: use one lane, since memory is short.
    """
    flops = [batch.flops for batch in batches]
    lanes: list[list[int]] = [[] for _ in range(LANES)]
    for number in sorted(range(len(batches)), key=lambda number: -flops[number]):
        min(lanes, key=lambda lane: sum(flops[own] for own in lane)).append(number)
    if sparing or not all(lanes) or temporary_bytes(batches, lanes) > MOST:
        return [list(range(len(batches)))]
    return lanes


def temporary_bytes(batches: Sequence[Batch], lanes: Sequence[Sequence[int]]) -> int:
    """Return the bytes of temporaries that all lanes need at once."""
    sizes = [batch.temporary_bytes for batch in batches]
    return sum(max((sizes[number] for number in lane), default=0) for lane in lanes)


def side_by_side(
    lanes: Sequence[Sequence[int]], run: Callable[[int], T], device: torch.device
) -> list[T]:
    """Run all batches and return their results in order, ready for the current stream.

    The first lane is the current stream. Tensors that another lane reads must be kept alive until
    this returns: the first lane gets memory of the current stream that is freed.
    """
    if device.type != "cuda" or len(lanes) == 1:
        found = {number: run(number) for lane in lanes for number in lane}
        return [found[number] for number in sorted(found)]
    found = {}
    own = torch.cuda.current_stream(device)
    others = [_stream(device, number) for number in range(1, len(lanes))]
    for stream in others:  # before the first lane has anything to do
        stream.wait_stream(own)
    try:
        for stream, lane in zip([*others, own], [*lanes[1:], *lanes[:1]], strict=True):
            with torch.cuda.stream(stream):
                found.update((number, run(number)) for number in lane)
    finally:  # also who goes on after an error, such as too little memory, has what was begun
        for stream in others:
            own.wait_stream(stream)
    return [found[number] for number in sorted(found)]


@cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """Return the CUDA stream of a lane."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
