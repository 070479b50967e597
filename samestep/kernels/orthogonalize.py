"""Orthogonalization with symmetric products, which halve the work of m x m products.

Both executions are those of `samestep.rules.orthogonalize`, which has the formulas. Blocks, Gram
matrices and polynomials are float16, sums float32: in bfloat16 a polynomial of several steps, which
is as large as 33, would be rounded by more than singular values may move (`rules.basin`). The first
Gram matrix and polynomial carry the scale that brings a block to unit norm, so that scaling costs
no pass over memory.

Small orthogonalizations run as CUDA graphs: their launches take longer than their arithmetic.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.kernels.call import recorded
from samestep.kernels.choice import padded
from samestep.kernels.launch import is_compiling
from samestep.kernels.symmetric import symmetric_product
from samestep.rules.basin import Coefficients, gram_segments
from samestep.rules.orthogonalize import EpsForm, Execution, block_norm, orthogonalize_flops

SMALL = 5e11  # floating-point operations: what a GPU does while the host launches all of it
KEPT = 64  # graphs
TURNED = 2048  # rows: from here on 2 to 3% faster on an H200, and no faster with 1280

Function = Callable[[Tensor, Tensor], Tensor]


def orthogonalize_blocks(
    blocks: Tensor,  # (B, rows, cols)
    table: Sequence[Coefficients],
    execution: Execution,
    *,
    norm_factor: float,
    eps: float,
    eps_form: EpsForm,
    dtype: torch.dtype,
) -> Tensor:
    """Return the (nearly) orthogonal factor of each block, in the dtype of `blocks`.

    `dtype`: blocks are rounded to it before, if it is bfloat16; products are in float16.
    """
    rows, cols = blocks.shape[1:]
    X = blocks.to(dtype).float() if dtype == torch.bfloat16 else blocks
    norms = block_norm(X)
    powers = fitting_powers(norms)
    scales = inverse_norms(norms, norm_factor, eps, eps_form) / powers
    X = (X * powers.to(X.dtype)).half()
    X = X.mT if rows > cols else X
    short, long = X.shape[1:]
    room = padded(long) - long, padded(short) - short
    if any(room):
        X = torch.nn.functional.pad(X, (0, room[0], 0, room[1]))
    # What a zero block is multiplied with stays finite.
    scales = scales.clamp_max(1.0).flatten().float()
    Y = orthogonalize_wide(X.contiguous(), scales, table, execution, overwrite=False)
    Y = Y[:, :short, :long]
    return (Y.mT if rows > cols else Y).to(blocks.dtype).contiguous()


def fitting_powers(norms: Tensor) -> Tensor:
    """Return powers of two that bring norms to 8 .. 16: they change no digit and fit float16."""
    exponents = torch.frexp(norms.clamp(2.0**-100, 2.0**120)).exponent
    return torch.ldexp(torch.ones_like(norms), 4 - exponents)


def inverse_norms(norms: Tensor, norm_factor: float, eps: float, eps_form: EpsForm) -> Tensor:
    """Return 1 / (factor norm + eps), or 1 / max(factor norm, eps)."""
    scaled = norms * norm_factor
    if eps_form == "add":
        scaled = scaled + eps
    # A zero block is divided by the smallest normal number: 0, not NaN.
    return scaled.clamp_min(max(eps, torch.finfo(torch.float32).tiny)).reciprocal()


def orthogonalize_wide(
    X: Tensor,  # (B, m, n) float16, m <= n, both multiples of ALIGNMENT
    scales: Tensor,  # (B,) float32: 1 / norm
    table: Sequence[Coefficients],
    execution: Execution,
    *,
    overwrite: bool,
) -> Tensor:
    """Return the (nearly) orthogonal factor of each block; `overwrite`: X may be overwritten."""
    flops = len(X) * orthogonalize_flops(X.shape[1], X.shape[2], table, execution, X.dtype)
    if can_replay(X, flops):
        run = partial(_orthogonalized, table=table, execution=execution, overwrite=True)
        return replayed(run, (tuple(table), execution), X, scales)
    return _orthogonalized(X, scales, table, execution, overwrite)


def _orthogonalized(
    X: Tensor,
    scales: Tensor,
    table: Sequence[Coefficients],
    execution: Execution,
    overwrite: bool,
) -> Tensor:
    rooms = [torch.empty_like(X), X if overwrite else torch.empty_like(X)]
    segments = steps_alone(len(table))
    if execution == "gram":
        segments = gram_segments(table, X.dtype, X.shape[1])
    for number, (start, stop) in enumerate(segments):
        own = scales if start == 0 else None
        A = symmetric_product(
            X,
            X,
            scales=None if own is None else own.square(),
            shift=_shift(table[start]) if stop == start + 1 and own is None else 0.0,
        )
        Q = _polynomial(A, table[start:stop], own)
        X = _times(Q, X, out=rooms[number % 2])
    return X


def _times(Q: Tensor, X: Tensor, out: Tensor | None = None) -> Tensor:
    """Return Q X for a symmetric Q; a large Q is transposed, which is faster in cuBLAS."""
    return torch.bmm(Q.mT if Q.shape[1] >= TURNED else Q, X, out=out)


def steps_alone(steps: int) -> tuple[tuple[int, int], ...]:
    """Return the segments of the standard execution, which has a Gram matrix per step."""
    return tuple((step, step + 1) for step in range(steps))


def _polynomial(A: Tensor, table: Sequence[Coefficients], scales: Tensor | None) -> Tensor:
    """Return Q, times the scales, with X_k = Q X_0, A = X_0 X_0^T, P = a I + b A + c A A, Q <- P Q.

    The last A is only squared; it includes its shift h, so that no third operand is read:
    P = (a - c h h) I + c (A + h I)(A + h I).
    """
    Q: Tensor | None = None
    for number, (a, b, c) in enumerate(table):
        last = number + 1 == len(table)
        alone = last and Q is None
        # Eigenvalues of the first A are about 1 / m: a shift of the order of 1 would round them.
        shift = _shift((a, b, c)) if last and not (alone and scales is not None) else 0.0
        next_is_last = number + 2 == len(table)
        residue = A.new_empty(A.shape[:2], dtype=torch.float32) if next_is_last else None
        P = symmetric_product(
            A,
            A,
            addend=None if shift else A,
            alpha=c,
            beta=b,
            gamma=a - c * shift * shift,
            scales=scales if alone else None,
            residue=residue,
        )
        if Q is None:
            Q = P
        else:
            Q = symmetric_product(P, Q, scales=scales if last else None)
        if not last:
            # P A P of the very P that is part of Q. All would commute but for rounding, and a
            # mirrored P A would be another matrix. What rounding did to the diagonal of P can be
            # put right. What it did elsewhere is little, but would grow: only in the last A, which
            # is squared and no more, it does not.
            shift = _shift(table[number + 1]) if next_is_last else 0.0
            whole = residue is None
            PA = _times(P, A) if whole else symmetric_product(P, A, left_residue=residue)
            A = symmetric_product(PA, P, shift=shift)
    assert Q is not None
    return Q


def _shift(coefficients: Coefficients) -> float:
    """Return h of b A + c A A = c (A + h I)(A + h I) - c h h I; 0 if h is too large for float16."""
    _, b, c = coefficients
    return b / (2 * c) if c and abs(b) <= 8 * abs(c) else 0.0


# --- as CUDA graphs ---------------------------------------------------------------------------


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    X: Tensor
    scales: Tensor
    result: Tensor


_recorded: OrderedDict[Hashable, _Recorded] = OrderedDict()


def can_replay(X: Tensor, flops: float) -> bool:
    """Whether a CUDA graph pays off (few flops) and no other graph is being recorded."""
    if is_compiling() or not X.is_cuda:
        return False
    return flops < SMALL and not torch.cuda.is_current_stream_capturing()


def replayed(function: Function, key: Hashable, X: Tensor, scales: Tensor) -> Tensor:
    """Return `function(X, scales)` by a CUDA graph, recorded at the first call with a key.

    A graph has tensors of its own: X is copied in and the result out, which costs little against
    fifteen launches. Each stream has its own graphs, since they may run at the same time.
    """
    stream = torch.cuda.current_stream(X.device).cuda_stream
    key = (key, X.shape, X.dtype, X.device, stream)
    found = _recorded.get(key)
    if found is None:
        function(X.clone(), scales)  # compiles what a graph cannot
        found = _recorded[key] = _record(function, X, scales)
        if len(_recorded) > KEPT:
            _recorded.popitem(last=False)
    _recorded.move_to_end(key)
    found.X.copy_(X)
    found.scales.copy_(scales)
    found.graph.replay()
    return found.result.clone()


def _record(function: Function, X: Tensor, scales: Tensor) -> _Recorded:
    own_X, own_scales = torch.zeros_like(X), torch.zeros_like(scales)
    graph, result = recorded(lambda: function(own_X, own_scales), X.device)
    return _Recorded(graph, own_X, own_scales, result)
