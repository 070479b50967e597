"""Orthogonalization of blocks by a matrix polynomial, and its cost in FLOPs.

Each step applies  X <- a X + b (X X^T) X + c (X X^T)^2 X  to the wide orientation of a
block scaled to Frobenius norm <= 1, so a singular value s becomes a s + b s^3 + c s^5.
After a few steps every singular value is near 1 and X is near the polar factor U V^T.

Two executions of the same polynomial:

- standard: three products per step, two of them with the m x n block;
- gram: iterate on the m x m Gram matrix A = X X^T and collect the polynomial Q with
  X_k = Q X_0, so that only the first and last products see the long side n.
  Rounding errors of A and Q grow with every step, so Q is applied and A computed afresh as
  often as `samestep.rules.basin` asks for: once, after step 2, for the usual five steps.

The Frobenius norm is far above the largest singular value of most blocks: about sqrt(m) / 2 times
for square Gaussian ones. `start` takes another bound of it, from the first Gram matrix:

- norm: none; a block enters the first step with its norm at most 1;
- gram: times sqrt(trace A / r), where r is the lesser of the largest row sum of |A| and ||A||_F:
  both bound the largest eigenvalue of A = X X^T, and the second is at most its trace;
- aol: row i times sqrt(trace A / r_i), r_i the sum of row i of |A| (Turbo-Muon, arXiv 2512.04632;
  arXiv 2208.03160). With D = diag(1 / sqrt(r_i)), D^2 A has row sums of at most 1, and the
  eigenvalues of D A D. But D X has another polar factor than X, unless all r_i are alike.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from samestep.layout.blocks import Block
from samestep.rules.basin import (
    FEW_ROWS,
    ROUNDOFF,
    Table,
    as_table,
    constant_for_compilers,
    gram_segments,
    unsafe_step,
)
from samestep.rules.basin import Coefficients as Coefficients  # part of this interface
from samestep.rules.executions import products_on

Execution = Literal["standard", "gram"]
EpsForm = Literal["clamp", "add"]
Start = Literal["norm", "gram", "aol"]
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
    # The same for 4 and 3 steps, with the same safety factor and cushion, on the intervals that
    # they bring as near 1 as those five bring theirs: [4.1e-3, 1] and [1.7e-2, 1]. Made by
    # `tests/rules/quintics.py`.
    "polar-express-4": Polynomial(
        (
            (8.052883582775221, -22.197527146338555, 15.676948541745741),
            (3.891667802292666, -2.7724841532176883, 0.50606481785034),
            (3.2857536577556536, -2.368129493342537, 0.4644902423300309),
            (2.3465413258596373, -1.7097828382687061, 0.4232355116930524),
        ),
        norm_factor=1.01,
    ),
    "polar-express-3": Polynomial(
        (
            (7.655008779852204, -21.10079742859885, 14.902385896282563),
            (3.2857536577556536, -2.368129493342537, 0.4644902423300309),
            (2.346541325859637, -1.7097828382687066, 0.42323551169305273),
        ),
        norm_factor=1.01,
    ),
    # Cesista, You and Jordan 2025, leloykun.github.io/ponder/muon-opt-coeffs, as modded-nanogpt,
    # dion and Emerging-Optimizers run it.
    "quintic": Polynomial(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        norm_factor=1.0,
    ),
    # Grishina, Smirnov and Rakhuba 2025, arXiv 2506.10935, as Emerging-Optimizers rounds it: no
    # room for rounding to 16 bits.
    "cans": Polynomial(
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        norm_factor=1.0,
    ),
    # github.com/thib-s/flash-newton-schulz, whose first step follows another scaling (almost
    # orthogonal layers, arXiv 2208.03160); here blocks have unit norm, as in Emerging-Optimizers.
    "aol": Polynomial(
        (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
        norm_factor=1.0,
    ),
    # DeepSeek-V4's report (huggingface.co/deepseek-ai/DeepSeek-V4-Pro): eight steps of Keller
    # Jordan's, then two that settle at 1.
    "deepseek-v4": Polynomial(
        ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2, norm_factor=1.0
    ),
    # arXiv 2606.00371: cubics, two products per step, for singular values in [7e-3, 1].
    "cubic": Polynomial(
        (
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ),
        norm_factor=1.0,
    ),
}

USUAL_STEPS = 5  # of a single triple, for which no number of steps is given


def orthogonalize(
    blocks: Tensor,  # (B, rows, cols) or (rows, cols)
    *,
    method: str = "polar-express",
    steps: int | None = None,
    coefficients: CoefficientsLike | None = None,
    norm_factor: float | None = None,
    eps: float = 0.0,
    eps_form: EpsForm = "clamp",
    compute_dtype: torch.dtype | None = None,
    execution: Execution | None = None,
    start: Start = "norm",
) -> Tensor:
    """Replace each block by (nearly) its polar factor; a zero block stays zero.

    The result has the shape and dtype of `blocks`. With `eps=0` it does not depend on the
    scale of a block, as long as its norm fits `compute_dtype` (a larger one is an overflow, and
    gives zero). `execution=None` takes the one with fewer FLOPs, which depends on the shape of a
    block and the dtype, never on the batch. `coefficients` replace the table of `method`, but not
    its factor on the norm, which `norm_factor` does; `steps=None` runs as many steps as the table
    has (`step_coefficients`). Another `start` than "norm" is plain torch's on every device.
    """
    if blocks.numel() == 0:
        return blocks.clone()
    rows, cols = blocks.shape[-2:]
    device, stack = blocks.device, blocks.reshape(-1, rows, cols)
    plan = plan_orthogonalization(
        method,
        steps,
        coefficients,
        norm_factor,
        execution,
        compute_dtype,
        (rows, cols, blocks.dtype, device.type),
    )
    in_16_bits = plan.dtype.itemsize == 2
    if start == "norm" and in_16_bits and kernels_run(plan.table, plan.dtype, device):
        found: Tensor = products_on(device)(
            stack,
            plan.table,
            # Kernels multiply in float16 whatever 16 bits they are given.
            execution or cheaper_execution(rows, cols, plan.table, torch.float16),
            norm_factor=plan.norm_factor,
            eps=eps,
            eps_form=eps_form,
            dtype=plan.dtype,
        )
    else:
        found = _orthogonalize(stack, plan, eps, eps_form, start)
    return found.reshape(blocks.shape)


class OrthogonalizationPlan(NamedTuple):
    """The decisions about blocks of one shape, dtype and kind of device in plain torch.

    table: (a, b, c) of each step.
    norm_factor: of a block's norm, before the first step.
    segments: the ranges of steps that share one Gram matrix; None: the standard execution.
    dtype: of the products.
    """

    table: Table
    norm_factor: float
    segments: tuple[tuple[int, int], ...] | None
    dtype: torch.dtype


@constant_for_compilers
def plan_orthogonalization(
    method: str,
    steps: int | None,
    coefficients: CoefficientsLike | None,
    norm_factor: float | None,
    execution: Execution | None,
    compute_dtype: torch.dtype | None,
    of: tuple[int, int, torch.dtype, str],  # rows and columns of blocks, dtype, kind of device
) -> OrthogonalizationPlan:
    """Decide once what the options of a group mean for blocks of one kind."""
    table = None if coefficients is None else step_coefficients(method, steps, coefficients)
    return _planned(method, steps, table, norm_factor, execution, compute_dtype, of)


@lru_cache(maxsize=1024)
def _planned(
    method: str,
    steps: int | None,
    table: Table | None,
    norm_factor: float | None,
    execution: Execution | None,
    compute_dtype: torch.dtype | None,
    of: tuple[int, int, torch.dtype, str],
) -> OrthogonalizationPlan:
    """Return the plan; cached, because a step is short beside making it."""
    rows, cols, dtype, device = of
    table = table or step_coefficients(method, steps)
    dtype = compute_dtype or default_compute_dtype(dtype, device, table)
    execution = execution or cheaper_execution(rows, cols, table, dtype)
    segments = gram_segments(table, dtype, min(rows, cols)) if execution == "gram" else None
    factor = POLYNOMIALS[method].norm_factor if norm_factor is None else norm_factor
    return OrthogonalizationPlan(table, factor, segments, dtype)


def orthogonalize_plain(
    blocks: Tensor,  # (B, rows, cols)
    table: Sequence[Coefficients],
    execution: Execution,
    *,
    norm_factor: float,
    eps: float,
    eps_form: EpsForm,
    dtype: torch.dtype,
    start: Start = "norm",
) -> Tensor:
    """Orthogonalize in plain torch, on any device; all products are of `dtype`."""
    short = min(blocks.shape[1:])
    segments = gram_segments(as_table(table), dtype, short) if execution == "gram" else None
    plan = OrthogonalizationPlan(as_table(table), norm_factor, segments, dtype)
    return _orthogonalize(blocks, plan, eps, eps_form, start)


def _orthogonalize(
    blocks: Tensor, plan: OrthogonalizationPlan, eps: float, eps_form: EpsForm, start: Start
) -> Tensor:
    """Scale blocks (B, rows, cols), and iterate on their wide orientation."""
    rows, cols = blocks.shape[1:]
    dtype = plan.dtype
    # The range of float16 is too small for gradients and their norms: scaled before the cast. And
    # what scales a block once more has 32 bits, so that blocks are rounded to 16 only once.
    first = dtype == torch.float16 or (start != "norm" and dtype.itemsize == 2)
    wide = torch.promote_types(blocks.dtype, torch.float32) if first else dtype
    X = blocks if blocks.dtype == wide else blocks.to(wide)
    X = scale_to_unit_norm(X, plan.norm_factor, eps, eps_form)
    if rows > cols:
        X = X.mT
    A: Tensor | None = None
    if start != "norm":
        A = X @ X.mT
        scales = gram_scales(A, start)
        X, A = X * scales, A * scales * scales.mT
    if X.dtype != dtype:
        X, A = X.to(dtype), None  # that of the rounded block is another
    X = X.contiguous()
    if plan.segments is None:
        X = _standard(X, plan.table, A)
    else:
        X = _gram(X, plan.table, plan.segments, A)
    if rows > cols:
        X = X.mT
    return X if X.dtype == blocks.dtype else X.to(blocks.dtype)


def kernels_run(table: Sequence[Coefficients], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels of a device can run the products; their symmetric ones have 16 bits."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and not torch.compiler.is_compiling()
        and all(c != 0 for _, _, c in table)
        and has_room(table)
        and products_on(device) is not None
    )


def default_compute_dtype(
    dtype: torch.dtype, device: str, table: Sequence[Coefficients] | None = None
) -> torch.dtype:
    """Return float16 where the hardware is made for it, else float32; float64 for float64.

    float16, not bfloat16: blocks are scaled, so its range suffices, and its 3 bits more are what
    the margins of Polar Express are about. A table without room even for those gets float32.

    device: the kind of device, as "cuda".
    """
    if dtype == torch.float64:
        return torch.float64
    if device in ("cpu", "xla") or not (table is None or has_room(table)):
        return torch.float32
    return torch.float16


@constant_for_compilers
def has_room(table: Sequence[Coefficients]) -> bool:
    """Whether singular values stay in the basin when all is rounded to float16."""
    return unsafe_step(as_table(table), 1.0, torch.float16) is None


def step_coefficients(
    method: str,
    steps: int | None = None,
    coefficients: CoefficientsLike | None = None,
) -> Table:
    """Return one (a, b, c) per step, of the method's table or of the caller's own.

    `steps=None`: as many as the table has, and `USUAL_STEPS` of a single triple. More than that
    repeat the last triple. Fewer cut the table of a method short; of the caller's own table
    nothing is dropped in silence: ValueError.
    """
    own = coefficients is not None
    table = POLYNOMIALS[method].coefficients if coefficients is None else coefficients
    if isinstance(table[0], (float, int)):  # torch 2.9 cannot compile `float | int`
        table = [cast("Coefficients", tuple(table))]
    triples = cast("Sequence[Coefficients]", table)
    if steps is None:
        steps = len(triples) if len(triples) > 1 else USUAL_STEPS
    if own and steps < len(triples):
        raise ValueError(
            f"ns_steps is {steps}, but ns_coefficients has {len(triples)} triples, one per step: "
            f"leave ns_steps out (None) to run all of them, or give the first {steps} alone"
        )
    return as_table([triples[min(step, len(triples) - 1)] for step in range(steps)])


def scale_to_unit_norm(X: Tensor, norm_factor: float, eps: float, eps_form: EpsForm) -> Tensor:
    """Return X / (factor ||X||_F + eps) or X / max(factor ||X||_F, eps), for X (B, rows, cols).

    The norm is summed in float64: the square of 1e30 fits, and so does that of 1e-30.
    """
    norm = block_norm(X) * norm_factor
    if eps_form == "add":
        norm = norm + eps
    # A zero block is divided by the smallest normal number: 0, not NaN.
    floor = max(eps, torch.finfo(X.dtype).tiny)
    return X / norm.to(X.dtype).clamp_min(floor)


def gram_scales(A: Tensor, start: Start) -> Tensor:
    """Return the factors of the rows of a block X, from A = X X^T. (B, m, m) -> (B, m or 1, 1).

    Singular values are at most ||X||_F afterwards, as before: it is what norm factor and eps have
    made of it. Errors of the entries of A are those of its rows' norms, and of as many signs as
    there are: the bound is raised by what they may add to it, sqrt(m) roundings.
    """
    trace = A.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[:, None, None]
    bound = A.abs().sum(dim=-1, keepdim=True)
    if start == "gram":
        norm = torch.linalg.matrix_norm(A)[:, None, None]
        bound = torch.minimum(bound.amax(dim=-2, keepdim=True), norm)
    bound = bound * (1 + ROUNDOFF[A.dtype] * A.shape[-1] ** 0.5)
    # Rows of zeros, or nearly: a smaller factor is as safe, and 0 stays 0.
    scales: Tensor = (trace / bound.clamp_min(torch.finfo(A.dtype).tiny)).sqrt()
    return scales


def block_norm(X: Tensor) -> Tensor:
    """Return the Frobenius norm of each block, in float64. (B, rows, cols) -> (B, 1, 1)."""
    norm: Tensor = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    return norm


def _quadratic(A: Tensor, b: float, c: float) -> Tensor:
    """Return b A + c A A. On x86 torch's baddbmm in 16 bits forgets b where c is 0."""
    return torch.baddbmm(A, A, A, beta=b, alpha=c) if c else A * b


