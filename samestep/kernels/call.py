"""What every update by kernels is told of a step, and how launches on tiles are cut."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from samestep.rules.rule import Options

# Compilers that may fuse a product and a sum choose which, here and there another: then an element
# would be rounded by its place in a tile, which is not the same in a part and in a whole block.
FUSION = False
TILE = 64  # rows and columns of a block or part that one program works on


def tiled() -> dict[str, Any]:
    """The constants of a launch on tiles."""
    return {"ROWS": TILE, "COLS": TILE, "num_warps": 4, "enable_fp_fusion": FUSION}


def tiles(size: int) -> int:
    """How many of them are beside each other."""
    return -(-size // TILE)


class Step(NamedTuple):
    """One step of a group."""

    scalars: Mapping[str, Tensor]
    options: Options
    factor: Tensor | None  # gradients are multiplied with it
    maximize: bool
    only_if: Tensor | None  # (): 0 leaves all as it is


class Gradients(NamedTuple):
    """The gradients of the tensors that one launch works on."""

    addresses: Tensor  # (count,)
    aligned: bool
    dtype: object  # Triton's
    writes: Tensor | None  # (count,) float64: 0 leaves a tensor as it is
