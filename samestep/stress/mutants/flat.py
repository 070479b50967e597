"""Bugs of flat buffers: gradients and sums that share memory."""

from typing import Any

from torch import Tensor

from samestep.placements.whole.buffers import FlatGradients
from samestep.stress.mutants.mutant import mutant


@mutant(
    "the sum kept in the gradient buffer is overwritten by the next micro-batch",
    expected="reference",
    scenario="uneven_accumulation_sharded",
    layout="flat_zero1",
)
def kept_sum_overwritten() -> list[Any]:
    """The sum is not set aside when a round ends."""

    def set_aside(original: Any, self: FlatGradients, total: Tensor) -> Tensor:
        return total

    return [(FlatGradients, "set_aside", set_aside)]
