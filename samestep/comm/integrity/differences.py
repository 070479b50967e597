"""Locate differences between ranks, once checksums differ: the values travel."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from samestep.comm.collectives import from_first
from samestep.comm.groups import RankGroup
from samestep.comm.integrity.agreement import gather_texts

Value = float | int | bool | str

AT_ONCE = 1 << 24  # elements that are compared at a time, to bound memory


@dataclass(frozen=True)
class Difference:
    """The difference of ranks from the first rank of their group, in one tensor or text."""

    ranks: tuple[int, ...]  # the global ranks that do
    max_abs_diff: float  # the largest over all of them; inf where no number tells how far it is
    count: int  # elements that differ, on the rank with most of them; of a text lines
    index: tuple[int, ...]  # of the first element that differs on ranks[0], and both values
    first: Value
    other: Value


def locate(
    name: str, values: Sequence[Tensor | str], group: RankGroup, device: torch.device
) -> list[Difference | None]:
    """Return the difference of each value between ranks; None where ranks agree.

    Collective; every rank gets the same answer. Shapes are the same on all ranks, and the first
    rank sends each tensor.
    """
    mine = [v if isinstance(v, str) else _from_first(name, v, group) for v in values]
    texts = gather_texts(name, json.dumps(mine), group, device)
    by_value = zip(values, zip(*map(json.loads, texts), strict=True), strict=True)
    return [
        difference_of(
            [_compared_texts(found[0], text) for text in found]
            if isinstance(value, str)
            else found,
            group.members,
        )
        for value, found in by_value
    ]


def _from_first(name: str, tensor: Tensor, group: RankGroup) -> list[Any]:
    own = tensor.detach().contiguous().view(-1)
    first = own.clone()
    # As bytes: not every backend knows every dtype, and bits are what is compared.
    from_first(name, first.view(torch.uint8), group).wait()
    return compared(first, own, tensor.shape)


def compared(first: Tensor, own: Tensor, shape: Sequence[int]) -> list[Any]:
    """Return [number of elements that differ, largest difference, index, both values].

    Both tensors are flat, (n,); the index is of `shape`.
    """
    count, largest = 0, 0.0
    place: int | None = None
    for start in range(0, own.numel(), AT_ONCE):
        theirs, ours = first[start : start + AT_ONCE], own[start : start + AT_ONCE]
        bits = [part.view(torch.uint8).view(part.numel(), -1) for part in (theirs, ours)]
        places = (bits[0] != bits[1]).any(1).nonzero().flatten()
        if places.numel():
            count += places.numel()
            largest = max(largest, _distance(theirs[places], ours[places]))
            place = start + int(places[0]) if place is None else place
    if place is None:
        return [0, 0.0, [], None, None]
    return [count, largest, _index(place, shape), _value(first[place]), _value(own[place])]


def _index(place: int, shape: Sequence[int]) -> list[int]:
    index = []
    for size in reversed(shape):
        place, within = divmod(place, size)
        index.append(within)
    return index[::-1]


def _distance(left: Tensor, right: Tensor) -> float:
    """Return the largest difference; 0 between two NaNs, inf between a NaN and a number."""
    wide = torch.complex128 if left.is_complex() else torch.float64
    left, right = left.to(wide), right.to(wide)
    distance = (left - right).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(distance.masked_fill_(left.isnan() & right.isnan(), 0.0).max())


def _value(element: Tensor) -> Value:
    value = element.double().item() if element.is_floating_point() else element.item()
    return str(value) if isinstance(value, complex) else value


def difference_of(found: Sequence[Any], members: Sequence[int]) -> Difference | None:
    """Return the difference from the results of `compared` on each rank; None if none."""
    places = [place for place, (count, *_) in enumerate(found) if count]
    if not places:
        return None
    _, _, index, first, other = found[places[0]]
    return Difference(
        ranks=tuple(members[place] for place in places),
        max_abs_diff=max(found[place][1] for place in places),
        count=max(found[place][0] for place in places),
        index=tuple(index),
        first=first,
        other=other,
    )


def _compared_texts(one: str, two: str) -> list[Any]:
    """Compare lines as `compared` does; the index of a text of one line is empty."""
    pairs = list(zip_longest(one.split("\n"), two.split("\n"), fillvalue=""))
    lines = [number for number, (first, other) in enumerate(pairs) if first != other]
    if not lines:
        return [0, 0.0, [], None, None]
    first, other = (_number(line) for line in pairs[lines[0]])
    distance = float("inf")
    if not isinstance(first, str) and not isinstance(other, str):
        distance = _distance(*torch.tensor([[first], [other]], dtype=torch.float64))
    return [len(lines), distance, lines[:1] if len(pairs) > 1 else [], first, other]


def _number(text: str) -> Value:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
