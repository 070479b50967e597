"""Odd quintics that bring singular values to 1 in few steps, best in the largest error.

Tables of `samestep.rules.orthogonalize` for fewer steps than five are made here. The best
composition of quintics on [least, 1] is that of the best quintic for each interval in turn (Amsel
et al. 2025, arXiv 2505.16932): each is found by Remez exchange, and the interval it gives is the
next one's.

Two changes are made for rounding, as in that paper. A quintic whose interval would start below
`CUSHION` of its end is the best from there on, brought to a mean of 1 again: a steeper one would
press the largest values to 0. And all but the last take their values times 1 / (1 + SAFETY), so
that a value which rounding has lifted a little over the interval's end does not escape.
"""

import math

import numpy as np

Triple = tuple[float, float, float]

SAFETY, CUSHION = 2e-2, 2e-2
FIVE = 1e-3  # where the interval of the usual five steps starts


def value(triple: Triple, s: float) -> float:
    """a s + b s^3 + c s^5."""
    a, b, c = triple
    return s * (a + s * s * (b + s * s * c))


def best_quintic(low: float, high: float) -> Triple:
    """The one whose largest distance from 1 on [low, high] is least.

    It errs by the same amount, with changing signs, at both ends and at its two extrema: a linear
    system for given extrema, which are then those of its solution, until nothing changes.
    """
    if low / high > 1 - 5e-6:  # the limit of all these, where a system would be singular
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    inner = np.array([(3 * low + high) / 4, (low + 3 * high) / 4])
    error = math.inf
    for _ in range(100):
        places = np.array([low, *inner, high])
        system = np.stack([places, places**3, places**5, [1.0, -1.0, 1.0, -1.0]], axis=1)
        a, b, c, new_error = (float(number) for number in np.linalg.solve(system, np.ones(4)))
        if abs(new_error - error) <= 1e-15:
            break
        error = new_error
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner = np.sqrt((-3 * b + np.array([-root, root])) / (10 * c))
    return a, b, c


def composition(least: float, steps: int) -> tuple[list[Triple], float]:
    """Quintics for singular values in [least, 1], and how far from 1 the last may leave them."""
    low, high = least, 1.0
    table: list[Triple] = []
    for step in range(steps):
        a, b, c = best_quintic(max(low, CUSHION * high), high)
        if CUSHION * high > low:
            scale = 2 / (value((a, b, c), low) + value((a, b, c), high))
            a, b, c = a * scale, b * scale, c * scale
        if step + 1 < steps:
            room = 1 + SAFETY
            a, b, c = a / room, b / room**3, c / room**5
        table.append((a, b, c))
        low = value((a, b, c), low)
        high = 2 - low
    return table, 1 - low


def as_good_as_five(steps: int) -> tuple[list[Triple], float]:
    """The table of so many steps that ends as near 1 as the usual five, and its interval's start.

    Fewer steps reach less far down: the start is found by bisection.
    """
    _, wanted = composition(FIVE, 5)
    low, high = math.log(FIVE), math.log(0.5)
    for _ in range(200):
        middle = (low + high) / 2
        _, error = composition(math.exp(middle), steps)
        low, high = (middle, high) if error > wanted else (low, middle)
    least = math.exp(high)
    return composition(least, steps)[0], least
