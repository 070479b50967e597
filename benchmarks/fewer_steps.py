"""How far from the exact polar factor blocks end, by number of steps and by their start.

    python -m benchmarks.fewer_steps

prints the tables of docs/fewer_steps.md.

The distance is ||X - U V^T||_F / sqrt(min(rows, cols)) of a block U S V^T, in 32 bits as samestep
runs on a CPU, and with every product rounded to bfloat16. The decomposition is float64's.
"""

import math
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import NoOptions, run_script
from benchmarks.hard_blocks import Draw, Shape, blocks_of
from samestep.rules.orthogonalize import (
    POLYNOMIALS,
    USUAL_TABLE,
    Start,
    cheaper_execution,
    gram_scales,
    orthogonalize,
    orthogonalize_flops,
    scale_to_unit_norm,
    step_coefficients,
)

SHAPES: tuple[Shape, ...] = ((192, 192), (96, 384), (384, 96))
SPECTRA = ("gaussian", "low rank + noise", "power law", "uneven rows", "steep")
LARGE: Shape = (768, 768)  # of Gaussian blocks alone
COUNT = 8  # blocks of each shape and spectrum
METHODS = {5: "polar-express", 4: "polar-express-4", 3: "polar-express-3"}
STARTS: tuple[Start, ...] = ("norm", "gram", "aol")
DTYPES = (torch.float32, torch.bfloat16)


class Way(NamedTuple):
    """A number of steps, and the start before them."""

    steps: int
    start: Start

    def flops(self, m: int, n: int, dtype: torch.dtype) -> int:
        """Of its products; a start has one more where the first step needs another Gram matrix."""
        of_start = 2 * m * m * n if self.start != "norm" and dtype.itemsize == 2 else 0
        table = step_coefficients(METHODS[self.steps])
        return of_start + orthogonalize_flops(m, n, table, dtype=dtype)


WAYS = [Way(steps, start) for start in STARTS for steps in METHODS]


def blocks(spectrum: str, shape: Shape) -> Tensor:
    """(COUNT, rows, cols) in float32, the same at each call."""
    seed = SPECTRA.index(spectrum)
    if spectrum != "low rank + noise":
        device = torch.device("cpu")
        return blocks_of(spectrum, shape, COUNT, seed, USUAL_TABLE, device, scaled=False)
    draw = Draw(shape, seed, USUAL_TABLE, torch.device("cpu"))
    rank = draw.short // 8
    signal = draw.normal(COUNT, draw.rows, rank) @ draw.normal(COUNT, rank, draw.cols)
    noise = draw.normal(COUNT, *shape)
    return signal + noise * (0.1 * math.sqrt(rank))


def polar(given: Tensor) -> Tensor:
    """U V^T in float64."""
    U, _, Vt = torch.linalg.svd(given.double(), full_matrices=False)
    factor: Tensor = U @ Vt
    return factor


def orthogonalized(given: Tensor, way: Way, dtype: torch.dtype) -> Tensor:
    """What it gives; bfloat16 is emulated, in the standard execution."""
    method = METHODS[way.steps]
    if dtype == torch.float32:
        return orthogonalize(given, method=method, start=way.start)
    X = scale_to_unit_norm(given, POLYNOMIALS[method].norm_factor, 0.0, "clamp")
    X = X.mT if X.shape[1] > X.shape[2] else X
    if way.start != "norm":
        X = X * gram_scales(X @ X.mT, way.start)
    X = _rounded(X)
    for a, b, c in step_coefficients(method):
        A = _rounded(X @ X.mT)
        X = _rounded(a * X + _rounded(b * A + c * (A @ A)) @ X)
    return X.mT if given.shape[1] > given.shape[2] else X


def _rounded(X: Tensor) -> Tensor:
    return X.to(torch.bfloat16).float()


class Cell(NamedTuple):
    """Distances of the blocks of one kind."""

    median: float
    worst: float


def measured(spectrum: str, shape: Shape, dtype: torch.dtype) -> dict[Way, Cell]:
    """Of all ways, on the same blocks."""
    given = blocks(spectrum, shape)
    exact, cells = polar(given), {}
    for way in WAYS:
        apart = torch.linalg.matrix_norm(orthogonalized(given, way, dtype).double() - exact)
        found = (apart / min(shape) ** 0.5).tolist()
        cells[way] = Cell(statistics.median(found), max(found))
    return cells


def line(spectrum: str, shape: Shape, dtype: torch.dtype) -> str:
    """Of the table."""
    cells = measured(spectrum, shape, dtype).values()
    texts = (f"{cell.median:.3f} / {cell.worst:.3f}" for cell in cells)
    return row([f"{spectrum}, {shape[0]} x {shape[1]}", *texts])


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table(dtype: torch.dtype) -> Iterator[str]:
    """Markdown, line by line."""
    yield row(["", *(f"{way.steps} {way.start}" for way in WAYS)])
    yield "|---" * (len(WAYS) + 1) + "|"
    yield line("gaussian", LARGE, dtype)
    for spectrum in SPECTRA:
        yield from (line(spectrum, shape, dtype) for shape in SHAPES)


def flops_table() -> Iterator[str]:
    """Markdown: in units of m^3, of the cheaper execution."""
    yield row(["FLOPs / m^3", *(f"{way.steps} {way.start}" for way in WAYS)])
    yield "|---" * (len(WAYS) + 1) + "|"
    m = 1024
    for dtype in (torch.float32, torch.float16):
        for times in (1, 4):
            used = cheaper_execution(m, m * times, dtype=dtype)
            counts = (way.flops(m, m * times, dtype) / m**3 for way in WAYS)
            name = f"{8 * dtype.itemsize} bits, n = {times} m ({used})"
            yield row([name, *(f"{count:g}" for count in counts)])


def main(options: NoOptions | None = None) -> None:
    torch.set_num_threads(1)
    print("\n".join(flops_table()))
    for dtype in DTYPES:
        print(f"\nIn {str(dtype).removeprefix('torch.')}, median / worst:\n")
        print("\n".join(table(dtype)), flush=True)


if __name__ == "__main__":
    run_script(main)
