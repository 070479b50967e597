"""How far ours is ahead of the best peer, shape by shape."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from samestep.bench.orthogonalize.measure import Result, Shape

EVERY_SHAPE = 1.0
MEAN = 1.2


class Lead(NamedTuple):
    """On one shape."""

    shape: Shape
    best_peer: str
    ratio: float  # milliseconds of the best peer / ours


def lead(shape: Shape, results: Sequence[Result]) -> Lead | None:
    """Ours as shipped against the best peer; None if one of them is missing."""
    ours = next((r.ms for r in results if r.contestant.name == "ours"), None)
    peers = [(r.ms, r.contestant.name) for r in results if r.ms and not r.contestant.ours]
    if not ours or not peers:
        return None
    ms, name = min(peers)
    return Lead(shape, name, ms / ours)


def geometric_mean(leads: Sequence[Lead]) -> float | None:
    """Of the ratios."""
    if not leads:
        return None
    return math.exp(sum(math.log(each.ratio) for each in leads) / len(leads))


def lines(leads: Sequence[Lead], shapes: int) -> list[str]:
    """Both bars in words."""
    mean = geometric_mean(leads)
    if mean is None or len(leads) < shapes:
        return [f"not measured  the lead on {shapes - len(leads)} of {shapes} shapes"]
    least = min(leads, key=lambda each: each.ratio)
    where = "x".join(map(str, least.shape))
    return [
        f"{_state(least.ratio >= EVERY_SHAPE):12} at least as fast as the best peer on every "
        f"shape: least {least.ratio:.2f} x {least.best_peer} on {where}",
        f"{_state(mean >= MEAN):12} geometric mean: {mean:.2f}, bar >= {MEAN:g}",
    ]


def _state(met: bool) -> str:
    return "met" if met else "NOT MET"
