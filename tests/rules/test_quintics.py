"""The tables of Polar Express are what `tests/rules/quintics.py` finds, and that is best."""

from __future__ import annotations

import math

import numpy as np
import pytest

from samestep.rules.orthogonalize import POLYNOMIALS
from tests.rules.quintics import as_good_as_five, best_quintic, composition, value

# method -> (steps, where the interval starts)
MADE = {
    "polar-express": (5, 1e-3),
    "polar-express-4": (4, 4.095e-3),
    "polar-express-3": (3, 1.6764e-2),
}


@pytest.mark.parametrize("method", MADE)
def test_tables_are_those_of_the_generator(method):
    """That of the five steps is the published one."""
    steps, start = MADE[method]
    table, least = as_good_as_five(steps)
    assert least == pytest.approx(start, rel=1e-4)
    assert len(table) == steps
    for made, ours in zip(table, POLYNOMIALS[method].coefficients, strict=True):
        assert made == pytest.approx(ours, rel=1e-12)
    assert POLYNOMIALS[method].norm_factor == 1.01


@pytest.mark.parametrize("method", MADE)
def test_all_end_as_near_1_as_the_five(method):
    _, start = MADE[method]
    s = np.geomspace(start, 1, 300_001)
    for a, b, c in POLYNOMIALS[method].coefficients:
        s = s * (a + s**2 * (b + s**2 * c))
    assert s.min() == pytest.approx(0.858873, abs=2e-5)
    assert s.max() == pytest.approx(1.141127, abs=2e-6)


@pytest.mark.parametrize(("low", "high"), [(1e-3, 1.0), (0.02, 1.0), (0.3, 1.7), (0.86, 1.14)])
def test_a_quintic_is_best(low, high):
    """Errors of one size at four places, with changing signs: nothing else errs less."""
    triple = best_quintic(low, high)
    places = np.geomspace(low, high, 200_001)
    errors = np.array([1 - value(triple, s) for s in places])
    worst = np.abs(errors).max()
    turns = np.array([errors[0], errors[1:-1].min(), errors[1:-1].max(), errors[-1]])
    assert turns == pytest.approx(worst * np.array([1, -1, 1, -1]), rel=1e-6)
    # Any other with three numbers, such as one that errs less at the lower end, errs more.
    for change in np.random.default_rng(0).standard_normal((50, 3)) * 1e-3:
        other = tuple(number * (1 + part) for number, part in zip(triple, change, strict=True))
        assert max(abs(1 - value(other, s)) for s in places[::500]) > worst * (1 - 1e-4)


def test_safety_lets_values_that_rounding_has_lifted_stay():
    """2e-2 above its interval, a value is still in the interval of every later quintic."""
    table, error = composition(1e-3, 5)
    lifted = 1.02
    for triple in table[:-1]:
        lifted = max(value(triple, s) for s in np.linspace(0, lifted, 20_001)) * 1.005
        assert math.isfinite(lifted)
    assert value(table[-1], lifted) < 1 + error + 0.15
