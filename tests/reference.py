"""Plain float64 references for the update rules, written from the formulas in numpy.

Nothing here shares code, a table of coefficients or even an array library with the package
under test: matrices are float64 numpy arrays, polynomials of a matrix are taken through its
singular value decomposition, and every block of every parameter is visited in a Python loop.
Slow and obvious is the point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

Array = np.ndarray
Triple = tuple[float, float, float]

# Retyped from the publications on purpose: an edit to the package's tables must show here.
QUINTIC: list[Triple] = [(3.4445, -4.7750, 2.0315)]
POLAR_EXPRESS: list[Triple] = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def to_numpy(tensor: torch.Tensor) -> Array:
    """Copy a tensor of any floating dtype into a float64 array (exact for all of them)."""
    return tensor.detach().to(torch.float64).contiguous().numpy().copy()


def relative_error(actual: Array | torch.Tensor, expected: Array | torch.Tensor) -> float:
    """Largest absolute difference over the largest magnitude of ``expected``."""
    actual = to_numpy(actual) if isinstance(actual, torch.Tensor) else actual
    expected = to_numpy(expected) if isinstance(expected, torch.Tensor) else expected
    assert actual.shape == expected.shape
    if expected.size == 0:
        return 0.0
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-300))


# --- Orthogonalization ---------------------------------------------------------------------


def polar_factor(M: Array) -> Array:
    """Return ``U V^T`` of the singular value decomposition ``M = U S V^T``."""
    U, _, Vt = np.linalg.svd(M, full_matrices=False)
    return U @ Vt


def coefficients_for(table: Sequence[Triple], steps: int) -> list[Triple]:
    """Return one triple per step: a short table repeats its last triple, a long one is cut."""
    return [table[min(k, len(table) - 1)] for k in range(steps)]


def polynomial_singular_values(s: Array, coefficients: Sequence[Triple]) -> Array:
    """Iterate ``s -> a s + b s^3 + c s^5`` over the triples."""
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return s


def normalized_singular_values(
    M: Array, norm_factor: float = 1.0, eps: float = 0.0, eps_form: str = "clamp"
) -> Array:
    """Singular values of ``M`` divided by the norm that the iteration divides by."""
    frobenius = math.sqrt(float((M * M).sum()))
    if eps_form == "add":
        norm = norm_factor * frobenius + eps
    elif eps_form == "clamp":
        norm = max(norm_factor * frobenius, eps)
    else:
        raise ValueError(eps_form)
    s = np.linalg.svd(M, compute_uv=False)
    return s / norm if norm > 0 else np.zeros_like(s)


def reference_orthogonalize(
    M: Array,
    table: Sequence[Triple],
    steps: int = 5,
    norm_factor: float = 1.0,
    eps: float = 0.0,
    eps_form: str = "clamp",
) -> Array:
    """``U diag(p(s / norm)) V^T`` for one matrix; a zero matrix gives zeros."""
    if not M.any():
        return np.zeros_like(M)
    s = normalized_singular_values(M, norm_factor, eps, eps_form)
    U, _, Vt = np.linalg.svd(M, full_matrices=False)
    return (U * polynomial_singular_values(s, coefficients_for(table, steps))) @ Vt


# --- AdamW ---------------------------------------------------------------------------------


class ReferenceAdamW:
    """AdamW with decoupled decay and eps added after the bias correction, in float64."""

    def __init__(
        self,
        params: Sequence[Array],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> None:
        self.params = [np.array(p, dtype=np.float64, order="C") for p in params]
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.amsgrad, self.maximize = amsgrad, maximize
        self.steps = [0 for _ in params]
        self.exp_avg = [np.zeros_like(p) for p in self.params]
        self.exp_avg_sq = [np.zeros_like(p) for p in self.params]
        self.max_exp_avg_sq = [np.zeros_like(p) for p in self.params]

    def step(self, grads: Sequence[Array | None]) -> None:
        """Make one step; a parameter whose gradient is None is untouched and not counted."""
        beta1, beta2 = self.betas
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            g = -grad if self.maximize else grad
            self.steps[i] += 1
            self.params[i] = self.params[i] * (1 - self.lr * self.weight_decay)
            self.exp_avg[i] = beta1 * self.exp_avg[i] + (1 - beta1) * g
            self.exp_avg_sq[i] = beta2 * self.exp_avg_sq[i] + (1 - beta2) * g * g
            second = self.exp_avg_sq[i]
            if self.amsgrad:
                # The maximum is taken before the bias correction, as torch does.
                second = self.max_exp_avg_sq[i] = np.maximum(self.max_exp_avg_sq[i], second)
            m_hat = self.exp_avg[i] / (1 - beta1 ** self.steps[i])
            v_hat = second / (1 - beta2 ** self.steps[i])
            self.params[i] = self.params[i] - self.lr * m_hat / (np.sqrt(v_hat) + self.eps)


# --- Muon ----------------------------------------------------------------------------------

Block = tuple[int, slice]


def blocks_of(shape: Sequence[int], split_sizes: Sequence[int] | None) -> Iterator[Block]:
    """Name every block of a parameter seen as a stack: (matrix of the stack, its rows).

    Each matrix of a 3-D stack stands alone, and ``split_sizes`` cuts its rows further.
    """
    rows = shape[-2]
    sizes = [rows] if split_sizes is None else list(split_sizes)
    assert sum(sizes) == rows
    for matrix in range(shape[0] if len(shape) == 3 else 1):
        start = 0
        for size in sizes:
            yield matrix, slice(start, start + size)
            start += size


def keller_scale(rows: int, cols: int) -> float:
    """Scale of Keller Jordan's recipe, which torch calls "original"."""
    return math.sqrt(max(1.0, rows / cols))