def _standard(X: Tensor, table: Sequence[Coefficients], A: Tensor | None = None) -> Tensor:
    """A = X X^T;  B = b A + c A A;  X <- a X + B X.

    X: (B, m, n), m <= n; A: the first, if known.
    """
    for a, b, c in table:
        B = _quadratic(X @ X.mT if A is None else A, b, c)
        X, A = torch.baddbmm(X, B, X, beta=a), None
    return X


def _gram(
    X: Tensor, table: Table, segments: Sequence[tuple[int, int]], first: Tensor | None = None
) -> Tensor:
    """P = a I + b A + c A A;  Q <- P Q;  A <- P A P;  at the end of a segment X <- Q X.

    X: (B, m, n); first: the first A, if known.
    """
    for start, stop in segments:
        known = first if start == 0 else None
        if stop == start + 1:
            X = _standard(X, table[start:stop], known)
            continue
        A = X @ X.mT if known is None else known
        Q: Tensor | None = None
        for step in range(start, stop):
            a, b, c = table[step]
            P = _quadratic(A, b, c)
            P.diagonal(dim1=-2, dim2=-1).add_(a)
            Q = P if Q is None else P @ Q
            if step + 1 < stop:
                A = P @ A @ P
        assert Q is not None
        X = Q @ X
    return X


