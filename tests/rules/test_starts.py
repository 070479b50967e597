"""What comes before the first step (`ns_start`): bounds and polar factors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import samestep
from benchmarks.hard_blocks import KINDS, blocks_of
from benchmarks.survival import judge
from samestep.rules import muon
from samestep.rules.orthogonalize import (
    POLYNOMIALS,
    gram_scales,
    orthogonalize,
    scale_to_unit_norm,
    step_coefficients,
)

CPU = torch.device("cpu")
STARTS = ["gram", "aol"]
SHAPES = [(3, 6), (8, 8), (64, 64), (30, 12)]
FIVE = step_coefficients("polar-express")


def started(X: torch.Tensor, start: str) -> torch.Tensor:
    X = X if X.shape[1] <= X.shape[2] else X.mT
    return X * gram_scales(X @ X.mT, start)


def largest(X: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_norm(X.double(), 2)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_singular_value_is_above_the_norm_that_was_asked_for(kind, start):
    for seed, shape in enumerate(SHAPES):
        blocks = blocks_of(kind, shape, 40, seed, FIVE, CPU)
        for factor, eps in ((1.0, 0.0), (1.01, 0.0), (1.0, 1e-3)):
            X = scale_to_unit_norm(blocks, factor, eps, "clamp")
            norms = torch.linalg.matrix_norm(X.double())
            after = largest(started(X, start))
            assert (after <= norms * (1 + 1e-6)).all(), (shape, factor, eps)


@pytest.mark.parametrize("kind", KINDS)
def test_gram_never_leaves_less_than_the_norm(kind):
    for seed, shape in enumerate(SHAPES):
        blocks = blocks_of(kind, shape, 40, seed, FIVE, CPU, scaled=False).double()
        X = scale_to_unit_norm(blocks, 1.0, 0.0, "clamp")
        assert (largest(started(X, "gram")) >= largest(X) * (1 - 1e-9)).all()


def test_what_square_gaussian_blocks_gain():
    """About m^(1/4), as the page says."""
    for m in (64, 256):
        drawn = torch.randn(4, m, m, generator=torch.Generator().manual_seed(m))
        X = scale_to_unit_norm(drawn, 1.0, 0.0, "clamp")
        gains = largest(started(X, "gram")) / largest(X)
        assert gains == pytest.approx(np.full(4, m**0.25), rel=0.13)


@pytest.mark.parametrize("execution", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(10, 33), (24, 24), (40, 16)])
def test_gram_is_the_polynomial_of_other_singular_values(shape, execution):
    M = np.random.default_rng(0).standard_normal(shape) * 1e-5
    U, s, Vt = np.linalg.svd(M, full_matrices=False)
    A = M @ M.T if shape[0] <= shape[1] else M.T @ M
    s = s / 1.01 / np.sqrt(min(np.abs(A).sum(axis=1).max(), np.linalg.norm(A)))
    for a, b, c in FIVE:
        s = s * (a + s**2 * (b + s**2 * c))
    found = orthogonalize(torch.from_numpy(M), start="gram", execution=execution)
    assert np.abs(found.numpy() - (U * s) @ Vt).max() < 1e-10


@pytest.mark.parametrize("execution", ["standard", "gram"])
def test_aol_scales_each_row_by_its_own_sum(execution):
    M = np.random.default_rng(1).standard_normal((12, 20)) * np.logspace(0, -3, 12)[:, None]
    X = M / np.sqrt(np.abs(M @ M.T).sum(axis=1, keepdims=True)) / 1.01
    U, s, Vt = np.linalg.svd(X, full_matrices=False)
    for a, b, c in FIVE:
        s = s * (a + s**2 * (b + s**2 * c))
    found = orthogonalize(torch.from_numpy(M), start="aol", execution=execution)
    assert np.abs(found.numpy() - (U * s) @ Vt).max() < 1e-10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("execution", ["standard", "gram"])
@pytest.mark.parametrize("start", STARTS)
def test_results_stay_in_bounds(start, execution, dtype):
    for number, method in enumerate(("polar-express", "polar-express-4", "polar-express-3")):
        table = step_coefficients(method)
        for seed, kind in enumerate(KINDS):
            shape = SHAPES[:2][(seed + number) % 2]
            blocks = blocks_of(kind, shape, 30, seed, table, CPU)
            blocks[3] = 0
            blocks[5, 1] = 0
            found = orthogonalize(
                blocks, method=method, start=start, execution=execution, compute_dtype=dtype
            )
            assert torch.equal(found[3], torch.zeros(shape))
            assert not found[5, 1].any()
            failures, value, place = judge(found, table, POLYNOMIALS[method].norm_factor)
            assert failures == 0, (method, kind, value, place)


def test_blocks_keep_their_scale_and_their_company_out_of_it():
    blocks = torch.randn(3, 6, 10)
    for start in STARTS:
        X = orthogonalize(blocks, start=start)
        for factor in (2.0**-60, 2.0**60):
            assert torch.equal(orthogonalize(blocks * factor, start=start), X)
        assert torch.equal(orthogonalize(blocks[1], start=start), X[1])
    bad = blocks.clone()
    bad[1, 2, 3] = torch.nan
    found = orthogonalize(bad, start="gram")
    assert not torch.isfinite(found[1]).all()
    assert torch.equal(found[::2], orthogonalize(blocks, start="gram")[::2])


def test_on_a_gpu_a_start_of_32_bits_does_not_share_a_product():
    """cuBLAS chooses how to multiply those by how many blocks there are."""
    on_gpu = SimpleNamespace(is_cuda=True)
    options = {**muon.MuonRule.defaults, "compute_dtype": torch.float16}
    assert not muon._depends_on_company(on_gpu, options)
    for start in STARTS:
        assert muon._depends_on_company(on_gpu, {**options, "ns_start": start})


def test_kernels_are_not_asked_for_a_start(monkeypatch):
    blocks = torch.randn(2, 6, 10)
    wanted = {start: orthogonalize(blocks, start=start) for start in STARTS}
    monkeypatch.setattr("samestep.rules.orthogonalize.kernels_run", lambda *given: True)
    for start in STARTS:
        found = orthogonalize(blocks, start=start)
        assert torch.equal(found, wanted[start])


def test_the_option_reaches_the_step():
    moved = {}
    for start in ("norm", *STARTS):
        param = nn.Parameter(torch.zeros(16, 16))
        param.grad = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
        samestep.Muon([param], lr=1.0, adjust_lr=None, momentum=0.0, ns_start=start).step()
        moved[start] = -param.detach()
        wanted = orthogonalize(param.grad, start=start, eps=1e-7)
        assert (moved[start] - wanted).abs().max() < 1e-4
    assert (moved["gram"] - moved["norm"]).abs().max() > 1e-2
    assert (moved["gram"] - moved["aol"]).abs().max() > 1e-3
