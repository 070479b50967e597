"""The basin of polynomials: how far rounding may move a singular value without harm.

An orthogonalization applies odd quintics p_k(s) = a s + b s^3 + c s^5 one after another, so the
fate of a block is that of its singular values. Two numbers per step, both exact (the quintics
have their extrema where a quadratic in s^2 is zero):

- `largest[k]`: the largest singular value that k exact steps can give, from [0, 1 / norm factor];
- `edge[k]`: how far up all singular values may lie before step k, such that the remaining exact
  steps end at most `TOLERANCE` above `largest[-1]`. Just beyond it the quintics grow without end:
  of five steps of Polar Express, 2.01 after step 2 ends in bounds, and 2.02 at 48.

What lies between them is the margin that rounding has. Its size is a model, stated here and
measured by `python -m benchmarks.survival`; u is the unit roundoff of the compute dtype.

1. A segment ends with X <- Q X. Rounding Q (entry by entry) moves X by |dQ| |X|, where |Q| is at
   most the product of the largest |p_k(s) / s|: 33 for two steps of Polar Express. At worst
   |dQ| = u sqrt(m) |Q|; random signs give SIZE u |Q|. Rounding the new X adds SIZE u |X|.
2. Rounding a Gram matrix moves its eigenvalues by up to u |A|, in every direction. Where X has the
   small singular value s, the polynomial is then that of s^2 + e: taken here as it is,
   max s |q(s^2 + e)|, also for negative eigenvalues. At worst |e| = u |A|, which blocks of a few
   rows reach; in a block of many rows the errors of the entries average out. Inside a segment
   noise grows by a_k^2 at each step: `growth`.

Errors of different roundings are added as squares. That is their usual size, not a worst case:
so a segment of several steps must keep `SAFETY` times its noise inside the margin. A step alone
is what there is when nothing longer will do, and must keep its noise inside the margin once.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
Coefficients = tuple[float, float, float]
Table = tuple[Coefficients, ...]

TOLERANCE = 0.15  # a result may lie this far above the largest of the exact polynomials
SAFETY = 2.0  # how often the noise of several steps must fit the margin
FEW_ROWS = 64  # up to here the roundings of a Gram matrix may all pull the same way
# Of u |M|: the spectral norm of M's random rounding errors. Relative to u an entry errs by
# 1 / sqrt(3), times 0.72 for the average digit; the norm of such a matrix is twice that of a row.
SIZE = 2 * 0.72 / math.sqrt(3)
# In a block of more than FEW_ROWS rows, none of which holds over 4 / m of its square sum.
SIZE_IN_MANY_ROWS = SIZE * math.sqrt(4 / FEW_ROWS)
# Noise of a Gram matrix may grow this much within a segment: small singular values keep all but
# three digits of their dtype. 16 bits are stopped earlier, by the margins.
GROWTH = 1000.0
LARGEST_RESULT = 2.5  # one step of Polar Express ends at 1.99
FAR = 1e6  # an edge this far away is none
POINTS = 700  # of the scan for the worst place of a Gram matrix's noise

# Sums run in 32 bits where products are 16 bits wide. Of wide dtypes the sums round as well:
# 16 times the rounding of one operation covers rows of thousands.
ROUNDOFF = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float32: 2.0**-20,
    torch.float64: 2.0**-49,
}


class Basin(NamedTuple):
    """The basin of a table of K steps; each field has K + 1 numbers, the first before any step."""

    largest: tuple[float, ...]
    edge: tuple[float, ...]

    @property
    def margin(self) -> tuple[float, ...]:
        """Return the room for rounding above the largest singular value, per number of steps."""
        return tuple(e - s for e, s in zip(self.edge, self.largest, strict=True))


class RoundingNoise(NamedTuple):
    """The error of rounding in a segment of steps, in three parts."""

    factor: float  # of the polynomial that is applied
    gram: float  # of Gram matrices
    block: float  # of the result

    @property
    def total(self) -> float:
        """Return the root of the sum of squares of the parts, which are independent."""
        return math.hypot(*self)


@lru_cache(maxsize=256)
def basin_of(table: Table, norm_factor: float = 1.0) -> Basin:
    """Return the largest singular values of exact steps, and the edges beyond which they escape."""
    largest = [1 / norm_factor]
    for triple in table:
        largest.append(_largest(triple, largest[-1]))
    edge = [largest[-1] + TOLERANCE]
    for triple in reversed(table):
        edge.append(_first_beyond(triple, edge[-1]))
    return Basin(tuple(largest), tuple(reversed(edge)))


def noise_of(
    table: Table, start: int, stop: int, dtype: torch.dtype, *, few_rows: bool, largest: float
) -> RoundingNoise:
    """Return the rounding error of steps start .. stop - 1 on one Gram matrix.

    Singular values before the first of these steps are at most `largest`.
    """
    return _noise(table[start:stop], ROUNDOFF[dtype], few_rows, largest)


def growth(table: Table, start: int, stop: int, largest: float) -> float:
    """Return by how much noise of a Gram matrix grows where the block has no singular value.

    The factor is |A| times a_k^2 for all steps but the last, whose Gram matrix is not computed.
    """
    return math.prod((a * a for a, _, _ in table[start : stop - 1]), start=largest * largest)


def constant_for_compilers(function: F) -> F:
    """Mark a function as one that compilers run once, taking its result for a constant.

    `torch.compiler.assume_constant_result` does the same, but imports all of torch._dynamo, which
    takes as long as importing torch itself, and most users never compile.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_for_compilers
