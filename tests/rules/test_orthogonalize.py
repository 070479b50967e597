"""Orthogonalization against the singular value decomposition in float64.

The iteration only ever multiplies a matrix by polynomials of its own Gram matrix, so in exact
arithmetic it keeps the singular vectors and maps every singular value through a scalar
polynomial. That is what is checked: the whole result against ``U p(S) V^T``, its singular
values against ``p(s)``, and ``p`` itself against the band in which a recipe promises to land.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from samestep.rules.orthogonalize import orthogonalize
from tests.reference import (
    POLAR_EXPRESS,
    QUINTIC,
    coefficients_for,
    normalized_singular_values,
    polar_factor,
    polynomial_singular_values,
    reference_orthogonalize,
    to_numpy,
)

# method -> (table, factor on the Frobenius norm)
METHODS = {"polar-express": (POLAR_EXPRESS, 1.01), "newton-schulz": (QUINTIC, 1.0)}
EXECUTIONS = ["standard", "gram"]

# (method, steps) -> (smallest normalized singular value that is brought into the band,
#                     least and largest result from there to 1, largest result from 0 to 1).
# test_bands_are_those_of_the_polynomials recomputes them on a dense grid.
BANDS = {
    ("polar-express", 4): (1e-3, 0.416347, 1.575531, 1.575531),
    ("polar-express", 5): (1e-3, 0.858872, 1.141128, 1.141128),
    ("polar-express", 7): (1e-3, 0.964385, 1.087381, 1.141128),
    ("newton-schulz", 4): (1e-2, 0.681831, 1.202369, 1.202369),
    ("newton-schulz", 5): (1e-2, 0.681831, 1.134358, 1.202369),
    ("newton-schulz", 7): (1e-2, 0.681831, 1.134358, 1.202369),
}

# A rounding error near a singular value of zero is amplified by the slope of the whole
# polynomial there, the product of the leading coefficients (485 for five quintic steps, 978 for
# Polar Express, 5756 for seven quintic steps). Bounds are therefore stated in units of machine
# epsilon times that slope, separately for matrices of full rank and for those that have
# directions which are nothing but noise. The largest seen over six draws of every matrix is
# given beside each bound. In float64 the decomposition behind the reference errs as well.
ERROR_UNITS = {
    (torch.float32, "full rank"): 0.6,  # 0.22
    (torch.float32, "degenerate"): 3.0,  # 0.99
    (torch.float64, "full rank"): 0.75,  # 0.25
    (torch.float64, "degenerate"): 8.0,  # 2.8
}
AGREEMENT_UNITS = {  # Gram against standard, by the number of steps
    (4, "full rank"): 0.35,  # 0.13
    (5, "full rank"): 0.12,  # 0.04
    (7, "full rank"): 0.6,  # 0.22
    (4, "degenerate"): 0.9,  # 0.31
    (5, "degenerate"): 0.9,  # 0.31
    (7, "degenerate"): 3.0,  # 1.05
}
# 8 bits, amplified: only the size of the entries is still to be recognised. Absolute, seen over
# 30 draws: 0.10 (standard), 0.16 (Gram), and 0.15 for the textbook loop in bfloat16.
BFLOAT16_ERROR = {"standard": 0.15, "gram": 0.25}

SHAPES = [(16, 16), (40, 24), (10, 33), (1, 9), (9, 1), (1, 1)]
KINDS = ["random", "low-rank", "rank-1", "ill-conditioned", "tiny", "huge"]


def make_matrix(kind: str, shape: tuple[int, int], dtype: torch.dtype = torch.float32):
    """Draw a matrix of the given kind; the same arguments give the same matrix."""
    m, n = shape
    rng = np.random.default_rng([m, n, KINDS.index(kind)])
    k = min(m, n)
    M = rng.standard_normal((m, n))
    if kind == "low-rank":
        rank = max(1, k // 3)
        M = rng.standard_normal((m, rank)) @ rng.standard_normal((rank, n))
    elif kind == "rank-1":
        M = np.outer(rng.standard_normal(m), rng.standard_normal(n))
    elif kind == "ill-conditioned":
        U, _, Vt = np.linalg.svd(M, full_matrices=False)
        M = (U * np.logspace(0, -8, k)) @ Vt
    elif kind == "tiny":
        M *= 1e-30
    elif kind == "huge":
        M *= 1e30
    return torch.tensor(M, dtype=dtype)


def expected(M: torch.Tensor, method: str, steps: int = 5, **eps) -> np.ndarray:
    table, norm_factor = METHODS[method]
    return reference_orthogonalize(to_numpy(M), table, steps, norm_factor, **eps)


def noise_unit(method: str, steps: int, dtype: torch.dtype) -> float:
    slope = np.prod([a for a, _, _ in coefficients_for(METHODS[method][0], steps)])
    return float(torch.finfo(dtype).eps * slope)


def error_bound(method: str, steps: int, kind: str, dtype: torch.dtype = torch.float32) -> float:
    return ERROR_UNITS[dtype, rank_of(kind)] * noise_unit(method, steps, dtype)


def rank_of(kind: str) -> str:
    return "degenerate" if kind in ("low-rank", "rank-1", "ill-conditioned") else "full rank"


def max_error(actual: torch.Tensor, reference: np.ndarray) -> float:
    assert torch.isfinite(actual).all()
    return float(np.abs(to_numpy(actual) - reference).max())


@pytest.mark.parametrize(("method", "steps"), list(BANDS))
def test_bands_are_those_of_the_polynomials(method, steps):
    start, low, high, top = BANDS[method, steps]
    coefficients = coefficients_for(METHODS[method][0], steps)
    band = polynomial_singular_values(np.geomspace(start, 1, 300_001), coefficients)
    whole = polynomial_singular_values(np.geomspace(1e-9, 1, 300_001), coefficients)
    assert low <= band.min() < low + 2e-6
    assert high - 2e-6 < band.max() <= high
    assert whole.min() > 0
    assert top - 2e-6 < whole.max() <= top


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "steps"), list(BANDS))
def test_float32_is_the_polynomial_of_the_singular_values(method, steps, kind, execution):
    table, norm_factor = METHODS[method]
    start, low, high, top = BANDS[method, steps]
    bound = error_bound(method, steps, kind)
    slack = 2 * bound  # singular values move by the spectral norm of the error, not its entries
    for shape in SHAPES:
        M = make_matrix(kind, shape)
        X = orthogonalize(M, method=method, steps=steps, execution=execution)
        assert X.shape == M.shape
        assert X.dtype == M.dtype
        assert max_error(X, expected(M, method, steps)) < bound, shape

        s = normalized_singular_values(to_numpy(M), norm_factor)
        p = polynomial_singular_values(s, coefficients_for(table, steps))
        found = np.linalg.svd(to_numpy(X), compute_uv=False)
        assert np.abs(found - np.sort(p)[::-1]).max() < slack, shape

        # Those that start high enough land in the band, the others below its top.
        assert found.max() <= top + slack, shape
        in_band = int((s >= start).sum())
        assert in_band >= 1
        if in_band == s.size:
            assert low - slack <= found.min(), shape
            assert found.max() <= high + slack, shape


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "steps"), list(BANDS))
def test_float64_is_the_polynomial_of_the_singular_values(method, steps, kind, execution):
    bound = error_bound(method, steps, kind, torch.float64)
    for shape in SHAPES:
        M = make_matrix(kind, shape, torch.float64)
        X = orthogonalize(M, method=method, steps=steps, execution=execution)
        assert X.dtype == torch.float64
        assert max_error(X, expected(M, method, steps)) < bound, shape


@pytest.mark.parametrize("method", METHODS)
def test_default_execution_and_dtype(method):
    """Leaving out execution must be no less accurate than naming one."""
    for shape in [*SHAPES[:3], (24, 100)]:
        for kind in KINDS:
            M = make_matrix(kind, shape)
            X = orthogonalize(M, method=method)
            assert max_error(X, expected(M, method)) < error_bound(method, 5, kind)


@pytest.mark.parametrize("method", METHODS)
def test_compute_dtype_is_that_of_the_iteration(method):
    """A float32 matrix taken through float64 is right to the last bit of its own dtype."""
    M = make_matrix("ill-conditioned", (10, 33))
    X = orthogonalize(M, method=method, compute_dtype=torch.float64)
    assert X.dtype == torch.float32
    assert max_error(X, expected(M, method)) < 6e-8
    assert max_error(orthogonalize(M, method=method), expected(M, method)) > 6e-7


@pytest.mark.parametrize("method", METHODS)
def test_lands_within_the_band_of_the_polar_factor(method):
    """``||X - U V^T||_2`` is exactly the worst ``|p(s) - 1|``: a direct look at the goal."""
    start, low, high, _ = BANDS[method, 5]
    for shape in SHAPES:
        U, _, Vt = np.linalg.svd(to_numpy(make_matrix("random", shape)), full_matrices=False)
        M = (U * np.linspace(1, 0.2, len(Vt))) @ Vt
        assert normalized_singular_values(M, 1.01).min() > start
        X = to_numpy(orthogonalize(torch.from_numpy(M), method=method))
        assert np.linalg.norm(X - U @ Vt, 2) <= max(1 - low, high - 1) + 1e-12


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_converging_coefficients_reach_the_polar_factor(execution):
    """The classical triple (15, -10, 3) / 8 has its fixed point at 1, so it must arrive there."""
    M = make_matrix("random", (10, 33), torch.float64)
    X = orthogonalize(
        M,
        method="newton-schulz",
        steps=20,
        coefficients=[(15 / 8, -10 / 8, 3 / 8)],
        compute_dtype=torch.float64,
        execution=execution,
    )
    assert max_error(X, polar_factor(to_numpy(M))) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_cubic_coefficients(execution, dtype):
    """Without the square of the Gram matrix: torch's product has its own way for that."""
    M = torch.stack([make_matrix("random", (16, 24)), make_matrix("low-rank", (16, 24))])
    options = {"method": "newton-schulz", "steps": 1, "coefficients": (1.5, -0.5, 0.0)}
    found = orthogonalize(M, compute_dtype=dtype, execution=execution, **options)
    exact = orthogonalize(M.double(), compute_dtype=torch.float64, execution=execution, **options)
    assert (found - exact).norm() < 4 * torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("eps_form", ["clamp", "add"])