def moonlight_scale(rows: int, cols: int) -> float:
    """Scale of Moonlight's recipe, which torch calls "match_rms_adamw"."""
    return 0.2 * math.sqrt(max(rows, cols))


class ReferenceMuon:
    """What the recipes share: whole-parameter momentum and the walk over the blocks.

    ``scale_whole`` is a deliberate mistake (the scale of the fused matrix for each of its
    blocks) with which the tests show that they can tell the difference.
    """

    scale: Callable[[int, int], float] = staticmethod(keller_scale)

    def __init__(
        self,
        params: Sequence[Array],
        lr: float,
        weight_decay: float,
        momentum: float,
        split_sizes: Sequence[int] | None = None,
        nesterov: bool = True,
        scale_whole: bool = False,
    ) -> None:
        self.params = [np.array(p, dtype=np.float64, order="C") for p in params]
        self.lr, self.weight_decay, self.momentum = lr, weight_decay, momentum
        self.split_sizes, self.nesterov, self.scale_whole = split_sizes, nesterov, scale_whole
        self.momentum_buffers = [np.zeros_like(p) for p in self.params]

    def step(self, grads: Sequence[Array]) -> None:
        """Make one step, given one gradient per parameter."""
        for i, g in enumerate(grads):
            direction = self.momentum_direction(i, g)
            shape = self.params[i].shape
            stack = self.params[i].reshape(-1, *shape[-2:])  # a view: 2-D becomes a stack of 1
            directions = direction.reshape(-1, *shape[-2:])
            for matrix, rows in blocks_of(shape, self.split_sizes):
                block = stack[matrix, rows]
                size = shape[-2:] if self.scale_whole else block.shape
                stack[matrix, rows] = self.new_block(
                    (i, matrix, rows.start), block, directions[matrix, rows], self.scale(*size)
                )

    def momentum_direction(self, i: int, g: Array) -> Array:
        """Exponential moving average, then the Nesterov look-ahead."""
        mu = self.momentum
        m = self.momentum_buffers[i] = mu * self.momentum_buffers[i] + (1 - mu) * g
        return (1 - mu) * g + mu * m if self.nesterov else m

    def orthogonalize(self, M: Array) -> Array:
        raise NotImplementedError

    def new_block(self, key: object, p: Array, direction: Array, scale: float) -> Array:
        """Decay with the base learning rate, then the scaled update."""
        u = self.orthogonalize(direction)
        return p * (1 - self.lr * self.weight_decay) - self.lr * scale * u