def gram_segments(
    table: Sequence[Coefficients], dtype: torch.dtype, rows: int
) -> tuple[tuple[int, int], ...]:
    """Return the ranges of steps that share one Gram matrix: the fewest that the margins allow.

    `rows` counts the short side: all that matters is whether it is above `FEW_ROWS`. Among equally
    many segments, those whose largest share of a margin is smallest are taken. Norm factors make a
    margin wider or leave it, so that they need not be known.
    """
    return _segments(as_table(table), dtype, rows <= FEW_ROWS)


def as_table(table: Sequence[Coefficients]) -> Table:
    """Return a table of coefficients as tuples of floats, which caches can hash."""
    return tuple((float(a), float(b), float(c)) for a, b, c in table)


@lru_cache(maxsize=1024)
def _segments(table: Table, dtype: torch.dtype, few_rows: bool) -> tuple[tuple[int, int], ...]:
    largest, margin = basin_of(table).largest, basin_of(table).margin
    # For each number of steps: (segments, largest share of a margin, where the segments end).
    best: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]
    for stop in range(1, len(table) + 1):
        found = []
        for start in range(stop - 1, -1, -1):
            alone = stop == start + 1
            if not alone and growth(table, start, stop, largest[start]) > GROWTH:
                break
            noise = noise_of(table, start, stop, dtype, few_rows=few_rows, largest=largest[start])
            share = (1.0 if alone else SAFETY) * noise.total / margin[stop]
            if alone or share <= 1:
                count, worst, ends = best[start]
                found.append((count + 1, max(worst, share), (*ends, stop)))
        best.append(min(found))
    ends = best[-1][2]
    return tuple(zip((0, *ends[:-1]), ends, strict=True))


@lru_cache(maxsize=256)
def unsafe_step(table: Table, norm_factor: float, dtype: torch.dtype) -> str | None:
    """Return the reason why a table cannot run in a dtype even with every step alone, or None."""
    basin, u = basin_of(table, norm_factor), ROUNDOFF[dtype]
    final = basin.largest[-1]
    if not final <= LARGEST_RESULT:
        step = next(k for k, s in enumerate(basin.largest) if not s <= LARGEST_RESULT)
        return (
            f"its exact polynomials bring singular values to {basin.largest[step]:.4g} at step "
            f"{step} and to {final:.4g} at the end, where {LARGEST_RESULT} is the most that is "
            "still orthogonalization"
        )
    for step, (largest, edge) in enumerate(zip(basin.largest, basin.edge, strict=True)):
        if step:
            noise = _noise(table[step - 1 : step], u, True, basin.largest[step - 1]).total
        else:
            noise = u * largest
        if not largest + noise <= edge:
            return (
                f"after step {step} the largest singular value is {largest:.4f}, rounding adds up "
                f"to {noise:.2g}, and above {edge:.4f} the steps that follow end more than "
                f"{TOLERANCE} over the {final:.4f} of exact arithmetic"
            )
    return None