@pytest.mark.parametrize("method", METHODS)
def test_eps_is_added_to_or_clamps_the_norm(method, eps_form):
    """With a norm around eps the two forms, and leaving eps out, are far apart."""
    M = make_matrix("random", (10, 33), torch.float64)
    M /= torch.linalg.matrix_norm(M)
    results = {}
    for eps in (0.0, 0.5, 2.0):
        X = orthogonalize(M, method=method, eps=eps, eps_form=eps_form, compute_dtype=torch.float64)
        results[eps] = X
        assert max_error(X, expected(M, method, eps=eps, eps_form=eps_form)) < 1e-12
        other = "add" if eps_form == "clamp" else "clamp"
        if eps:
            assert max_error(X, expected(M, method, eps=eps, eps_form=other)) > 1e-3
    assert torch.equal(results[0.0], results[0.5]) == (eps_form == "clamp")
    zero = torch.zeros(4, 6, dtype=torch.float64)
    assert torch.equal(orthogonalize(zero, method=method, eps=1e-7, eps_form=eps_form), zero)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_scale_invariance_is_exact(method, execution):
    """Powers of two change no mantissa, so with eps = 0 they may change no bit of the result."""
    for shape in SHAPES:
        M = make_matrix("random", shape)
        X = orthogonalize(M, method=method, execution=execution)
        for exponent in (-100, -3, 1, 100):
            scaled = orthogonalize(M * 2.0**exponent, method=method, execution=execution)
            assert torch.equal(scaled, X), exponent
        # The sign is as exact: every term of the polynomial is odd.
        assert torch.equal(orthogonalize(-M, method=method, execution=execution), -X)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "steps"), list(BANDS))
