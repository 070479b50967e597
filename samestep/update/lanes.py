"""Batches of blocks beside each other, on two streams of a GPU.

The last tiles of a product leave most of a GPU idle, and passes over memory all of its matrix
units: a second batch has work for both. Large batches fill a GPU by themselves for so long that it
is not worth the memory of two.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")

LANES = 2
FILLED = 2e13  # floating-point operations of all batches: on an H200 no more is won from here on


def dealt(flops: Sequence[float]) -> list[list[int]]:
    """The numbers of batches that run one after the other, lane by lane, most work first."""
    order = sorted(range(len(flops)), key=lambda number: -flops[number])
    if len(flops) < LANES or sum(flops) > FILLED:
        return [list(range(len(flops)))]
    lanes: list[list[int]] = [[] for _ in range(LANES)]
    for number in order:
        min(lanes, key=lambda lane: sum(flops[own] for own in lane)).append(number)
    return lanes


def side_by_side(
    lanes: Sequence[Sequence[int]], run: Callable[[int], T], device: torch.device
) -> list[T]:
    """What each batch gives, by its number; all of it is ready for the current stream.

    The first lane is the current stream. What another one reads has to be kept until this returns:
    memory of the current stream that is free is given to the first lane.
    """
    found: dict[int, T] = {}
    if device.type != "cuda":
        found.update((number, run(number)) for lane in lanes for number in lane)
        return [found[number] for number in sorted(found)]
    own = torch.cuda.current_stream(device)
    others = [_stream(device, number) for number in range(1, len(lanes))]
    for stream in others:  # before the first lane has anything to do
        stream.wait_stream(own)
    for stream, lane in zip([*others, own], [*lanes[1:], *lanes[:1]], strict=True):
        with torch.cuda.stream(stream):
            found.update((number, run(number)) for number in lane)
    for stream in others:
        own.wait_stream(stream)
    return [found[number] for number in sorted(found)]


@cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """Of one lane, for all steps: each stream has free memory of its own."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