def _value(triple: Coefficients, s: float) -> float:
    a, b, c = triple
    square = s * s
    return abs(s * (a + square * (b + square * c)))


def _extrema(triple: Coefficients) -> list[float]:
    """Return the turning points of the quintic for s > 0: a + 3 b x + 5 c x^2 = 0 with x = s^2."""
    a, b, c = triple
    if c == 0:
        squares = [] if b == 0 else [-a / (3 * b)]
    else:
        inner = 9 * b * b - 20 * a * c
        squares = [] if inner < 0 else [(-3 * b + r * math.sqrt(inner)) / (10 * c) for r in (1, -1)]
    return sorted(math.sqrt(x) for x in squares if x > 0)


def _largest(triple: Coefficients, limit: float) -> float:
    """Return the largest |p(s)| on [0, limit]."""
    return max(_value(triple, s) for s in (limit, *(s for s in _extrema(triple) if s < limit)))


def _first_beyond(triple: Coefficients, limit: float) -> float:
    """Return the first s > 0 from which |p(s)| is above the limit, by bisection; at most `FAR`."""
    low = 0.0
    for high in (*_extrema(triple), FAR):
        if _value(triple, high) > limit:
            for _ in range(100):
                middle = (low + high) / 2
                low, high = (low, middle) if _value(triple, middle) > limit else (middle, high)
            return low
        low = high
    return FAR


def _largest_factor(triple: Coefficients, limit: float) -> float:
    """Return the largest |p(s) / s|, a + b x + c x^2, on [0, limit]: at an end or at its vertex."""
    a, b, c = triple
    places = [0.0, limit * limit]
    if c and 0 < -b / (2 * c) < places[1]:
        places.append(-b / (2 * c))
    return max(abs(a + x * (b + x * c)) for x in places)


@lru_cache(maxsize=4096)
def _noise(steps: Table, u: float, few_rows: bool, largest: float) -> RoundingNoise:
    values = [largest]
    for triple in steps:
        values.append(_largest(triple, values[-1]))
    factors = [_largest_factor(t, s) for t, s in zip(steps, values, strict=False)]
    size = SIZE if few_rows else SIZE_IN_MANY_ROWS
    gram = []
    for k in range(len(steps)):
        error = values[k] * values[k]
        if k:  # P A P is rounded twice: after P A, which is then multiplied with P again
            error = math.hypot(error, factors[k - 1] * values[k - 1] * values[k])
        gram.append(_lift(steps[k:], values[k], size * u * error))
    return RoundingNoise(
        factor=SIZE * u * math.prod(factors) * largest * math.sqrt(max(1, len(steps) - 1)),
        gram=math.hypot(*gram),
        block=SIZE * u * values[-1],
    )


def _lift(steps: Table, largest: float, error: float) -> float:
    """Return how far s |q(x)|, s up to `largest`, rises if x is s^2 - error or s^2 + error."""
    exact = lifted = 0.0
    for place in range(POINTS):
        s = largest * 10 ** (-4 * place / POINTS)
        exact = max(exact, _result(steps, s, s * s))
        for x in (s * s - error, s * s + error):
            value = _result(steps, s, x)
            lifted = lifted if value <= lifted else value  # NaN stays
    return lifted - exact if not lifted <= exact else 0.0


def _result(steps: Table, s: float, x: float) -> float:
    """Return |s q(x)| of a singular value s for which the Gram matrix has the eigenvalue x."""
    for a, b, c in steps:
        factor = a + x * (b + x * c)
        s *= factor
        x *= factor * factor
    return abs(s)