USUAL_TABLE = step_coefficients("polar-express")


def cheaper_execution(
    rows: int,
    cols: int,
    table: Sequence[Coefficients] = USUAL_TABLE,
    dtype: torch.dtype = torch.float16,
) -> Execution:
    """Return the execution with fewer FLOPs for a block of this shape; standard where they tie.

    Blocks of few rows in 16 bits are always standard: the Gram form would restart at most steps.
    """
    if min(rows, cols) <= FEW_ROWS and dtype.itemsize == 2:
        return "standard"
    standard, gram = (
        orthogonalize_flops(rows, cols, table, execution, dtype)
        for execution in ("standard", "gram")
    )
    return "gram" if gram < standard else "standard"


def orthogonalize_flops(
    rows: int,
    cols: int,
    table: Sequence[Coefficients] = USUAL_TABLE,
    execution: Execution | None = None,
    dtype: torch.dtype = torch.float16,
) -> int:
    """Return the FLOPs of the products for one block; `execution=None`: of the one that runs.

    The defaults are the usual table as accelerators run it, whatever the device is, because ranks
    divide the work by these numbers.
    """
    m, n = min(rows, cols), max(rows, cols)
    execution = execution or cheaper_execution(rows, cols, table, dtype)
    long_product, square_product = 2 * m * m * n, 2 * m * m * m
    if execution == "standard":
        return len(table) * (2 * long_product + square_product)
    total = 0
    for start, stop in gram_segments(table, dtype, m):
        count = stop - start
        total += 2 * long_product  # A = X X^T and X <- Q X
        total += (count + (count - 1) + 2 * (count - 1)) * square_product  # A A, P Q, P A P
    return total


def block_flops(block: Block) -> int:
    """Return the FLOPs of all matrices of a block, which its owner computes."""
    return sum(orthogonalize_flops(*shape) for shape in block.matrices)