def test_gram_and_standard_agree(method, steps, kind, dtype):
    bound = AGREEMENT_UNITS[steps, rank_of(kind)] * noise_unit(method, steps, dtype)
    for shape in [*SHAPES, (24, 100)]:
        M = make_matrix(kind, shape, dtype)
        standard, gram = (
            orthogonalize(M, method=method, steps=steps, execution=execution)
            for execution in EXECUTIONS
        )
        assert (standard - gram).abs().max().item() < bound, shape


@pytest.mark.parametrize("method", METHODS)
def test_gram_and_standard_are_two_computations(method):
    """Otherwise their agreement says nothing: they round differently."""
    M = make_matrix("random", (24, 100))
    standard, gram = (orthogonalize(M, method=method, execution=e) for e in EXECUTIONS)
    assert not torch.equal(standard, gram)


@pytest.mark.parametrize("shape", [(6, 12), (8, 8), (12, 6)], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_stays_near_the_polynomial(method, shape):
    M = make_matrix("random", shape)
    results = {
        execution: orthogonalize(
            M, method=method, compute_dtype=torch.bfloat16, execution=execution
        )
        for execution in EXECUTIONS
    }
    for execution, X in results.items():
        assert X.dtype == torch.float32
        assert max_error(X, expected(M, method)) < BFLOAT16_ERROR[execution]
    difference = (results["standard"] - results["gram"]).abs().max().item()
    assert difference < BFLOAT16_ERROR["gram"]


@pytest.mark.parametrize("execution", [None, *EXECUTIONS])
@pytest.mark.parametrize("method", METHODS)
def test_zero_gives_exact_zeros(method, execution):
    for shape in [*SHAPES, (3, 5, 7)]:
        X = orthogonalize(torch.zeros(shape), method=method, execution=execution)
        assert X.shape == shape
        assert torch.equal(X, torch.zeros(shape))


@pytest.mark.parametrize("execution", [None, *EXECUTIONS])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_batch_is_each_of_its_matrices_alone(method, execution, shape):
    batch = torch.stack([make_matrix(kind, shape) for kind in KINDS])
    together = orthogonalize(batch, method=method, execution=execution)
    assert together.shape == batch.shape
    for M, X in zip(batch, together, strict=True):
        assert torch.equal(X, orthogonalize(M, method=method, execution=execution))
        assert torch.equal(X, orthogonalize(M[None], method=method, execution=execution)[0])


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_zero_and_huge_matrices_share_a_batch(method, execution):
    shape = (10, 33)
    huge, tiny = make_matrix("huge", shape), make_matrix("tiny", shape)
    batch = torch.stack([torch.zeros(shape), huge, tiny])
    X = orthogonalize(batch, method=method, execution=execution)
    assert torch.equal(X[0], torch.zeros(shape))
    assert max_error(X[1], expected(huge, method)) < error_bound(method, 5, "huge")
    assert max_error(X[2], expected(tiny, method)) < error_bound(method, 5, "tiny")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_not_a_number_stays_in_its_block(method, execution, bad):
    batch = torch.stack([make_matrix("random", (10, 33)) for _ in range(3)])
    batch[2] *= 2
    clean = orthogonalize(batch, method=method, execution=execution)
    batch[1, 4, 5] = bad
    X = orthogonalize(batch, method=method, execution=execution)
    assert not torch.isfinite(X[1]).all(), "a broken block must not look sound"
    assert torch.equal(X[0], clean[0])
    assert torch.equal(X[2], clean[2])


@pytest.mark.parametrize("execution", [None, *EXECUTIONS])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_strides_do_not_matter(method, execution, shape):
    m, n = shape
    batch = torch.stack([make_matrix(kind, shape) for kind in ("random", "low-rank")])
    X = orthogonalize(batch, method=method, execution=execution)
    wide = torch.full((2, m, 2 * n + 1), torch.nan)
    wide[:, :, : 2 * n : 2] = batch
    views = {
        "column-major": batch.mT.contiguous().mT,
        "every other column": wide[:, :, : 2 * n : 2],
        "matrices interleaved": batch.movedim(0, 2).contiguous().movedim(2, 0),
    }
    for name, view in views.items():
        assert torch.equal(view, batch)
        assert torch.equal(orthogonalize(view, method=method, execution=execution), X), name


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_transpose_gives_the_transpose(method, execution, shape):
    M = make_matrix("random", shape)
    X = orthogonalize(M, method=method, execution=execution)
    Xt = orthogonalize(M.T.contiguous(), method=method, execution=execution)
    assert (X - Xt.T).abs().max().item() < error_bound(method, 5, "random")


@pytest.mark.parametrize("execution", [None, *EXECUTIONS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(6, 8), (8, 6), (2, 6, 8), (2, 8, 6)], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_the_input_is_not_modified(method, execution, dtype, shape):
    """Also where compute_dtype is the input's own: ``.to`` is then no copy."""
    M = make_matrix("random", (8, 12)).flatten()[: torch.Size(shape).numel()].view(shape).to(dtype)
    before = M.clone()
    X = orthogonalize(M, method=method, compute_dtype=dtype, execution=execution)
    assert torch.equal(M, before)
    assert X.data_ptr() != M.data_ptr()


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 7, 9])
@pytest.mark.parametrize("method", METHODS)
def test_the_number_of_steps_cuts_or_extends_the_table(method, steps, execution):
    """More steps than triples repeat the last triple: never silently fewer steps."""
    M = make_matrix("random", (10, 33), torch.float64)

    def run(k, **kwargs):
        return orthogonalize(
            M, method=method, steps=k, compute_dtype=torch.float64, execution=execution, **kwargs
        )

    X = run(steps)
    assert max_error(X, expected(M, method, steps)) < 1e-12
    assert max_error(X, expected(M, method, steps + 1)) > 1e-4
    assert max_error(X, expected(M, method, steps - 1)) > 1e-4
    # Spelling the table out is the same thing, to the bit.
    spelled = coefficients_for(METHODS[method][0], steps)
    assert torch.equal(X, run(steps, coefficients=spelled))


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_as_many_triples_as_are_given_are_run(execution):
    table = [(3.0, -3.5, 1.4), (2.5, -2.2, 0.7), (1.9, -1.3, 0.4)]
    M = make_matrix("random", (40, 24), torch.float64)
    options = {"method": "newton-schulz", "execution": execution}
    for given, steps, run in ((table, None, 3), (table, 3, 3), (table, 5, 5), (table[0], None, 5)):
        X = orthogonalize(M, steps=steps, coefficients=given, **options)
        triples = given if given is table else [given]
        assert max_error(X, reference_orthogonalize(to_numpy(M), triples, run)) < 1e-12
    with pytest.raises(ValueError, match=r"ns_steps is 2, but ns_coefficients has 3 triples.*None"):
        orthogonalize(M, steps=2, coefficients=table, **options)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_finite_entries_whose_norm_overflows(method, execution):
    """Every entry is finite, but the norm is beyond the dtype: counts as overflow, zero, no NaN."""
    M = make_matrix("random", (10, 33))
    huge = M * 2.0**126
    assert torch.isfinite(huge).all()
    assert torch.isinf(torch.linalg.matrix_norm(huge))
    X = orthogonalize(huge, method=method, execution=execution)
    assert torch.equal(X, torch.zeros_like(X))
    largest = M * 2.0**120  # the norm still fits: as orthogonal as any
    assert torch.equal(
        orthogonalize(largest, method=method, execution=execution),
        orthogonalize(M, method=method, execution=execution),
    )


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_subnormal_entries_give_finite_results(method, execution):
    """Hardware may flush these to zero; what comes out is finite and bounded all the same."""
    for scale in (2.0**-126, 2.0**-135, 2.0**-149):
        X = orthogonalize(
            make_matrix("random", (10, 33)) * scale, method=method, execution=execution
        )
        assert torch.isfinite(X).all()
        assert torch.linalg.matrix_norm(X, 2).item() < 1.3
