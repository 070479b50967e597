"""What every update by kernels is told of a step."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from samestep.rules.rule import Options

# Compilers that may fuse a product and a sum choose which, here and there another: then an element
# would be rounded by its place in a tile, which is not the same in a part and in a whole block.
FUSION = False


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
