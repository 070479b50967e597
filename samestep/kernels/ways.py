"""How each symmetric product is computed, by its shape; `kernels.measure` settles it."""

from typing import Literal

Way = Literal["large", "small", "torch"]  # tiles of `kernels.symmetric`, or the whole by cuBLAS
Shape = tuple[int, int]  # of (m, k) whose product with itself is wanted
WAYS: tuple[Way, ...] = ("large", "small", "torch")

ALIGNMENT = 8  # elements: TMA wants rows that begin at multiples of 16 bytes

settled: dict[Shape, Way] = {}  # of this process, for good: bits depend on it


def way_of(size: int, depth: int) -> Way:
    """What was settled; where nothing was, what was best on an H200 (docs/gpu.md)."""
    # Wide tiles feed the matrix units best, but lose more where they end: for long sums only.
    return settled.get((size, depth), "large" if size >= 1024 and depth >= 4096 else "small")


def settled_line() -> str:
    """All that was settled, for the plan that ranks compare."""
    return "products " + ", ".join(f"{m}x{k} {way}" for (m, k), way in sorted(settled.items()))


def products_of(rows: int, cols: int) -> tuple[Shape, Shape]:
    """The symmetric products of a block: with its long side inside, and of its Gram matrices."""
    short, long = sorted((padded(rows), padded(cols)))
    return (short, long), (short, short)


def padded(size: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT
