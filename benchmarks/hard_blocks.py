"""Blocks to orthogonalize: the kinds that training makes, and those that rounding hurts most."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from samestep.rules.basin import Coefficients

Shape = tuple[int, int]
Table = Sequence[Coefficients]


class Draw:
    """Random blocks of one shape, on a device, to be hard for a polynomial.

    The same seed gives the same blocks.
    """

    def __init__(self, shape: Shape, seed: int, table: Table, device: torch.device) -> None:
        self.rows, self.cols = shape
        self.short = min(shape)
        self.table, self.device = table, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def turned(self, values: Tensor) -> Tensor:
        """(B, short) singular values -> blocks that have them, turned by random reflections."""
        blocks = torch.zeros(len(values), self.rows, self.cols, device=self.device)
        blocks.diagonal(dim1=-2, dim2=-1).copy_(values)
        for _ in range(min(4, self.short)):
            left = self.normal(len(values), self.rows, 1)
            left = left / left.norm(dim=1, keepdim=True)
            blocks = blocks - 2 * left @ (left.mT @ blocks)
            right = self.normal(len(values), 1, self.cols)
            right = right / right.norm(dim=2, keepdim=True)
            blocks = blocks - 2 * (blocks @ right.mT) @ right
        return blocks

    def order(self) -> Tensor:
        return torch.arange(1, self.short + 1, device=self.device).float()


def _steep(draw: Draw, count: int) -> Tensor:
    decades = 6 * (draw.order() - 1) / max(1, draw.short - 1)
    return draw.turned(torch.pow(10.0, -decades).expand(count, -1))


def _low_rank(draw: Draw, count: int) -> Tensor:
    rank = max(1, draw.short // 8)
    return draw.normal(count, draw.rows, rank) @ draw.normal(count, rank, draw.cols)


def _equilibrated(draw: Draw, count: int) -> Tensor:
    blocks = draw.normal(count, draw.rows, draw.cols)
    normed: Tensor = blocks / blocks.norm(dim=2, keepdim=True)
    return normed


def _same_rows(draw: Draw, count: int) -> Tensor:
    """As of a layer whose output is summed: all rows the same, and one may differ."""
    blocks = draw.normal(count, 1, draw.cols).expand(-1, draw.rows, -1).clone()
    blocks[count // 2 :, 0] *= 1.001
    return blocks


def _one_hot(draw: Draw, count: int) -> Tensor:
    """One to three entries that are not zero, one per row."""
    blocks = torch.zeros(count, draw.rows, draw.cols, device=draw.device)
    for row in range(min(3, draw.short)):
        cols = (draw.uniform(count) * draw.cols).long().clamp_max(draw.cols - 1)
        sizes = draw.normal(count) * (draw.uniform(count) < 0.6 if row else 1)
        blocks[torch.arange(count, device=draw.device), row, cols] = sizes
    return blocks


def dangerous_values(table: Table) -> list[float]:
    """Where k exact steps come near their largest value, for each k: all peaks, small and large.

    No rounding is harmless there, and a large one carries the most of what polynomials lose.
    """
    starts = torch.logspace(-5, 0, 20_001, dtype=torch.float64)
    values, found = starts, []
    for a, b, c in table:
        values = values * (a + values**2 * (b + values**2 * c))
        size = values.abs()
        peaks = (
            (size[1:-1] >= size[:-2]) & (size[1:-1] >= size[2:]) & (size[1:-1] > 0.97 * size.max())
        )
        found += starts[1:-1][peaks].tolist()
    return found or [1.0]


def _dangerous(draw: Draw, count: int) -> Tensor:
    """Singular values at the dangerous places, and one that brings the norm to 1."""
    places = torch.tensor(dangerous_values(draw.table[:5]), device=draw.device)
    chosen = (draw.uniform(count, draw.short) * len(places)).long().clamp_max(len(places) - 1)
    values = places[chosen] * (0.97 + 0.06 * draw.uniform(count, draw.short))
    values = values * (draw.uniform(count, draw.short) < draw.uniform(count, 1))
    values[:, 0] = 0
    values = torch.where(values.square().cumsum(1) < 0.95, values, 0.0)
    values[:, 0] = (1 - values.square().sum(1)).clamp_min(0.0).sqrt()
    return draw.turned(values)


def _few_rows(draw: Draw, count: int) -> Tensor:
    """Two to four rows of dangerous values, the others zero."""
    rows = min(4, draw.rows)
    inner = Draw((rows, draw.cols), 0, draw.table, draw.device)
    inner.generator = draw.generator
    blocks = torch.zeros(count, draw.rows, draw.cols, device=draw.device)
    blocks[:, :rows] = _dangerous(inner, count)
    return blocks


KINDS: dict[str, Callable[[Draw, int], Tensor]] = {
    "gaussian": lambda draw, count: draw.normal(count, draw.rows, draw.cols),
    "power law": lambda draw, count: draw.turned(
        torch.pow(draw.order(), -0.5 - draw.uniform(count, 1))
    ),
    "steep": _steep,
    "low rank": _low_rank,
    "equilibrated": _equilibrated,
    "uneven rows": lambda draw, count: (
        draw.normal(count, draw.rows, draw.cols) * 10 ** (-4 * draw.uniform(count, draw.rows, 1))
    ),
    "rank one": lambda draw, count: (
        draw.normal(count, draw.rows, 1) @ draw.normal(count, 1, draw.cols)
    ),
    "same rows": _same_rows,
    "one-hot": _one_hot,
    "dangerous": _dangerous,
    "few rows": _few_rows,
}


def blocks_of(
    kind: str,
    shape: Shape,
    count: int,
    seed: int,
    table: Table,
    device: torch.device,
    *,
    scaled: bool = True,
) -> Tensor:
    """(count, rows, cols) float32; `scaled`: each by a factor of 1e-8 to 1e8."""
    draw = Draw(shape, seed, table, device)
    blocks = KINDS[kind](draw, count)
    return blocks * 10 ** (16 * draw.uniform(count, 1, 1) - 8) if scaled else blocks
