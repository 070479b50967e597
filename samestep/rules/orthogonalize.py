"""Orthogonalization of blocks by a matrix polynomial, and what it costs.

Each step applies  X <- a X + b (X X^T) X + c (X X^T)^2 X  to the wide orientation of a
block scaled to Frobenius norm <= 1, so a singular value s becomes a s + b s^3 + c s^5.
After a few steps every singular value is near 1 and X is near the polar factor U V^T.

Two executions of the same polynomial:

- standard: three products per step, two of them with the m x n block;
- gram: iterate on the m x m Gram matrix A = X X^T and collect the polynomial Q with
  X_k = Q X_0, so that only the first and last products see the long side n.
  Small eigenvalues of A lose relative precision, so Q is applied and A computed
  afresh once, after step 2, when the smallest have grown enough.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from samestep.kernels.choice import missing_products

Coefficients = tuple[float, float, float]
Execution = Literal["standard", "gram"]
EpsForm = Literal["clamp", "add"]
CoefficientsLike = Coefficients | Sequence[Coefficients]  # for every step, or one per step


class Polynomial(NamedTuple):
    """A named table: one (a, b, c) per step, and the factor on the norm before the first."""

    coefficients: tuple[Coefficients, ...]
    norm_factor: float


POLYNOMIALS: dict[str, Polynomial] = {
    # Keller Jordan, kellerjordan.github.io/posts/muon: steep at 0, never settles at 1.
    "newton-schulz": Polynomial(((3.4445, -4.7750, 2.0315),), norm_factor=1.0),
    # Amsel et al. 2025, arXiv 2505.16932: the minimax sequence for singular values in
    # [1e-3, 1], 5 steps, safety factor 2e-2, cushion 2. The norm factor keeps the largest
    # singular value below 1 after rounding to 16 bits.
    "polar-express": Polynomial(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        norm_factor=1.01,
    ),
}

GRAM_RESTART = 2  # steps before the Gram matrix is computed afresh


def orthogonalize(
    blocks: Tensor,  # (B, rows, cols) or (rows, cols)
    *,
    method: str = "polar-express",
    steps: int = 5,
    coefficients: CoefficientsLike | None = None,
    eps: float = 0.0,
    eps_form: EpsForm = "clamp",
    compute_dtype: torch.dtype | None = None,
    execution: Execution | None = None,
) -> Tensor:
    """Replace each block by (nearly) its polar factor; a zero block stays zero.

    The result has the shape and dtype of `blocks`. With `eps=0` it does not depend on the
    scale of a block, as long as its norm fits `compute_dtype` (a larger one is an overflow, and
    gives zero). `execution=None` takes the one with fewer FLOPs, which depends
    on the shape of a block alone, never on the batch. `coefficients` replace the table
    of `method`, but not its factor on the norm.
    """
    table = step_coefficients(method, steps, coefficients)
    rows, cols = blocks.shape[-2:]
    if blocks.numel() == 0:
        return blocks.clone()
    dtype = compute_dtype or default_compute_dtype(blocks)
    X = blocks.reshape(-1, rows, cols)
    execution = execution or cheaper_execution(rows, cols, steps)
    polynomial = POLYNOMIALS[method]
    if kernels_run(table, dtype, blocks.device):
        from samestep.kernels.orthogonalize import orthogonalize_blocks

        found = orthogonalize_blocks(
            X, table, execution, norm_factor=polynomial.norm_factor, eps=eps, eps_form=eps_form,
            dtype=dtype,
        )  # fmt: skip
        return found.reshape(blocks.shape)
    # The range of float16 is too small for gradients: they are scaled before the cast.
    if X.dtype != dtype != torch.float16:
        X = X.to(dtype)
    X = scale_to_unit_norm(X, polynomial.norm_factor, eps, eps_form)
    if X.dtype != dtype:
        X = X.to(dtype)
    if rows > cols:
        X = X.mT
    X = X.contiguous()
    X = _gram(X, table) if execution == "gram" else _standard(X, table)
    if rows > cols:
        X = X.mT
    if X.dtype != blocks.dtype:
        X = X.to(blocks.dtype)
    return X.reshape(blocks.shape)


def kernels_run(table: Sequence[Coefficients], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether symmetric 16-bit products of `samestep.kernels` do it."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and not torch.compiler.is_compiling()
        and all(c != 0 for _, _, c in table)
        and missing_products(device) is None
    )


def default_compute_dtype(blocks: Tensor) -> torch.dtype:
    """16 bits where the hardware is made for it, 32 on CPU; float64 blocks keep theirs."""
    if blocks.dtype == torch.float64:
        return torch.float64
    return torch.float32 if blocks.device.type == "cpu" else torch.bfloat16


def step_coefficients(
    method: str,
    steps: int,
    coefficients: CoefficientsLike | None = None,
) -> list[Coefficients]:
    """One (a, b, c) per step: fewer steps truncate a table, more repeat its last triple."""
    table = POLYNOMIALS[method].coefficients if coefficients is None else coefficients
    if isinstance(table[0], float | int):
        return [cast("Coefficients", tuple(table))] * steps
    triples = cast("Sequence[Coefficients]", table)
    return [triples[min(step, len(triples) - 1)] for step in range(steps)]


def scale_to_unit_norm(X: Tensor, norm_factor: float, eps: float, eps_form: EpsForm) -> Tensor:
    """X / (factor ||X||_F + eps), or X / max(factor ||X||_F, eps). X: (B, rows, cols).

    The norm is summed in float64: the square of 1e30 fits, and so does that of 1e-30.
    """
    norm = block_norm(X) * norm_factor
    if eps_form == "add":
        norm = norm + eps
    # A zero block is divided by the smallest normal number: 0, not NaN.
    floor = max(eps, torch.finfo(X.dtype).tiny)
    return X / norm.to(X.dtype).clamp_min(floor)


def block_norm(X: Tensor) -> Tensor:
    """Frobenius norm of each block, in float64. (B, rows, cols) -> (B, 1, 1)."""
    norm: Tensor = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    return norm


def _quadratic(A: Tensor, b: float, c: float) -> Tensor:
    """b A + c A A. On x86 torch's baddbmm in 16 bits forgets b where c is 0."""
    return torch.baddbmm(A, A, A, beta=b, alpha=c) if c else A * b