class ReferenceKeller(ReferenceMuon):
    """Keller Jordan: EMA, quintic with 1e-7 added to the norm, sqrt(max(1, rows/cols))."""

    def orthogonalize(self, M: Array) -> Array:
        return reference_orthogonalize(M, QUINTIC, 5, 1.0, 1e-7, "add")


class ReferenceMoonlight(ReferenceKeller):
    """Moonlight: momentum is a sum, not an average; scale 0.2 sqrt(max(rows, cols))."""

    scale = staticmethod(moonlight_scale)

    def momentum_direction(self, i: int, g: Array) -> Array:
        mu = self.momentum
        m = self.momentum_buffers[i] = mu * self.momentum_buffers[i] + g
        return g + mu * m if self.nesterov else m


class ReferenceTorch(ReferenceMuon):
    """torch.optim.Muon: as Keller's, but the norm is clamped at 1e-7 instead of added to."""

    def __init__(
        self,
        *args: object,
        adjust_lr_fn: str = "original",
        ns_steps: int = 5,
        ns_coefficients: Triple = QUINTIC[0],
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.scale = {"original": keller_scale, "match_rms_adamw": moonlight_scale}[adjust_lr_fn]
        self.ns_steps, self.ns_coefficients = ns_steps, ns_coefficients

    def orthogonalize(self, M: Array) -> Array:
        return reference_orthogonalize(M, [self.ns_coefficients], self.ns_steps, 1.0, 1e-7, "clamp")


class ReferenceNanochat(ReferenceMuon):
    """nanochat: row equilibration, Polar Express, variance reduction, cautious decay.

    ``leave_out`` names one ingredient to omit, again to show that the tests see each of them.
    """

    INGREDIENTS = ("equilibration", "rescale", "variance", "decay scale", "caution")

    def __init__(
        self,
        *args: object,
        variance_beta2: float = 0.9,
        leave_out: str | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)
        assert leave_out is None or leave_out in self.INGREDIENTS
        self.beta2, self.leave_out = variance_beta2, leave_out
        self.second_moments: dict[object, Array] = {}  # one per block, from zero, not corrected

    def orthogonalize(self, M: Array) -> Array:
        rows, cols = M.shape
        X = M
        if self.leave_out != "equilibration":
            row_norms = np.maximum(np.sqrt((M * M).sum(axis=1, keepdims=True)), 1e-6)
            X = M * (np.linalg.norm(M) / math.sqrt(rows)) / row_norms
        X = reference_orthogonalize(X, POLAR_EXPRESS, 5, 1.01, 1e-6, "add")
        if self.leave_out != "rescale":
            X = X * (math.sqrt(min(rows, cols)) / max(np.linalg.norm(X), 1e-6))
        return X

    def reduce_variance(self, key: object, u: Array) -> Array:
        """Even out the rows (tall) or columns (wide) by their running mean square."""
        rows, cols = u.shape
        axis = 1 if rows >= cols else 0
        v = (u * u).mean(axis=axis, keepdims=True)
        s = self.second_moments.get(key, np.zeros_like(v))
        s = self.second_moments[key] = self.beta2 * s + (1 - self.beta2) * v
        r = 1 / np.sqrt(np.maximum(s, 1e-10))
        after = math.sqrt(float((v * u.shape[axis] * r * r).sum()))  # ||u r||
        return u * r * (np.linalg.norm(u) / max(after, 1e-10))

    def new_block(self, key: object, p: Array, direction: Array, scale: float) -> Array:
        """Scale the learning rate of update and decay alike; decay only where signs agree."""
        u = self.orthogonalize(direction)
        if self.leave_out != "variance":
            u = self.reduce_variance(key, u)
        mask = np.ones_like(p) if self.leave_out == "caution" else (u * p >= 0).astype(np.float64)
        lr = self.lr * scale
        decay_lr = self.lr if self.leave_out == "decay scale" else lr
        return p - lr * u - decay_lr * self.weight_decay * p * mask


REFERENCES: dict[str, type[ReferenceMuon]] = {
    "keller": ReferenceKeller,
    "moonlight": ReferenceMoonlight,
    "nanochat": ReferenceNanochat,
    "torch": ReferenceTorch,
}
