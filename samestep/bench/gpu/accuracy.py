"""How orthogonal a result is, and how far from its own polynomial computed in float64.

Two matrices are looked at: a Gaussian one, and one whose singular values fall as 1, 1/2, 1/3, ...
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Table = Sequence[Sequence[float]]  # (a, b, c) for each iteration


class Reference(NamedTuple):
    """The polynomial that a contestant says it computes."""

    table: Table
    norm_factor: float = 1.0


class Accuracy(NamedTuple):
    """Of one result."""

    low: float  # smallest singular value
    high: float  # largest
    spread: float  # of fourth against second moments: 1 if all singular values are equal
    distance: float | None  # relative, from the polynomial in float64; None: not known


def power_law(rows: int, cols: int, device: torch.device) -> Tensor:
    """A matrix with singular values 1, 1/2, 1/3, ... and the norm of a Gaussian one."""
    count = min(rows, cols)
    left, _ = torch.linalg.qr(torch.randn(rows, count, device=device))
    right, _ = torch.linalg.qr(torch.randn(cols, count, device=device))
    values = 1 / torch.arange(1, count + 1, device=device, dtype=torch.float32)
    scale = (rows * cols) ** 0.5 / values.norm()
    matrix: Tensor = (left * (values * scale)) @ right.mT
    return matrix


def polynomial(X: Tensor, reference: Reference) -> Tensor:
    """The polynomial of a matrix scaled to unit norm, in float64."""
    X = X.double()
    tall = X.shape[0] > X.shape[1]
    X = X.mT if tall else X
    X = X / (X.norm() * reference.norm_factor)
    for a, b, c in reference.table:
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    return X.mT if tall else X


def accuracy_of(result: Tensor, exact: Tensor | None, *, scaled: bool = False) -> Accuracy:
    """Look at one matrix.

    `scaled`: it is a multiple of what was computed, as an update is; then singular values are
    told relative to their root mean square, and the distance is that of the best multiple.
    """
    D = result.double()
    squares = torch.linalg.eigvalsh(D @ D.mT if D.shape[0] <= D.shape[1] else D.mT @ D)
    squares = squares.clamp_min(0)
    mean = squares.mean()
    unit = mean.sqrt() if scaled else torch.ones_like(mean)
    distance = None
    if exact is not None:
        fit = (D * exact).sum() / exact.square().sum() if scaled else 1.0
        distance = float((D / fit - exact).norm() / exact.norm())
    return Accuracy(
        float(squares.min().sqrt() / unit),
        float(squares.max().sqrt() / unit),
        float(squares.square().mean() / mean.square()),
        distance,
    )