def _standard(X: Tensor, table: list[Coefficients]) -> Tensor:
    """A = X X^T;  B = b A + c A A;  X <- a X + B X.  X: (B, m, n), m <= n."""
    for a, b, c in table:
        A = X @ X.mT
        B = _quadratic(A, b, c)
        X = torch.baddbmm(X, B, X, beta=a)
    return X


def _gram(X: Tensor, table: list[Coefficients]) -> Tensor:
    """P = a I + b A + c A A;  Q <- P Q;  A <- P A P;  at the end X <- Q X.  X: (B, m, n)."""
    for start, stop in gram_segments(len(table)):
        A = X @ X.mT
        Q: Tensor | None = None
        for step in range(start, stop):
            a, b, c = table[step]
            P = _quadratic(A, b, c)
            P.diagonal(dim1=-2, dim2=-1).add_(a)
            Q = P if Q is None else P @ Q
            if step + 1 < stop:
                A = P @ A @ P
        if Q is not None:
            X = Q @ X
    return X


def gram_segments(steps: int) -> list[tuple[int, int]]:
    """Ranges of steps that share one Gram matrix."""
    if steps <= GRAM_RESTART:
        return [(0, steps)]
    return [(0, GRAM_RESTART), (GRAM_RESTART, steps)]


def cheaper_execution(rows: int, cols: int, steps: int) -> Execution:
    """The execution with fewer FLOPs for a block of this shape; standard where they tie."""
    standard = orthogonalize_flops(rows, cols, steps, "standard")
    return "gram" if orthogonalize_flops(rows, cols, steps, "gram") < standard else "standard"


def orthogonalize_flops(
    rows: int, cols: int, steps: int = 5, execution: Execution | None = None
) -> int:
    """Floating-point operations of the products for one block; None: of the one that runs."""
    m, n = min(rows, cols), max(rows, cols)
    execution = execution or cheaper_execution(rows, cols, steps)
    long_product, square_product = 2 * m * m * n, 2 * m * m * m
    if execution == "standard":
        return steps * (2 * long_product + square_product)
    total = 0
    for start, stop in gram_segments(steps):
        count = stop - start
        total += 2 * long_product  # A = X X^T and X <- Q X
        total += (count + (count - 1) + 2 * (count - 1)) * square_product  # A A, P Q, P A P
    return total
