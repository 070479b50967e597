"""What the kernels of `samestep.kernels.orthogonalize` compute, on any device, in plain torch.

Products are float32 here and are rounded where the kernels round, to the dtype they round to, so
that a CPU shows the errors of a GPU. Sums run in another order, which is little beside 16 bits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.rules.basin import Coefficients, gram_segments
from samestep.rules.orthogonalize import Execution

Segments = Sequence[tuple[int, int]]


class Arithmetic(NamedTuple):
    """Which dtypes a version of the kernels rounds to; m x m matrices are float16 in each."""

    before: torch.dtype | None = None  # blocks first of all
    blocks: torch.dtype = torch.float16  # blocks, and the polynomial they are multiplied with


FLOAT16 = Arithmetic()
BFLOAT16 = Arithmetic(before=torch.bfloat16)
# What the kernels did at first: blocks and the last polynomial in bfloat16. Singular values escape.
OLD = Arithmetic(blocks=torch.bfloat16)
OLD_SEGMENTS = ((0, 2), (2, 5))


def emulated(
    blocks: Tensor,  # (B, rows, cols)
    table: Sequence[Coefficients],
    execution: Execution,
    *,
    norm_factor: float,
    arithmetic: Arithmetic = FLOAT16,
    segments: Segments | None = None,
) -> Tensor:
    """`orthogonalize_blocks` with eps = 0, in float32."""
    X = blocks.float() if blocks.dtype.itemsize == 2 else blocks
    if arithmetic.before is not None:
        X = X.to(arithmetic.before).float()
    X = X.mT if X.shape[1] > X.shape[2] else X
    norms = torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True, dtype=torch.float64)
    scales = (norms * norm_factor).clamp_min(torch.finfo(torch.float32).tiny).reciprocal()
    if arithmetic.blocks == torch.float16:
        exponents = torch.frexp(norms.clamp(2.0**-100, 2.0**100)).exponent
        powers = torch.ldexp(torch.ones_like(norms), 4 - exponents)
        scales, X = (scales / powers).clamp_max(1.0), X * powers.to(X.dtype)
    else:
        scales = scales.clamp_max(1e18)
    X = X.to(arithmetic.blocks).float()
    if segments is None:
        alone = [(step, step + 1) for step in range(len(table))]
        in_gram = execution == "gram"
        segments = (
            gram_segments(table, torch.float16, -(-X.shape[1] // 8) * 8) if in_gram else alone
        )
    for start, stop in segments:
        own = scales.float() if start == 0 else None
        X = (_polynomial(X, table[start:stop], own, arithmetic.blocks) @ X).to(arithmetic.blocks)
        X = X.float()
    return X.mT if blocks.shape[1] > blocks.shape[2] else X


def _polynomial(
    X: Tensor, table: Sequence[Coefficients], scales: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Q with X_k = Q X_0, times the scales, rounded to `dtype`. (B, m, n) -> (B, m, m)."""
    identity = torch.eye(X.shape[1], device=X.device)
    A = _symmetric(X, X)
    A = A if scales is None else A * (scales * scales)
    A = (
        (A + (_shift(table[0]) if len(table) == 1 and scales is None else 0.0) * identity)
        .half()
        .float()
    )
    Q: Tensor | None = None
    for number, (a, b, c) in enumerate(table):
        last = number + 1 == len(table)
        shift = _shift((a, b, c)) if last and not (Q is None and scales is not None) else 0.0
        P = c * _symmetric(A, A) + (a - c * shift * shift) * identity
        P = P if shift else P + b * A
        if Q is None and last:
            return (P if scales is None else P * scales).to(dtype).float()
        exact = P
        P = P.half().float()
        if Q is None:
            Q = P
        else:
            Q = _symmetric(P, Q)
            if last:
                return (Q if scales is None else Q * scales).to(dtype).float()
            Q = Q.half().float()
        next_is_last = number + 2 == len(table)
        PA = _mirrored(P, A, P - exact) if next_is_last else P @ A
        shift = _shift(table[number + 1]) if next_is_last else 0.0
        A = (_symmetric(PA.half().float(), P) + shift * identity).half().float()
    raise AssertionError("a polynomial has at least one step")


def _symmetric(left: Tensor, right: Tensor) -> Tensor:
    """One triangle of the product, mirrored."""
    lower = torch.tril(left @ right.mT)
    return lower + torch.tril(lower, -1).mT


def _mirrored(P: Tensor, A: Tensor, rounding: Tensor) -> Tensor:
    """One triangle of P A; the other is its mirror image but for what P's diagonal differs by."""
    lower, d = torch.tril(P @ A), rounding.diagonal(dim1=-2, dim2=-1)
    return lower + torch.tril(lower + A * (d[:, None, :] - d[:, :, None]), -1).mT


def _shift(triple: Coefficients) -> float:
    _, b, c = triple
    return b / (2 * c) if c and abs(b) <= 8 * abs(c) else 0.0
